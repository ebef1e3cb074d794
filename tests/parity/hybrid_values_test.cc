// Hybrid sharding: what is decided over all ranks, and what is kept between
// backwards.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/parity/counting_backend.h"
#include "tests/parity/hybrid_reference.h"

namespace composable {
namespace {

using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void Spoil(const std::vector<Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    const Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    gradient.flatten()[0].fill_(kInfinity);
    return;
  }
}

// Inf in a shard of one rank: on any of them, in a group of either mesh, or in
// a parameter that is not sharded.
TEST(HybridGradScalerTest, OneRankSkipsTheStepOfAll) {
  for (const int where : {0, 1, 2}) {
    for (int owner = 0; owner < 4; ++owner) {
      RunRanks(4, [&](RankContext& rank) {
        auto model = RankContext::Seeded(1, [] { return Mlp(); });
        const auto mesh = Grid(rank, 2, 2);
        fully_shard(model->first, FullyShardOptions().mesh(mesh));
        fully_shard(model->second, FullyShardOptions().mesh(mesh["shard"]));
        torch::optim::SGD optimizer(model->parameters(), 0.01);
        GradScaler scaler;
        scaler.scale(MlpLoss(model, rank.rank)).backward();
        if (rank.rank == owner) {
          const std::vector<std::vector<Tensor>> in = {
              model->first->parameters(), model->second->parameters(),
              model->third->parameters()};
          const torch::NoGradGuard no_grad;
          Spoil(in[where]);
        }
        EXPECT_FALSE(scaler.step(optimizer)) << where << " " << owner;
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 32768);
      });
    }
  }
}

TEST(HybridGradScalerTest, OneAllReducePerMeshDimension) {
  RunRanks(4, [](RankContext& rank) {
    const auto made = Grid(rank, 2, 2);
    const auto across = CountCollectives(made.get_group("replicate"));
    const auto within = CountCollectives(made.get_group("shard"));
    const auto mesh = DeviceMesh::from_group(
        {across.group, within.group}, "cpu", {2, 2}, made.mesh_dim_names());
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    Shard(model, Groups::kPerModule, FullyShardOptions().mesh(mesh));
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    GradScaler scaler;
    scaler.scale(MlpLoss(model, rank.rank)).backward();
    *within.counts = *across.counts = {};
    scaler.unscale_(optimizer);
    EXPECT_EQ(within.counts->all_reduces, 1);
    EXPECT_EQ(across.counts->all_reduces, 1);
  });
}

// --- What is kept for the next all-reduce ------------------------------------

enum class Clear { kModule, kZeros, kOptimizer };

class HybridZeroGradTest : public testing::TestWithParam<Clear> {};
INSTANTIATE_TEST_SUITE_P(All, HybridZeroGradTest,
                         testing::Values(Clear::kModule, Clear::kZeros,
                                         Clear::kOptimizer));

TEST_P(HybridZeroGradTest, DropsPartials) {
  RunRanks(4, [clear = GetParam()](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handle =
        fully_shard(sharded, FullyShardOptions().mesh(Grid(rank, 2, 2)));
    torch::optim::SGD optimizer(sharded->parameters(), 0.01);
    for (const bool had_gradient : {false, true}) {
      handle.set_requires_all_reduce(false);
      MlpLoss(sharded, 50 + rank.rank).backward();
      EXPECT_GT(handle.pending_gradient_bytes(), 0U);
      if (clear == Clear::kOptimizer) {
        optimizer.zero_grad();
      } else {
        sharded->zero_grad(/*set_to_none=*/clear == Clear::kModule);
      }
      EXPECT_EQ(handle.pending_gradient_bytes(), 0U) << had_gradient;
      // With a partial of its own, and without sync before.
      MlpLoss(sharded, 10 + rank.rank).backward();
      handle.set_requires_gradient_sync(false);
      MlpLoss(sharded, 20 + rank.rank).backward();
      handle.set_requires_gradient_sync(true);
      MlpLoss(sharded, rank.rank).backward();
      plain->zero_grad();
      HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
        for (const int seed : {10, 20, 0}) MlpLoss(plain, seed + r).backward();
      });
      ExpectGradients(*sharded, *plain, 1e-5);
      EXPECT_EQ(handle.pending_gradient_bytes(), 0U);
    }
  });
}

// One parameter's gradient was cleared: those of the others stay.
TEST(HybridKeptTest, ClearingOneDropsThatOne) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handle =
        fully_shard(sharded, FullyShardOptions().mesh(Grid(rank, 2, 2)));
    handle.set_requires_all_reduce(false);
    MlpLoss(sharded, 10 + rank.rank).backward();
    for (auto& parameter : sharded->second->parameters()) {
      parameter.mutable_grad().reset();
    }
    handle.set_requires_all_reduce(true);
    MlpLoss(sharded, rank.rank).backward();
    HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, 10 + r).backward();
      plain->second->zero_grad();
      MlpLoss(plain, r).backward();
    });
    ExpectGradients(*sharded, *plain, 1e-5);
  });
}

TEST(HybridKeptTest, ChangedGradientsAreAnError) {
  RunRanks(4, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    auto handle =
        fully_shard(model, FullyShardOptions().mesh(Grid(rank, 2, 2)));
    MlpLoss(model, rank.rank).backward();
    handle.set_requires_all_reduce(false);
    MlpLoss(model, rank.rank).backward();
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.mutable_grad().mul_(0.5);
    }
    ExpectThrows<c10::ValueError>(
        [&] { handle.pending_gradient_bytes(); },
        {"was changed while gradients of its group are pending"});
  });
}

// --- GradientSyncGuard --------------------------------------------------------

TEST(HybridSyncGuardTest, SetsAndGivesBackTheAllReduceToo) {
  RunRanks(4, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    const auto options = FullyShardOptions().mesh(Grid(rank, 2, 2));
    auto first = fully_shard(model->first, options);
    fully_shard(model->second, options);
    fully_shard(model, options);
    const auto requires_all_reduce = [&] {
      std::vector<bool> all;
      const std::vector<ModuleRef> modules = {model->first, model->second,
                                              model};
      for (const auto& module : modules) {
        all.push_back(fully_shard.state(module)
                          ->reduction()
                          ->settings()
                          .requires_all_reduce);
      }
      return all;
    };
    first.set_requires_all_reduce(false);
    {
      const GradientSyncGuard sync(model, true);
      EXPECT_EQ(requires_all_reduce(), (std::vector<bool>{true, true, true}));
      {
        const GradientSyncGuard no_sync(model, false);
        EXPECT_EQ(requires_all_reduce(),
                  (std::vector<bool>{false, false, false}));
      }
      EXPECT_EQ(requires_all_reduce(), (std::vector<bool>{true, true, true}));
    }
    EXPECT_EQ(requires_all_reduce(), (std::vector<bool>{false, true, true}));
  });
}

}  // namespace
}  // namespace composable
