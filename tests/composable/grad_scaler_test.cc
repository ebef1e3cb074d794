// Loss scaling: what one rank finds is what all do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>

#include "tests/composable/ranks_and_groups.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The element of `module` that `owner` holds last, in its gradient.
void SpoilOn(int owner, RankContext& rank, Module& module, double value) {
  if (rank.rank != owner) return;
  for (auto& shard : module.parameters()) {
    const Tensor& gradient = shard.grad();
    if (gradient.defined() && gradient.numel() > 0) {
      gradient.flatten()[0].fill_(value);
      return;
    }
  }
}

// example-begin tests/composable/ranks_and_groups.h
class GradScalerTest : public RanksAndGroupsTest {};
INSTANTIATE_TEST_SUITE_P(All, GradScalerTest, RanksAndGroups(),
                         NameOfRanksAndGroups);
// example-end

// A scale that is a power of two changes no bit of what is unscaled.
TEST_P(GradScalerTest, TrainsAsWithoutIt) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(plain, groups(), rank.options());
    Shard(sharded, groups(), rank.options());
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.01);
    torch::optim::SGD optimizer(sharded->parameters(), 0.01);
    GradScaler scaler(GradScalerOptions().growth_interval(2));
    for (int step = 0; step < 4; ++step) {
      MlpLoss(plain, rank.rank + step).backward();
      plain_optimizer.step();
      plain_optimizer.zero_grad();
      scaler.scale(MlpLoss(sharded, rank.rank + step)).backward();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
    }
    EXPECT_EQ(scaler.get_scale(), 4 * 65536);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(
          torch::equal(plain->parameters()[i], sharded->parameters()[i]));
    }
  });
}

TEST_P(GradScalerTest, InfOrNanOnOneRankSkipsTheStepOfAll) {
  for (int owner = 0; owner < world_size(); ++owner) {
    for (const double value : {kInfinity, -kInfinity, std::nan("")}) {
      RunRanks(world_size(), [&](RankContext& rank) {
        auto [plain, model] = MakePair([] { return Mlp(); });
        Shard(model, groups(), rank.options());
        torch::optim::SGD optimizer(model->parameters(), 0.01);
        GradScaler scaler(GradScalerOptions().init_scale(8));
        scaler.scale(MlpLoss(model, rank.rank)).backward();
        SpoilOn(owner, rank, *model, value);
        EXPECT_FALSE(scaler.step(optimizer));
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 4);
        ExpectParameters(*model, *plain);
        // And the next one is taken.
        optimizer.zero_grad();
        scaler.scale(MlpLoss(model, rank.rank)).backward();
        EXPECT_TRUE(scaler.step(optimizer));
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 4);
      });
    }
  }
}

// A rank without gradients issues the same collectives.
TEST_P(GradScalerTest, UndefinedGradientsOnSomeRanks) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    Shard(model, groups(), rank.options());
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    MlpLoss(model, 1).backward();
    if (rank.rank == 0) optimizer.zero_grad(/*set_to_none=*/true);
    if (rank.rank == world_size() - 1 && world_size() > 1) {
      SpoilOn(rank.rank, rank, *model, kInfinity);
    }
    GradScaler scaler;
    scaler.unscale_(optimizer);
    EXPECT_EQ(scaler.step(optimizer), world_size() == 1);
    scaler.update();
  });
}

TEST_P(GradScalerTest, ClipBetweenUnscaleAndStep) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(plain, groups(), rank.options());
    Shard(sharded, groups(), rank.options());
    MlpLoss(plain, rank.rank).backward();
    const double norm = clip_grad_norm_(plain->parameters(), 0.5);
    torch::optim::SGD optimizer(sharded->parameters(), 0.01);
    GradScaler scaler;
    scaler.scale(MlpLoss(sharded, rank.rank)).backward();
    scaler.unscale_(optimizer);
    EXPECT_EQ(clip_grad_norm_(sharded->parameters(), 0.5), norm);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(plain->parameters()[i].grad(),
                               sharded->parameters()[i].grad()));
    }
    EXPECT_TRUE(scaler.step(optimizer));
  });
}

// Plain parameters beside sharded ones: what one rank finds there counts too.
TEST(GradScalerDetails, InfInAPlainParameterOfOneRank) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model->second, rank.options());
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    GradScaler scaler;
    scaler.scale(MlpLoss(model, rank.rank)).backward();
    if (rank.rank == 1) model->first->weight.mutable_grad()[0][0] = kInfinity;
    EXPECT_FALSE(scaler.step(optimizer));
  });
}

TEST(GradScalerDetails, SeveralOptimizersShareTheScale) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    ShardEverySubmodule(model, rank.options());
    torch::optim::SGD first(model->first->parameters(), 0.01);
    torch::optim::SGD third(model->third->parameters(), 0.01);
    GradScaler scaler;
    scaler.scale(MlpLoss(model, rank.rank)).backward();
    SpoilOn(1, rank, *model->first, kInfinity);
    EXPECT_FALSE(scaler.step(first));
    EXPECT_TRUE(scaler.step(third));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768);
  });
}

TEST(GradScalerDetails, StateMovesToAnother) {
  GradScaler scaler(GradScalerOptions().init_scale(16).growth_interval(3));
  Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  scaler.scale(model(torch::ones({1, 2})).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  GradScaler other;
  other.load_state_dict(scaler.state_dict());
  EXPECT_EQ(other.get_scale(), 16);
  EXPECT_EQ(other.state_dict().growth_tracker, 1);
  EXPECT_EQ(other.get_growth_interval(), 3);
  for (int i = 0; i < 2; ++i) {
    other.step(optimizer);
    other.update();
  }
  EXPECT_EQ(other.get_scale(), 32);
  other.update(7);
  EXPECT_EQ(other.get_scale(), 7);
}

TEST(GradScalerDetails, NotEnabledStepsAlways) {
  GradScaler scaler(GradScalerOptions().enabled(false));
  EXPECT_EQ(scaler.get_scale(), 1);
  Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  const Tensor loss = model(torch::ones({1, 2})).sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  model->bias.mutable_grad()[0] = kInfinity;
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_NO_THROW(scaler.update());
}

TEST(GradScalerDetails, WrongOrderAndWrongFactors) {
  Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  model(torch::ones({1, 2})).sum().backward();
  GradScaler scaler;
  ExpectThrows<c10::ValueError>([&] { scaler.update(); },
                                {"no gradients were looked at"});
  scaler.unscale_(optimizer);
  ExpectThrows<c10::ValueError>([&] { scaler.unscale_(optimizer); },
                                {"unscale_ was called twice"});
  ExpectThrows<c10::ValueError>(
      [&] { scaler.load_state_dict(scaler.state_dict()); },
      {"between unscale_ and update"});
  scaler.step(optimizer);
  ExpectThrows<c10::ValueError>([&] { scaler.step(optimizer); },
                                {"step was called twice"});
  ExpectThrows<c10::ValueError>([&] { scaler.unscale_(optimizer); },
                                {"after step()"});
  ExpectThrows<c10::ValueError>([&] { scaler.update(-1); }, {"above 0"});
  scaler.update();
  ExpectThrows<c10::ValueError>([&] { scaler.set_growth_factor(1); },
                                {"growth_factor above 1"});
  ExpectThrows<c10::ValueError>([&] { scaler.set_backoff_factor(1); },
                                {"backoff_factor between 0 and 1"});
  ExpectThrows<c10::ValueError>(
      [] { GradScaler(GradScalerOptions().growth_interval(0)); },
      {"growth_interval of at least 1"});
  ExpectThrows<c10::ValueError>(
      [] { GradScaler(GradScalerOptions().init_scale(0)); },
      {"init_scale above 0"});
  Linear half(2, 2);
  half->to(torch::kHalf);
  half->weight.mutable_grad() = torch::ones({2, 2}, torch::kHalf);
  torch::optim::SGD of_half(half->parameters(), 0.01);
  ExpectThrows<c10::ValueError>([&] { scaler.unscale_(of_half); },
                                {"got Half"});
}

}  // namespace
}  // namespace composable
