// The examples in the opening comments of headers that are about the values of
// parameters and buffers. See header_examples_test.cc.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "composable/composable.h"
#include "composable/describe.h"
#include "composable/full_parameters.h"
#include "composable/sync_buffers.h"
#include "examples/gpt.h"
#include "hooks/full_parameter_scope.h"
#include "hooks/join.h"
#include "hooks/meta_device.h"
#include "hooks/missing_values.h"
#include "hooks/root_pre_forward.h"
#include "hooks/shard_data.h"
#include "hooks/tree_report.h"
#include "state/fsdp_state.h"
#include "state/initial_values.h"

namespace header_examples {
namespace {

using examples::GPT;
using examples::GPTConfig;

composable::FullyShardOptions OfOneRank() {
  return composable::FullyShardOptions().mesh(composable::init_process_group(
      c10::make_intrusive<c10d::HashStore>(), 0, 1));
}

struct Ring {
  torch::nn::Linear model{3, 5};
  Ring() { composable::fully_shard(model, OfOneRank()); }
};

TEST(HeaderExamplesOfValues, FullParameters) {
  Ring ring;
  auto& model = ring.model;
  // example-begin composable/full_parameters.h
  {
    composable::FullParameters scope(model, {.writeback = true});
    torch::nn::init::xavier_uniform_(model->weight);
    model->weight[0].zero_();
  }  // each rank's rows are in its shards now
  composable::ForEachFullParameter(
      model, [](const std::string& fqn, at::Tensor& whole) {
        std::cout << fqn << " " << whole.norm() << "\n";
      });
  // example-end
  EXPECT_EQ(model->parameters()[0].const_data_ptr<float>()[0], 0);
}

[[maybe_unused]] void Offload(const torch::nn::Linear& block) {
  // example-begin state/offload_policy.h
  composable::fully_shard(block, composable::FullyShardOptions().offload_policy(
                                     composable::CPUOffloadPolicy()));
  // example-end
}

TEST(HeaderExamplesOfValues, GradScaler) {
  const GPTConfig config = {.seq = 8, .layers = 1, .dim = 8, .heads = 2};
  GPT model(config);
  composable::fully_shard(model, OfOneRank());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto loader =
      std::make_shared<std::vector<at::Tensor>>(1, torch::randint(256, {2, 9}));
  // example-begin composable/grad_scaler.h
  composable::GradScaler scaler;
  for (auto& batch : *loader) {
    scaler.scale(model->loss(batch)).backward();
    scaler.unscale_(optimizer);  // only to clip
    composable::clip_grad_norm_(model->parameters(), 1.0);
    scaler.step(optimizer);  // skips it if a gradient is inf or NaN
    scaler.update();
    optimizer.zero_grad();
  }
  // example-end
}

[[maybe_unused]] void Materialize(const GPTConfig& config) {
  // example-begin composable/materialize.h
  GPT model(nullptr);
  {
    const composable::MetaDevice meta;
    model = GPT(config);
  }
  for (auto& block : *model->blocks) composable::fully_shard(block);
  composable::fully_shard(model);
  composable::materialize(model, [](torch::nn::Module& module) {
    if (auto* linear = module.as<torch::nn::Linear>()) {
      linear->reset_parameters();
    }
  });
  // example-end
}

[[maybe_unused]] void SyncBuffers(const torch::nn::BatchNorm1d& model) {
  // example-begin composable/sync_buffers.h
  composable::sync_buffers(model, composable::BufferSync::kMean);
  // example-end
}

[[maybe_unused]] void Describe(const GPT& model) {
  // example-begin composable/describe.h
  composable::fully_shard(model);
  const composable::Description description = composable::describe(model);
  std::cout << composable::to_string(description);
  std::string json = composable::to_json(description);
  // example-end
}

TEST(HeaderExamplesOfValues, Hold) {
  Ring ring;
  const auto state = composable::fully_shard.state(ring.model);
  const auto context = composable::LazyInit(*state);
  // example-begin hooks/full_parameter_scope.h
  auto held = composable::HoldWhole({state}, /*writeback=*/true, "example");
  held.clear();  // written back and freed
  // example-end
  // example-begin hooks/missing_values.h
  composable::CheckHasValues(context->states);  // as a forward starts
  // example-end
  // example-begin hooks/tree_report.h
  composable::ReportTree(*context);
  // example-end
  const at::Tensor other =
      torch::zeros(state->group()->params()[0].local_sizes(), torch::kDouble);
  const int index = 0;
  // example-begin hooks/shard_data.h
  composable::GiveShardData(state, index, other);  // parameter `index`
  // example-end
  EXPECT_TRUE(state->group()->is_sharded());
}

TEST(HeaderExamplesOfValues, MetaDevice) {
  // example-begin hooks/meta_device.h
  torch::nn::Linear huge(nullptr);
  {
    const composable::MetaDevice meta;
    huge = torch::nn::Linear(1 << 20, 1 << 20);  // 4 TiB, of which none
  }
  huge->weight.is_meta();
  // example-end
  EXPECT_TRUE(huge->weight.is_meta());
}

[[maybe_unused]] void Join(composable::FSDPStateContext& context,
                           composable::FSDPState& state) {
  // example-begin hooks/join.h
  composable::JoinRound round(context, composable::JoinOp::kGather, state.id);
  state.group()->IssueUnshard(context.pool);  // this rank's own
  round.Finish();
  // example-end
}

[[maybe_unused]] void InitialValues(
    composable::Communicator& communicator, composable::FSDPParamGroup* group,
    const std::vector<composable::NamedBuffer>& buffers) {
  // example-begin state/initial_values.h
  const std::vector<at::Tensor> values =
      composable::SyncInitialValues(communicator, group, buffers, "Linear");
  // ... nothing can fail any more ...
  composable::SetBuffers(buffers, values);
  // example-end
}

}  // namespace
}  // namespace header_examples
