// Models without memory, and where their values come from.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/support/memory_counter.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// A layer and a norm with buffers, of `dim` rows.
struct NormedImpl : Module {
  explicit NormedImpl(int64_t dim)
      : fc(register_module("fc", Linear(dim, dim))),
        norm(register_module("norm", BatchNorm1d(dim))),
        mask(register_buffer("mask", torch::zeros({dim}))) {}
  Tensor forward(const Tensor& x) { return norm(fc(x)) + mask; }
  Linear fc;
  BatchNorm1d norm;
  Tensor mask;
};
TORCH_MODULE(Normed);

// The root's own parameters come before and after those of the blocks.
struct StackImpl : Module {
  explicit StackImpl(int64_t dim)
      : in(register_module("embed", Linear(dim, dim))),
        first(register_module("first", Normed(dim))),
        second(register_module("second", Normed(dim))),
        out(register_module("head", Linear(dim, 3))) {}
  Tensor forward(const Tensor& x) { return out(second(first(in(x)))); }
  Linear in;
  Normed first, second;
  Linear out;
};
TORCH_MODULE(Stack);

// Draws from a generator of its own, because ranks are threads here.
class Init {
 public:
  explicit Init(uint64_t seed)
      : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  void operator()(Module& module) {
    if (auto* linear = module.as<Linear>()) {
      linear->weight.normal_(0, 1, generator_);
      linear->bias.uniform_(-1, 1, generator_);
    } else if (auto* norm = module.as<BatchNorm1d>()) {
      norm->reset_parameters();
      norm->reset_running_stats();
    } else if (auto* normed = module.as<Normed>()) {
      normed->mask.normal_(0, 1, generator_);
    }
  }

 private:
  at::Generator generator_;
};

Stack MakePlain(int64_t dim, uint64_t seed) {
  Stack model(dim);
  const torch::NoGradGuard no_grad;
  Init init(seed);
  for (const auto& module : model->modules()) init(*module);
  return model;
}

Stack MakeOnMeta(int64_t dim) {
  const MetaDevice meta;
  return Stack(dim);
}

void ShardStack(Stack& model, const FullyShardOptions& options) {
  fully_shard(model->first, options);
  fully_shard(model->second, options);
  fully_shard(model, options);
}

void ExpectBuffers(Module& module, Module& plain) {
  for (const auto& item : plain.named_buffers()) {
    const Tensor mine = module.named_buffers()[item.key()];
    ASSERT_FALSE(mine.is_meta()) << item.key();
    EXPECT_TRUE(torch::equal(mine, item.value())) << item.key();
  }
}

Tensor StackLoss(Stack& model, int64_t seed, int64_t dim) {
  return model(Input(seed, {4, dim})).pow(2).sum();
}

// Even, uneven and empty shards.
class MaterializeTest
    : public testing::TestWithParam<std::tuple<int, int64_t>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  int64_t dim() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(All, MaterializeTest,
                         testing::Combine(testing::Values(1, 2, 4),
                                          testing::Values(8, 3, 1)),
                         [](const auto& info) {
                           return "Dim" +
                                  std::to_string(std::get<1>(info.param)) +
                                  "Ranks" +
                                  std::to_string(std::get<0>(info.param));
                         });

TEST_P(MaterializeTest, EqualsTheUnshardedModelAndTrains) {
  RunRanks(world_size(), [&](RankContext& rank) {
    Stack plain = MakePlain(dim(), 7);
    Stack model = MakeOnMeta(dim());
    for (const auto& parameter : model->parameters()) {
      ASSERT_TRUE(parameter.is_meta());
    }
    ShardStack(model, rank.options());
    // May be built before there are values.
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    // Ranks draw other numbers: those of rank 0 count.
    materialize(model, Init(7 + rank.rank));
    EXPECT_EQ(fsdp_stats(model).unsharded_param_bytes, 0);
    ExpectParameters(*model, *plain);
    ExpectBuffers(*model, *plain);
    // BatchNorm has no single value per channel with equal inputs: eval mode.
    plain->eval();
    model->eval();
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      ExpectSameBackward(
          rank, plain, model,
          [&](Stack& m, int r) { return StackLoss(m, r, dim()); },
          rank.world_size <= 2 ? 0 : 1e-4);
      optimizer.step();
      plain_optimizer.step();
      optimizer.zero_grad();
      plain_optimizer.zero_grad();
    }
    ExpectParameters(*model, *plain, rank.world_size <= 2 ? 0 : 1e-4);
  });
}

TEST_P(MaterializeTest, AForwardBeforeListsTheParametersInOrder) {
  RunRanks(world_size(), [&](RankContext& rank) {
    Stack model = MakeOnMeta(dim());
    ShardStack(model, rank.options());
    const std::vector<std::string> texts = {
        "materialized from meta device",
        "'embed.weight', 'embed.bias', 'head.weight', 'head.bias', "
        "'first.fc.weight', 'first.fc.bias', 'first.norm.weight', "
        "'first.norm.bias', 'second.fc.weight'",
        "composable::materialize"};
    for (int attempt = 0; attempt < 2; ++attempt) {
      ExpectThrows<c10::ValueError>([&] { StackLoss(model, 1, dim()); }, texts);
    }
    ExpectThrows<c10::ValueError>([&] { full_state_dict(model); },
                                  {"materialized from meta device"});
    ExpectThrows<c10::ValueError>([&] { const FullParameters scope(model); },
                                  {"materialized from meta device"});
    materialize(model, Init(7));
    EXPECT_NO_THROW(full_state_dict(model));
  });
}

TEST_P(MaterializeTest, LoadingAFullStateDictInstead) {
  RunRanks(world_size(), [&](RankContext& rank) {
    Stack plain = MakePlain(dim(), 9);
    Stack model = MakeOnMeta(dim());
    ShardStack(model, rank.options());
    load_full_state_dict(model, full_state_dict(plain));
    ExpectParameters(*model, *plain);
    ExpectBuffers(*model, *plain);
    plain->eval();
    model->eval();
    ExpectSameBackward(
        rank, plain, model,
        [&](Stack& m, int r) { return StackLoss(m, r, dim()); },
        rank.world_size <= 2 ? 0 : 1e-4);
  });
}

TEST(MaterializeDetails, WhatInitDidNotWriteIsReportedAndCanFollow) {
  RunRanks(2, [](RankContext& rank) {
    Stack plain = MakePlain(4, 3);
    Stack model = MakeOnMeta(4);
    ShardStack(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] {
          materialize(model, [](Module& module) {
            if (auto* linear = module.as<Linear>()) linear->reset_parameters();
            if (auto* norm = module.as<BatchNorm1d>()) norm->weight.fill_(1);
          });
        },
        {"init_fn has not written", "'first.mask'", "'first.norm.running_mean'",
         "'first.norm.bias'", "'second.mask'"});
    EXPECT_TRUE(model->first->mask.is_meta());
    ExpectThrows<c10::ValueError>(
        [&] { StackLoss(model, 1, 4); },
        {"'first.norm.bias', 'second.norm.bias'. Call"});
    int calls = 0;
    materialize(model, [&](Module& module) {
      ++calls;
      if (auto* norm = module.as<BatchNorm1d>()) {
        // What the first call wrote is there.
        EXPECT_TRUE(torch::equal(norm->weight.sum(), torch::tensor(4.0)));
        norm->bias.zero_();
        norm->reset_running_stats();
      }
      if (auto* normed = module.as<Normed>()) normed->mask.zero_();
    });
    EXPECT_EQ(calls, 4);  // two blocks with a mask, two norms
    EXPECT_NO_THROW(StackLoss(model, 1, 4));
  });
}

TEST(MaterializeDetails, AnInitThatThrowsCanBeRepeated) {
  RunRanks(2, [](RankContext& rank) {
    Stack plain = MakePlain(4, 3);
    Stack model = MakeOnMeta(4);
    ShardStack(model, rank.options());
    int calls = 0;
    EXPECT_THROW(materialize(model,
                             [&](Module& module) {
                               if (++calls == 4) throw std::runtime_error("no");
                               Init(3)(module);
                             }),
                 std::runtime_error);
    EXPECT_EQ(fsdp_stats(model).unsharded_param_bytes, 0);
    Init init(3);
    load_full_state_dict(model, full_state_dict(plain));
    ExpectParameters(*model, *plain);
  });
}

// Each rank's own draws where nothing is synchronised.
TEST(MaterializeDetails, WithoutSyncEachRankKeepsItsOwnRows) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = [] {
      const MetaDevice meta;
      return Linear(4, 4);
    }();
    fully_shard(model, rank.options().sync_module_states(false));
    materialize(model, [&](Module& module) {
      module.as<Linear>()->weight.fill_(rank.rank);
      module.as<Linear>()->bias.fill_(rank.rank);
    });
    const torch::NoGradGuard no_grad;
    for (const auto& shard : model->parameters()) {
      EXPECT_TRUE(torch::equal(shard, torch::full_like(shard, rank.rank)));
    }
  });
}

// Parameters that are gathered in another dtype have the unrounded values.
class CastMaterializeTest
    : public testing::TestWithParam<std::tuple<int, std::string>> {};

INSTANTIATE_TEST_SUITE_P(
    All, CastMaterializeTest,
    testing::Combine(testing::Values(1, 2, 4),
                     testing::Values("Ragged", "ShardOne", "Replicate",
                                     "TwoDtypes", "Double")),
    [](const auto& info) {
      return std::get<1>(info.param) + std::to_string(std::get<0>(info.param));
    });

FullyShardOptions CastOptions(FullyShardOptions options,
                              const std::string& kind) {
  MixedPrecisionPolicy policy;
  policy.param_dtype(kind == "Double" ? torch::kDouble : torch::kBFloat16);
  if (kind == "TwoDtypes") {
    policy.param_dtype_override_fn(
        [](const std::string& fqn,
           const Tensor& parameter) -> std::optional<c10::ScalarType> {
          if (fqn.find("bias") == std::string::npos) return torch::kBFloat16;
          return parameter.scalar_type();
        });
  }
  if (kind == "ShardOne" || kind == "Replicate") {
    options.shard_placement_fn(
        [kind](const std::string& /*fqn*/,
               const Tensor& parameter) -> std::optional<Placement> {
          if (parameter.dim() < 2) return std::nullopt;
          if (kind == "Replicate") return Replicate();
          return composable::Shard(1);
        });
  }
  return options.mp_policy(policy);
}

TEST_P(CastMaterializeTest, EqualsTheUnshardedInitialisation) {
  const auto& [world_size, kind_] = GetParam();
  RunRanks(world_size, [kind = kind_](RankContext& rank) {
    Stack plain = MakePlain(5, 7);
    Stack model = MakeOnMeta(5);
    ShardStack(model, CastOptions(rank.options(), kind));
    const auto dtype = model->in->weight.scalar_type();
    EXPECT_NE(dtype, torch::kFloat);
    Init init(7 + rank.rank);
    materialize(model, [&](Module& module) {
      if (auto* linear = module.as<Linear>()) {
        EXPECT_EQ(linear->weight.scalar_type(), torch::kFloat);
      }
      init(module);
    });
    ExpectParameters(*model, *plain);
    ExpectBuffers(*model, *plain);
    EXPECT_EQ(model->in->weight.scalar_type(), dtype);
    EXPECT_EQ(fsdp_stats(model).unsharded_param_bytes, 0);
    // Gathered as ever.
    const Tensor gathered = model->in->weight.clone();
    EXPECT_EQ(gathered.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(gathered, plain->in->weight.to(dtype)));
  });
}

// What the first call has written is gathered unrounded for the second.
TEST_P(CastMaterializeTest, InTwoCalls) {
  const auto& [world_size, kind_] = GetParam();
  RunRanks(world_size, [kind = kind_](RankContext& rank) {
    Linear plain(5, 5);
    Linear model = [] {
      const MetaDevice meta;
      return Linear(5, 5);
    }();
    fully_shard(model, CastOptions(rank.options(), kind));
    const Tensor weight = Input(1, {5, 5});
    const Tensor bias = Input(2, {5});
    {
      const torch::NoGradGuard no_grad;
      plain->weight.copy_(weight);
      plain->bias.copy_(bias);
    }
    ExpectThrows<c10::ValueError>(
        [&] {
          materialize(model, [&](Module& module) {
            module.as<Linear>()->weight.copy_(weight);
          });
        },
        {"has not written 'bias'"});
    materialize(model, [&](Module& module) {
      EXPECT_TRUE(torch::equal(module.as<Linear>()->weight, weight));
      module.as<Linear>()->bias.copy_(bias);
    });
    ExpectParameters(*model, *plain);
  });
}

// In the dtype of its shards.
TEST(MaterializeDetails, PeakIsOneGroupAboveTheShards) {
  constexpr int64_t kDim = 256;
  for (const int world_size : {1, 2, 4}) {
    for (const bool cast : {false, true}) {
      RunRanks(world_size, [&](RankContext& rank) {
        MemoryCounter memory;
        Stack model = MakeOnMeta(kDim);
        ShardStack(model, cast ? CastOptions(rank.options(), "Ragged")
                               : rank.options());
        // Flat shards have none yet.
        EXPECT_LT(memory.live(), 16 << 10);
        memory.ResetPeak();
        materialize(model, Init(1));
        int64_t shards = 0;
        int64_t largest = 0;
        for (const auto& module : model->modules()) {
          const auto state = fully_shard.state(module);
          if (state == nullptr) continue;
          const auto bytes =
              static_cast<int64_t>(state->group()->sharded_bytes());
          shards += bytes;
          largest = std::max(largest, bytes * world_size);
        }
        constexpr int64_t kSmall = 64 << 10;  // buffers and flags
        EXPECT_LE(memory.peak(), shards + largest + kSmall);
        EXPECT_GE(memory.peak(), shards + largest / 2);
        EXPECT_LE(memory.live(), shards + kSmall);
      });
    }
  }
}

TEST(MaterializeDetails, TheExampleOfTheMetaDevice) {
  Linear huge(nullptr);
  {
    const MetaDevice meta;
    huge = Linear(1 << 20, 1 << 20);
    EXPECT_TRUE(torch::ones({2}).is_meta());
  }
  EXPECT_TRUE(huge->weight.is_meta());
  EXPECT_FALSE(torch::ones({2}).is_meta());
}

// A failed fully_shard leaves the model on the meta device.
TEST(MaterializeDetails, ARefusedCallLeavesItOnTheMetaDevice) {
  RunRanks(1, [](RankContext& rank) {
    Stack model = MakeOnMeta(3);
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(model, rank.options().limit_all_gathers(0)); },
        {"limit_all_gathers"});
    EXPECT_TRUE(model->in->weight.is_meta());
    EXPECT_TRUE(model->first->mask.is_meta());
  });
}

}  // namespace
}  // namespace composable
