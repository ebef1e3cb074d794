// An exception ends a pass, never the model: the tree is idle and sharded, no
// gather is pending, and training goes on as if nothing had happened.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"

namespace composable {
namespace {

using torch::Tensor;

struct Fault : std::runtime_error {
  Fault() : std::runtime_error("a fault of the test") {}
};

constexpr int kSteps = 6;
constexpr int kFaultyStep = 2;

struct Training {
  explicit Training(RankContext& rank)
      : rank(rank), model(RankContext::Seeded(1, [] { return Mlp(); })) {
    fully_shard(model->first, rank.options());
    fully_shard(model->second, rank.options());
    fully_shard(model->third, rank.options());
    fully_shard(model, rank.options());
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters());
  }
  double Step(int step) {
    optimizer->zero_grad();
    const Tensor loss = MlpLoss(model, 10 * step + rank.rank);
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }
  RankContext& rank;
  Mlp model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

std::vector<double> Uninterrupted(RankContext& rank) {
  Training training(rank);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    losses.push_back(training.Step(step));
  }
  return losses;
}

void ExpectIdle(const Mlp& model) {
  const FSDPStats stats = fsdp_stats(model);
  EXPECT_EQ(stats.unsharded_param_bytes, 0);
  EXPECT_EQ(stats.gathers_in_flight, 0);
  const auto context = fully_shard.state(model)->context;
  EXPECT_EQ(context->training_state, TrainingState::kIdle);
  EXPECT_TRUE(context->reducing.empty());
  EXPECT_TRUE(context->resident.empty());
  for (const FSDPState* state : context->states) {
    if (state->group() == nullptr) continue;
    EXPECT_TRUE(state->group()->is_sharded());
    EXPECT_FALSE(state->reduction()->has_pending());
  }
}

// Runs two good steps, one in which `arm` makes something throw, and then the
// rest. False if nothing threw.
bool SurvivesFault(RankContext& rank, const std::vector<double>& expected,
                   const std::function<void(Training&)>& arm,
                   const std::function<void(Training&)>& disarm) {
  Training training(rank);
  for (int step = 0; step < kFaultyStep; ++step) training.Step(step);
  arm(training);
  bool threw = false;
  try {
    training.Step(kFaultyStep);
  } catch (const std::exception& error) {
    threw = true;
    EXPECT_NE(std::string(error.what()).find("a fault of the test"),
              std::string::npos)
        << error.what();
    ExpectIdle(training.model);
  }
  disarm(training);
  if (!threw) return false;
  for (int step = kFaultyStep; step < kSteps; ++step) {
    EXPECT_EQ(training.Step(step), expected[step]) << step;
  }
  return true;
}

// Every event of every group in forward, backward and at its end.
TEST(ExceptionTest, AtEveryHookPointOfEveryLayer) {
  ExactRanks(2, [](RankContext& rank) {
    const auto expected = Uninterrupted(rank);
    int points = 0;
    for (bool threw = true; threw; ++points) {
      SCOPED_TRACE(points);
      int events = 0;
      threw = SurvivesFault(
          rank, expected,
          [&](Training& training) {
            set_trace_observer(training.model,
                               [&](TraceEvent, const std::string&) {
                                 if (events++ == points) throw Fault();
                               });
          },
          [](Training& training) {
            set_trace_observer(training.model, nullptr);
          });
    }
    // Three layers, each gathered, waited for, freed, reduced and waited for.
    EXPECT_GT(points, 15);
  });
}

// Code of the user that autograd or a hook runs.
TEST(ExceptionTest, InEveryKindOfHookOfEveryParameter) {
  ExactRanks(2, [](RankContext& rank) {
    const auto expected = Uninterrupted(rank);
    const auto throws = [](bool& armed) {
      return [&armed](const Tensor& gradient) {
        if (armed) throw Fault();
        return gradient;
      };
    };
    for (const char* name : {"first.weight", "second.bias", "third.weight"}) {
      for (const bool on_member : {false, true}) {
        SCOPED_TRACE(std::string(name) + (on_member ? " member" : " shard"));
        bool armed = false;
        EXPECT_TRUE(SurvivesFault(
            rank, expected,
            [&](Training& training) {
              const auto layer = training.model->named_modules()[std::string(
                  name, std::string(name).find('.'))];
              auto& linear = *layer->as<torch::nn::Linear>();
              const bool weight = std::string(name).back() == 't';
              Tensor member = weight ? linear.weight : linear.bias;
              Tensor shard = training.model->named_parameters()[name];
              (on_member ? member : shard).register_hook(throws(armed));
              armed = true;
            },
            [&](Training&) { armed = false; }));
      }
    }
  });
}

// A node of the graph that is none of ours.
struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw Fault();
  }
};

TEST(ExceptionTest, InANodeBetweenTwoLayers) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(model, rank.options());
    const auto loss = [](Mlp& m, int r, bool faulty) {
      Tensor x = torch::tanh(m->first(Input(r, {4, 5})));
      if (faulty) x = ThrowInBackward::apply(x);
      return m->third(torch::tanh(m->second(x))).pow(2).sum();
    };
    for (int round = 0; round < 2; ++round) {
      EXPECT_ANY_THROW(loss(model, rank.rank, true).backward());
      ExpectIdle(model);
      // What was reduced before the fault is there, as in plain LibTorch.
      model->zero_grad();
      plain->zero_grad();
      ExpectSameBackward(rank, plain, model,
                         [&](Mlp& m, int r) { return loss(m, r, false); });
    }
  });
}

// A backward inside a backward, as a re-entrant checkpoint runs it.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const torch::nn::Linear& layer,
                        const bool* faulty) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.get());
    context->saved_data["faulty"] = reinterpret_cast<int64_t>(faulty);
    const torch::NoGradGuard no_grad;
    return torch::nn::Linear(layer)(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(
        context->saved_data["layer"].toInt());
    const auto* faulty =
        reinterpret_cast<const bool*>(context->saved_data["faulty"].toInt());
    const at::AutoGradMode grad(true);
    Tensor y = layer->forward(x);
    if (*faulty) throw Fault();
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), Tensor(), Tensor()};
  }
};

TEST(ExceptionTest, InARecompute) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(model, rank.options());
    bool faulty = false;
    const auto loss = [&](Mlp& m, int r) {
      Tensor x = torch::tanh(m->first(Input(r, {4, 5})));
      x = Recompute::apply(x, m->second, &faulty);
      return m->third(torch::tanh(x)).pow(2).sum();
    };
    for (int round = 0; round < 2; ++round) {
      faulty = true;
      EXPECT_ANY_THROW(loss(model, rank.rank).backward());
      ExpectIdle(model);
      faulty = false;
      model->zero_grad();
      plain->zero_grad();
      ExpectSameBackward(rank, plain, model, loss);
    }
  });
}

// The collectives themselves, one after the other.
TEST(ExceptionTest, InEveryCollective) {
  const auto backend = MakeManualBackend(2, [](const std::string&) {});
  backend->set_finish_on_wait(true);
  RankContext rank;
  rank.group = GroupOf(backend);
  rank.world_size = 2;
  const auto expected = Uninterrupted(rank);
  size_t collectives = 0;
  for (bool threw = true; threw; ++collectives) {
    SCOPED_TRACE(collectives);
    threw = SurvivesFault(
        rank, expected,
        [&](Training&) {
          backend->Fail(backend->issued() + collectives, "a fault of the test");
        },
        [](Training&) {});
  }
  // Three gathers in forward, three reductions, and the run without a fault.
  EXPECT_GE(collectives, 7u);
}

}  // namespace
}  // namespace composable
