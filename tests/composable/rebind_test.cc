// Optimizers and the shards: rebind moves one that was built too early, with its
// state, and a warning tells of one that was not moved.
#include "composable/rebind.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"

namespace composable {
namespace {

using torch::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

// --- rebind ------------------------------------------------------------------

// Two layers with one weight, a third, and a frozen parameter.
struct TiedMlpImpl : torch::nn::Module {
  TiedMlpImpl()
      : first(register_module("first", torch::nn::Linear(5, 5))),
        second(register_module(
            "second",
            torch::nn::Linear(torch::nn::LinearOptions(5, 5).bias(false)))),
        third(register_module("third", torch::nn::Linear(5, 3))),
        tie(second->register_parameter("tie", first->weight)) {
    second->weight.requires_grad_(false);
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::tanh(first(x));
    return third(torch::tanh(second(hidden) + torch::matmul(hidden, tie)));
  }
  torch::nn::Linear first, second, third;
  Tensor tie;
};
TORCH_MODULE(TiedMlp);

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>)>
      make;
  // Other options for the second group.
  std::function<std::unique_ptr<OptimizerOptions>()> others;
};

template <typename T, typename Options>
Kind KindOf(std::string name, const Options& options, const Options& others) {
  return {std::move(name),
          [options](std::vector<OptimizerParamGroup> groups)
              -> std::unique_ptr<Optimizer> {
            return std::make_unique<T>(std::move(groups), options);
          },
          [others] {
            return static_cast<const OptimizerOptions&>(others).clone();
          }};
}

std::vector<Kind> Kinds() {
  using namespace torch::optim;  // NOLINT: a zoo of its names
  return {
      KindOf<SGD>("Sgd", SGDOptions(0.05), SGDOptions(0.01).weight_decay(0.1)),
      KindOf<SGD>("SgdMomentum", SGDOptions(0.05).momentum(0.9),
                  SGDOptions(0.01).momentum(0.5).nesterov(true)),
      KindOf<Adam>("Adam", AdamOptions(0.01),
                   AdamOptions(0.02).weight_decay(0.1)),
      KindOf<Adam>("AdamAmsgrad", AdamOptions(0.01).amsgrad(true),
                   AdamOptions(0.02).betas({0.5, 0.9})),
      KindOf<AdamW>("AdamW", AdamWOptions(0.01),
                    AdamWOptions(0.02).weight_decay(0)),
      KindOf<AdamW>("AdamWAmsgrad", AdamWOptions(0.01).amsgrad(true),
                    AdamWOptions(0.02)),
      KindOf<RMSprop>("RmsProp", RMSpropOptions(0.01),
                      RMSpropOptions(0.02).alpha(0.9)),
      KindOf<RMSprop>("RmsPropCentered",
                      RMSpropOptions(0.01).centered(true).momentum(0.9),
                      RMSpropOptions(0.02)),
      KindOf<Adagrad>("Adagrad", AdagradOptions(0.05),
                      AdagradOptions(0.1).lr_decay(0.1)),
      KindOf<Adagrad>("AdagradInitialValue",
                      AdagradOptions(0.05).initial_accumulator_value(0.1),
                      AdagradOptions(0.1).weight_decay(0.1)),
  };
}

// Matrices with the default options, the rest with others; a tied parameter
// once.
template <typename Holder>
std::unique_ptr<Optimizer> Build(const Kind& kind, Holder& model) {
  std::vector<Tensor> matrices;
  std::vector<Tensor> others;
  for (const auto& item : model->named_parameters()) {
    auto& list =
        item.key().find("bias") == std::string::npos ? matrices : others;
    bool known = false;
    for (const auto& other : list) known |= other.is_same(item.value());
    if (!known) list.push_back(item.value());
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(others, kind.others());
  return kind.make(std::move(groups));
}

class RebindTest : public testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Kinds, RebindTest, testing::ValuesIn(Kinds()),
                         [](const auto& info) { return info.param.name; });

Tensor LossOf(TiedMlp& model, int64_t seed) {
  return model(Input(seed, {4, 5})).pow(2).sum();
}
Tensor LossOf(Mlp& model, int64_t seed) { return MlpLoss(model, seed); }

// Steps of a model that is still whole, the same on all ranks.
template <typename Holder>
void StepWhole(RankContext& rank, Holder& model, Optimizer& optimizer,
               int step) {
  optimizer.zero_grad();
  BackwardOfAllRanks(*model, rank.world_size,
                     [&](int r) { LossOf(model, 10 * step + r).backward(); });
  optimizer.step();
}

// `early_steps` before fully_shard, then five: equal to the unsharded model
// and, without early steps, to an optimizer that was built afterwards.
template <typename Holder>
void CheckRebind(RankContext& rank, const Kind& kind, int early_steps,
                 Groups groups) {
  SCOPED_TRACE(std::to_string(early_steps) + " early steps " + Name(groups));
  auto [plain, sharded] = MakePair([] { return Holder(); });
  Holder right = RankContext::Seeded(1, [] { return Holder(); });
  auto expected = Build(kind, plain);
  auto optimizer = Build(kind, sharded);
  for (int step = 0; step < early_steps; ++step) {
    StepWhole(rank, plain, *expected, step);
    StepWhole(rank, sharded, *optimizer, step);
  }
  Shard(sharded, groups, rank.options());
  rebind(*optimizer, sharded);
  Shard(right, groups, rank.options());
  auto built_after = Build(kind, right);
  for (int step = 10; step < 15; ++step) {
    StepWhole(rank, plain, *expected, step);
    for (auto* used : {&sharded, &right}) {
      auto& by = used == &sharded ? *optimizer : *built_after;
      by.zero_grad();
      LossOf(*used, 10 * step + rank.rank).backward();
      by.step();
    }
  }
  ExpectParameters(*sharded, *plain);
  if (early_steps > 0) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < right->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(sharded->parameters()[i], right->parameters()[i]));
  }
}

TEST_P(RebindTest, TrainsAsOneThatWasBuiltRight) {
  ExactRanks(2, [](RankContext& rank) {
    for (const int early_steps : {0, 3}) {
      for (const Groups groups : {Groups::kOne, Groups::kPerModule}) {
        CheckRebind<Mlp>(rank, GetParam(), early_steps, groups);
        CheckRebind<TiedMlp>(rank, GetParam(), early_steps, groups);
      }
    }
  });
}

TEST(RebindDetails, KeepsGroupsOptionsAndTheOrderOfParameters) {
  ExactRanks(2, [](RankContext& rank) {
    const Kind kind = Kinds()[4];
    TiedMlp model = RankContext::Seeded(1, [] { return TiedMlp(); });
    auto optimizer = Build(kind, model);
    const auto names_of = [&](const OptimizerParamGroup& group) {
      std::string names;
      for (const auto& parameter : group.params()) {
        for (const auto& item : model->named_parameters()) {
          if (!item.value().is_same(parameter)) continue;
          names += item.key() + " ";
          break;
        }
      }
      return names;
    };
    std::vector<std::string> before;
    for (const auto& group : optimizer->param_groups()) {
      before.push_back(names_of(group));
    }
    fully_shard(model->third, rank.options());
    fully_shard(model, rank.options());
    rebind(*optimizer, model);
    ASSERT_EQ(optimizer->param_groups().size(), before.size());
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(names_of(optimizer->param_groups()[i]), before[i]);
    }
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.02);
    // A second time there is nothing to move.
    rebind(*optimizer, model);
    EXPECT_EQ(names_of(optimizer->param_groups()[0]), before[0]);
  });
}

// A block is moved, the other parameters stay plain.
TEST(RebindDetails, OfAPartOfTheModel) {
  ExactRanks(2, [](RankContext& rank) {
    for (const auto& kind : Kinds()) {
      SCOPED_TRACE(kind.name);
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      auto expected = Build(kind, plain);
      auto optimizer = Build(kind, sharded);
      StepWhole(rank, plain, *expected, 0);
      StepWhole(rank, sharded, *optimizer, 0);
      fully_shard(sharded->second, rank.options());
      rebind(*optimizer, sharded);
      for (int step = 1; step < 3; ++step) {
        StepWhole(rank, plain, *expected, step);
        optimizer->zero_grad();
        MlpLoss(sharded, 10 * step + rank.rank).backward();
        for (const auto& parameter : sharded->parameters()) {
          if (IsShard(parameter)) continue;
          Tensor gradient = parameter.grad();
          c10d::AllreduceOptions sum;
          std::vector<Tensor> list{gradient};
          rank.group->allreduce(list, sum)->wait();
          gradient.div_(rank.world_size);
        }
        optimizer->step();
      }
      ExpectParameters(*sharded, *plain);
    }
  });
}

// State of a kind that rebind does not know.
struct OddState : torch::optim::OptimizerCloneableParamState<OddState> {
  bool operator==(const OddState&) const { return true; }
};

TEST(RebindDetails, UnknownStateIsRefusedAndNothingChanges) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    torch::optim::SGD optimizer(model->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    StepWhole(rank, model, optimizer, 0);
    const Tensor last = model->parameters().back();
    optimizer.state()[last.unsafeGetTensorImpl()] =
        std::make_unique<OddState>();
    const auto before = optimizer.param_groups()[0].params();
    fully_shard(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] { rebind(optimizer, model); },
        {"rebind: expected the state of SGD, Adam, AdamW, RMSprop or Adagrad",
         "OddState", "Build this optimizer after fully_shard"});
    const auto& now = optimizer.param_groups()[0].params();
    ASSERT_EQ(now.size(), before.size());
    for (size_t i = 0; i < now.size(); ++i) {
      EXPECT_TRUE(now[i].is_same(before[i]));
      EXPECT_EQ(optimizer.state().count(now[i].unsafeGetTensorImpl()), 1u);
    }
  });
}

TEST(RebindDetails, HyperParametersOfAnLbfgsBeforeItsFirstStepAreMoved) {
  ExactRanks(1, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    torch::optim::LBFGS optimizer(model->parameters());
    fully_shard(model, rank.options());
    rebind(optimizer, model);
    EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(
        model->parameters()[0]));
  });
}

// --- The warning -------------------------------------------------------------

constexpr char kCleared[] = "was cleared, and no parameter of its group has";

Mlp TwoGroups(RankContext& rank) {
  Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
  fully_shard(model->second, rank.options());
  fully_shard(model, rank.options());
  return model;
}

void ExpectWarnings(int count, const std::function<void(RankContext&)>& run) {
  ExactRanks(2, [&](RankContext& rank) {
    WarningsOfThisThread warnings;
    run(rank);
    EXPECT_EQ(warnings.Count(kCleared), count) << warnings.text();
    if (count == 0) return;
    EXPECT_EQ(warnings.Count("The gradient of '"), count);
    EXPECT_EQ(warnings.Count("it was built before fully_shard: build it "
                             "afterwards from module->parameters(), or move it "
                             "with composable::rebind(optimizer, module)"),
              count)
        << warnings.text();
  });
}

// The optimizer holds another model's parameters.
TEST(ClearedGradientTest, OnceForEachGroupThatNoOptimizerTrains) {
  for (const bool set_to_none : {true, false}) {
    SCOPED_TRACE(set_to_none);
    ExpectWarnings(2, [&](RankContext& rank) {
      Mlp model = TwoGroups(rank);
      Mlp other;
      torch::optim::SGD optimizer(other->parameters(), 0.1);
      for (int step = 0; step < 5; ++step) {
        model->zero_grad(set_to_none);
        MlpLoss(model, 10 * step + rank.rank).backward();
        optimizer.step();
      }
    });
  }
}

TEST(ClearedGradientTest, OnlyForTheGroupThatTheOptimizerLacks) {
  ExpectWarnings(1, [](RankContext& rank) {
    Mlp model = TwoGroups(rank);
    torch::optim::SGD optimizer(model->first->parameters(), 0.1);
    for (int step = 0; step < 5; ++step) {
      model->zero_grad();
      MlpLoss(model, 10 * step + rank.rank).backward();
      optimizer.step();
    }
  });
}

TEST(ClearedGradientTest, NeverInALoopThatSteps) {
  ExpectWarnings(0, [](RankContext& rank) {
    for (const auto& kind : Kinds()) {
      for (const bool set_to_none : {true, false}) {
        Mlp model = TwoGroups(rank);
        auto optimizer = Build(kind, model);
        for (int step = 0; step < 4; ++step) {
          optimizer->zero_grad(set_to_none);
          MlpLoss(model, 10 * step + rank.rank).backward();
          clip_grad_norm_(model->parameters(), 0.1);
          optimizer->step();
        }
      }
    }
  });
}

TEST(ClearedGradientTest, NeverAfterRebind) {
  ExpectWarnings(0, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    torch::optim::AdamW optimizer(model->parameters());
    fully_shard(model, rank.options());
    rebind(optimizer, model);
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      MlpLoss(model, 10 * step + rank.rank).backward();
      optimizer.step();
    }
  });
}

TEST(ClearedGradientTest, NeverWhileGradientsAreAccumulated) {
  ExpectWarnings(0, [](RankContext& rank) {
    for (const bool sync : {true, false}) {
      Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
      auto handle = fully_shard(model, rank.options());
      torch::optim::SGD optimizer(model->parameters(), 0.01);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        for (int micro = 0; micro < 3; ++micro) {
          handle.set_requires_gradient_sync(sync || micro == 2);
          MlpLoss(model, 10 * step + micro + rank.rank).backward();
        }
        optimizer.step();
      }
    }
  });
}

// A scaled loss, and gradients that are divided again after each micro batch.
// The second rank's rows of the embedding are never read, so theirs are zero.
TEST(ClearedGradientTest, NeverForGradientsThatAreScaledByHand) {
  ExpectWarnings(0, [](RankContext& rank) {
    torch::nn::Embedding table =
        RankContext::Seeded(1, [] { return torch::nn::Embedding(8, 3); });
    fully_shard(table, rank.options());
    torch::optim::SGD optimizer(table->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      for (int micro = 0; micro < 3; ++micro) {
        (8 * table(torch::tensor({0, 1}))).sum().backward();
        const at::NoGradGuard no_grad;
        for (const auto& parameter : table->parameters()) {
          Tensor gradient = parameter.grad();
          gradient.mul_(0.5);
        }
      }
      optimizer.step();
    }
  });
}

// The generator's backward fills the discriminator's gradients too, and its
// optimizer clears them before its own.
TEST(ClearedGradientTest, NeverInAnAdversarialLoop) {
  ExpectWarnings(0, [](RankContext& rank) {
    torch::nn::Linear generator =
        RankContext::Seeded(1, [] { return torch::nn::Linear(5, 5); });
    Mlp discriminator = TwoGroups(rank);
    fully_shard(generator, rank.options());
    torch::optim::Adam of_generator(generator->parameters());
    torch::optim::Adam of_discriminator(discriminator->parameters());
    for (int step = 0; step < 4; ++step) {
      const Tensor noise = Input(10 * step + rank.rank, {4, 5});
      of_discriminator.zero_grad();
      discriminator(generator(noise).detach()).pow(2).sum().backward();
      of_discriminator.step();
      of_generator.zero_grad();
      discriminator(generator(noise)).sum().backward();
      of_generator.step();
    }
  });
}

// A shard that is stepped as soon as its gradient is there: no write follows.
TEST(ClearedGradientTest, NeverWhenAHookSteps) {
  ExpectWarnings(0, [](RankContext& rank) {
    torch::nn::Linear model = RankContext::Seeded(1, [] {
      return torch::nn::Linear(torch::nn::LinearOptions(5, 3).bias(false));
    });
    fully_shard(model, rank.options());
    const Tensor shard = model->parameters()[0];
    shard.register_hook([rows = shard.detach()](const Tensor& gradient) {
      rows.add_(gradient, -0.01);
    });
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      model(Input(10 * step + rank.rank, {4, 5})).pow(2).sum().backward();
    }
  });
}

TEST(ClearedGradientTest, NeverForFrozenParametersAndEvaluation) {
  ExpectWarnings(0, [](RankContext& rank) {
    Mlp model = TwoGroups(rank);
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    for (int step = 0; step < 6; ++step) {
      for (auto& parameter : model->second->parameters()) {
        parameter.requires_grad_(step % 2 == 0);
      }
      optimizer.zero_grad();
      MlpLoss(model, 10 * step + rank.rank).backward();
      optimizer.step();
      const at::NoGradGuard no_grad;
      MlpLoss(model, step);
    }
  });
}

}  // namespace
}  // namespace composable
