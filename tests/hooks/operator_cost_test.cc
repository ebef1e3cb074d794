// What the guard costs, in operators: nothing for models that are not sharded,
// and one boxed call for each operator that is given a parameter.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hooks/guard.h"
#include "tests/hooks/small_models.h"
#include "tests/support/operator_list.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

using Names = std::vector<std::string>;

constexpr int kOwnPerParameter = 7;
constexpr int kOwnPerGroup = 40;

void Train(Net& net) {
  net.zero_grad();
  net.forward(at::ones({2, 4})).sum().backward();
  const at::NoGradGuard no_grad;
  for (auto& p : net.parameters()) {
    if (p.grad().defined()) p.add_(p.grad(), -0.1);
  }
}

Names NamesOf(const std::function<void()>& run) {
  const OperatorList list;
  run();
  return list.names();
}

TEST(OperatorCostTest, AnUnshardedModelRunsTheSameOperatorsBesideAShardedOne) {
  Net plain(3);
  Train(plain);
  const Names before = NamesOf([&] { Train(plain); });
  EXPECT_GE(before.size(), 3U * 5);
  const SmallRank rank;
  const auto sharded = rank.Shard(3);
  Train(*sharded);
  const at::Tensor loss = sharded->forward(at::ones({2, 4})).sum();
  const int64_t guarded = GuardedOperatorCount();
  EXPECT_EQ(NamesOf([&] { Train(plain); }), before);
  EXPECT_EQ(GuardedOperatorCount(), guarded);
  loss.backward();
}

// A forward of gathered parameters has no operator of the library's own, and a
// gather has as many for one layer as for many: those of the process group.
TEST(OperatorCostTest, AForwardRunsTheOperatorsOfTheModelAlone) {
  RunRanks(2, [](RankContext& rank) {
    const auto of_a_gather = [&](int layers) {
      auto net = std::make_shared<Net>(layers);
      Net plain(layers);
      FSDPModule handle = fully_shard(net, rank.options());
      size_t own = 0;
      for (int step = 0; step < 3; ++step) {
        Train(*net);
        Train(plain);
        at::Tensor loss;
        const auto forward = [&] { loss = net->forward(at::ones({2, 4})); };
        const Names expected = NamesOf([&] {
          plain.forward(at::ones({2, 4}));
        });
        own = NamesOf(forward).size() - expected.size();
        loss.sum().backward();
        handle.unshard();
        EXPECT_EQ(NamesOf(forward), expected);
        loss.sum().backward();
      }
      return own;
    };
    EXPECT_EQ(of_a_gather(1), of_a_gather(12));
  });
}

// Of a whole step, those operators pass that are given a parameter, a shard or a
// gradient of one, each of them once.
TEST(OperatorCostTest, OneBoxedCallForEachOperatorThatIsGivenAParameter) {
  RunRanks(2, [](RankContext& rank) {
    constexpr int kLayers = 4;
    auto net = std::make_shared<Net>(kLayers);
    for (auto& layer : net->layers) fully_shard(layer, rank.options());
    fully_shard(net, rank.options());
    int64_t last = 0;
    const auto passed = [&] {
      return GuardedOperatorCount() -
             std::exchange(last, GuardedOperatorCount());
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      passed();
      const at::Tensor loss = net->forward(at::ones({2, 4})).sum();
      EXPECT_EQ(passed(), 2 * kLayers);
      loss.backward();
      // t() of the saved view and mm(), but for the first layer, whose input
      // needs no gradient.
      EXPECT_EQ(passed(), 2 * (kLayers - 1));
      const at::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.add_(p.grad(), -0.1);
      EXPECT_EQ(passed(), 2 * kLayers);  // a weight and a bias each
    }
    // However many operators one is made of.
    FSDPModule(fully_shard.state(net->at(0))).unshard();
    passed();
    at::linear(at::ones({2, 3, 4}), net->at(0)->weight, net->at(0)->bias);
    EXPECT_EQ(passed(), 1);
    at::einsum("ij,kj->ik", {at::ones({2, 4}), net->at(0)->weight});
    EXPECT_EQ(passed(), 1);
    at::ones({2, 4}).add(1).sum();
    EXPECT_EQ(passed(), 0);
  });
}

// How many operators more a backward runs than that of the unsharded model: for
// each group, and for each gradient that is packed and handed out.
TEST(OperatorCostTest, OwnOperatorsOfABackward) {
  RunRanks(2, [](RankContext& rank) {
    const auto own = [&](int layers, bool one_group) {
      auto net = std::make_shared<Net>(layers);
      Net plain(layers);
      if (!one_group) {
        for (auto& layer : net->layers) fully_shard(layer, rank.options());
      }
      fully_shard(net, rank.options());
      Train(*net);
      Train(plain);
      const auto run = [](Net& m) {
        const at::Tensor loss = m.forward(at::ones({2, 4})).sum();
        return static_cast<int>(NamesOf([&] { loss.backward(); }).size());
      };
      return run(*net) - run(plain);
    };
    const int small = own(2, true);
    EXPECT_LE(small, kOwnPerGroup + 4 * kOwnPerParameter);
    EXPECT_LE(own(12, true) - small, 20 * kOwnPerParameter);
    EXPECT_LE(own(12, false), 12 * (kOwnPerGroup + 2 * kOwnPerParameter));
  });
}

TEST(OperatorCostTest, Example) {
  const auto model = std::make_shared<Net>(1);
  const at::Tensor x = at::ones({2, 4});
  // example-begin tests/support/operator_list.h
  composable::OperatorList list;
  model->forward(x).sum().backward();
  list.names();  // {"aten::t", "aten::addmm", ...}
  // example-end
  EXPECT_EQ(list.names().front(), "aten::t");
}

}  // namespace
}  // namespace composable
