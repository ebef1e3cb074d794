// Module boundaries: where groups are gathered and left, what a read outside
// any forward gives, and what an exception leaves behind.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/composable/traced_blocks.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls `reach` where forwards begin and end.
struct Points {
  std::function<void(const std::string&)> reach = [](const std::string&) {};
  bool catches = false;  // the root catches what its children throw
};

// A layer with another one inside.
struct NodeImpl : torch::nn::Module {
  NodeImpl(Points& p, std::string n, int depth)
      : points(p), name(std::move(n)) {
    fc = register_module("fc", Linear(4, 4));
    if (depth > 0) {
      inner = std::make_shared<NodeImpl>(p, name + ".inner", depth - 1);
      register_module("inner", inner);
    }
  }
  // Runs itself again, `rounds` times.
  Tensor forward(const Tensor& x, int rounds = 0) {
    points.reach(name + " begin");
    Tensor y = torch::tanh(fc(x));
    if (inner != nullptr) y = call(inner, y) + x;
    if (rounds > 0) y = call(*this, y, rounds - 1) + fc(y);
    points.reach(name + " end");
    return y;
  }
  Points& points;
  std::string name;
  Linear fc{nullptr};
  std::shared_ptr<NodeImpl> inner;
};
COMPOSABLE_MODULE(Node);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(Points& p) : points(p) {
    first = register_module("first", Linear(4, 4));
    a = register_module("a", Node(p, "a", 1));
    b = register_module("b", Node(p, "b", 0));
    last = register_module("last", Linear(4, 4));
  }
  Tensor Try(Node& node, const Tensor& x, int rounds = 0) const {
    try {
      return node(x, rounds);
    } catch (const Fault&) {
      if (!points.catches) throw;
      return x;
    }
  }
  Tensor forward(const Tensor& x, int rounds = 0) {
    points.reach("root begin");
    Tensor y = Try(a, first(x), rounds);
    points.reach("root middle");
    y = last(Try(b, y));
    if (rounds > 0) y = Try(a, y);  // twice in one forward
    points.reach("root end");
    return y;
  }
  Tensor method(const Tensor& x) { return last(first(x)); }
  Points& points;
  Linear first{nullptr};
  Node a{nullptr};
  Node b{nullptr};
  Linear last{nullptr};
};
COMPOSABLE_MODULE(Net);

// Groups: the root's own layers, a, a.inner, b.
struct Handles {
  FSDPModule inner, a, b, root;
};
Handles ShardNet(Net& net, const FullyShardOptions& options) {
  FSDPModule inner = fully_shard(net->a->inner, options);
  FSDPModule a = fully_shard(net->a, options);
  FSDPModule b = fully_shard(net->b, options);
  return {inner, a, b, fully_shard(net, options)};
}

FSDPState& StateOf(const ModuleRef& module) {
  return *fully_shard.state(module);
}
bool IsSharded(const ModuleRef& module) {
  return StateOf(module).group()->is_sharded();
}

Tensor NetLoss(Net& net, int seed, int rounds = 0) {
  return net(Input(seed, {2, 4}), rounds).pow(2).sum();
}

// --- The exact points ---------------------------------------------------------

#define EXPECT_EVENTS(actual, ...) \
  EXPECT_EQ(OnePerLine(actual), OnePerLine(Events{__VA_ARGS__}))

struct TracedNet : TracedRank {
  explicit TracedNet(int64_t limit = 2, bool observed = true)
      : net(points),
        handles(ShardNet(net, options().limit_all_gathers(limit))) {
    points.reach = [this](const std::string& point) { log.Add(point); };
    if (observed) Observe(net);
  }
  Points points;
  Net net;
  Handles handles;
  Tensor x = torch::ones({2, 4});
};

TEST(BoundaryPointsTest, GatheredBeforeTheFirstStatement) {
  TracedNet t;
  const Tensor y = t.net(t.x);
  EXPECT_EVENTS(t.log.Take(), "gather root, wait gather root, root begin",
                "gather a, wait gather a, a begin",
                "gather a.inner, wait gather a.inner, a.inner begin",
                "a.inner end, a end, root middle",
                // Both are left; a was read longer ago.
                "free a, gather b, wait gather b, b begin, b end", "root end");
  y.sum().backward();
  t.log.Take();
  // The next iteration gathers one group ahead, and still no later than there.
  const Tensor z = t.net(t.x);
  EXPECT_EVENTS(t.log.Take(), "gather root, gather a, wait gather root",
                "root begin, gather a.inner, wait gather a, a begin",
                "wait gather a.inner, a.inner begin, a.inner end, a end",
                "root middle, free a, gather b, wait gather b, b begin",
                "b end, root end");
}

TEST(BoundaryPointsTest, LeftAtTheEndThoughNothingElseIsRead) {
  for (const bool boundary : {true, false}) {
    TracedNet t(/*limit=*/1);
    const torch::NoGradGuard no_grad;
    if (boundary) {
      t.net->b(t.x);
    } else {
      t.net->b->forward(t.x);
    }
    EXPECT_EQ(StateOf(t.net->b).left, boundary);
    EXPECT_FALSE(IsSharded(t.net->b));
    t.log.Take();
    t.handles.a.unshard();  // needs the slot
    EXPECT_EQ(OnePerLine(t.log.Take()),
              boundary ? "free b\ngather a\nwait gather a\n"
                       : "gather a\nwait gather a\n");
  }
}

TEST(BoundaryPointsTest, NotLeftWhereItIsStillUsed) {
  TracedNet t;
  const torch::NoGradGuard no_grad;
  int checked = 0;
  int open = 3;
  t.points.reach = [&](const std::string& point) {
    if (point == "a end") {
      ++checked;
      EXPECT_FALSE(StateOf(t.net->a).left);
      EXPECT_TRUE(StateOf(t.net->a->inner).left);
      EXPECT_EQ(StateOf(t.net->a).open_scopes, open--);
    }
    if (point == "root middle") {
      EXPECT_TRUE(StateOf(t.net->a).left);
    }
  };
  t.net->a(t.x, /*rounds=*/2);
  EXPECT_EQ(checked, 3);
  EXPECT_TRUE(StateOf(t.net->a).left);
  open = 1;
  t.net(t.x);
  EXPECT_EQ(checked, 4);
  EXPECT_FALSE(StateOf(t.net).left);
  EXPECT_EQ(StateOf(t.net).context->open_scopes, 0);
}

TEST(BoundaryPointsTest, NotLeftWhereItIsGatheredForALaterUse) {
  TracedNet t;
  t.points.reach = [&](const std::string& point) {
    if (point == "b end") StateOf(t.net->b).prefetched = true;
  };
  t.net->b(t.x);
  EXPECT_FALSE(StateOf(t.net->b).left);
}

TEST(BoundaryPointsTest, AReadAfterTheEndBringsTheGroupBack) {
  TracedNet t;
  const ForwardScope scope(t.net);
  t.net->b(t.x);
  EXPECT_TRUE(StateOf(t.net->b).left);
  torch::sum(t.net->b->fc->weight);
  EXPECT_FALSE(StateOf(t.net->b).left);
}

// Only what a boundary adds over the guard: b's group though b reads nothing.
TEST(BoundaryPointsTest, GathersWhatForwardDoesNotRead) {
  TracedNet t;
  t.points.reach = [&](const std::string& point) {
    if (point == "b begin") throw Fault("b");
  };
  EXPECT_THROW(t.net->b(t.x), Fault);
  EXPECT_FALSE(IsSharded(t.net->b));
  EXPECT_TRUE(StateOf(t.net->b).left);
}

TEST(BoundaryPointsTest, AfterAnEvaluationTheTreeIsIdle) {
  TracedNet t;
  FSDPStateContext& context = *StateOf(t.net).context;
  {
    const torch::NoGradGuard no_grad;
    t.net(t.x);
  }
  EXPECT_EQ(context.training_state, TrainingState::kIdle);
  // The root and the two groups used last.
  EXPECT_FALSE(IsSharded(t.net));
  EXPECT_FALSE(IsSharded(t.net->b));
  t.log.Take();
  {
    const c10::InferenceMode inference;
    t.net(t.x);
  }
  EXPECT_EQ(context.training_state, TrainingState::kIdle);
  const Events again = t.log.Take();
  EXPECT_EQ(std::count(again.begin(), again.end(), "gather root"), 0);
  // In the middle of a pass with gradients it stays that pass.
  const Tensor y = t.net(t.x);
  {
    const torch::NoGradGuard no_grad;
    t.net(t.x);
  }
  EXPECT_EQ(context.training_state, TrainingState::kForward);
  y.sum().backward();
  EXPECT_EQ(context.training_state, TrainingState::kIdle);
  EXPECT_EQ(fsdp_stats(t.net).unsharded_param_bytes, 0);
}

TEST(BoundaryPointsTest, ShardsAreCheckedAfterAnEvaluation) {
  TracedNet t;
  {
    const torch::NoGradGuard no_grad;
    t.net(t.x);
  }
  t.net->b->fc->weight = torch::zeros(t.net->b->fc->weight.sizes());
  ExpectThrows<c10::ValueError>([&] { t.net(t.x); },
                                {"No member holds parameter 'b.fc.weight'"});
  EXPECT_EQ(StateOf(t.net).context->training_state, TrainingState::kIdle);
  EXPECT_EQ(StateOf(t.net).context->open_scopes, 0);
  EXPECT_EQ(fsdp_stats(t.net).unsharded_param_bytes, 0);
}

// --- Gradients ------------------------------------------------------------------

class BoundaryGradientTest : public testing::TestWithParam<int64_t> {};

TEST_P(BoundaryGradientTest, AreThoseOfTheUnshardedModel) {
  ExactRanks(2, [limit = GetParam()](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options().limit_all_gathers(limit));
    {
      const c10::InferenceMode inference;
      EXPECT_TRUE(torch::equal(NetLoss(net, 3), NetLoss(plain, 3)));
    }
    for (int step = 0; step < 4; ++step) {
      plain->zero_grad();
      net->zero_grad();
      ExpectSameBackward(rank, plain, net, [&](Net& model, int r) {
        Tensor loss = NetLoss(model, 10 * step + r, /*rounds=*/step);
        const torch::NoGradGuard no_grad;
        model->eval();
        loss.add_(NetLoss(model, r).detach());
        model->train();
        return loss;
      });
      // Two forwards of one backward; a child alone.
      ExpectSameBackward(rank, plain, net, [&](Net& model, int r) {
        const Tensor alone = model->a(Input(r, {2, 4})).sum();
        return NetLoss(model, step + r) * NetLoss(model, r) + alone;
      });
    }
    EXPECT_EQ(fsdp_stats(net).unsharded_param_bytes, 0);
  });
}
INSTANTIATE_TEST_SUITE_P(Limits, BoundaryGradientTest,
                         testing::Values(1, 2, 4));

// Runs a module again in its backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, NodeImpl* node) {
    context->save_for_backward({x});
    context->saved_data["node"] = reinterpret_cast<int64_t>(node);
    return call(*node, x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const Tensor x =
        context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* node =
        reinterpret_cast<NodeImpl*>(context->saved_data["node"].toInt());
    {
      const at::AutoGradMode enable(true);
      call(*node, x).backward(gradients[0]);
    }
    return {x.grad(), Tensor()};
  }
};

TEST(BoundaryRecomputeTest, StartsNoForwardAndLeavesNothing) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options().limit_all_gathers(1));
    const auto loss = [](Net& model, int r) {
      const Tensor x = Input(r, {2, 4}).requires_grad_(true);
      return Recompute::apply(Recompute::apply(x, model->a.get()),
                              model->b.get())
          .pow(2)
          .sum();
    };
    int recomputed = 0;
    points.reach = [&, &net = net](const std::string& point) {
      if (torch::autograd::get_current_graph_task_id() == -1) return;
      const auto context = StateOf(net).context;
      if (context == nullptr ||
          context->training_state == TrainingState::kIdle) {
        return;  // of the plain model
      }
      if (point == "a begin") {
        EXPECT_FALSE(IsSharded(net->a));
      }
      if (point != "a end") return;
      ++recomputed;
      EXPECT_EQ(context->training_state, TrainingState::kPreBackward);
      EXPECT_FALSE(StateOf(net->a).left);
      EXPECT_FALSE(StateOf(net->a->inner).left);
      EXPECT_FALSE(IsSharded(net->a->inner));
    };
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      net->zero_grad();
      ExpectSameBackward(rank, plain, net, loss);
      EXPECT_EQ(StateOf(net).context->training_state, TrainingState::kIdle);
      EXPECT_EQ(StateOf(net).context->open_scopes, 0);
    }
    EXPECT_EQ(recomputed, 3);
  });
}

// Computes without an operator that the guard sees before autograd does.
struct OwnScale : torch::autograd::Function<OwnScale> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x});
    return x * weight.detach();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    return {Tensor(), gradients[0] * context->get_saved_variables()[0]};
  }
};

struct ScaleImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return OwnScale::apply(x, weight); }
  Tensor weight{register_parameter("weight", torch::ones({4}))};
};
COMPOSABLE_MODULE(Scale);

TEST(BoundaryFreezingTest, IsSeenAsAForwardBegins) {
  ExactRanks(2, [](RankContext& rank) {
    Scale plain;
    Scale model;
    fully_shard(model, rank.options());
    Tensor shard = model->parameters()[0];
    shard.requires_grad_(false);
    EXPECT_FALSE(model(Input(1, {4})).requires_grad());
    shard.requires_grad_(true);
    ExpectSameBackward(rank, plain, model,
                       [](Scale& m, int r) { return m(Input(r, {4})).sum(); });
  });
}

TEST(BoundaryTreeTest, ShardingAboveInAForwardMakesANewTree) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    fully_shard(net->b, rank.options());
    net->b(Input(1, {2, 4}));
    EXPECT_TRUE(StateOf(net->b).context->has_boundary);
    {
      const ForwardScope scope(net->b);
      fully_shard(net, rank.options());
      torch::sum(net->b->fc->weight);  // the first use of the new tree
    }
    EXPECT_EQ(StateOf(net->b).open_scopes, 0);
    EXPECT_FALSE(StateOf(net->b).left);
    EXPECT_EQ(StateOf(net).context->open_scopes, 0);
    EXPECT_FALSE(StateOf(net).context->has_boundary);
    ExpectSameBackward(rank, plain, net,
                       [](Net& model, int r) { return NetLoss(model, r); });
  });
}

// --- Reads outside any forward ---------------------------------------------------

TEST(OutsideForwardTest, ThrowsOnThatRankAndTrainingGoesOn) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    auto handles = ShardNet(net, rank.options());
    torch::optim::SGD plain_sgd(plain->parameters(), 0.1);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const auto look = [&, &net = net] {
      if (rank.rank != 0) return;
      const int64_t gathers = fsdp_stats(net).num_gathers;
      const auto state = StateOf(net).context->training_state;
      ExpectThrows<c10::ValueError>(
          [&] { net->b->fc->weight.norm(); },
          {"Rank 0: aten::", "norm", "'b.fc.weight'", "is sharded",
           "outside any forward or backward", "root module has ended",
           "unshard()", "reshard()", "full_state_dict",
           "composable::ForwardScope scope(model)"});
      // Even if it happens to be gathered, and through views, in a list too.
      ExpectThrows<c10::ValueError>(
          [&] {
            net->first->bias.view({2, 2});
          },
          {"'first.bias'"});
      ExpectThrows<c10::ValueError>(
          [&] {
            torch::stack({net->a->fc->bias, net->b->fc->bias});
          },
          {"'a.fc.bias'"});
      ExpectThrows<c10::ValueError>(
          [&] {
            net->a->fc(Input(1, {2, 4}));
          },
          {"'a.fc."});
      EXPECT_EQ(fsdp_stats(net).num_gathers, gathers);
      EXPECT_EQ(StateOf(net).context->training_state, state);
    };
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      net->zero_grad();
      ExpectSameBackward(rank, plain, net, [&](Net& model, int r) {
        Tensor loss = NetLoss(model, 10 * step + r);
        if (model.get() == net.get()) look();  // between forward and backward
        return loss;
      });
      look();
      composable::clip_grad_norm_(net->parameters(), 1e9);
      plain_sgd.step();
      sgd.step();
      look();
      ExpectParameters(*net, *plain);
    }
    const auto whole = full_state_dict(net);
    EXPECT_TRUE(torch::equal(whole["b.fc.weight"], plain->b->fc->weight));
    load_full_state_dict(net, whole);
    look();
  });
}

TEST(OutsideForwardTest, WhatUnshardGatheredMayBeRead) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    auto handles = ShardNet(net, rank.options());
    NetLoss(net, rank.rank).backward();
    handles.b.unshard();
    if (rank.rank == 0) {
      const int64_t gathers = fsdp_stats(net).num_gathers;
      EXPECT_TRUE(
          torch::equal(net->b->fc->weight.norm(), plain->b->fc->weight.norm()));
      ExpectThrows<c10::ValueError>(
          [&] { torch::add(net->b->fc->weight, net->a->fc->weight); },
          {"'a.fc.weight'"});
      EXPECT_EQ(fsdp_stats(net).num_gathers, gathers);
    }
    EXPECT_EQ(StateOf(net).context->training_state, TrainingState::kIdle);
    {
      const torch::NoGradGuard no_grad;
      for (auto& shard : net->parameters()) shard.fill_(2);
    }
    ExpectThrows<c10::ValueError>(
        [&] { net->b->fc->weight.norm(); },
        {"'b.fc.weight'", "have changed", "unshard() again"});
    handles.b.unshard();
    EXPECT_EQ(net->b->fc->weight.sum().item<float>(), 32);
    handles.b.reshard();
    ExpectThrows<c10::ValueError>([&] { net->b->fc->weight.norm(); },
                                  {"'b.fc.weight'", "on every rank"});
  });
}

TEST(OutsideForwardTest, AnyForwardCounts) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options());
    NetLoss(net, rank.rank).backward();
    net->zero_grad();
    const Tensor x = Input(1, {2, 4});
    ExpectThrows<c10::ValueError>([&] { net->method(x); }, {"'first."});
    ExpectSameBackward(rank, plain, net, [&](Net& model, int) {
      const ForwardScope scope(model);
      return model->method(x).sum();
    });
    // A module that is not sharded itself, of this tree or of none.
    EXPECT_TRUE(torch::equal(call(net->last, x), plain->last(x)));
    EXPECT_TRUE(torch::equal(call(*net->last, x), plain->last(x)));
    // Another thread, while the forward runs in this one.
    {
      const ForwardScope scope(net);
      std::thread([&, &plain = plain, &net = net] {
        EXPECT_TRUE(torch::equal(net->method(x), plain->method(x)));
      }).join();
    }
    Linear foreign(4, 4);
    {
      const ForwardScope scope(foreign.ptr());
      EXPECT_TRUE(torch::equal(net->method(x), plain->method(x)));
    }
    ExpectThrows<c10::ValueError>([&] { net->method(x); }, {"'first."});
  });
}

TEST(OutsideForwardTest, WithoutABoundaryOfTheRootNothingChanges) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options());
    ExpectSameBackward(rank, plain, net, [](Net& model, int r) {
      return model->forward(Input(r, {2, 4})).pow(2).sum();
    });
    EXPECT_FALSE(StateOf(net).context->has_boundary);
    EXPECT_TRUE(
        torch::equal(net->b->fc->weight.norm(), plain->b->fc->weight.norm()));
  });
}

// --- Exceptions ------------------------------------------------------------------

const char* const kPoints[] = {"root begin",  "a begin", "a.inner begin",
                               "a.inner end", "a end",   "root middle",
                               "b begin",     "b end",   "root end"};

// Losses of `steps` steps; `before(step)` runs ahead of each.
std::vector<Tensor> Train(RankContext& rank, Points& points,
                          const std::function<void(Net&, int)>& before) {
  Net net = RankContext::Seeded(1, [&] { return Net(points); });
  ShardNet(net, rank.options());
  torch::optim::AdamW optimizer(net->parameters());
  std::vector<Tensor> losses;
  for (int step = 0; step < 4; ++step) {
    before(net, step);
    Tensor loss = NetLoss(net, 10 * step + rank.rank, step % 2);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  for (const auto& item : full_state_dict(net)) losses.push_back(item.value());
  return losses;
}

void ExpectEqual(const std::vector<Tensor>& actual,
                 const std::vector<Tensor>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << what << ", item " << i;
  }
}

TEST(BoundaryExceptionTest, LeavesTheTreeIdleAndSharded) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    const auto expected = Train(rank, points, [](Net&, int) {});
    for (const bool training : {true, false}) {
      for (const char* point : kPoints) {
        const auto faulty = [&](Net& net, int step) {
          if (step != 0 && step != 2) return;
          points.reach = [&](const std::string& reached) {
            if (reached == point) throw Fault(point);
          };
          try {
            const at::AutoGradMode mode(training);
            NetLoss(net, 77, /*rounds=*/1);
            ADD_FAILURE() << point;
          } catch (const Fault& fault) {
            EXPECT_STREQ(fault.what(), point);
          }
          points.reach = [](const std::string&) {};
          const auto context = StateOf(net).context;
          const FSDPStats stats = fsdp_stats(net);
          EXPECT_EQ(context->training_state, TrainingState::kIdle) << point;
          EXPECT_EQ(stats.unsharded_param_bytes, 0) << point;
          EXPECT_EQ(stats.gathers_in_flight, 0) << point;
          EXPECT_TRUE(context->resident.empty()) << point;
          EXPECT_EQ(context->open_scopes, 0) << point;
          for (const FSDPState* state : context->states) {
            EXPECT_EQ(state->open_scopes, 0) << point;
          }
        };
        ExpectEqual(Train(rank, points, faulty), expected, point);
      }
    }
  });
}

TEST(BoundaryExceptionTest, CaughtInTheRootClosesOnlyWhatItLeaves) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    points.catches = true;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options());
    NetLoss(net, 1).backward();
    net->zero_grad();
    for (const char* point : {"a begin", "a.inner end", "a end", "b end"}) {
      plain->zero_grad();
      net->zero_grad();
      points.reach = [&, &net = net](const std::string& reached) {
        if (reached == point) throw Fault(point);
        const auto context = StateOf(net).context;
        if (reached == "root middle" && context->open_scopes > 0) {
          EXPECT_EQ(context->training_state, TrainingState::kForward);
          EXPECT_EQ(context->open_scopes, 1) << point;
          EXPECT_FALSE(IsSharded(net)) << point;
        }
      };
      ExpectSameBackward(rank, plain, net,
                         [](Net& model, int r) { return NetLoss(model, r); });
    }
  });
}

// The forward that is refused must not take anything from the backward.
TEST(BoundaryExceptionTest, OfAForwardWhileAnotherThreadIsInBackward) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options());
    int refused = 0;
    ExpectSameBackward(rank, plain, net, [&, &net = net](Net& model, int r) {
      const Tensor loss = NetLoss(model, r);
      if (model.get() != net.get()) return loss;
      loss.register_hook([&](const Tensor&) {
        torch::sum(net->first->weight);  // the backward has begun
        std::thread([&] {
          ExpectThrows<c10::ValueError>(
              [&] {
                net(Input(1, {2, 4}));
              },
              {"backward runs in another"});
          ++refused;
        }).join();
        EXPECT_EQ(StateOf(net).context->training_state,
                  TrainingState::kPreBackward);
        EXPECT_FALSE(IsSharded(net));
      });
      return loss;
    });
    EXPECT_EQ(refused, 1);
  });
}

TEST(BoundaryExceptionTest, OfAnObserverInTheCleanUp) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options());
    set_trace_observer(net, [](TraceEvent event, const std::string& fqn) {
      if (event == TraceEvent::kReshard && fqn == "b") throw Fault("observer");
    });
    points.reach = [](const std::string& point) {
      if (point == "root end") throw Fault(point);
    };
    // An exception is on its way: the second is a warning.
    try {
      NetLoss(net, 1);
      ADD_FAILURE();
    } catch (const Fault& fault) {
      EXPECT_STREQ(fault.what(), "root end");
    }
    points.reach = [](const std::string&) {};
    set_trace_observer(net, nullptr);
    ExpectSameBackward(rank, plain, net,
                       [](Net& model, int r) { return NetLoss(model, r); });
  });
}

TEST(BoundaryExceptionTest, OfABackwardInsideTheForward) {
  ExactRanks(2, [](RankContext& rank) {
    Points points;
    auto [plain, net] = MakePair([&] { return Net(points); });
    ShardNet(net, rank.options());
    points.reach = [&, &net = net](const std::string& point) {
      if (point != "root middle") return;
      Tensor y = net->b->fc(Input(1, {2, 4}));
      y.register_hook([](const Tensor&) -> Tensor { throw Fault("hook"); });
      net->a->fc(y).sum().backward();
    };
    EXPECT_ANY_THROW(NetLoss(net, 1));
    points.reach = [](const std::string&) {};
    EXPECT_EQ(StateOf(net).context->training_state, TrainingState::kIdle);
    EXPECT_EQ(fsdp_stats(net).unsharded_param_bytes, 0);
    net->zero_grad();
    ExpectSameBackward(rank, plain, net,
                       [](Net& model, int r) { return NetLoss(model, r); });
  });
}

}  // namespace
}  // namespace composable
