// What sharded training holds in memory, counted by an allocator installed in
// LibTorch, not by counters of the project.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "composable/composable.h"
#include "state/fsdp_state.h"
#include "tests/support/memory_counter.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

constexpr int64_t kWidth = 96;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::tanh(up(x)));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t num_blocks)
      : in(register_module("in", torch::nn::Linear(8, kWidth))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        out(register_module("out", torch::nn::Linear(kWidth, 8))) {
    for (int64_t i = 0; i < num_blocks; ++i) blocks->push_back(Block());
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return out(x).pow(2).mean();
  }
  torch::nn::Linear in;
  torch::nn::ModuleList blocks;
  torch::nn::Linear out;
};
TORCH_MODULE(Model);

int64_t Bytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors)
    bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

std::vector<FSDPModule> ShardModel(Model& model,
                                   const FullyShardOptions& options) {
  std::vector<FSDPModule> handles;
  for (auto& block : *model->blocks) {
    handles.push_back(fully_shard(block, options));
  }
  handles.push_back(fully_shard(model, options));
  return handles;
}

// Flat shards, and their gradients with the flags of the payload.
struct ShardBytes {
  int64_t shards = 0;
  int64_t places = 0;         // behind them, of shards without rows
  int64_t largest_group = 0;  // unsharded
  int64_t root = 0;           // unsharded
  int64_t reduce_buffer = 0;  // of the largest group
  int64_t gradients = 0;
};

ShardBytes Measure(const std::vector<FSDPModule>& handles) {
  ShardBytes bytes;
  for (const auto& handle : handles) {
    const FSDPParamGroup& group = *handle.state()->group();
    const auto unsharded = static_cast<int64_t>(group.unsharded_bytes());
    bytes.shards += static_cast<int64_t>(group.sharded_bytes());
    const auto& params = group.params();
    if (std::any_of(params.begin(), params.end(), [](const FSDPParam& param) {
          return param.local_range().begin == param.local_range().end;
        })) {
      bytes.places += 4 * static_cast<int64_t>(params.size());
    }
    bytes.largest_group = std::max(bytes.largest_group, unsharded);
    bytes.root = unsharded;
    // Shard, one flag per parameter, rounded up to 16 bytes.
    const int64_t chunk =
        (static_cast<int64_t>(group.sharded_bytes()) +
         4 * static_cast<int64_t>(group.params().size()) + 15) /
        16 * 16;
    bytes.gradients += chunk;
    bytes.reduce_buffer = std::max(
        bytes.reduce_buffer,
        chunk * static_cast<int64_t>(group.segments()[0].layout.world_size()));
  }
  return bytes;
}

const RunRanksOptions kInProcess{.backend = TestBackend::kInProcess};

TEST(Memory, OnlyShardsRemainAfterFullyShard) {
  RunRanks(
      3,
      [](RankContext& rank) {
        MemoryCounter memory;
        Model model = RankContext::Seeded(1, [] { return Model(4); });
        const int64_t whole = Bytes(model->parameters());
        ASSERT_EQ(memory.live(), whole);
        int64_t largest = Bytes(model->blocks[0]->parameters());
        memory.ResetPeak();
        const auto handles = ShardModel(model, rank.options());
        const ShardBytes bytes = Measure(handles);
        EXPECT_EQ(memory.live(), bytes.shards + bytes.places);
        int64_t padding = 0;
        for (const auto& handle : handles) {
          padding +=
              handle.state()->group()->segments()[0].layout.padding() * 4;
        }
        EXPECT_EQ(bytes.shards, (whole + padding) / rank.world_size);
        EXPECT_LE(padding, whole / 50);
        // Where rank 0's values are scattered: of one group, all of it and the
        // shard.
        const int64_t packed = rank.rank == 0 ? bytes.largest_group : 0;
        EXPECT_LE(memory.peak(), whole + largest + packed);
      },
      kInProcess);
}

// Gives the gradients of a set of parameters up when all of them are there.
class DropWhenComplete : public torch::autograd::PostAccumulateGradHook {
 public:
  DropWhenComplete(std::vector<at::Tensor> group, std::shared_ptr<size_t> count)
      : group_(std::move(group)), count_(std::move(count)) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    if (++*count_ < group_.size()) return;
    *count_ = 0;
    for (const at::Tensor& p : group_) p.mutable_grad().reset();
  }

 private:
  std::vector<at::Tensor> group_;
  std::shared_ptr<size_t> count_;
};

// The memory that any training of the model needs besides parameters:
// activations, and the gradients of a group until all of them are there.
int64_t PeakOfActivations(int64_t num_blocks, const at::Tensor& input) {
  MemoryCounter memory;
  Model model = RankContext::Seeded(1, [&] { return Model(num_blocks); });
  const auto drop_when_complete = [](const std::vector<at::Tensor>& group) {
    const auto count = std::make_shared<size_t>(0);
    for (const at::Tensor& parameter : group) {
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameter, std::make_unique<DropWhenComplete>(group, count));
    }
  };
  for (const auto& block : *model->blocks) {
    drop_when_complete(block->parameters());
  }
  std::vector<at::Tensor> root = model->in->parameters();
  for (const auto& p : model->out->parameters()) root.push_back(p);
  drop_when_complete(root);
  const int64_t before = memory.live();
  memory.ResetPeak();
  model(input).backward();
  // Hooks and parameters hold each other.
  for (const at::Tensor& parameter : model->parameters()) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
  return memory.peak() - before;
}

struct StepPeak {
  int64_t extra = 0;  // above shards, their gradients and activations
  int64_t bound = 0;  // root, two groups, one reduce buffer
};

// The peak of training steps over all ranks.
StepPeak PeakOfSteps(int world_size, int64_t num_blocks,
                     int64_t limit_all_gathers) {
  const at::Tensor input = RankContext::Seeded(7, [] {
    return torch::randn({2, 8});
  });
  int64_t activations = 0;
  std::thread([&] {
    activations = PeakOfActivations(num_blocks, input);
  }).join();
  std::vector<StepPeak> peaks(world_size);
  RunRanks(
      world_size,
      [&](RankContext& rank) {
        MemoryCounter memory;
        Model model = RankContext::Seeded(1, [&] { return Model(num_blocks); });
        const auto handles = ShardModel(
            model, rank.options().limit_all_gathers(limit_all_gathers));
        const ShardBytes bytes = Measure(handles);
        StepPeak& peak = peaks[rank.rank];
        peak.bound = bytes.root + 2 * bytes.largest_group + bytes.reduce_buffer;
        torch::optim::SGD optimizer(model->parameters(), 0.01);
        for (int step = 0; step < 4; ++step) {
          memory.ResetPeak();
          const int64_t before = memory.live();
          EXPECT_EQ(before, bytes.shards + bytes.places);
          model(input).backward();
          peak.extra = std::max(peak.extra, memory.peak() - before -
                                                bytes.gradients - activations);
          optimizer.step();
          optimizer.zero_grad();
        }
      },
      kInProcess);
  return *std::max_element(
      peaks.begin(), peaks.end(),
      [](const StepPeak& a, const StepPeak& b) { return a.extra < b.extra; });
}

TEST(Memory, PeakOfAStepIsRootTwoGroupsAndOneReduceBuffer) {
  for (const int world_size : {2, 4}) {
    const StepPeak few = PeakOfSteps(world_size, 4, 2);
    const StepPeak many = PeakOfSteps(world_size, 16, 2);
    EXPECT_LE(few.extra, few.bound);
    EXPECT_LE(many.extra, many.bound);
    // More blocks need no more memory than their shards.
    EXPECT_LE(many.extra, few.extra);
    // And the measure sees one group too many.
    const StepPeak three_slots = PeakOfSteps(world_size, 16, 3);
    EXPECT_GT(three_slots.extra, three_slots.bound);
  }
}

TEST(Memory, AfterAStepOnlyShardsAndOptimizerStateRemain) {
  RunRanks(
      2,
      [](RankContext& rank) {
        MemoryCounter memory;
        Model model = RankContext::Seeded(1, [] { return Model(4); });
        const auto handles = ShardModel(model, rank.options());
        const ShardBytes bytes = Measure(handles);
        int64_t rows = Bytes(model->parameters());
        torch::optim::AdamW optimizer(model->parameters());
        const at::Tensor input = torch::ones({2, 8});
        const int64_t inputs = static_cast<int64_t>(input.nbytes());
        for (int step = 0; step < 5; ++step) {
          model(input).backward();
          optimizer.step();
          optimizer.zero_grad();
          EXPECT_EQ(memory.pool(), 0);
          EXPECT_EQ(memory.live(),
                    bytes.shards + bytes.places + inputs + 2 * rows)
              << step;
        }
      },
      kInProcess);
}

TEST(Memory, FullStateDictNeedsOneGroupMoreThanItsResult) {
  RunRanks(
      3,
      [](RankContext& rank) {
        MemoryCounter memory;
        Model model = RankContext::Seeded(1, [] { return Model(6); });
        const int64_t whole = Bytes(model->parameters());
        const ShardBytes bytes = Measure(ShardModel(model, rank.options()));
        memory.ResetPeak();
        const int64_t before = memory.live();
        const auto weights = full_state_dict(model);
        EXPECT_EQ(memory.live() - before, whole);
        EXPECT_LE(memory.peak() - before, whole + bytes.largest_group);
        EXPECT_EQ(memory.pool(), 0);
      },
      kInProcess);
}

TEST(SteadyState, NothingGrowsAndGathersAllocateNothing) {
  RunRanks(
      2,
      [](RankContext& rank) {
        MemoryCounter memory;
        Model model = RankContext::Seeded(1, [] { return Model(6); });
        const auto handles = ShardModel(model, rank.options());
        const ShardBytes bytes = Measure(handles);
        const auto context = [&] { return handles[0].state()->context; };
        torch::optim::AdamW optimizer(model->parameters());
        const at::Tensor input = torch::ones({2, 8});
        const auto step = [&] {
          auto loss = model(input);
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
        };
        for (int i = 0; i < 3; ++i) step();
        const int64_t live = memory.live();
        const size_t reservations = context()->pool.reservations();
        const int64_t first = memory.allocations();
        step();
        const int64_t per_step = memory.allocations() - first;
        // Larger than any activation and any single gradient.
        memory.WatchLarge(bytes.largest_group);
        for (int i = 0; i < 50; ++i) {
          const int64_t before = memory.allocations();
          step();
          EXPECT_EQ(memory.live(), live);
          EXPECT_EQ(memory.allocations() - before, per_step);
        }
        EXPECT_EQ(memory.large_allocations(), 0);
        EXPECT_EQ(context()->pool.reservations(), reservations);

        // Gathers alone: not one tensor.
        const int64_t before = memory.allocations();
        for (int i = 0; i < 50; ++i) {
          for (auto handle : handles) {
            handle.unshard();
            handle.reshard();
          }
        }
        EXPECT_EQ(memory.allocations(), before);
        EXPECT_EQ(context()->pool.reservations(), reservations);
      },
      kInProcess);
}

// A frozen layer with a small trainable one beside it, as in LoRA.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl()
      : base(register_module("base", torch::nn::Linear(kWidth, kWidth))),
        a(register_module("a", torch::nn::Linear(kWidth, 2))),
        b(register_module("b", torch::nn::Linear(2, kWidth))) {
    for (auto& p : base->parameters()) p.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::tanh(base(x) + b(a(x)));
  }
  torch::nn::Linear base, a, b;
};
TORCH_MODULE(Adapted);

struct AdaptedModelImpl : torch::nn::Module {
  AdaptedModelImpl()
      : in(register_module("in", torch::nn::Linear(8, kWidth))),
        blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int i = 0; i < 16; ++i) blocks->push_back(Adapted());
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (const auto& block : *blocks) x = block->as<Adapted>()->forward(x);
    return x.pow(2).mean();
  }
  torch::nn::Linear in;
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(AdaptedModel);

// Base and adapters in one group, or each adapter in a group of its own.
class FrozenWithAdapters : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Groups, FrozenWithAdapters, testing::Bool());

TEST_P(FrozenWithAdapters, BackwardHoldsRootAndTwoGroups) {
  RunRanks(
      2,
      [&](RankContext& rank) {
        MemoryCounter memory;
        AdaptedModel model =
            RankContext::Seeded(1, [] { return AdaptedModel(); });
        std::vector<FSDPModule> handles;
        for (auto& block : *model->blocks) {
          if (GetParam()) {
            auto* adapted = block->as<Adapted>();
            handles.push_back(
                fully_shard({adapted->a, adapted->b}, rank.options()));
          }
          handles.push_back(fully_shard(block, rank.options()));
        }
        handles.push_back(fully_shard(model, rank.options()));
        const ShardBytes bytes = Measure(handles);
        int64_t peak = 0;
        bool backward = false;
        int64_t adapter_gradients = 0;
        for (const auto& p : model->parameters()) {
          if (p.requires_grad()) adapter_gradients += 2 * p.nbytes();
        }
        set_trace_observer(model, [&](TraceEvent, const std::string&) {
          if (backward) {
            peak = std::max(peak, fsdp_stats(model).unsharded_param_bytes);
          }
        });
        for (int step = 0; step < 3; ++step) {
          peak = 0;
          at::Tensor loss = model(torch::ones({2, 8}));
          backward = true;
          memory.ResetPeak();
          const int64_t before = memory.live() - memory.pool();
          loss.backward();
          backward = false;
          EXPECT_GT(peak, bytes.largest_group);
          EXPECT_LE(peak, bytes.root + 2 * bytes.largest_group) << step;
          // The same from outside, with what the adapters' gradients need on
          // their way and the activations of one block.
          EXPECT_LE(memory.peak() - before, bytes.root +
                                                2 * bytes.largest_group +
                                                adapter_gradients + 8 * 1024);
          model->zero_grad();
        }
      },
      kInProcess);
}

}  // namespace
}  // namespace composable
