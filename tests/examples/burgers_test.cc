// The example's equation: pieces on several ranks are one ring.
#include "examples/burgers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/ranks.h"

namespace composable {
namespace {

using examples::Burgers;

constexpr int64_t kCells = 24;
constexpr double kStep = 0.05;

at::Tensor Simulate(const Burgers& burgers, int steps) {
  at::Tensor u = 1 + burgers.Centers().sin();
  for (int i = 0; i < steps; ++i) u = burgers.Advance(u, i * kStep, kStep);
  return u;
}

// With three ranks the neighbours to the left and to the right are two.
TEST(BurgersTest, HaloIsTheNeighboursCells) {
  RunRanks(3, [](RankContext& rank) {
    const Burgers burgers(rank.group, kCells / 3);
    const at::Tensor mine = torch::arange(8) + 8 * rank.rank;
    EXPECT_TRUE(torch::equal(
        burgers.WithHalo(mine, 2),
        (torch::arange(-2, 10) + 8 * rank.rank).remainder(kCells)));
  });
}

TEST(BurgersTest, PiecesAdvanceAsTheWhole) {
  at::Tensor whole;
  RunRanks(1, [&](RankContext& rank) {
    whole = Simulate(Burgers(rank.group, kCells), 40);
  });
  RunRanks(3, [&](RankContext& rank) {
    const at::Tensor mine = Simulate(Burgers(rank.group, kCells / 3), 40);
    EXPECT_TRUE(torch::allclose(
        mine, whole.slice(0, 8 * rank.rank, 8 * rank.rank + 8), 1e-5, 1e-6));
  });
}

// What flows out of a cell flows into the next, and the force is zero on
// average: nothing is lost.
TEST(BurgersTest, KeepsTheMean) {
  RunRanks(1, [](RankContext& rank) {
    const at::Tensor u = Simulate(Burgers(rank.group, kCells), 100);
    EXPECT_NEAR(u.mean().item<double>(), 1, 1e-5);
    EXPECT_GT(u.std().item<double>(), 0.1);
  });
}

}  // namespace
}  // namespace composable
