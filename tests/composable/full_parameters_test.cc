// Whole parameters in a scope: what is read, what is written, what comes of it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/ranks_and_groups.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

int64_t GroupsInMemory(const ModuleRef& module) {
  return fsdp_stats(module).unsharded_param_bytes;
}

class FullParametersTest : public RanksAndGroupsTest {};

INSTANTIATE_TEST_SUITE_P(All, FullParametersTest, RanksAndGroups(),
                         NameOfRanksAndGroups);

// Three ranks share rows of 7, 7 and 3.
TEST_P(FullParametersTest, EditsOfAnyKindReachTheShards) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    const auto edit = [](Mlp& m) {
      init::constant_(m->first->weight, 0.25);
      init::eye_(m->second->weight);
      m->second->bias.add_(1);
      m->third->weight.t().mul_(2);
      m->third->weight[1].fill_(3);
      m->third->bias.data().copy_(torch::arange(3, torch::kFloat));
      *m->first->bias.data_ptr<float>() = 7;
    };
    {
      const torch::NoGradGuard no_grad;
      edit(plain);
    }
    {
      const FullParameters scope(sharded);
      for (const auto& item : plain->named_parameters()) {
        ASSERT_EQ(scope.named_parameters()[item.key()].sizes(),
                  item.value().sizes());
      }
      edit(sharded);
      EXPECT_TRUE(torch::equal(sharded->third->weight, plain->third->weight));
    }
    EXPECT_EQ(GroupsInMemory(sharded), 0);
    ExpectParameters(*sharded, *plain);
    // The next step is that of the edited model.
    ExpectSameBackward(
        rank, plain, sharded, [](Mlp& m, int r) { return MlpLoss(m, r); },
        world_size() > 2 ? 1e-5 : 0);
  });
}

TEST_P(FullParametersTest, WithoutWritebackReadsButRefusesToWrite) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    {
      const FullParameters scope(sharded, {.writeback = false});
      for (const auto& item : plain->named_parameters()) {
        EXPECT_TRUE(
            torch::equal(scope.named_parameters()[item.key()], item.value()));
      }
      EXPECT_TRUE(torch::equal(sharded->first->weight.sum(),
                               plain->first->weight.sum()));
      ExpectThrows<c10::ValueError>(
          [&] { sharded->first->weight.zero_(); },
          {"aten::zero_ writes the whole parameter 'first.weight'",
           "FullParameters scope with writeback"});
      // Memory that is written all the same is not written back.
      *sharded->first->weight.data_ptr<float>() = 100;
    }
    ExpectParameters(*sharded, *plain);
    EXPECT_EQ(GroupsInMemory(sharded), 0);
  });
}

TEST_P(FullParametersTest, AnExceptionInsideKeepsWhatWasWritten) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    const auto edit = [](Mlp& m) {
      const torch::NoGradGuard no_grad;
      m->first->weight.fill_(0.5);
      throw std::runtime_error("stop");
    };
    EXPECT_THROW(edit(plain), std::runtime_error);
    EXPECT_THROW(
        {
          const FullParameters scope(sharded);
          edit(sharded);
        },
        std::runtime_error);
    EXPECT_EQ(GroupsInMemory(sharded), 0);
    EXPECT_EQ(fsdp_stats(sharded).gathers_in_flight, 0);
    ExpectParameters(*sharded, *plain);
    ExpectSameBackward(
        rank, plain, sharded, [](Mlp& m, int r) { return MlpLoss(m, r); },
        world_size() > 2 ? 1e-5 : 0);
  });
}

TEST_P(FullParametersTest, OneGroupAtATime) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    size_t largest = 0;
    for (const auto& module : sharded->modules()) {
      const auto state = fully_shard.state(module);
      if (state == nullptr || state->group() == nullptr) continue;
      largest = std::max(largest, state->group()->unsharded_bytes());
    }
    std::vector<std::string> names;
    ForEachFullParameter(sharded, [&](const std::string& fqn, Tensor& whole) {
      names.push_back(fqn);
      EXPECT_TRUE(torch::equal(whole, plain->named_parameters()[fqn]));
      whole.mul_(2);
      EXPECT_LE(GroupsInMemory(sharded), static_cast<int64_t>(largest));
    });
    const torch::NoGradGuard no_grad;
    for (auto& parameter : plain->parameters()) parameter.mul_(2);
    EXPECT_EQ(names, plain->named_parameters().keys());
    EXPECT_EQ(fsdp_stats(sharded).peak_unsharded_bytes,
              static_cast<int64_t>(largest));
    ExpectParameters(*sharded, *plain);
  });
}

TEST(FullParametersDetails, NestedScopes) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, rank.options());
    {
      const FullParameters outer(sharded, {.writeback = false});
      const int64_t gathered = fsdp_stats(sharded).num_gathers;
      {
        const FullParameters inner(sharded->second);
        sharded->second->weight.fill_(2);
        ExpectThrows<c10::ValueError>([&] { sharded->first->weight.fill_(2); },
                                      {"with writeback"});
      }
      EXPECT_EQ(fsdp_stats(sharded).num_gathers, gathered);
      // Still there, and read-only again.
      EXPECT_EQ(sharded->second->weight.sum().item<float>(), 98);
      EXPECT_EQ(fsdp_stats(sharded).num_gathers, gathered);
      ExpectThrows<c10::ValueError>([&] { sharded->second->weight.fill_(3); },
                                    {"with writeback"});
    }
    const torch::NoGradGuard no_grad;
    plain->second->weight.fill_(2);
    ExpectParameters(*sharded, *plain);
    EXPECT_EQ(GroupsInMemory(sharded), 0);
  });
}

TEST(FullParametersDetails, WithoutRecurseTheModulesOwnGroup) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model->first, rank.options());
    fully_shard(model, rank.options());
    const FullParameters scope(model, {.recurse = false});
    EXPECT_EQ(scope.named_parameters().keys(),
              (std::vector<std::string>{"second.weight", "second.bias",
                                        "third.weight", "third.bias"}));
    EXPECT_EQ(fully_shard.state(model->first)->group()->sharded_state(),
              ShardedState::kSharded);
  });
}

// What would be lost, or would break the scope, throws.
TEST(FullParametersDetails, WhatItRefuses) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    FSDPModule handle = fully_shard(model, rank.options());
    const auto weights = full_state_dict(model);
    Tensor loss = MlpLoss(model, rank.rank);
    {
      const FullParameters scope(model);
      ExpectThrows<c10::ValueError>([&] { loss.backward(); },
                                    {"backward", "FullParameters scope"});
      ExpectThrows<c10::ValueError>([&] { handle.reshard(); },
                                    {"reshard()", "FullParameters scope"});
      ExpectThrows<c10::ValueError>(
          [&] { load_full_state_dict(model, weights); },
          {"load_full_state_dict", "FullParameters scope", "first.weight"});
      ExpectThrows<c10::ValueError>(
          [&] { model->parameters()[0].zero_(); },
          {"writes the shard of 'first.weight'", "Write the member"});
      ExpectThrows<c10::ValueError>([&] { model->first->weight.t_(); },
                                    {"another shape or memory", "copy_"});
      ExpectThrows<c10::ValueError>(
          [&] {
            model->first->weight.set_(torch::ones({7, 5}));
          },
          {"another shape or memory"});
      Sequential above(model);
      ExpectThrows<c10::ValueError>([&] { fully_shard(above, rank.options()); },
                                    {"FullParameters scope is open"});
      const torch::AutoGradMode with_gradients(true);
      ExpectThrows<c10::ValueError>([&] { model->first->weight.zero_(); },
                                    {"gradients on", "NoGradGuard"});
    }
    ExpectParameters(*model, *plain);
    ExpectSameBackward(rank, plain, model,
                       [](Mlp& m, int r) { return MlpLoss(m, r); });
  });
}

// The error of a write outside of a scope names the scope.
TEST(FullParametersDetails, AWriteOutsideNamesTheScope) {
  RunRanks(1, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] { init::zeros_(model->first->weight); },
        {"writes the whole parameter 'first.weight'",
         "composable::FullParameters scope(module)", "opened by all ranks"});
  });
}

class OpensAScopeImpl : public Module {
 public:
  OpensAScopeImpl() : fc(register_module("fc", Linear(3, 3))) {}
  Tensor forward(const Tensor& x) {
    const FullParameters scope(fc);
    return fc(x);
  }
  Linear fc;
};
COMPOSABLE_MODULE(OpensAScope);

TEST(FullParametersDetails, NotInsideOfAForwardOrBackward) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return OpensAScope(); });
    fully_shard(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] {
          model(Input(1, {2, 3}));
        },
        {"composable::FullParameters", "inside of a forward",
         "between iterations"});
    EXPECT_EQ(GroupsInMemory(model), 0);
    auto other = RankContext::Seeded(1, [] { return OpensAScope(); });
    fully_shard(other, rank.options());
    Tensor y = other->fc(Input(1, {2, 3}));
    y.register_hook(
        [&](const Tensor& /*gradient*/) { const FullParameters scope(other); });
    ExpectThrows<c10::ValueError>(
        [&] { y.sum().backward(); },
        {"composable::FullParameters", "inside of a backward"});
  });
}

// Weights swapped for their average between two evaluations, and back: what is
// gathered for one is not taken for the other.
TEST(FullParametersDetails, SwapOfAnAverageBetweenEvaluations) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    fully_shard(sharded, rank.options());
    const Tensor x = Input(5, {4, 5});
    const torch::NoGradGuard no_grad;
    const auto check = [&] { EXPECT_TRUE(torch::equal(sharded(x), plain(x))); };
    check();
    StateDict kept;
    ForEachFullParameter(sharded, [&](const std::string& fqn, Tensor& whole) {
      kept.insert(fqn, whole.clone());
      whole.mul_(2);
    });
    for (auto& parameter : plain->parameters()) parameter.mul_(2);
    check();
    {
      const FullParameters scope(sharded);
      for (const auto& item : scope.named_parameters()) {
        at::Tensor(item.value()).copy_(kept[item.key()]);
      }
      for (auto& item : plain->named_parameters()) {
        item.value().copy_(kept[item.key()]);
      }
      check();  // a forward inside of the scope
    }
    check();
  });
}

// A backward through an earlier use of what was written fails as in LibTorch.
TEST(FullParametersDetails,
     AWriteBetweenForwardAndBackwardIsAutogradsOwnError) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model, rank.options());
    Tensor loss = MlpLoss(model, rank.rank);
    {
      const FullParameters scope(model);
      model->second->weight.mul_(2);
    }
    ExpectThrows([&] { loss.backward(); },
                 {"modified by an inplace operation"});
  });
}

// unshard() of the handle holds over a scope; what was written is gathered anew.
TEST(FullParametersDetails, OfAGroupThatIsPinned) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    FSDPModule handle = fully_shard(model, rank.options());
    handle.unshard();
    {
      const FullParameters scope(model);
      // Each rank writes another value: its rows count.
      model->second->weight.fill_(rank.rank);
    }
    const Tensor whole = model->second->weight.detach() + 0;
    const Tensor rows =
        LocalRows(model->named_parameters()["second.weight"], whole);
    EXPECT_TRUE(torch::equal(rows, torch::full_like(rows, rank.rank)));
    EXPECT_GT(GroupsInMemory(model), 0);
    handle.reshard();
    EXPECT_EQ(GroupsInMemory(model), 0);
  });
}

}  // namespace
}  // namespace composable
