// From the first use of a tree to the end of a backward, and what is left when
// one of them throws.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hooks/root_post_backward.h"
#include "hooks/root_pre_forward.h"
#include "tests/hooks/small_models.h"
#include "tests/support/errors.h"

namespace composable {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Outer : torch::nn::Module {
  Outer() {
    scale = register_parameter("scale", at::ones({4}));
    inner = register_module("inner", std::make_shared<Net>(2));
    plain = register_module("plain", torch::nn::Linear(4, 4));
  }
  at::Tensor scale;
  std::shared_ptr<Net> inner;
  torch::nn::Linear plain{nullptr};
};

bool AllSharded(Net& net) {
  for (auto& layer : net.layers) {
    if (!IsSharded(layer)) return false;
  }
  return true;
}

std::vector<at::Tensor> Gradients(Net& net) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : net.parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                   : at::Tensor());
  }
  return gradients;
}

// The gradients of one iteration.
std::vector<at::Tensor> Iterate(Net& net) {
  net.zero_grad();
  net.forward(at::ones({1, 4})).sum().backward();
  return Gradients(net);
}

void ExpectSame(const std::vector<at::Tensor>& a,
                const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i].defined() && b[i].defined()) << i;
    EXPECT_TRUE(at::equal(a[i], b[i])) << i << a[i] << b[i];
  }
}

// --- The first use of a tree -------------------------------------------------

TEST(LazyInitTest, FindsTheRootAndNamesTheGroups) {
  const SmallRank rank;
  const auto outer = std::make_shared<Outer>();
  for (auto& layer : outer->inner->layers) fully_shard(layer, rank.options());
  fully_shard(outer->inner, rank.options());
  fully_shard(outer, rank.options());
  EXPECT_EQ(StateOf(outer).context, nullptr);

  at::sum(outer->inner->at(1)->weight);  // the deepest first
  const auto context = StateOf(outer).context;
  ASSERT_NE(context, nullptr);
  EXPECT_EQ(LazyInit(StateOf(outer)), context);
  EXPECT_EQ(context->states.size(), 4u);
  EXPECT_EQ(StateOf(outer).fqn, "");
  EXPECT_EQ(StateOf(outer->inner).fqn, "inner");
  EXPECT_EQ(StateOf(outer->inner->at(1)).fqn, "inner.l1");
  EXPECT_EQ(StateOf(outer->inner).group(), nullptr);  // nothing left for it
  std::vector<std::string> names;
  for (const auto& param : StateOf(outer).group()->params()) {
    names.push_back(param.fqn);
  }
  EXPECT_THAT(names, ElementsAre("scale", "plain.weight", "plain.bias"));
  EXPECT_EQ(StateOf(outer->inner->at(1)).group()->params()[1].fqn,
            "inner.l1.bias");
}

TEST(LazyInitTest, Ancestors) {
  const SmallRank rank;
  const auto outer = std::make_shared<Outer>();
  for (auto& layer : outer->inner->layers) fully_shard(layer, rank.options());
  fully_shard(outer->inner, rank.options());
  fully_shard(outer, rank.options());
  LazyInit(StateOf(outer));
  auto& leaf = StateOf(outer->inner->at(0));
  EXPECT_TRUE(StateOf(outer).IsAncestorOf(leaf));
  EXPECT_TRUE(StateOf(outer->inner).IsAncestorOf(leaf));
  EXPECT_FALSE(leaf.IsAncestorOf(leaf));
  EXPECT_FALSE(leaf.IsAncestorOf(StateOf(outer)));
  EXPECT_FALSE(StateOf(outer->inner->at(1)).IsAncestorOf(leaf));
}

TEST(LazyInitTest, WhatBelongsTogetherByDefault) {
  const SmallRank rank;
  const auto outer = std::make_shared<Outer>();
  fully_shard(outer->inner, rank.options());
  fully_shard(outer, rank.options());
  LazyInit(StateOf(outer));
  EXPECT_FALSE(StateOf(outer).reshard_after_forward);  // the root stays
  EXPECT_TRUE(StateOf(outer->inner).reshard_after_forward);
}

TEST(LazyInitTest, ModulesWithoutACommonStateAreTreesOfTheirOwn) {
  const SmallRank rank;
  const auto net = std::make_shared<Net>(2);
  for (auto& layer : net->layers) fully_shard(layer, rank.options());
  net->forward(at::ones({1, 4})).sum().backward();
  EXPECT_NE(StateOf(net->at(0)).context, StateOf(net->at(1)).context);
  EXPECT_EQ(StateOf(net->at(0)).fqn, "");
  EXPECT_TRUE(AllSharded(*net));
  EXPECT_TRUE(net->parameters()[0].grad().defined());
}

TEST(LazyInitTest, ShardingFurtherUpMakesANewTree) {
  const SmallRank rank;
  const auto net = std::make_shared<Net>(2);
  for (auto& layer : net->layers) fully_shard(layer, rank.options());
  net->forward(at::ones({1, 4}));
  const auto old = StateOf(net->at(0)).context;
  fully_shard(net, rank.options());
  EXPECT_EQ(StateOf(net->at(0)).context, nullptr);
  EXPECT_TRUE(AllSharded(*net));
  net->forward(at::ones({1, 4})).sum().backward();
  EXPECT_NE(StateOf(net->at(0)).context, old);
  EXPECT_EQ(StateOf(net->at(0)).context, StateOf(net->at(1)).context);
  EXPECT_EQ(StateOf(net->at(1)).fqn, "l1");
}

TEST(LazyInitTest, NotWhileABackwardRuns) {
  const SmallRank rank;
  const auto net = std::make_shared<Net>(2);
  for (auto& layer : net->layers) fully_shard(layer, rank.options());
  std::string error;
  at::Tensor x = net->at(0)(at::ones({1, 4}));
  x.register_hook([&](const at::Tensor& /*gradient*/) {
    error = ErrorOf<c10::ValueError>([&] { fully_shard(net, rank.options()); });
  });
  // The second layer's backward runs before the hook; its tree has ended then
  // only where the engine has said so.
  net->at(1)(x).sum().backward();
  EXPECT_EQ(error,
            "fully_shard: a backward through modules that are being sharded is "
            "running. Shard all modules before training.");
  fully_shard(net, rank.options());  // now
}

// --- States ------------------------------------------------------------------

TEST(TrainingStatesTest, OneIteration) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  const auto context = LazyInit(StateOf(net));
  EXPECT_EQ(context->training_state, TrainingState::kIdle);
  at::Tensor x = net->at(0)(at::ones({1, 4}));
  EXPECT_EQ(context->training_state, TrainingState::kForward);
  TrainingState seen = TrainingState::kIdle;
  x.register_hook(
      [&](const at::Tensor& /*gradient*/) { seen = context->training_state; });
  net->at(1)(x).sum().backward();
  EXPECT_EQ(seen, TrainingState::kPreBackward);
  EXPECT_EQ(context->training_state, TrainingState::kIdle);
  EXPECT_TRUE(AllSharded(*net));
  EXPECT_EQ(context->pool.committed_bytes(), 0u);
  EXPECT_TRUE(context->reducing.empty());
  EXPECT_TRUE(context->resident.empty());
}

TEST(TrainingStatesTest, BackwardForAnInputAloneFreesEverything) {
  const SmallRank rank;
  const auto net = rank.Shard(3);
  const at::Tensor x = at::ones({1, 4}).set_requires_grad(true);
  const at::Tensor loss = net->forward(x).sum();
  const auto gradients = torch::autograd::grad({loss}, {x});
  EXPECT_TRUE(gradients[0].defined());
  EXPECT_TRUE(AllSharded(*net));
  EXPECT_FALSE(net->parameters()[0].grad().defined());
  EXPECT_EQ(fsdp_stats(net).num_reductions, 0);
}

TEST(TrainingStatesTest, BackwardTwiceThroughOneGraph) {
  const SmallRank rank;
  const auto net = rank.Shard(3);
  const at::Tensor loss = net->forward(at::ones({1, 4})).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = Gradients(*net);
  EXPECT_TRUE(AllSharded(*net));
  loss.backward();
  auto twice = Gradients(*net);
  for (auto& gradient : twice) gradient = gradient / 2;
  ExpectSame(twice, once);
}

// --- Errors ------------------------------------------------------------------

TEST(ErrorsTest, BackwardThatThrowsLeavesATreeThatWorks) {
  const SmallRank rank;
  const auto net = rank.Shard(4);
  const auto iterate = [&] { return Iterate(*net); };
  iterate();
  const auto expected = iterate();
  for (const int where : {3, 2, 1, 0}) {
    at::Tensor x = at::ones({1, 4});
    for (int i = 0; i < 4; ++i) {
      x = net->at(i)(x);
      if (i == where) {
        x.register_hook([](const at::Tensor& /*gradient*/) {
          throw std::runtime_error("a user's hook");
        });
      }
    }
    EXPECT_THROW(x.sum().backward(), std::runtime_error);
    net->at(0)(at::ones({1, 4}));  // the next forward cleans up
    const auto context = StateOf(net).context;
    EXPECT_EQ(context->training_state, TrainingState::kForward);
    EXPECT_TRUE(context->reducing.empty());
    EXPECT_EQ(context->resident.size(), 2u);  // and the one gathered ahead
    ExpectSame(iterate(), expected);
    EXPECT_TRUE(AllSharded(*net));
    EXPECT_EQ(fsdp_stats(net).gathers_in_flight, 0);
    EXPECT_EQ(fsdp_stats(net).unsharded_param_bytes, 0);
    EXPECT_TRUE(StateOf(net).context->reducing.empty());
  }
}

TEST(ErrorsTest, ForwardThatThrowsLeavesATreeThatWorks) {
  const SmallRank rank;
  const auto net = rank.Shard(4);
  const auto iterate = [&] { return Iterate(*net); };
  const auto expected = iterate();
  at::Tensor x = net->at(0)(at::ones({1, 4}));
  EXPECT_THROW(net->at(1)(at::ones({1, 5})), c10::Error);  // a wrong shape
  ExpectSame(iterate(), expected);
  EXPECT_TRUE(AllSharded(*net));
}

TEST(ErrorsTest, AnyFailedCollectiveThrowsAndTheNextIterationWorks) {
  const SmallRank rank;
  const auto net = rank.Shard(3);
  const auto iterate = [&] { return Iterate(*net); };
  const auto expected = iterate();
  const size_t before = rank.backend->issued();
  iterate();
  const size_t per_iteration = rank.backend->issued() - before;
  // Whichever collective of an iteration fails.
  for (size_t which = 0; which < per_iteration; ++which) {
    rank.backend->Fail(rank.backend->issued() + which, "the cable is cut");
    const std::string error = ErrorOf<c10::DistError>(iterate);
    EXPECT_NE(error.find("failed on rank 0 of 2: the cable is cut. If another "
                         "rank has failed, its error is the cause."),
              std::string::npos)
        << which << ": " << error;
    // The first iteration afterwards may follow the order of a broken forward,
    // and gather in vain.
    ExpectSame(iterate(), expected);
    ExpectSame(iterate(), expected);
    EXPECT_TRUE(AllSharded(*net)) << which;
    EXPECT_EQ(fsdp_stats(net).gathers_in_flight, 0) << which;
    EXPECT_EQ(fsdp_stats(net).unsharded_param_bytes, 0) << which;
  }
}

// --- Life time ---------------------------------------------------------------

TEST(LifeTimeTest, LossThatOutlivesItsModel) {
  const SmallRank rank;
  auto net = rank.Shard(2);
  const at::Tensor x = at::ones({1, 4}).set_requires_grad(true);
  const at::Tensor loss = net->forward(x).sum();
  const std::weak_ptr<FSDPState> state = fully_shard.state(net->at(1));
  const std::weak_ptr<torch::nn::Module> module = net;
  const auto shards = net->parameters();
  net.reset();
  EXPECT_TRUE(module.expired());
  EXPECT_FALSE(state.expired());  // the graph reads its parameters
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
  for (const auto& shard : shards) EXPECT_TRUE(shard.grad().defined());
}

TEST(LifeTimeTest, StatesDieWithTheirModule) {
  const SmallRank rank;
  auto net = rank.Shard(2);
  net->forward(at::ones({1, 4})).sum().backward();
  std::vector<std::weak_ptr<FSDPState>> states;
  for (auto& layer : net->layers) states.push_back(fully_shard.state(layer));
  const std::weak_ptr<FSDPStateContext> context = StateOf(net).context;
  const auto parameters = net->parameters();  // as an optimizer holds them
  net.reset();
  for (const auto& state : states) EXPECT_TRUE(state.expired());
  EXPECT_FALSE(parameters[0].isnan().any().item<bool>());
}

TEST(LifeTimeTest, LossThatOutlivesItsModelAndItsParameters) {
  struct Bias : torch::nn::Module {
    Bias() { bias = register_parameter("bias", at::ones({4})); }
    at::Tensor bias;
  };
  const SmallRank rank;
  auto module = std::make_shared<Bias>();
  fully_shard(module, rank.options());
  const at::Tensor shard = module->parameters()[0];
  const std::weak_ptr<FSDPState> state = fully_shard.state(module);
  // An addition saves neither of its inputs.
  at::Tensor loss = (at::ones({4}) + module->bias).sum();
  module.reset();
  loss.backward();
  EXPECT_TRUE(at::equal(shard.grad(), at::ones_like(shard)));
  loss.reset();
  EXPECT_TRUE(state.expired());
}

// --- Freezing after sharding -------------------------------------------------

void SetTrainable(torch::nn::Linear& layer, bool on) {
  for (auto& shard : layer->parameters()) shard.set_requires_grad(on);
}

TEST(FreezingTest, ShardsDecide) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  const auto iterate = [&] {
    net->zero_grad();
    net->forward(at::ones({1, 4})).sum().backward();
  };
  iterate();
  SetTrainable(net->at(0), false);
  for (int i = 0; i < 2; ++i) {
    const int64_t reductions = fsdp_stats(net).num_reductions;
    iterate();
    EXPECT_FALSE(net->at(0)->parameters()[0].grad().defined());
    EXPECT_TRUE(net->at(1)->parameters()[0].grad().defined());
    EXPECT_EQ(fsdp_stats(net).num_reductions, reductions + 1);
  }
  SetTrainable(net->at(0), true);
  iterate();
  EXPECT_TRUE(net->at(0)->parameters()[0].grad().defined());
}

TEST(FreezingTest, AllFrozenAndBack) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  const auto iterate = [&] {
    net->zero_grad();
    const at::Tensor x = at::ones({1, 4}).set_requires_grad(true);
    net->forward(x).sum().backward();
    EXPECT_TRUE(x.grad().defined());
    EXPECT_TRUE(AllSharded(*net));
  };
  iterate();
  for (auto& layer : net->layers) SetTrainable(layer, false);
  iterate();
  EXPECT_FALSE(net->parameters()[0].grad().defined());
  for (auto& layer : net->layers) SetTrainable(layer, true);
  iterate();
  for (const auto& shard : net->parameters()) {
    EXPECT_TRUE(shard.grad().defined());
  }
}

// A user's own operator: its forward runs with gradients off.
struct OwnMatmul : torch::autograd::Function<OwnMatmul> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return at::matmul(x, weight);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {at::matmul(gradients[0], saved[1].t()),
            at::matmul(saved[0].t(), gradients[0])};
  }
};

TEST(FreezingTest, GroupsThatOnlyOwnOperatorsRead) {
  const SmallRank rank;
  const auto net = rank.Shard(2);
  const at::Tensor x = at::ones({1, 4}).set_requires_grad(true);
  const auto iterate = [&] {
    net->zero_grad();
    at::Tensor y = OwnMatmul::apply(x, net->at(0)->weight);
    OwnMatmul::apply(y, net->at(1)->weight).sum().backward();
  };
  iterate();
  EXPECT_TRUE(net->at(0)->parameters()[0].grad().defined());
  SetTrainable(net->at(0), false);
  iterate();
  EXPECT_FALSE(net->at(0)->parameters()[0].grad().defined());
  EXPECT_TRUE(net->at(1)->parameters()[0].grad().defined());
  SetTrainable(net->at(0), true);
  // Autograd asks for the parameter's edge before it runs such an operator, and
  // so before its read is seen: the edges follow when a forward starts, here by
  // an operator of LibTorch.
  at::sum(net->at(1)->bias);
  iterate();
  EXPECT_TRUE(net->at(0)->parameters()[0].grad().defined());
  EXPECT_TRUE(AllSharded(*net));
}

}  // namespace
}  // namespace composable
