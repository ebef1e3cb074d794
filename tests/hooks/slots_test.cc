// Which groups stay gathered: leaving, slots, and gathers that fail.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "hooks/post_forward.h"
#include "hooks/unshard.h"
#include "tests/hooks/small_models.h"
#include "tests/support/errors.h"

namespace composable {
namespace {

void Touch(const torch::nn::Linear& layer) { at::sum(layer->weight); }

bool Left(const ModuleRef& module) { return StateOf(module).left; }

// The layers that are gathered, as in "01".
std::string Resident(Net& net) {
  std::string names;
  for (size_t i = 0; i < net.layers.size(); ++i) {
    if (!IsSharded(net.layers[i])) names += std::to_string(i);
  }
  return names;
}

TEST(LeaveRuleTest, TouchingOneLeavesTheOthers) {
  const SmallRank rank;
  const auto net = rank.Shard(3);
  Touch(net->at(0));
  EXPECT_FALSE(Left(net->at(0)));
  Touch(net->at(1));
  EXPECT_TRUE(Left(net->at(0)));
  EXPECT_FALSE(Left(net->at(1)));
  EXPECT_EQ(Resident(*net), "01");  // left is not freed
  Touch(net->at(0));
  EXPECT_FALSE(Left(net->at(0)));
  EXPECT_TRUE(Left(net->at(1)));
  EXPECT_EQ(rank.backend->issued(), 2u);
}

TEST(LeaveRuleTest, AllGroupsOfAnOperatorStay) {
  const SmallRank rank;
  const auto net = rank.Shard(3, FullyShardOptions().limit_all_gathers(1));
  at::stack({net->at(0)->weight, net->at(1)->weight});
  EXPECT_FALSE(Left(net->at(0)));
  EXPECT_FALSE(Left(net->at(1)));
  EXPECT_EQ(Resident(*net), "01");  // over the limit: they are needed
  Touch(net->at(2));
  EXPECT_EQ(Resident(*net), "2");
}

TEST(LeaveRuleTest, AnOperatorOverManyGroupsKeepsToTheLimitInFlight) {
  for (const int64_t limit : {1, 2, 4}) {
    const SmallRank rank;
    const auto net =
        rank.Shard(6, FullyShardOptions().limit_all_gathers(limit));
    std::vector<at::Tensor> weights;
    for (auto& layer : net->layers) weights.push_back(layer->weight);
    at::stack(weights);
    EXPECT_EQ(Resident(*net), "012345");
    EXPECT_EQ(fsdp_stats(net).peak_gathers_in_flight, limit);
    EXPECT_EQ(fsdp_stats(net).gathers_in_flight, 0);
  }
}

TEST(SmallModelsTest, Example) {
  // example-begin tests/hooks/small_models.h
  SmallRank rank;
  auto net = rank.Shard(3);
  at::sum(net->at(0)->weight);
  IsSharded(net->at(0));  // false
  // example-end
  EXPECT_FALSE(IsSharded(net->at(0)));
}

struct Parent : torch::nn::Module {
  Parent() {
    scale = register_parameter("scale", at::ones({4}));
    child = register_module("child", std::make_shared<Net>(2));
    sibling = register_module("sibling", torch::nn::Linear(4, 4));
  }
  at::Tensor scale;
  std::shared_ptr<Net> child;
  torch::nn::Linear sibling{nullptr};
};

TEST(LeaveRuleTest, AncestorsAreNotLeft) {
  const SmallRank rank;
  struct Root : torch::nn::Module {
    Root() {
      parent = register_module("parent", std::make_shared<Parent>());
      other = register_module("other", torch::nn::Linear(4, 4));
    }
    std::shared_ptr<Parent> parent;
    torch::nn::Linear other{nullptr};
  };
  const auto root = std::make_shared<Root>();
  auto& parent = *root->parent;
  for (auto& layer : parent.child->layers) fully_shard(layer, rank.options());
  fully_shard(parent.sibling, rank.options());
  fully_shard(parent, rank.options());
  fully_shard(root->other, rank.options());
  fully_shard(root, rank.options().limit_all_gathers(8));
  at::sum(parent.scale);
  Touch(parent.child->at(0));
  EXPECT_FALSE(Left(parent));
  Touch(parent.child->at(1));
  EXPECT_FALSE(Left(parent));
  EXPECT_TRUE(Left(parent.child->at(0)));
  Touch(parent.sibling);
  EXPECT_FALSE(Left(parent));
  EXPECT_FALSE(IsSharded(parent));
  Touch(root->other);
  EXPECT_TRUE(Left(parent));
  // A child does not stay for its parent's sake.
  at::sum(parent.scale);
  EXPECT_TRUE(Left(root->other));
}

TEST(SlotsTest, TheLeastRecentlyUsedMakesRoomWhileTheOrderIsUnknown) {
  const SmallRank rank;
  const auto net = rank.Shard(4);
  Touch(net->at(0));
  Touch(net->at(1));
  Touch(net->at(0));
  Touch(net->at(2));
  EXPECT_EQ(Resident(*net), "02");
  Touch(net->at(3));
  EXPECT_EQ(Resident(*net), "23");
}

TEST(SlotsTest, TheOneNeededLastMakesRoomWhereTheOrderIsKnown) {
  const SmallRank rank;
  const auto net = rank.Shard(
      3, FullyShardOptions().limit_all_gathers(2).forward_prefetch(false));
  // 0 is used every other time.
  const std::vector<int> order = {0, 1, 0, 2, 0, 1, 0, 2};
  for (int iteration = 1; iteration <= 2; ++iteration) {
    at::Tensor x = at::ones({1, 4});
    std::vector<int> gathers(3, 0);
    for (const int i : order) {
      const bool was_sharded = IsSharded(net->at(i));
      x = net->at(i)(x);
      gathers[i] += was_sharded;
    }
    EXPECT_EQ(gathers, std::vector<int>({1, 2, 2})) << iteration;
    x.sum().backward();
    EXPECT_EQ(Resident(*net), "");
  }
}

TEST(SlotsTest, UnshardPinsAGroupUntilReshard) {
  const SmallRank rank;
  const auto net = rank.Shard(3, FullyShardOptions().limit_all_gathers(1));
  FSDPModule handle(fully_shard.state(net->at(0)));
  handle.unshard();
  for (const int i : {1, 2, 1, 2}) Touch(net->at(i));
  EXPECT_EQ(Resident(*net), "02");
  Touch(net->at(0));
  EXPECT_EQ(Resident(*net), "02");
  handle.reshard();
  EXPECT_EQ(Resident(*net), "2");
  handle.reshard();  // does nothing
  Touch(net->at(0));
  EXPECT_EQ(Resident(*net), "0");
}

TEST(SlotsTest, StatisticsFollow) {
  const SmallRank rank;
  const auto net = rank.Shard(3);
  const auto bytes =
      static_cast<int64_t>(StateOf(net->at(0)).group()->unsharded_bytes());
  for (int i = 0; i < 3; ++i) Touch(net->at(i));
  const FSDPStats stats = fsdp_stats(net);
  EXPECT_EQ(stats.num_gathers, 3);
  EXPECT_EQ(stats.gathered_bytes, 3 * bytes);
  EXPECT_EQ(stats.unsharded_param_bytes, 2 * bytes);
  EXPECT_EQ(stats.peak_unsharded_bytes, 2 * bytes);
  EXPECT_EQ(stats.gathers_in_flight, 0);
}

TEST(FailedGatherTest, ThrowsWhereItIsReadAndCanBeRepeated) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  rank.backend->Fail(0, "the cable is cut");
  EXPECT_EQ(ErrorOf<c10::DistError>([&] { Touch(net->at(0)); }),
            "all-gather of 'l0' failed on rank 0 of 2: the cable is cut. If "
            "another rank has failed, its error is the cause.");
  EXPECT_EQ(Resident(*net), "");
  EXPECT_EQ(fsdp_stats(net).gathers_in_flight, 0);
  EXPECT_EQ(fsdp_stats(net).unsharded_param_bytes, 0);
  Touch(net->at(0));
  Touch(net->at(1));
  EXPECT_EQ(Resident(*net), "01");
}

TEST(FailedGatherTest, OneThatRanAheadThrowsWhereItsGroupIsRead) {
  const SmallRank rank;
  const auto net = rank.Shard(3);
  const auto iterate = [&] { net->forward(at::ones({1, 4})).sum().backward(); };
  iterate();
  // Gathers of the next forward: 0, 1 ahead, ...
  rank.backend->Fail(rank.backend->issued() + 1, "the cable is cut");
  at::Tensor x = net->at(0)(at::ones({1, 4}));
  EXPECT_EQ(Resident(*net), "01");
  EXPECT_EQ(ErrorOf<c10::DistError>([&] { x = net->at(1)(x); }),
            "all-gather of 'l1' failed on rank 0 of 2: the cable is cut. If "
            "another rank has failed, its error is the cause.");
  EXPECT_TRUE(IsSharded(net->at(1)));
  x = net->at(1)(x);
  net->at(2)(x).sum().backward();
  EXPECT_EQ(Resident(*net), "");
  EXPECT_EQ(fsdp_stats(net).gathers_in_flight, 0);
  iterate();
}

}  // namespace
}  // namespace composable
