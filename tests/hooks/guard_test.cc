// What operators do with sharded parameters.
#include "hooks/guard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "state/tensor_access.h"
#include "tests/hooks/small_models.h"
#include "tests/support/errors.h"

namespace composable {
namespace {

using testing::HasSubstr;

// The layer's weight in what this rank's communicator gathers: its shard,
// twice.
at::Tensor Whole(torch::nn::Linear& layer) {
  const FSDPParamGroup& group = *StateOf(layer).group();
  const at::Tensor& shard = group.segments()[0].flat_shard;
  const at::Tensor buffer = at::cat({shard, shard});
  return group.params()[0].WholeIn(internal::StorageOf(buffer));
}

TEST(GuardTest, ReadingGathersTheGroup) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  EXPECT_TRUE(IsSharded(net->at(0)));
  const at::Tensor read = net->at(0)->weight + 0;
  EXPECT_FALSE(IsSharded(net->at(0)));
  EXPECT_TRUE(IsSharded(net->at(1)));  // another group
  EXPECT_TRUE(at::equal(read, Whole(net->at(0))));
  at::sum(net->at(0)->bias);  // of the same group: no second gather
  EXPECT_EQ(rank.backend->issued(), 1u);
}

TEST(GuardTest, MetadataIsThereWithoutAGather) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  const at::Tensor& weight = net->at(0)->weight;
  EXPECT_EQ(weight.sizes(), at::IntArrayRef({4, 4}));
  EXPECT_EQ(weight.strides(), at::IntArrayRef({4, 1}));
  EXPECT_EQ(weight.dim(), 2);
  EXPECT_EQ(weight.numel(), 16);
  EXPECT_EQ(weight.scalar_type(), c10::kFloat);
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(weight.is_contiguous());
  EXPECT_EQ(rank.backend->issued(), 0u);
}

TEST(GuardTest, RawAccessWhileShardedThrowsAndSaysWhatToDo) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  at::sum(net->at(1)->weight);  // names are known from the first use on
  EXPECT_THAT(ErrorOf([&] { net->at(0)->weight.const_data_ptr<float>(); }),
              testing::AllOf(HasSubstr("'l0.weight', 'l0.bias'"),
                             HasSubstr("of the module 'l0' are sharded"),
                             HasSubstr("call unshard() on the handle")));
}

TEST(GuardTest, ViewsOfAParameterGatherAsItDoes) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  const at::Tensor view = net->at(0)->weight.t().select(0, 1);
  const at::Tensor before = view.clone();
  FSDPModule(fully_shard.state(net->at(0))).reshard();
  ASSERT_TRUE(IsSharded(net->at(0)));
  EXPECT_TRUE(at::equal(view.clone(), before));
  EXPECT_FALSE(IsSharded(net->at(0)));
}

TEST(GuardTest, ListsOfTensors) {
  const SmallRank rank;
  const auto net = rank.Shard(3, FullyShardOptions().limit_all_gathers(1));
  const at::Tensor both = at::cat({net->at(0)->weight, net->at(2)->weight});
  EXPECT_TRUE(at::equal(both.narrow(0, 0, 4), Whole(net->at(0))));
  EXPECT_TRUE(at::equal(both.narrow(0, 4, 4), Whole(net->at(2))));
  EXPECT_TRUE(IsSharded(net->at(1)));
}

TEST(GuardTest, ListsOfOptionalTensors) {
  struct Indices : torch::nn::Module {
    Indices() {
      rows = register_parameter("rows", at::zeros({4}, c10::kLong) + 1,
                                /*requires_grad=*/false);
    }
    at::Tensor rows;
  };
  const SmallRank rank;
  const auto module = std::make_shared<Indices>();
  fully_shard(module, rank.options());
  const at::Tensor x = at::ones({2, 3});
  EXPECT_EQ(at::index(x, {module->rows}).sizes(), at::IntArrayRef({4, 3}));
  EXPECT_FALSE(IsSharded(module));
}

TEST(GuardTest, OptionalTensorThatIsNotThere) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  at::linear(at::ones({1, 4}), net->at(0)->weight);
  EXPECT_FALSE(IsSharded(net->at(0)));
}

TEST(GuardTest, InferenceMode) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(net->at(0)->weight + 0, Whole(net->at(0))));
  }
  at::sum(net->at(0)->weight).backward();
  EXPECT_TRUE(net->at(0)->parameters()[0].grad().defined());
}

TEST(GuardTest, WritingAWholeParameterThrows) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  at::sum(net->at(0)->bias);
  const at::NoGradGuard no_grad;
  const std::string rest =
      " writes the whole parameter 'l0.weight', which is sharded: the change "
      "would be lost. Write it inside of a composable::FullParameters "
      "scope(module), opened by all ranks. Or initialise a module before "
      "fully_shard, change the shard that module->parameters() holds, or load "
      "whole values with composable::load_full_state_dict.";
  at::Tensor weight = net->at(0)->weight;
  at::Tensor row = weight.select(0, 3);
  const size_t issued = rank.backend->issued();
  const std::map<std::string, std::function<void()>> writes = {
      {"aten::mul_", [&] { weight.mul_(2); }},
      {"aten::zero_", [&] { row.zero_(); }},
      {"aten::add", [&] { at::add_out(weight, weight, weight); }},
      {"aten::_foreach_mul_", [&] { at::_foreach_mul_({weight}, 2); }},
      {"aten::copy_",
       [&] {
         weight.data().copy_(at::ones({4, 4}));
       }},
  };
  for (const auto& [name, write] : writes) {
    EXPECT_EQ(ErrorOf<c10::ValueError>(write), name + rest);
  }
  EXPECT_EQ(rank.backend->issued(), issued);
}

TEST(GuardTest, ReadingAShardGathersNothing) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& shard : net->parameters()) {
    EXPECT_EQ((shard + 0).sizes(), shard.sizes());
  }
  EXPECT_EQ(rank.backend->issued(), 0u);
}

// Every way in which an optimizer writes.
TEST(GuardTest, WritingAShardMakesTheGatheredValuesStale) {
  const std::map<std::string, std::function<void(at::Tensor)>> writes = {
      {"add_", [](at::Tensor s) { s.add_(1); }},
      {"data().add_", [](at::Tensor s) { s.data().add_(1); }},
      {"detach().add_", [](at::Tensor s) { s.detach().add_(1); }},
      {"copy_", [](at::Tensor s) { s.copy_(s + 1); }},
      {"view", [](at::Tensor s) { s.view({-1}).add_(1); }},
      {"out", [](at::Tensor s) { at::add_out(s, s, at::ones({})); }},
      {"foreach", [](at::Tensor s) { at::_foreach_add_({s}, 1); }},
  };
  for (const auto& [name, write] : writes) {
    const SmallRank rank;
    const auto net = rank.Shard(1);
    const at::NoGradGuard no_grad;
    const at::Tensor before = net->at(0)->weight + 0;
    EXPECT_FALSE(StateOf(net->at(0)).group()->dirty());
    write(net->at(0)->parameters()[0]);
    EXPECT_TRUE(StateOf(net->at(0)).group()->dirty()) << name;
    EXPECT_TRUE(at::equal(net->at(0)->weight + 0, before + 1)) << name;
    EXPECT_FALSE(StateOf(net->at(0)).group()->dirty()) << name;
    EXPECT_EQ(rank.backend->issued(), 2u) << name;
  }
}

TEST(GuardTest, WritesByRawPointerAreMarkedByHand) {
  const SmallRank rank;
  const auto net = rank.Shard(1);
  const at::NoGradGuard no_grad;
  const at::Tensor before = net->at(0)->weight + 0;
  net->at(0)->parameters()[0].mutable_data_ptr<float>()[0] = 100;
  EXPECT_TRUE(at::equal(net->at(0)->weight + 0, before));
  FSDPModule(fully_shard.state(net->at(0))).mark_dirty();
  EXPECT_EQ((net->at(0)->weight + 0)[0][0].item<float>(), 100.0F);
}

TEST(GuardTest, StepBetweenForwardAndBackwardIsAutogradsOwnError) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  const at::Tensor loss = net->forward(at::ones({1, 4})).sum();
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& shard : net->parameters()) shard.add_(1);
  }
  EXPECT_THAT(ErrorOf([&] { loss.backward(); }),
              HasSubstr("modified by an inplace operation"));
  // And the tree goes on.
  net->forward(at::ones({1, 4})).sum().backward();
  EXPECT_TRUE(net->parameters()[0].grad().defined());
}

TEST(GuardTest, TwoTreesInOneOperator) {
  const SmallRank rank;
  const auto one = rank.Shard(1);
  const auto two = rank.Shard(1);
  const at::Tensor sum = one->at(0)->weight + two->at(0)->weight;
  EXPECT_TRUE(at::equal(sum, Whole(one->at(0)) + Whole(two->at(0))));
  EXPECT_NE(StateOf(one->at(0)).context, StateOf(two->at(0)).context);
}

}  // namespace
}  // namespace composable
