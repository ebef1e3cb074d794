// requires_grad set on parameters() after sharding: what is frozen gets no
// gradient and keeps its value, what is not trains as unsharded.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

struct GanImpl : Module {
  GanImpl()
      : generator(register_module("generator", Mlp())),
        critic(register_module(
            "critic", Sequential(Linear(3, 7), Tanh(), Linear(7, 1)))) {}
  Mlp generator;
  Sequential critic;
};
TORCH_MODULE(Gan);

void SetTrainable(Module& module, bool trainable) {
  for (auto& parameter : module.parameters()) {
    parameter.set_requires_grad(trainable);
  }
}

enum class GanGroups { kOne, kHalves, kPerModule };

class FreezingTest
    : public testing::TestWithParam<std::tuple<int, GanGroups, bool>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  void ShardGan(Gan& model, const RankContext& rank) const {
    auto options = rank.options();
    if (std::get<2>(GetParam())) options.reshard_after_forward(false);
    switch (std::get<1>(GetParam())) {
      case GanGroups::kOne:
        break;
      case GanGroups::kHalves:
        fully_shard(model->generator, options);
        fully_shard(model->critic, options);
        break;
      case GanGroups::kPerModule:
        ShardEverySubmodule(model, options);
        return;
    }
    fully_shard(model, options);
  }
};

std::string FreezingTestName(
    const testing::TestParamInfo<FreezingTest::ParamType>& info) {
  const char* groups[] = {"OneGroup", "Halves", "GroupPerModule"};
  return groups[static_cast<int>(std::get<1>(info.param))] +
         std::to_string(std::get<0>(info.param)) +
         (std::get<2>(info.param) ? "Keep" : "");
}

INSTANTIATE_TEST_SUITE_P(
    All, FreezingTest,
    testing::Combine(testing::Values(2, 3),
                     testing::Values(GanGroups::kOne, GanGroups::kHalves,
                                     GanGroups::kPerModule),
                     testing::Bool()),
    FreezingTestName);

TEST_P(FreezingTest, AlternatesBetweenHalves) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Gan(); });
    ShardGan(sharded, rank);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      const bool train_critic = step % 2 == 0;
      for (Gan* model : {&plain, &sharded}) {
        SetTrainable(*(*model)->generator, !train_critic);
        SetTrainable(*(*model)->critic, train_critic);
      }
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      ExpectSameBackward(rank, plain, sharded, [&](Gan& model, int r) {
        return model->critic
            ->forward(model->generator(Input(10 * step + r, {4, 5})))
            .pow(2)
            .sum();
      });
      for (const auto& item : sharded->named_parameters()) {
        const bool is_critic = item.key().find("critic") == 0;
        EXPECT_EQ(item.value().grad().defined(), is_critic == train_critic)
            << item.key();
      }
      plain_optimizer.step();
      optimizer.step();
      ExpectParameters(*sharded, *plain);
    }
  });
}

TEST_P(FreezingTest, HalfOfTheParametersOfEachModule) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Gan(); });
    ShardGan(sharded, rank);
    for (int step = 0; step < 4; ++step) {
      const bool train_biases = step % 2 == 0;
      for (Gan* model : {&plain, &sharded}) {
        for (auto& item : (*model)->named_parameters()) {
          const bool is_bias = item.key().find("bias") != std::string::npos;
          item.value().set_requires_grad(is_bias == train_biases);
        }
      }
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(rank, plain, sharded, [&](Gan& model, int r) {
        return model->critic
            ->forward(model->generator(Input(10 * step + r, {4, 5})))
            .pow(2)
            .sum();
      });
    }
  });
}

TEST_P(FreezingTest, UnfreezesWhatWasFrozenWhenSharded) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] {
      Gan model;
      SetTrainable(*model->generator, false);
      model->critic[0]->as<Linear>()->weight.set_requires_grad(false);
      return model;
    });
    ShardGan(sharded, rank);
    const auto loss = [](Gan& model, int r) {
      return model->critic->forward(model->generator(Input(r, {4, 5})))
          .pow(2)
          .sum();
    };
    ExpectSameBackward(rank, plain, sharded, loss);
    for (const auto& shard : sharded->generator->parameters()) {
      EXPECT_FALSE(shard.requires_grad());
      EXPECT_FALSE(shard.grad().defined());
    }
    for (Gan* model : {&plain, &sharded}) SetTrainable(**model, true);
    ExpectSameBackward(rank, plain, sharded, loss);
    for (Gan* model : {&plain, &sharded}) {
      SetTrainable(*(*model)->generator, false);
    }
    ExpectSameBackward(rank, plain, sharded, loss);
  });
}

TEST_P(FreezingTest, EverythingThenAgainNothing) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Gan(); });
    ShardGan(sharded, rank);
    const auto loss = [](Gan& model, int r) {
      return model->critic->forward(model->generator(Input(r, {4, 5})))
          .pow(2)
          .sum();
    };
    SetTrainable(*sharded, false);
    const Tensor frozen = loss(sharded, rank.rank);
    EXPECT_FALSE(frozen.requires_grad());
    EXPECT_TRUE(torch::equal(frozen, loss(plain, rank.rank).detach()));
    SetTrainable(*sharded, true);
    ExpectSameBackward(rank, plain, sharded, loss);
  });
}

TEST_P(FreezingTest, InputStillGetsAGradientThroughFrozenParameters) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Gan(); });
    ShardGan(sharded, rank);
    SetTrainable(*sharded, false);
    SetTrainable(*plain, false);
    const auto input_gradient = [&](Gan& model) {
      Tensor x = Input(rank.rank, {4, 5}).requires_grad_(true);
      model->critic->forward(model->generator(x)).pow(2).sum().backward();
      return x.grad();
    };
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(torch::equal(input_gradient(sharded), input_gradient(plain)));
    }
    for (const auto& shard : sharded->parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
  });
}

// A critic step reads the generator without gradients, as training loops do.
TEST_P(FreezingTest, DetachedGeneratorOutput) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Gan(); });
    ShardGan(sharded, rank);
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(rank, plain, sharded, [&](Gan& model, int r) {
        const Tensor fake = model->generator(Input(r, {4, 5})).detach();
        return model->critic->forward(fake).pow(2).sum() +
               model->critic->forward(Input(90 + r, {4, 3})).sum();
      });
    }
  });
}

TEST_P(FreezingTest, BetweenForwardAndBackward) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Gan(); });
    ShardGan(sharded, rank);
    ExpectSameBackward(rank, plain, sharded, [](Gan& model, int r) {
      SetTrainable(*model, true);
      Tensor loss = model->critic->forward(model->generator(Input(r, {4, 5})));
      SetTrainable(*model->generator, false);
      // A second forward makes the change known before backward starts.
      return loss.pow(2).sum() +
             model->critic->forward(model->generator(Input(70 + r, {4, 5})))
                 .sum();
    });
    for (const auto& shard : sharded->generator->parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
  });
}

}  // namespace
}  // namespace composable
