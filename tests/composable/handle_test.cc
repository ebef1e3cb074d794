// What the caller holds: handles, ways to name modules, and the life times of
// models, states, process groups, optimizers and losses.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

Mlp MakeMlp() {
  return RankContext::Seeded(1, [] { return Mlp(); });
}

bool IsSharded(const ModuleRef& module) {
  return fully_shard.state(module)->group()->is_sharded();
}

// --- unshard() and reshard() -------------------------------------------------

TEST(UnshardTest, GivesWholeValuesUntilReshard) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    // One slot, for which the other groups compete.
    const auto options = rank.options().limit_all_gathers(1);
    FSDPModule handle = fully_shard(sharded->first, options);
    fully_shard(sharded->second, options);
    fully_shard(sharded->third, options);
    fully_shard(sharded, options);
    handle.unshard();
    handle.unshard();  // again: nothing
    const auto expect_readable = [&, &plain = plain, &sharded = sharded] {
      const auto* data = sharded->first->weight.data_ptr<float>();
      const auto* expected = plain->first->weight.data_ptr<float>();
      for (int i = 0; i < 7 * 5; ++i) EXPECT_EQ(data[i], expected[i]);
    };
    expect_readable();
    // Kept through forwards that leave it.
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(torch::equal(MlpLoss(sharded, 1), MlpLoss(plain, 1)));
      EXPECT_TRUE(IsSharded(sharded->second));
      expect_readable();
    }
    handle.reshard();
    EXPECT_TRUE(IsSharded(sharded->first));
    handle.reshard();
    EXPECT_TRUE(torch::equal(MlpLoss(sharded, 1), MlpLoss(plain, 1)));
  });
}

TEST(UnshardTest, EndsWithTheNextBackward) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handles = ShardEverySubmodule(sharded, rank.options());
    for (auto& handle : handles) handle.unshard();
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
    for (const auto& child : sharded->children()) {
      EXPECT_TRUE(IsSharded(child));
    }
  });
}

TEST(UnshardTest, SeesTheLastStep) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(3, 5); });
    auto handle = fully_shard(model, rank.options());
    handle.unshard();
    {
      const torch::NoGradGuard no_grad;
      for (auto& shard : model->parameters()) shard.fill_(2);
    }
    handle.unshard();
    EXPECT_EQ(model->weight.data_ptr<float>()[14], 2);
    handle.reshard();
  });
}

// --- Naming modules ----------------------------------------------------------

TEST(ModuleRefTest, HolderPointerAndReference) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    FSDPModule by_holder = fully_shard(sharded->first, rank.options());
    FSDPModule by_pointer = fully_shard(sharded->second.ptr(), rank.options());
    FSDPModule by_reference = fully_shard(*sharded->third, rank.options());
    const std::shared_ptr<Module> base = sharded.ptr();
    fully_shard(base, rank.options());
    EXPECT_EQ(fully_shard.state(sharded->first.ptr()), by_holder.state());
    EXPECT_EQ(fully_shard.state(*sharded->second), by_pointer.state());
    EXPECT_EQ(fully_shard.state(sharded->third), by_reference.state());
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
  });
}

TEST(ListOfModulesTest, IsOneGroup) {
  RunRanks(2, [](RankContext& rank) {
    for (const bool as_vector : {false, true}) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      FSDPModule handle =
          as_vector
              ? fully_shard(std::vector<Linear>{sharded->first, sharded->third},
                            rank.options())
              : fully_shard({sharded->first, sharded->third}, rank.options());
      FSDPModule root = fully_shard(sharded, rank.options());
      EXPECT_EQ(fully_shard.state(sharded->first), handle.state());
      EXPECT_EQ(fully_shard.state(sharded->third), handle.state());
      EXPECT_NE(root.state(), handle.state());
      EXPECT_EQ(handle.state()->group()->params().size(), 4);
      handle.unshard();
      EXPECT_NO_THROW(sharded->third->weight.data_ptr<float>());
      EXPECT_TRUE(IsSharded(sharded));
      handle.reshard();
      for (int step = 0; step < 2; ++step) {
        ExpectSameBackward(rank, plain, sharded,
                           [](Mlp& model, int r) { return MlpLoss(model, r); });
      }
    }
  });
}

TEST(ListOfModulesTest, WithModulesInsideEachOther) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    const ModuleRef child = sharded->first;
    const ModuleRef parent = sharded;
    fully_shard({child, parent}, rank.options());
    EXPECT_EQ(fully_shard.state(sharded)->group()->params().size(), 6);
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
  });
}

// --- Order of sharding -------------------------------------------------------

TEST(ShardingOrderTest, RootAfterAFirstTrainingOfAChild) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    fully_shard(sharded->first, rank.options());
    fully_shard(sharded->second, rank.options());
    const auto of_child = [](Mlp& model, int r) {
      return model->second(model->first(Input(r, {4, 5}))).pow(2).sum();
    };
    const auto child_step = [&, &plain = plain, &sharded = sharded] {
      BackwardOfAllRanks(*plain, 2,
                         [&](int r) { of_child(plain, r).backward(); });
      of_child(sharded, rank.rank).backward();
      ExpectGradients(*sharded->first, *plain->first, 0);
      ExpectGradients(*sharded->second, *plain->second, 0);
    };
    child_step();
    {  // A forward alone leaves groups gathered.
      const torch::NoGradGuard no_grad;
      of_child(sharded, 1);
    }
    fully_shard(sharded, rank.options());
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
    child_step();
  });
}

TEST(ShardingOrderTest, ChildAfterParentIsRefusedAndChangesNothing) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    fully_shard(sharded, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(sharded->first, rank.options()); },
        {"belong to an earlier call", "bottom-up"});
    EXPECT_EQ(fully_shard.state(sharded->first), nullptr);
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
  });
}

TEST(ShardingOrderTest, ChildIsUsedWithoutItsParent) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, rank.options());
    for (int step = 0; step < 2; ++step) {
      ExpectSameBackward(rank, plain, sharded, [](Mlp& model, int r) {
        return model->second(Input(r, {4, 7})).pow(2).sum();
      });
    }
  });
}

TEST(ShardingOrderTest, TwoTreesInOneLoss) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain_a, a] = MakePair([] { return Mlp(); });
    auto [plain_b, b] = MakePair([] { return Linear(3, 4); });
    ShardEverySubmodule(a, rank.options());
    fully_shard(b, rank.options());
    const auto loss = [](Mlp& first, Linear& second, int r) {
      return second(first(Input(r, {4, 5}))).pow(2).sum();
    };
    for (int step = 0; step < 2; ++step) {
      Sequential both(plain_a, plain_b);
      BackwardOfAllRanks(*both, 2,
                         [&, &plain_a = plain_a, &plain_b = plain_b](int r) {
                           loss(plain_a, plain_b, r).backward();
                         });
      loss(a, b, rank.rank).backward();
      ExpectGradients(*a, *plain_a, 0);
      ExpectGradients(*b, *plain_b, 0);
    }
  });
}

// --- Life times --------------------------------------------------------------

TEST(LifeTimeTest, StateDiesWithItsModule) {
  RunRanks(2, [](RankContext& rank) {
    Mlp model = MakeMlp();
    std::vector<std::weak_ptr<FSDPState>> states;
    for (const auto& handle : ShardEverySubmodule(model, rank.options())) {
      states.push_back(handle.state());
    }
    // An optimizer, which holds shards, a handle and a finished backward do
    // not keep it.
    torch::optim::AdamW optimizer(model->parameters());
    MlpLoss(model, rank.rank).backward();
    optimizer.step();
    {
      const torch::NoGradGuard no_grad;
      MlpLoss(model, 1);  // and leaves groups gathered
    }
    const std::weak_ptr<MlpImpl> module = model.ptr();
    model = nullptr;
    EXPECT_TRUE(module.expired());
    // The root, which has no parameters, is kept by the registry until the
    // next call.
    states.pop_back();
    for (const auto& state : states) EXPECT_TRUE(state.expired());
    optimizer.step();  // harmless
  });
}

TEST(LifeTimeTest, StateOfOneModuleDiesWithoutTheOthers) {
  RunRanks(2, [](RankContext& rank) {
    Linear first = RankContext::Seeded(1, [] { return Linear(5, 5); });
    auto [plain, second] = MakePair([] { return Linear(5, 5); });
    Sequential parent(first, second);
    fully_shard(first, rank.options());
    fully_shard(second, rank.options());
    fully_shard(parent, rank.options());
    parent->forward(Input(1, {2, 5})).sum().backward();
    second->zero_grad();
    const std::weak_ptr<FSDPState> state = fully_shard.state(first);
    parent = nullptr;
    first = nullptr;
    EXPECT_TRUE(state.expired());
    ExpectSameBackward(rank, plain, second, [](Linear& model, int r) {
      return model(Input(r, {2, 5})).pow(2).sum();
    });
  });
}

TEST(LifeTimeTest, ModelOutlivesItsProcessGroup) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, rank.options());
    rank.group.reset();
    for (int step = 0; step < 2; ++step) {
      ExpectSameBackward(rank, plain, sharded,
                         [](Mlp& model, int r) { return MlpLoss(model, r); });
    }
  });
}

TEST(LifeTimeTest, ProcessGroupOutlivesModels) {
  RunRanks(2, [](RankContext& rank) {
    for (int i = 0; i < 3; ++i) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      ShardEverySubmodule(sharded, rank.options());
      ExpectSameBackward(rank, plain, sharded,
                         [](Mlp& model, int r) { return MlpLoss(model, r); });
    }
  });
}

TEST(LifeTimeTest, MemberTensorOutlivesItsModule) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(3, 5); });
    const Tensor expected = model->weight.detach().clone();
    fully_shard(model, rank.options());
    const Tensor weight = model->weight;
    model = nullptr;
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(weight, expected));
  });
}

// The graph keeps what its backward needs, and no longer than itself.
class LossOutlivesModel : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(All, LossOutlivesModel, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "InputNeedsGradient"
                                             : "InputWithoutGradient";
                         });

TEST_P(LossOutlivesModel, BackwardIsRightAndFreesTheStates) {
  RunRanks(2, [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    const auto handles = ShardEverySubmodule(sharded, rank.options());
    const auto shards = sharded->named_parameters();
    std::vector<Tensor> expected;
    BackwardOfAllRanks(*plain, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
    });
    for (const auto& item : plain->named_parameters()) {
      expected.push_back(LocalRows(shards[item.key()], item.value().grad()));
    }
    const Tensor x = Input(rank.rank, {4, 5}).requires_grad_(GetParam());
    Tensor loss = sharded(x).pow(2).sum();
    sharded = nullptr;
    EXPECT_NE(handles[0].state(), nullptr);
    loss.backward();
    for (size_t i = 0; i < expected.size(); ++i) {
      const Tensor& gradient = shards.values()[i].grad();
      ASSERT_TRUE(gradient.defined()) << shards.keys()[i];
      EXPECT_TRUE(torch::equal(gradient, expected[i])) << shards.keys()[i];
    }
    loss.reset();
    for (size_t i = 0; i + 1 < handles.size(); ++i) {
      EXPECT_EQ(handles[i].state(), nullptr);
    }
  });
}

TEST_P(LossOutlivesModel, DroppedLossFreesTheStates) {
  RunRanks(2, [&](RankContext& rank) {
    Mlp model = MakeMlp();
    const auto handles = ShardEverySubmodule(model, rank.options());
    const Tensor x = Input(rank.rank, {4, 5}).requires_grad_(GetParam());
    Tensor loss = model(x).pow(2).sum();
    model = nullptr;
    loss.reset();
    for (size_t i = 0; i + 1 < handles.size(); ++i) {
      EXPECT_EQ(handles[i].state(), nullptr);
    }
  });
}

TEST(LifeTimeTest, DroppedLossLeavesTheModelUsable) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, rank.options());
    for (int step = 0; step < 2; ++step) {
      MlpLoss(sharded, 100 + step);  // no backward
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(rank, plain, sharded,
                         [](Mlp& model, int r) { return MlpLoss(model, r); });
    }
  });
}

}  // namespace
}  // namespace composable
