// What is set about gathers and reductions, and reshard_after_forward(k).
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/custom_collectives.h"
#include "collectives/subgroups.h"
#include "composable/stats.h"
#include "state/fsdp_state.h"
#include "state/gradient_divide.h"
#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"
#include "tests/parity/counting_backend.h"
#include "tests/parity/hybrid_reference.h"

namespace composable {
namespace {

using torch::Tensor;
using torch::nn::Linear;

FullyShardOptions On(const DeviceMesh& mesh) {
  return FullyShardOptions().mesh(mesh);
}

// --- Division ----------------------------------------------------------------

TEST(GradientDivideTest, FactorsBeforeAndAfter) {
  const auto half = [](int64_t ranks) {
    return GradientDivide::For(at::kHalf, ranks, std::nullopt, false);
  };
  // As upstream divides for half: ranks, before, after.
  for (const auto& [ranks, before, after] :
       std::vector<std::tuple<int64_t, double, double>>{{1, 1, 1},
                                                        {2, 2, 1},
                                                        {3, 2, 1.5},
                                                        {4, 2, 2},
                                                        {6, 4, 1.5},
                                                        {8, 4, 2},
                                                        {16, 4, 4},
                                                        {32, 8, 4},
                                                        {64, 8, 8},
                                                        {128, 16, 8}}) {
    EXPECT_EQ(half(ranks).before, before) << ranks;
    EXPECT_EQ(half(ranks).reduction, 1) << ranks;
    EXPECT_EQ(half(ranks).after, after) << ranks;
    const auto doubles =
        GradientDivide::For(at::kDouble, ranks, std::nullopt, true);
    EXPECT_EQ(doubles.before * doubles.after, ranks);
    EXPECT_EQ(doubles.before, before);
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto mean = GradientDivide::For(dtype, 6, std::nullopt, false);
    EXPECT_EQ(mean.before, 1);
    EXPECT_EQ(mean.reduction, 6);
    EXPECT_EQ(mean.after, 1);
    const auto forced = GradientDivide::For(dtype, 6, 8.0, true);
    EXPECT_EQ(forced.before, 1);
    EXPECT_EQ(forced.reduction, 1);
    EXPECT_EQ(forced.after, 8);
  }
}

// The sum of gradients 1, 2, ... of the ranks, divided.
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(c10::ScalarType dtype)
      : weight(register_parameter("weight", torch::ones({3}, dtype))) {}
  Tensor forward(const Tensor& x) { return (weight * x).sum(); }
  Tensor weight;
};
TORCH_MODULE(Scale);

void BackwardOfScale(Scale& model, int rank, c10::ScalarType dtype) {
  model(torch::full({3}, rank + 1.0, dtype)).backward();
}

class DivideFactorTest
    : public testing::TestWithParam<std::tuple<int, int, at::ScalarType>> {};

INSTANTIATE_TEST_SUITE_P(
    Meshes, DivideFactorTest,
    testing::Combine(testing::Values(1, 2), testing::Values(1, 2),
                     testing::Values(at::kFloat, at::kDouble, at::kHalf,
                                     at::kBFloat16)));

TEST_P(DivideFactorTest, IsDividedOnce) {
  const auto [replicas_, shards_, dtype_] = GetParam();
  RunRanks(replicas_ * shards_, [replicas = replicas_, shards = shards_,
                                 dtype = dtype_](RankContext& rank) {
    const int ranks = replicas * shards;
    const double sum = ranks * (ranks + 1) / 2.0;
    for (const bool force : {false, true}) {
      for (const double factor : {0.0, 1.0, 2.0, 4.0, 0.5}) {
        Scale model(dtype);
        auto handle = fully_shard(model, On(Grid(rank, replicas, shards)));
        handle.set_force_sum_reduction_for_comms(force);
        if (factor > 0) handle.set_gradient_divide_factor(factor);
        BackwardOfScale(model, rank.rank, dtype);
        const Tensor& gradient = model->parameters()[0].grad();
        const Tensor expected = torch::full(
            gradient.sizes(), sum / (factor > 0 ? factor : ranks), dtype);
        EXPECT_TRUE(torch::equal(gradient, expected))
            << factor << " " << force << "\n"
            << gradient << expected;
      }
    }
  });
}

TEST(DivideFactorTest, RecursesAndIsTakenBack) {
  RunRanks(2, [](RankContext& rank) {
    for (const bool recurse : {true, false}) {
      torch::nn::Sequential both(Scale(at::kFloat), Linear(2, 2));
      auto inner = both[0]->as<ScaleImpl>();
      fully_shard(inner->shared_from_this(), rank.options());
      auto root = fully_shard(both, rank.options());
      root.set_gradient_divide_factor(8, recurse);
      const auto backward = [&] {
        both->zero_grad();
        inner->forward(torch::ones({3})).backward();
        return inner->parameters()[0].grad();
      };
      const Tensor with = backward();
      EXPECT_TRUE(
          torch::equal(with, torch::full_like(with, recurse ? 0.25 : 1)));
      root.set_gradient_divide_factor(std::nullopt);
      const Tensor without = backward();
      EXPECT_TRUE(torch::equal(without, torch::ones_like(without)));
    }
  });
}

TEST(DivideFactorTest, DeprecatedName) {
  RunRanks(2, [](RankContext& rank) {
    Scale model(at::kFloat);
    auto handle = fully_shard(model, rank.options());
    handle.set_reduce_scatter_divide_factor(6);
    BackwardOfScale(model, rank.rank, at::kFloat);
    const Tensor& gradient = model->parameters()[0].grad();
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, 0.5)));
  });
}

TEST(DivideFactorTest, RefusesWhatIsNoFactor) {
  RunRanks(1, [](RankContext& rank) {
    Scale model(at::kFloat);
    auto handle = fully_shard(model, rank.options());
    for (const double factor :
         {0.0, -2.0, static_cast<double>(INFINITY), std::nan("")}) {
      ExpectThrows<c10::ValueError>(
          [&] { handle.set_gradient_divide_factor(factor); },
          {"set_gradient_divide_factor: expected a finite factor above 0"});
    }
  });
}

// Ranks with 3 and 5 tokens and losses that are sums.
TEST(DivideFactorTest, TokenWeightedMean) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Linear(4, 3); });
    auto handle = fully_shard(sharded, rank.options());
    handle.set_gradient_divide_factor(8);
    const Tensor tokens = Input(3, {8, 4});
    plain(tokens).pow(2).sum(1).mean().backward();
    const Tensor mine =
        rank.rank == 0 ? tokens.narrow(0, 0, 3) : tokens.narrow(0, 3, 5);
    sharded(mine).pow(2).sum().backward();
    ExpectGradients(*sharded, *plain, 1e-6);
  });
}

// How often a division in place runs.
class Divisions {
 public:
  Divisions()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(
                [](const at::RecordFunction& function)
                    -> std::unique_ptr<at::ObserverContext> {
                  // One with a number calls the one with a tensor.
                  const auto name = function.operator_name();
                  if (name && name->name == "aten::div_" &&
                      name->overload_name == "Tensor") {
                    ++Count();
                  }
                  return nullptr;
                })
                .scopes({at::RecordScope::FUNCTION}))) {
    Count() = 0;
  }
  ~Divisions() { at::removeCallback(handle_); }
  static int& Count() {
    static thread_local int count = 0;
    return count;
  }

 private:
  at::CallbackHandle handle_;
};

TEST(ParityFullyShardWorldSize1, SingletonCopyDivision) {
  RunRanks(1, [](RankContext& rank) {
    const auto counted = CountCollectives(rank.group);
    for (const double factor : {0.0, 1.0, 2.0}) {
      Scale model(at::kFloat);
      auto handle = fully_shard(model, On(counted.group));
      if (factor > 0) handle.set_gradient_divide_factor(factor);
      const Tensor loss = model(torch::full({3}, 3.0));
      const Divisions divisions;
      loss.backward();
      EXPECT_EQ(Divisions::Count(), factor == 2 ? 1 : 0);
      EXPECT_EQ(model->parameters()[0].grad()[0].item<float>(),
                3 / std::max(factor, 1.0));
    }
    EXPECT_EQ(counted.counts->all_gathers, 0);
    EXPECT_EQ(counted.counts->reduce_scatters, 0);
    EXPECT_EQ(counted.counts->all_reduces, 0);
  });
}

TEST(ParityFullyShardWorldSize1, TrainParitySingleWorldsize1) {
  RunRanks(1, [](RankContext& rank) {
    const auto counted = CountCollectives(rank.group);
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, Groups::kPerModule, On(counted.group));
    torch::optim::Adam expected(plain->parameters());
    torch::optim::Adam optimizer(sharded->parameters());
    for (int step = 0; step < 4; ++step) {
      expected.zero_grad();
      optimizer.zero_grad();
      MlpLoss(plain, step).backward();
      MlpLoss(sharded, step).backward();
      ExpectGradients(*sharded, *plain, 0);
      expected.step();
      optimizer.step();
    }
    EXPECT_EQ(counted.counts->all_gathers + counted.counts->reduce_scatters +
                  counted.counts->all_reduces,
              0);
  });
}

// --- The all-reduce hook -----------------------------------------------------

TEST(ParityHSDPWithCustomHook, CustomHsdpAllReduceHook) {
  RunRanks(4, [](RankContext& rank) {
    const auto grid = Grid(rank, 2, 2);
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    const auto handles = Shard(sharded, Groups::kPerModule, On(grid["shard"]));
    auto root = handles.back();
    int calls = 0;
    root.set_all_reduce_hook([&](Tensor reduced) {
      ++calls;
      Communicator(grid.get_group("replicate"), c10::kCPU)
          .AllReduce(reduced, Communicator::Reduction::kSum);
      reduced.div_(2);
    });
    HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
    });
    MlpLoss(sharded, rank.rank).backward();
    EXPECT_EQ(calls, 3);
    ExpectGradients(*sharded, *plain, 0);
  });
}

// A mean where the reduction divides, a sum where that comes later; after the
// all-reduce over replicas.
TEST(ParityFullyShardForceSum, TheHookSeesASumIfThatIsForced) {
  RunRanks(4, [](RankContext& rank) {
    for (const bool force : {false, true}) {
      Scale model(at::kFloat);
      auto handle = fully_shard(model, On(Grid(rank, 2, 2)));
      double seen = 0;
      handle.set_force_sum_reduction_for_comms(force);
      handle.set_all_reduce_hook([&](Tensor reduced) {
        seen = reduced.max().item<double>();
        reduced.mul_(2);
      });
      BackwardOfScale(model, rank.rank, at::kFloat);
      EXPECT_TRUE(seen == (force ? 10 : 2.5) || seen == 0) << seen;
      if (model->parameters()[0].numel() == 0) continue;
      const AllowShardMath allow;
      EXPECT_EQ(seen, force ? 10 : 2.5);
      EXPECT_EQ(model->parameters()[0].grad().max().item<double>(), 5);
    }
  });
}

TEST(ParityHSDPWithCustomHook, CustomHookCustomStream) {
  RunRanks(1, [](RankContext& rank) {
    const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU));
    const auto hook = [](const Tensor& /*reduced*/) {};
    Linear one(2, 2);
    Linear two(2, 2);
    auto plain = fully_shard(one, rank.options());
    auto hybrid = fully_shard(two, On(Grid(rank, 1, 1)));
    ExpectThrows<c10::ValueError>(
        [&] { hybrid.set_all_reduce_hook(hook, true, stream); },
        {"stream cannot be set when using native HSDP"});
    ExpectThrows<c10::ValueError>(
        [&] { plain.set_all_reduce_hook(nullptr, true, stream); },
        {"stream is specified but hook itself is missing"});
    ExpectThrows<c10::NotImplementedError>(
        [&] { plain.set_all_reduce_hook(hook, true, stream); },
        {"a stream needs parameters on CUDA"});
  });
}

// --- Collectives of one's own ------------------------------------------------

class OwnAllGather final : public DefaultAllGather {
 public:
  Tensor allocate(int64_t size, c10::ScalarType dtype,
                  c10::Device device) override {
    ++allocations;
    EXPECT_EQ(dtype, at::kByte);
    return DefaultAllGather::allocate(size, dtype, device);
  }
  c10::intrusive_ptr<c10d::Work> operator()(const Tensor& output,
                                            const Tensor& input,
                                            const ProcessGroupPtr& group,
                                            bool async_op) override {
    ++calls;
    EXPECT_EQ(output.numel(), input.numel() * group->getSize());
    return DefaultAllGather::operator()(output, input, group, async_op);
  }
  int allocations = 0;
  int calls = 0;
};

class OwnReduceScatter final : public DefaultReduceScatter {
 public:
  explicit OwnReduceScatter(bool done_at_once) : done_at_once_(done_at_once) {}
  Tensor allocate(int64_t size, c10::ScalarType dtype,
                  c10::Device device) override {
    ++allocations;
    return DefaultReduceScatter::allocate(size, dtype, device);
  }
  c10::intrusive_ptr<c10d::Work> operator()(const Tensor& output,
                                            const Tensor& input,
                                            const ProcessGroupPtr& group,
                                            bool async_op) override {
    ++calls;
    return DefaultReduceScatter::operator()(output, input, group,
                                            async_op && !done_at_once_);
  }
  int allocations = 0;
  int calls = 0;

 private:
  bool done_at_once_;
};

TEST(CustomCollectivesTest, DoTheWorkInMemoryOfTheirOwn) {
  for (const bool done_at_once : {false, true}) {
    RunRanks(2, [done_at_once](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      auto root = Shard(sharded, Groups::kPerModule, rank.options()).back();
      const auto gather = std::make_shared<OwnAllGather>();
      const auto reduce = std::make_shared<OwnReduceScatter>(done_at_once);
      root.set_custom_all_gather(gather);
      root.set_custom_reduce_scatter(reduce);
      ExpectSameBackward(rank, plain, sharded, MlpLoss);
      EXPECT_GE(gather->calls, 3);
      EXPECT_EQ(gather->allocations, gather->calls);
      EXPECT_EQ(reduce->calls, 3);
      EXPECT_EQ(reduce->allocations, 6);
      root.set_custom_all_gather(nullptr);
      root.set_custom_reduce_scatter(nullptr);
      const int calls = gather->calls;
      ExpectSameBackward(rank, plain, sharded, MlpLoss);
      EXPECT_EQ(gather->calls, calls);
      EXPECT_EQ(reduce->calls, 3);
      EXPECT_EQ(gather.use_count(), 1);
    });
  }
}

class WrongMemory final : public DefaultReduceScatter {
 public:
  Tensor allocate(int64_t size, c10::ScalarType /*dtype*/,
                  c10::Device /*device*/) override {
    return torch::empty({size}, at::kDouble);
  }
};

TEST(CustomCollectivesTest, MemoryOfTheWrongKindIsRefused) {
  RunRanks(2, [](RankContext& rank) {
    Linear layer(2, 2);
    auto handle = fully_shard(layer, rank.options());
    handle.set_custom_reduce_scatter(std::make_shared<WrongMemory>());
    ExpectThrows<c10::ValueError>(
        [&] {
          layer(torch::ones({1, 2})).sum().backward();
        },
        {"allocate() of a custom reduce-scatter: expected",
         "contiguous elements of Float on the CPU, got"});
  });
}

TEST(ParityFullyShardAllocFromPG, ExceptionWhenUsedTogetherWithCommHooks) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handle = fully_shard(sharded, rank.options());
    handle.set_allocate_memory_from_process_group_for_comm(true);
    handle.set_custom_all_gather(std::make_shared<DefaultAllGather>());
    ExpectThrows<c10::ValueError>(
        [&] { handle.set_allocate_memory_from_process_group_for_comm(true); },
        {"when all gather comm is custom"});
    handle.set_custom_all_gather(nullptr);
    handle.set_custom_reduce_scatter(std::make_shared<DefaultReduceScatter>());
    ExpectThrows<c10::ValueError>(
        [&] { handle.set_allocate_memory_from_process_group_for_comm(false); },
        {"when reduce scatter comm is custom"});
    handle.set_custom_reduce_scatter(nullptr);
    // Gloo allocates nothing, so the library's own memory serves.
    handle.set_allocate_memory_from_process_group_for_comm(true);
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
  });
}

// --- A process group for reduce-scatters -------------------------------------

TEST(SeparateReduceScatterGroupTest, IsSharedUsedAndEndsWithItsUsers) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto root = Shard(sharded, Groups::kPerModule, rank.options()).back();
    const auto made = [&] {
      return rank.group->getStore()->add(
          "subgroup/reduce_scatter/0,1/calls/" + std::to_string(rank.rank), 0);
    };
    const auto separate = [](Linear& layer) {
      return fully_shard.state(layer)->reduction()->settings().separate;
    };
    root.set_separate_reduce_scatter_group();
    root.set_separate_reduce_scatter_group();
    EXPECT_EQ(made(), 1);
    ASSERT_TRUE(separate(sharded->first));
    EXPECT_TRUE(*separate(sharded->first) == *separate(sharded->third));
    EXPECT_FALSE(*separate(sharded->first) ==
                 fully_shard.state(sharded->first)->group()->communicator());
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
    const c10::weak_intrusive_ptr<c10d::ProcessGroup> group(
        separate(sharded->first)->group());
    EXPECT_FALSE(group.expired());
    root.set_separate_reduce_scatter_group(false);
    EXPECT_TRUE(group.expired());
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
    root.set_separate_reduce_scatter_group(true);
    EXPECT_EQ(made(), 2);
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
  });
}

TEST(SeparateReduceScatterGroupTest, ReducesOverItAlone) {
  RunRanks(2, [](RankContext& rank) {
    const auto counted = CountCollectives(rank.group);
    Linear layer = RankContext::Seeded(1, [] { return Linear(4, 4); });
    auto handle = fully_shard(layer, On(counted.group));
    // Its process group was not made with a store.
    ExpectThrows<c10::ValueError>(
        [&] { handle.set_separate_reduce_scatter_group(); },
        {"has no store", "init_process_group"});
  });
}

// --- Several payloads --------------------------------------------------------

// The most reductions that were in flight at one time.
int MostInFlight(Mlp& model, int rank) {
  int now = 0;
  int most = 0;
  set_trace_observer(model, [&](TraceEvent event, const std::string& /*fqn*/) {
    if (event == TraceEvent::kReduce) most = std::max(most, ++now);
    if (event == TraceEvent::kReduceWait) --now;
  });
  MlpLoss(model, rank).backward();
  set_trace_observer(model, nullptr);
  EXPECT_EQ(now, 0);
  return most;
}

TEST(ParityFullyShardCommunication, SetReduceScatterMaxInputBuffers) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handles = Shard(sharded, Groups::kPerModule, rank.options());
    FSDPModule& root = handles.back();
    for (const int count : {2, 1, 3, 2}) {  // at once, also later
      root.set_reduce_scatter_max_input_buffers(count);
      ExpectSameBackward(rank, plain, sharded, MlpLoss);
      EXPECT_EQ(MostInFlight(sharded, rank.rank), count);
      sharded->zero_grad();
      plain->zero_grad();
    }
  });
}

TEST(ParityFullyShardCommunication, MaxInputBuffersResolvesToMax) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handles = Shard(sharded, Groups::kPerModule, rank.options());
    handles[0].set_reduce_scatter_max_input_buffers(3, /*recurse=*/false);
    handles.back().set_reduce_scatter_max_input_buffers(2, /*recurse=*/false);
    EXPECT_EQ(MostInFlight(sharded, rank.rank), 3);
    EXPECT_EQ(fully_shard.state(sharded)->max_reduction_payloads, 2);
    handles[0].set_reduce_scatter_max_input_buffers(1, /*recurse=*/false);
    EXPECT_EQ(MostInFlight(sharded, rank.rank), 2);
  });
}

TEST(ParityFullyShardCommunication, MaxInputBuffersValidation) {
  RunRanks(1, [](RankContext& rank) {
    Linear layer(2, 2);
    auto handle = fully_shard(layer, rank.options());
    for (const int count : {0, -1}) {
      ExpectThrows<c10::ValueError>(
          [&] { handle.set_reduce_scatter_max_input_buffers(count); },
          {"expected at least 1 buffer, got " + std::to_string(count)});
    }
  });
}

TEST(ReductionsInFlightTest, OfReplicasAndSeveralPayloads) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto root = Shard(sharded, Groups::kPerModule, On(Grid(rank, 2, 2))).back();
    for (const int count : {1, 2, 3}) {
      root.set_reduce_scatter_max_input_buffers(count);
      plain->zero_grad();
      sharded->zero_grad();
      HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
        MlpLoss(plain, r).backward();
      });
      std::vector<std::string> events;
      set_trace_observer(sharded, [&](TraceEvent event,
                                      const std::string& fqn) {
        if (event == TraceEvent::kReduce || event == TraceEvent::kAllReduce ||
            event == TraceEvent::kAllReduceWait) {
          events.push_back(std::string(ToString(event)) + " " + fqn);
        }
      });
      MlpLoss(sharded, rank.rank).backward();
      set_trace_observer(sharded, nullptr);
      ExpectGradients(*sharded, *plain, 0);
      if (count != 1) continue;
      // The all-reduce of a group and the reduce-scatter of the next overlap.
      EXPECT_EQ(events,
                (std::vector<std::string>{
                    "reduce third", "all_reduce third", "reduce second",
                    "all_reduce_wait third", "all_reduce second",
                    "reduce first", "all_reduce first",
                    "all_reduce_wait second", "all_reduce_wait first"}));
    }
  });
}

// --- reshard_after_forward(k) ------------------------------------------------

TEST(ReshardAfterForwardTest, BoolAndNumberAreTold) {
  EXPECT_FALSE(ReshardAfterForward().frees().has_value());
  EXPECT_FALSE(ReshardAfterForward(std::nullopt).frees().has_value());
  EXPECT_EQ(ReshardAfterForward(true).frees(), true);
  EXPECT_EQ(ReshardAfterForward(false).frees(), false);
  EXPECT_FALSE(ReshardAfterForward(true).group_size().has_value());
  EXPECT_EQ(ReshardAfterForward(1).group_size(), 1);
  EXPECT_EQ(ReshardAfterForward(size_t{2}).group_size(), 2);
  static_assert(!std::is_constructible_v<ReshardAfterForward, double>);
  static_assert(!std::is_constructible_v<ReshardAfterForward, const char*>);
}

TEST(ReshardAfterForwardTest, NumbersThatAreNoFactorAreRefused) {
  RunRanks(4, [](RankContext& rank) {
    Linear layer(4, 4);
    for (const int size : {0, -1, 3, 5, 8}) {
      ExpectThrows<c10::ValueError>(
          [&] {
            fully_shard(layer, rank.options().reshard_after_forward(size));
          },
          {"If passing reshard_after_forward as an int, it should be a factor "
           "of 4",
           "not " + std::to_string(size)});
    }
    // Of the ranks that are sharded over, not of all.
    ExpectThrows<c10::ValueError>(
        [&] {
          fully_shard(layer, On(Grid(rank, 2, 2)).reshard_after_forward(4));
        },
        {"should be a factor of 2"});
  });
}

TEST(ReshardAfterForwardTest, OneMeansFalseAndAllMeansTrue) {
  WarningsOfThisThread outside;
  RunRanks(2, [](RankContext& rank) {
    Linear one(2, 2);
    Linear all(2, 2);
    for (int i = 0; i < 2; ++i) {
      Linear again(2, 2);
      fully_shard(again, rank.options().reshard_after_forward(1));
    }
    fully_shard(one, rank.options().reshard_after_forward(1));
    fully_shard(all, rank.options().reshard_after_forward(2));
    EXPECT_EQ(fully_shard.state(one)->options().reshard_after_forward().frees(),
              false);
    EXPECT_EQ(fully_shard.state(all)->options().reshard_after_forward().frees(),
              true);
    EXPECT_FALSE(fully_shard.state(all)->group()->keeps_part());
  });
}

// Blocks that give way to each other in forward. Odd rows.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int i = 0; i < 5; ++i) {
      blocks.push_back(register_module("b" + std::to_string(i), Linear(5, 5)));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& block : blocks) x = torch::tanh(block(x));
    return x;
  }
  std::vector<Linear> blocks;
};
TORCH_MODULE(Chain);

Tensor ChainLoss(Chain& model, int64_t seed) {
  return model(Input(seed, {3, 5})).pow(2).sum();
}

std::vector<FSDPModule> ShardChain(Chain& model,
                                   const FullyShardOptions& options) {
  std::vector<FSDPModule> handles;
  for (auto& block : model->blocks) {
    handles.push_back(fully_shard(block, options));
  }
  handles.push_back(fully_shard(model, options));
  return handles;
}

class PostForwardTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OneDOrHybrid, PostForwardTest, testing::Bool());

// The same bits as with `true`; and between forward and backward a part.
TEST_P(PostForwardTest, TrainsAsWithTrueAndKeepsAPart) {
  RunRanks(4, [hybrid = GetParam()](RankContext& rank) {
    const DeviceMesh mesh = hybrid ? Grid(rank, 1, 4) : DeviceMesh(rank.group);
    auto [whole, part] = MakePair([] { return Chain(); });
    ShardChain(whole, On(mesh).reshard_after_forward(true));
    ShardChain(part, On(mesh).reshard_after_forward(2));
    torch::optim::SGD of_whole(whole->parameters(), 0.1);
    torch::optim::SGD of_part(part->parameters(), 0.1);
    const auto bytes = static_cast<int64_t>(
        fully_shard.state(part->blocks[0])->group()->unsharded_bytes());
    for (int step = 0; step < 3; ++step) {
      const Tensor expected = ChainLoss(whole, 10 * step + rank.rank);
      const Tensor loss = ChainLoss(part, 10 * step + rank.rank);
      EXPECT_TRUE(torch::equal(loss, expected));
      const FSDPStats stats = fsdp_stats(part);
      int kept = 0;
      for (auto& block : part->blocks) {
        kept += fully_shard.state(block)->group()->sharded_state() ==
                ShardedState::kShardedPostForward;
      }
      EXPECT_EQ(kept, 3);  // two are in their slots
      // Bytes that pad the buffer behind its last segment are not kept.
      EXPECT_LE(stats.kept_part_bytes, kept * bytes / 2);
      EXPECT_GE(stats.kept_part_bytes, kept * (bytes - 128) / 2);
      expected.backward();
      loss.backward();
      EXPECT_EQ(fsdp_stats(part).kept_part_bytes, 0);
      of_whole.step();
      of_part.step();
      for (size_t i = 0; i < whole->parameters().size(); ++i) {
        EXPECT_TRUE(
            torch::equal(part->parameters()[i], whole->parameters()[i]));
      }
      of_whole.zero_grad();
      of_part.zero_grad();
    }
    EXPECT_EQ(fsdp_stats(part).num_gathers, fsdp_stats(whole).num_gathers);
  });
}

// Backward gathers among the k ranks, and equal ranks share one group.
TEST(PostForwardTest, GathersAmongFewOverOneGroup) {
  RunRanks(4, [](RankContext& rank) {
    Chain model = RankContext::Seeded(1, [] { return Chain(); });
    std::vector<int> sizes;
    struct Sizes final : DefaultAllGather {
      explicit Sizes(std::vector<int>* to) : sizes(to) {}
      c10::intrusive_ptr<c10d::Work> operator()(const Tensor& output,
                                                const Tensor& input,
                                                const ProcessGroupPtr& group,
                                                bool async_op) override {
        sizes->push_back(group->getSize());
        return DefaultAllGather::operator()(output, input, group, async_op);
      }
      std::vector<int>* sizes;
    };
    auto root =
        ShardChain(model, rank.options().reshard_after_forward(2)).back();
    const char* pair = rank.rank < 2 ? "0,1" : "2,3";
    EXPECT_EQ(rank.group->getStore()->add(std::string("subgroup//") + pair +
                                              "/calls/" +
                                              std::to_string(rank.rank % 2),
                                          0),
              1);
    root.set_custom_all_gather(std::make_shared<Sizes>(&sizes));
    const Tensor loss = ChainLoss(model, 0);
    EXPECT_EQ(sizes, (std::vector<int>{4, 4, 4, 4, 4}));
    sizes.clear();
    loss.backward();
    EXPECT_EQ(sizes, (std::vector<int>{2, 2, 2}));
  });
}

// A shard that was written since its part was kept is gathered from all ranks.
TEST(PostForwardTest, AWriteMakesThePartStale) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Chain(); });
    const auto handles =
        ShardChain(sharded, rank.options().reshard_after_forward(2));
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      EXPECT_TRUE(torch::equal(sharded(Input(step, {3, 5})),
                               plain(Input(step, {3, 5}))));
      EXPECT_EQ(fully_shard.state(sharded->blocks[0])->group()->sharded_state(),
                ShardedState::kShardedPostForward);
      for (auto* model : {&plain, &sharded}) {
        for (auto& parameter : (*model)->parameters()) parameter.mul_(1.5);
      }
    }
    // Not gathered at all, as every other way to whole values.
    for (auto handle : handles) handle.reshard();
    EXPECT_EQ(fsdp_stats(sharded).kept_part_bytes, 0);
    const auto values = full_state_dict(sharded);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(*values.find(item.key()), item.value()));
    }
  });
}

TEST(PostForwardTest, HandleReadsWholeValuesFromThePart) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Chain(); });
    auto handles = ShardChain(sharded, rank.options().reshard_after_forward(2));
    ChainLoss(sharded, 0);
    handles[0].unshard();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        torch::equal(sharded->blocks[0]->weight, plain->blocks[0]->weight));
    handles[0].reshard();
    ExpectThrows([&] { sharded->blocks[0]->weight.data_ptr(); },
                 {"b0.weight", "are sharded"});
  });
}

}  // namespace
}  // namespace composable
