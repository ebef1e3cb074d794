// The examples in the opening comments of the headers, as they stand there.
// documented_examples_test.py compares: a region is named after its header, and
// only white space may differ. Those of collectives/ have a file of their own.
//
// Examples run where one process can run them. Those that need a launcher or a
// backward in progress are only compiled; tests of their own cover them.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "collectives/buffer_pool.h"
#include "collectives/communicator.h"
#include "composable/composable.h"
#include "composable/module_ref.h"
#include "examples/burgers.h"
#include "examples/gpt.h"
#include "examples/support/byte_text.h"
#include "examples/support/plot_axis.h"
#include "examples/support/progress.h"
#include "examples/support/svg_plot.h"
#include "examples/support/table.h"
#include "examples/support/xml_text.h"
#include "hooks/alone.h"
#include "hooks/forward_scope.h"
#include "hooks/gradient_sink.h"
#include "hooks/pre_backward.h"
#include "hooks/pre_forward.h"
#include "hooks/root_pre_forward.h"
#include "state/allow_shard_math.h"
#include "state/compatibility.h"
#include "state/contract_registry.h"
#include "state/forwarding_variable_hooks.h"
#include "state/fsdp_param_group.h"
#include "state/fsdp_state.h"
#include "state/fully_shard_options.h"
#include "state/gradient_reduction.h"
#include "state/managed_params.h"
#include "state/pass_order.h"
#include "state/payload_pieces.h"
#include "state/shard_gradient.h"
#include "state/shard_layout.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"
#include "state/trace.h"
#include "state/training_state.h"
#include "state/tree_snapshot.h"
#include "tests/support/data_parallel_reference.h"
#include "tests/support/gradient_check.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"
#include "tests/support/memory_counter.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"
#include "tests/support/shards.h"

namespace header_examples {
namespace {

using data_parallel::DataParallelStep;
using data_parallel::FlatGroup;
using examples::Burgers;
using examples::ByteBatches;
using examples::FormatBytes;
using examples::FormatTable;
using examples::GPT;
using examples::GPTConfig;
using examples::PlotAxis;
using examples::Progress;
using examples::ReadText;
using examples::XmlText;

const GPTConfig kConfig = {.seq = 8, .layers = 2, .dim = 8, .heads = 2};

// The only rank of a group.
composable::RankContext OneRank() {
  composable::RankContext rank;
  rank.group = composable::init_process_group(
      c10::make_intrusive<c10d::HashStore>(), 0, 1);
  return rank;
}

// A model of sharded blocks, and its first block.
struct Sharded {
  Sharded() {
    for (auto& each : *model->blocks) {
      composable::fully_shard(each, rank.options());
    }
    composable::fully_shard(model, rank.options());
  }
  const composable::RankContext rank = OneRank();
  GPT model{kConfig};
  examples::Block block{
      std::dynamic_pointer_cast<examples::BlockImpl>(model->blocks[0])};
  at::Tensor batch = torch::randint(256, {2, 9});
};

// --- state --------------------------------------------------------------------

TEST(HeaderExamples, AllowShardMath) {
  Sharded sharded;
  auto& model = sharded.model;
  at::Tensor loss = model->loss(sharded.batch);
  // example-begin state/allow_shard_math.h
  composable::AllowShardMath allowed;
  for (const auto& p : model->parameters()) loss = loss + 1e-4 * p.pow(2).sum();
  loss.backward();
  // example-end
  EXPECT_TRUE(model->parameters()[0].grad().defined());
}

class MySink final : public composable::OwningNode {
 public:
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }

 private:
  void Release() override {}
};

TEST(HeaderExamples, Compatibility) {
  // example-begin state/compatibility.h
  // MySink derives from composable::OwningNode.
  composable::NodePtr sink = composable::MakeNode<MySink>();
  // example-end
  EXPECT_EQ(sink->name(), MySink().name());
}

struct AnyState : composable::ComposableState {};

TEST(HeaderExamples, ContractRegistry) {
  const auto module = torch::nn::Linear(2, 2).ptr();
  const auto state = std::make_shared<AnyState>();
  // example-begin state/contract_registry.h
  auto& registry = composable::ContractRegistry::Get();
  registry.Add({module}, "fully_shard", state);
  registry.Find(*module, "fully_shard");  // the state, or null
  // example-end
  EXPECT_EQ(registry.Find(*module, "fully_shard"), state);
}

TEST(HeaderExamples, FsdpParamGroup) {
  Sharded sharded;
  auto& group = *composable::fully_shard.state(sharded.block)->group();
  composable::BufferPool pool;
  // example-begin state/fsdp_param_group.h
  group.IssueUnshard(pool);  // returns at once
  group.WaitUnshard(pool);   // parameters may be read
  group.Reshard(pool);       // parameters may not be read
  // example-end
  EXPECT_TRUE(group.is_sharded());
}

TEST(HeaderExamples, FsdpState) {
  Sharded sharded;
  auto& block = sharded.block;
  // example-begin state/fsdp_state.h
  std::shared_ptr<composable::FSDPState> state =
      composable::fully_shard.state(block);
  state->group()->sharded_state();  // kSharded after a backward
  // example-end
  EXPECT_TRUE(state->group()->is_sharded());
}

[[maybe_unused]] void ForwardingVariableHooks() {
  // example-begin state/forwarding_variable_hooks.h
  class Mine final : public composable::internal::ForwardingVariableHooks {
    using ForwardingVariableHooks::ForwardingVariableHooks;
    void retain_grad(const at::TensorBase& self) const override {
      std::cout << "retain_grad\n";
      ForwardingVariableHooks::retain_grad(self);
    }
  };
  at::impl::SetVariableHooks(new Mine(at::impl::GetVariableHooks()));
  // example-end
}

[[maybe_unused]] void Options(const torch::nn::Linear& block) {
  // example-begin state/fully_shard_options.h
  composable::fully_shard(
      block, composable::FullyShardOptions().reshard_after_forward(false));
  // example-end
}

TEST(HeaderExamples, GradientReduction) {
  const auto rank = OneRank();
  const torch::nn::Linear module(2, 2);
  composable::FSDPParamGroup group(
      composable::CollectManagedParams({module.ptr()}, "test").owned,
      composable::Communicator(rank.group, c10::kCPU));
  for (auto& param : group.params()) param.has_edge = true;
  composable::GradientReduction reduction(group);
  composable::BufferPool pool;
  std::vector<at::Tensor> gradients = {torch::ones({2, 2}), torch::ones({2})};
  // example-begin state/gradient_reduction.h
  reduction.Pack(std::move(gradients), pool);  // frees each as it goes
  reduction.Issue();                           // reduce-scatter, at once
  // ... other work ...
  reduction.Advance(pool);  // the payload's memory is free
  reduction.Finish(pool);   // S.grad() is set
  // example-end
  EXPECT_TRUE(
      torch::equal(group.params()[0].sharded.grad(), torch::ones({2, 2})));
}

TEST(HeaderExamples, ManagedParams) {
  const auto module = torch::nn::Linear(2, 2).ptr();
  // example-begin state/managed_params.h
  composable::ManagedParams managed =
      composable::CollectManagedParams({module}, "fully_shard");
  // example-end
  EXPECT_EQ(managed.owned.size(), 2u);
}

TEST(HeaderExamples, PassOrder) {
  // example-begin state/pass_order.h
  composable::PassOrder order;
  order.Begin();
  order.Record(0);
  order.Record(1);
  order.Record(0);
  order.Commit();
  order.Begin();
  order.Advance(0);  // where we are: at the first use of group 0
  order.NextUse(0);  // 2, the position of its next use
  // example-end
  EXPECT_EQ(order.NextUse(0), 2u);
}

TEST(HeaderExamples, ShardGradient) {
  const at::Tensor shard = torch::zeros({2}, torch::requires_grad());
  const at::Tensor rows = torch::ones({2});
  // example-begin state/shard_gradient.h
  composable::AccumulateShardGradient(shard, rows);
  // example-end
  EXPECT_TRUE(torch::equal(shard.grad(), torch::ones({2})));
}

TEST(HeaderExamples, ShardLayout) {
  // example-begin state/shard_layout.h
  // Linear(64, 128): weight [128, 64] and bias [128], float32, 2 ranks.
  const std::vector<composable::ParamExtent> params = {
      {.numel = 128 * 64, .rows = 128}, {.numel = 128, .rows = 128}};
  const auto layout =
      composable::ShardLayout::Plan(params, {.world_size = 2, .itemsize = 4});
  const composable::ShardRange mine = layout.range(0, /*rank=*/1);
  const int64_t row = layout.placement(0).granularity;  // 64
  const int64_t first = mine.begin / row;               // 65
  // example-end
  EXPECT_EQ(row, 64);
  EXPECT_EQ(first, 65);
}

TEST(HeaderExamples, StorageRegistry) {
  Sharded sharded;
  const at::Tensor& tensor = sharded.block->fc->weight;
  // example-begin state/storage_registry.h
  composable::GuardedStorage found;
  if (composable::FindGuardedStorage(tensor, &found)) {
    // found.state: the group; found.is_shard: a shard, or whole parameters
  }
  // example-end
  EXPECT_EQ(found.state.lock(), composable::fully_shard.state(sharded.block));
}

TEST(HeaderExamples, TensorAccess) {
  const at::Tensor weight = torch::zeros({2});
  // example-begin state/tensor_access.h
  composable::internal::AddGuard(weight);  // operators on it now trap
  // example-end
  EXPECT_TRUE(composable::internal::HasGuard(weight));
}

TEST(HeaderExamples, Trace) {
  Sharded sharded;
  auto& model = sharded.model;
  model->loss(sharded.batch).backward();
  // example-begin state/trace.h
  composable::FSDPStats stats = composable::fsdp_stats(model);
  std::cout << stats.num_gathers << " gathers\n";
  // example-end
  EXPECT_GT(stats.num_gathers, 0);
}

TEST(HeaderExamples, TrainingState) {
  auto tree_state = composable::TrainingState::kIdle;
  // example-begin state/training_state.h
  composable::Transition(&tree_state, composable::TreeEvent::kBeginForward);
  composable::CheckGroupTransition(tree_state,
                                   composable::ShardedState::kSharded,
                                   composable::GroupEvent::kIssueUnshard);
  // example-end
  EXPECT_EQ(tree_state, composable::TrainingState::kForward);
}

TEST(HeaderExamples, TreeSnapshot) {
  Sharded sharded;
  auto& context =
      *composable::LazyInit(*composable::fully_shard.state(sharded.model));
  const auto& roots = context.roots;
  // example-begin state/tree_snapshot.h
  context.snapshot.Check(roots);  // at the start of each forward
  // example-end
  EXPECT_EQ(roots.size(), 1u);
}

// --- hooks --------------------------------------------------------------------

TEST(HeaderExamples, Alone) {
  Sharded sharded;
  const auto context =
      composable::LazyInit(*composable::fully_shard.state(sharded.model));
  // example-begin hooks/alone.h
  std::lock_guard<std::recursive_mutex> lock(context->mutex);
  composable::CheckAlone(*context, "reshard()");
  // example-end
}

TEST(HeaderExamples, ForwardScope) {
  Sharded sharded;
  auto& block = sharded.block;
  const at::Tensor x = torch::ones({2, 8, 8});
  at::Tensor y;
  // example-begin hooks/forward_scope.h
  {
    const composable::internal::ForwardScope scope(*block);  // gathered
    y = block->forward(x);
  }  // left
  // example-end
  EXPECT_EQ(y.sizes(), x.sizes());
}

[[maybe_unused]] void GradientSink(
    composable::FSDPParamGroup* group,
    const std::shared_ptr<composable::FSDPState>& state) {
  // example-begin hooks/gradient_sink.h
  group->Attach(state, composable::GradientSinkFactory(state));
  // example-end
}

[[maybe_unused]] void PreBackward(
    const std::shared_ptr<composable::FSDPStateContext>& context,
    composable::FSDPState* state_of_block_3) {
  // example-begin hooks/pre_backward.h
  composable::PreBackward(context, {state_of_block_3});
  // example-end
}

[[maybe_unused]] void PreForward(composable::FSDPStateContext& context,
                                 composable::FSDPState* state_of_block_3) {
  // example-begin hooks/pre_forward.h
  composable::PreForward(context, {state_of_block_3});
  // example-end
}

TEST(HeaderExamples, RootPreForward) {
  Sharded sharded;
  const auto state = composable::fully_shard.state(sharded.block);
  // example-begin hooks/root_pre_forward.h
  auto context = composable::LazyInit(*state);  // idempotent
  // example-end
  EXPECT_EQ(context->states.size(), 3u);
}

// --- composable ---------------------------------------------------------------

[[maybe_unused]] void Boundary(const at::Tensor& x) {
  at::Tensor y;
  // example-begin composable/boundary.h
  struct BlockImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return fc(x).relu(); }
    at::Tensor extra_method(const at::Tensor& x) { return fc(x); }
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
  };
  COMPOSABLE_MODULE(Block);  // in place of TORCH_MODULE(Block)

  Block block;
  composable::fully_shard(block);
  y = block(x);                    // through the boundary
  y = composable::call(block, x);  // the same, for any module
  composable::ForwardScope scope(block);
  y = block->extra_method(x);  // and for any method
  // example-end
}

TEST(HeaderExamples, ClipGradNorm) {
  Sharded sharded;
  auto& model = sharded.model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const at::Tensor loss = model->loss(sharded.batch);
  // example-begin composable/clip_grad_norm.h
  loss.backward();
  double norm = composable::clip_grad_norm_(model->parameters(), 1.0);
  optimizer.step();
  // example-end
  EXPECT_GT(norm, 0);
}

// quick_start_test runs it.
[[maybe_unused]] void PublicApi(const GPTConfig& config,
                                const std::vector<at::Tensor>* loader) {
  // example-begin composable/composable.h
  composable::init_process_group();
  GPT model(config);
  for (auto& block : *model->blocks) composable::fully_shard(block);
  composable::fully_shard(model);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(3e-4));
  for (auto& batch : *loader) {
    auto loss = model->loss(batch);
    loss.backward();
    composable::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  auto weights = composable::full_state_dict(model);
  // example-end
}

// example-begin composable/contract.h
struct MyState : composable::ComposableState {
  int calls = 0;
};
inline constexpr auto my_api = composable::contract<MyState>(
    "my_api", [](const composable::Modules& /*modules*/) {
      return std::make_shared<MyState>();
    });
// example-end

TEST(HeaderExamples, Contract) {
  const torch::nn::Linear model(2, 2);
  // example-begin composable/contract.h
  my_api(model);
  my_api.state(model)->calls;
  // example-end
  EXPECT_EQ(my_api.state(model)->calls, 0);
}

[[maybe_unused]] void FsdpModule(const examples::Block& block) {
  // example-begin composable/fsdp_module.h
  composable::FSDPModule handle = composable::fully_shard(block);
  handle.unshard();
  std::cout << block->fc->weight << "\n";  // whole values
  handle.reshard();
  // example-end
}

[[maybe_unused]] void BackwardHandles(composable::FSDPModule handle) {
  // example-begin composable/backward_handles.h
  composable::UnshardHandle gather = handle.unshard(/*async_op=*/true);
  // ... other work ...
  gather.wait();
  // example-end
}

[[maybe_unused]] void GradientSyncGuard(GPT& model, const at::Tensor& first,
                                        const at::Tensor& second) {
  // example-begin composable/gradient_sync_guard.h
  {
    const composable::GradientSyncGuard no_sync(model, false);
    model->loss(first).backward();  // gradients are kept
  }
  model->loss(second).backward();  // those of both are reduced
  // example-end
}

[[maybe_unused]] void FinalizeBackward(
    composable::FSDPModule handle, GPT& model,
    const std::vector<at::Tensor>& microbatches) {
  // example-begin hooks/finalize_backward.h
  handle.set_manual_backward_finalization(true);
  for (auto& batch : microbatches) model->loss(batch).backward();
  handle.finalize_backward();
  // example-end
}

[[maybe_unused]] void PayloadPieces(const composable::FSDPParam& param,
                                    const at::Tensor& payload) {
  // example-begin state/payload_pieces.h
  const composable::PayloadShape shape{.shard_numel = 12, .chunk_numel = 16};
  at::Tensor whole = composable::WholeOfPayload(param, shape, payload);
  // example-end
}

[[maybe_unused]] void FullyShard(const GPTConfig& config) {
  // example-begin composable/fully_shard.h
  composable::init_process_group();
  GPT model(config);
  for (auto& block : *model->blocks) composable::fully_shard(block);
  composable::fully_shard(model);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(3e-4));
  // example-end
}

int calls_of_f = 0;
void f(const composable::ModuleRef& module) {
  calls_of_f += module->is_training() ? 1 : 0;
}

TEST(HeaderExamples, ModuleRef) {
  torch::nn::Linear linear(2, 2);
  // example-begin composable/module_ref.h
  void f(const composable::ModuleRef& module);
  f(linear);        // a holder made by TORCH_MODULE
  f(linear.ptr());  // a shared_ptr
  f(*linear);       // a reference to a module that a holder owns
  // example-end
  EXPECT_EQ(calls_of_f, 3);
}

[[maybe_unused]] void Rebind(const GPT& model) {
  // example-begin composable/rebind.h
  torch::optim::AdamW optimizer(model->parameters());
  composable::fully_shard(model);
  composable::rebind(optimizer, model);
  // example-end
}

TEST(HeaderExamples, StateDict) {
  Sharded sharded;
  auto& model = sharded.model;
  GPT other_model(kConfig);
  // example-begin composable/state_dict.h
  auto weights = composable::full_state_dict(model);  // fqn -> full tensor
  composable::load_full_state_dict(other_model, weights);
  // example-end
  EXPECT_TRUE(torch::equal(other_model->head->weight, weights["head.weight"]));
}

TEST(HeaderExamples, Stats) {
  Sharded sharded;
  auto& model = sharded.model;
  model->loss(sharded.batch).backward();
  // example-begin composable/stats.h
  composable::FSDPStats stats = composable::fsdp_stats(model);
  std::cout << stats.gathered_bytes << " bytes gathered\n";
  // example-end
  EXPECT_GT(stats.gathered_bytes, 0);
}

// --- examples -----------------------------------------------------------------

TEST(HeaderExamples, Burgers) {
  const auto rank = OneRank();
  const auto& group = rank.group;
  // example-begin examples/burgers.h
  const Burgers fine(group, /*cells_here=*/256);
  at::Tensor u = fine.Centers().sin();  // this rank's cells
  u = fine.Advance(u, /*t=*/0, /*dt=*/1e-3);
  // example-end
  EXPECT_EQ(u.numel(), 256);
}

[[maybe_unused]] void ByteText(int64_t rank, int64_t world_size) {
  // example-begin examples/support/byte_text.h
  at::Tensor text = ReadText({"book.txt"});
  ByteBatches batches(text, {.steps = 20, .batch = 4, .seq = 128}, rank,
                      world_size);
  for (const at::Tensor& batch : batches) {
    std::cout << batch.sizes() << "\n";  // [4, 129], int64
  }
  // example-end
}

TEST(HeaderExamples, PlotAxis) {
  testing::internal::CaptureStdout();
  // example-begin examples/support/plot_axis.h
  const PlotAxis axis({1.2, 5.5, 3.0}, PlotAxis::Scale::kLinear);
  axis.Position(3.0);  // 0 at the start of the axis, 1 at its end
  for (const auto& tick : axis.ticks()) {
    std::cout << tick.value << " is labelled " << tick.label << "\n";
  }
  // example-end
  EXPECT_NE(testing::internal::GetCapturedStdout().find("2 is labelled 2\n"),
            std::string::npos);
}

TEST(HeaderExamples, Progress) {
  const std::vector<double> losses(20, 1.0);
  // example-begin examples/support/progress.h
  Progress progress(std::cerr, {.steps = 20,
                                .tokens_per_step = 1024,
                                .terminal = isatty(STDERR_FILENO) == 1});
  for (const double loss : losses) progress.Step(loss);
  // example-end
}

[[maybe_unused]] void SvgPlot(const std::vector<double>& losses) {
  // example-begin examples/support/svg_plot.h
  examples::WriteSvgPlot("loss.svg",
                         {.title = "Training",
                          .x_label = "step",
                          .y_label = "loss",
                          .log_y = true},
                         {{.name = "sharded", .y = losses}});
  // example-end
}

TEST(HeaderExamples, Table) {
  testing::internal::CaptureStdout();
  // example-begin examples/support/table.h
  std::cout << FormatTable({"rank", "held"}, {{"0", FormatBytes(2097152)}});
  // example-end
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "rank     held\n   0  2.0 MiB\n");
}

TEST(HeaderExamples, XmlText) {
  std::string svg;
  // example-begin examples/support/xml_text.h
  svg += "<text>" + XmlText("loss < 1") + "</text>";  // loss &lt; 1
  // example-end
  EXPECT_EQ(svg, "<text>loss &lt; 1</text>");
}

// --- tests --------------------------------------------------------------------

[[maybe_unused]] void DataParallelReference(GPT& model,
                                            torch::optim::Optimizer& optimizer,
                                            c10d::Backend& backend,
                                            const at::Tensor& batch) {
  // example-begin tests/support/data_parallel_reference.h
  std::vector<FlatGroup> groups = {
      {{{"fc.weight", 0, 12}, {"fc.bias", 12, 4}}, /*total_numel=*/16}};
  at::Tensor loss = DataParallelStep(*model, optimizer, backend, groups,
                                     [&] { return model->loss(batch); });
  // example-end
}

TEST(HeaderExamples, GradientCheck) {
  composable::RunRanks(2, [](composable::RankContext& rank) {
    // example-begin tests/support/gradient_check.h
    composable::CheckGradients(
        rank, [] { return torch::nn::Linear(4, 3); },
        [] {
          return std::vector<at::Tensor>{torch::randn({2, 4})};
        },
        [](auto& m, const auto& in, const auto& mid) {
          auto y = m(in[0]);
          mid();
          return y.pow(2).sum();
        });
    // example-end
  });
}

TEST(HeaderExamples, InProcessBackend) {
  const std::chrono::seconds timeout(10);
  // example-begin tests/support/in_process_backend.h
  auto hub = std::make_shared<composable::InProcessHub>(2, timeout);
  auto group = composable::MakeInProcessGroup(hub, /*rank=*/0);
  // example-end
  EXPECT_EQ(group->getSize(), 2);
}

void UseModuleShardedOver(const composable::ProcessGroupPtr& group) {
  const torch::nn::Linear module(4, 4);
  composable::fully_shard(module, composable::FullyShardOptions().mesh(group));
  module->weight.sum();
}

TEST(HeaderExamples, ManualBackend) {
  const auto log = [](const std::string& /*event*/) {};
  // example-begin tests/support/manual_backend.h
  auto backend = composable::MakeManualBackend(/*world_size=*/2, log);
  auto group = composable::GroupOf(backend);
  std::thread user([&] { UseModuleShardedOver(group); });
  backend->AwaitWait(0);  // the thread waits for collective 0
  backend->Finish(0);     // lets it go on
  user.join();
  // example-end
  EXPECT_EQ(backend->issued(), 1u);
}

TEST(HeaderExamples, MemoryCounter) {
  // example-begin tests/support/memory_counter.h
  composable::MemoryCounter counter;  // for this thread's tensors
  auto t = torch::zeros({1024});
  counter.live();  // 4096
  counter.ResetPeak();
  // example-end
  EXPECT_EQ(counter.live(), 4096);
}

[[maybe_unused]] void Processes() {
  // example-begin tests/support/processes.h
  composable::TemporaryFolder folder;
  composable::ProcessResult result = composable::RunRankProcesses(
      2, {"examples/train_gpt", "--losses=" + folder / "l.json"});
  EXPECT_EQ(result.exit_code, 0) << result.output();
  // example-end
}

TEST(HeaderExamples, Ranks) {
  // example-begin tests/support/ranks.h
  composable::RunRanks(2, [](composable::RankContext& rank) {
    auto model = rank.Seeded(1, [] { return torch::nn::Linear(4, 4); });
    composable::fully_shard(model, rank.options());
    // ...
  });
  // example-end
}

TEST(HeaderExamples, Shards) {
  Sharded sharded;
  sharded.model->head->weight.sum().backward();
  const at::Tensor parameter = sharded.model->named_parameters()["head.weight"];
  const at::Tensor whole_gradient = torch::ones(parameter.sizes());
  // example-begin tests/support/shards.h
  at::Tensor mine = composable::LocalRows(parameter, whole_gradient);
  EXPECT_TRUE(torch::equal(parameter.grad(), mine));
  // example-end
}

}  // namespace
}  // namespace header_examples
