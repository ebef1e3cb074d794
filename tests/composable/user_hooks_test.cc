// Hooks, saved members and aliases of a user, where plain LibTorch has an answer
// that sharding must not change.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"

namespace composable {
namespace {

using torch::Tensor;

Mlp TwoGroups(RankContext& rank) {
  Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
  fully_shard(model->second, rank.options());
  fully_shard(model, rank.options());
  return model;
}

TEST(UserHookTest, WhatAHookKeepsDoesNotChange) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp model = TwoGroups(rank);
    std::vector<Tensor> kept;
    model->parameters()[0].register_hook([&](const Tensor& gradient) {
      kept.push_back(gradient);
      return gradient;
    });
    MlpLoss(model, rank.rank).backward();
    const Tensor first = kept[0].clone();
    MlpLoss(model, rank.rank).backward();
    EXPECT_TRUE(torch::equal(kept[0], first));
  });
}

TEST(UserHookTest, AResultMayBeExpanded) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Mlp sharded = TwoGroups(rank);
    for (auto* model : {&plain, &sharded}) {
      for (auto& parameter : (*model)->parameters()) {
        parameter.register_hook([](const Tensor& gradient) {
          return torch::ones({}).expand_as(gradient);
        });
      }
    }
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
  });
}

TEST(UserHookTest, OnAMemberOutlivesFreezingItsGroup) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Mlp sharded = TwoGroups(rank);
    for (auto* model : {&plain, &sharded}) {
      (*model)->second->weight.register_hook(
          [](const Tensor& gradient) { return gradient * 2; });
    }
    for (const bool on : {false, true}) {
      for (auto* model : {&plain, &sharded}) {
        (*model)->zero_grad();
        for (auto& parameter : (*model)->second->parameters()) {
          parameter.requires_grad_(on);
        }
      }
      ExpectSameBackward(rank, plain, sharded, MlpLoss);
    }
  });
}

TEST(UserHookTest, OnAMemberThatGetsNoGradientIsNotRun) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Mlp sharded = TwoGroups(rank);
    for (auto* model : {&plain, &sharded}) {
      (*model)->third->weight.register_hook(
          [](const Tensor& gradient) { return gradient * 2; });
    }
    ExpectSameBackward(rank, plain, sharded, [](Mlp& model, int r) {
      return model->first(Input(r, {2, 5})).pow(2).sum();
    });
  });
}

TEST(UserHookTest, RegisteredBeforehandIsRemovableThroughTheMember) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    const unsigned hook = sharded->first->weight.register_hook(
        [](const Tensor& gradient) { return gradient * 2; });
    fully_shard(sharded, rank.options());
    sharded->first->weight.remove_hook(hook);
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
  });
}

// Refused, whoever calls and whatever else is asked for, and nothing is kept.
TEST(MemberAsInputTest, LeavesNoRetainedGradient) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Mlp sharded = TwoGroups(rank);
    const Tensor member = sharded->second->weight;
    const Tensor shard = sharded->named_parameters()["second.bias"];
    WarningsOfThisThread warnings;
    for (const bool mixed : {false, true}) {
      SCOPED_TRACE(mixed);
      std::vector<Tensor> inputs{member};
      if (mixed) inputs.push_back(shard);
      ExpectThrows<c10::ValueError>(
          [&] {
            MlpLoss(sharded, rank.rank).backward({}, false, false, inputs);
          },
          {"backward(inputs = ...) was given", "'second.weight'",
           "module->parameters()"});
      EXPECT_FALSE(member.retains_grad());
    }
    EXPECT_EQ(warnings.text(), "");
    sharded->zero_grad();
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
    EXPECT_THROW((void)member.grad(), c10::ValueError);
  });
}

struct SavesItsWeight : torch::autograd::Function<SavesItsWeight> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const Tensor& weight,
                        const Tensor& bias) {
    context->save_for_backward({x, weight});
    return torch::addmm(bias, x, weight.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0]),
            gradients[0].sum(0)};
  }
};

TEST(SavedMemberTest, InAFunctionIsRightAndWarnsOfNothing) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Mlp sharded = TwoGroups(rank);
    WarningsOfThisThread warnings;
    ExpectSameBackward(rank, plain, sharded, [](Mlp& model, int r) {
      Tensor x = Input(r, {4, 5});
      for (auto& layer : {model->first, model->second, model->third}) {
        x = torch::tanh(SavesItsWeight::apply(x, layer->weight, layer->bias));
      }
      return x.pow(2).sum();
    });
    EXPECT_EQ(warnings.text(), "");
  });
}

// In LibTorch `kept` would keep the old memory; here it is the shard's own.
TEST(AliasTest, SwappingAShardForAnAverageIsRightOrNotSilent) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp model = TwoGroups(rank);
    Tensor shard = model->parameters()[0];
    const Tensor before = shard.detach().clone();
    WarningsOfThisThread warnings;
    bool threw = false;
    try {
      const Tensor kept = shard.data();
      shard.set_data(torch::zeros(shard.sizes()));
      shard.set_data(kept);
    } catch (const c10::ValueError& error) {
      threw = true;
    }
    EXPECT_TRUE(threw || warnings.Count("'first.weight'") > 0 ||
                torch::equal(shard.detach(), before));
  });
}

}  // namespace
}  // namespace composable
