// module->to(dtype), and set_data, on what is sharded already.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"

namespace composable {
namespace {

using torch::kBFloat16;
using torch::kDouble;
using torch::kFloat;

at::Tensor LossIn(c10::ScalarType dtype, Mlp& model, int64_t seed) {
  return model(Input(seed, {4, 5}).to(dtype)).pow(2).sum();
}

void ExpectDtypes(Mlp& model, c10::ScalarType dtype) {
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), dtype) << item.key();
    if (item.value().grad().defined()) {
      EXPECT_EQ(item.value().grad().scalar_type(), dtype) << item.key();
    }
  }
  EXPECT_EQ(model->first->weight.scalar_type(), dtype);
  EXPECT_EQ(model->third->bias.scalar_type(), dtype);
}

template <typename Optimizer>
void TrainBoth(RankContext& rank, Mlp& plain, Mlp& sharded, Optimizer& of_plain,
               Optimizer& of_sharded, c10::ScalarType dtype, int steps,
               double tolerance) {
  for (int step = 0; step < steps; ++step) {
    of_plain.zero_grad();
    of_sharded.zero_grad();
    ExpectSameBackward(
        rank, plain, sharded,
        [&](Mlp& m, int r) { return LossIn(dtype, m, 10 * step + r); },
        tolerance);
    ExpectDtypes(sharded, dtype);
    of_plain.step();
    of_sharded.step();
  }
  ExpectParameters(*sharded, *plain, tolerance);
}

TEST(ParityCastAfterInit, ToFloat64AfterInit) {
  for (const int world_size : {1, 2, 3}) {
    for (const Groups groups : {Groups::kOne, Groups::kPerModule}) {
      ExactRanks(world_size, [&](RankContext& rank) {
        auto [plain, sharded] = MakePair([] { return Mlp(); });
        Shard(sharded, groups, rank.options());
        plain->to(kDouble);
        sharded->to(kDouble);
        ExpectDtypes(sharded, kDouble);
        const auto options = torch::optim::AdamOptions(0.01);
        torch::optim::Adam of_plain(plain->parameters(), options);
        torch::optim::Adam of_sharded(sharded->parameters(), options);
        TrainBoth(rank, plain, sharded, of_plain, of_sharded, kDouble, 10,
                  world_size < 3 ? 0 : 1e-12);
      });
    }
  }
}

// Rows stay where they are, so what the optimizer keeps for them still fits.
TEST(DtypeChangeTest, InTheMiddleOfTrainingAndBack) {
  for (const Groups groups : {Groups::kOne, Groups::kPerModule}) {
    ExactRanks(2, [&](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      Shard(sharded, groups, rank.options());
      const auto options = torch::optim::AdamWOptions(0.01);
      torch::optim::AdamW of_plain(plain->parameters(), options);
      torch::optim::AdamW of_sharded(sharded->parameters(), options);
      for (const auto dtype : {kFloat, kDouble, kFloat}) {
        plain->to(dtype);
        sharded->to(dtype);
        TrainBoth(rank, plain, sharded, of_plain, of_sharded, dtype, 3, 0);
      }
    });
  }
}

struct TwoDtypesImpl : torch::nn::Module {
  TwoDtypesImpl() {
    weight = register_parameter("weight", torch::randn({6, 3}));
    bias = register_parameter("bias", torch::randn({6}));
    scale = register_parameter("scale", torch::randn({3, 6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::linear(torch::tanh(torch::linear(x, weight, bias.to(kFloat))),
                         scale.to(kFloat));
  }
  at::Tensor weight, bias, scale;
};
TORCH_MODULE(TwoDtypes);

at::Tensor TwoDtypesLoss(TwoDtypes& model, int r) {
  return model(Input(r, {4, 3})).pow(2).sum();
}

using PlacementFn = ShardPlacementFn;

TEST(DtypeChangeTest, OfSomeParametersOfAGroupOfAnyPlacement) {
  const std::vector<PlacementFn> placements = {
      nullptr,
      [](const std::string& fqn, const at::Tensor& parameter) {
        return fqn == "weight" ? Shard(1) : Shard(parameter.dim() - 1);
      },
      [](const std::string&, const at::Tensor&) { return Owned(); }};
  for (const auto& placement : placements) {
    ExactRanks(2, [&](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return TwoDtypes(); });
      fully_shard(sharded, rank.options().shard_placement_fn(placement));
      const auto loss = [](TwoDtypes& m, int r) { return TwoDtypesLoss(m, r); };
      ExpectSameBackward(rank, plain, sharded, loss);
      plain->zero_grad();
      sharded->zero_grad();
      for (auto* model : {&plain, &sharded}) {
        for (const char* name : {"bias", "scale"}) {
          at::Tensor parameter = (*model)->named_parameters()[name];
          parameter.set_data(parameter.to(kDouble));
        }
      }
      EXPECT_EQ(sharded->weight.scalar_type(), kFloat);
      EXPECT_EQ(sharded->bias.scalar_type(), kDouble);
      ExpectSameBackward(rank, plain, sharded, loss);
      torch::optim::SGD(plain->parameters(), 0.1).step();
      torch::optim::SGD(sharded->parameters(), 0.1).step();
      ExpectParameters(*sharded, *plain);
      ExpectSameBackward(rank, plain, sharded, loss);
    });
  }
}

TEST(DtypeChangeTest, ByWholeValues) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    fully_shard(sharded, rank.options());
    const at::NoGradGuard no_grad;
    for (const auto& item : plain->named_parameters()) {
      const at::Tensor other = Input(3, item.value().sizes()).to(kDouble);
      item.value().set_data(other);
      sharded->named_parameters()[item.key()].set_data(other);
    }
    ExpectParameters(*sharded, *plain);
    const auto whole = full_state_dict(sharded);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(whole[item.key()].equal(item.value())) << item.key();
    }
  });
}

TEST(DtypeChangeTest, ValuesCanBeReadLoadedAndWrittenAtOnce) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    FSDPModule handle = fully_shard(sharded, rank.options());
    const auto expect = [&, &plain = plain, &sharded = sharded] {
      const auto whole = full_state_dict(sharded);
      for (const auto& item : plain->named_parameters()) {
        EXPECT_TRUE(whole[item.key()].equal(item.value())) << item.key();
      }
    };
    const auto convert = [&, &plain = plain,
                          &sharded = sharded](c10::ScalarType dtype) {
      plain->to(dtype);
      sharded->to(dtype);
    };
    convert(kDouble);
    expect();
    convert(kFloat);
    handle.unshard();
    EXPECT_TRUE(sharded->second->weight.equal(plain->second->weight));
    handle.reshard();
    convert(kDouble);
    const torch::NoGradGuard no_grad;
    StateDict weights;
    for (const auto& item : plain->named_parameters()) {
      item.value().add_(1);
      weights.insert(item.key(), item.value().detach().clone());
    }
    load_full_state_dict(sharded, weights);
    expect();
    convert(kFloat);
    {
      const FullParameters whole(sharded);
      sharded->first->bias.fill_(2);
    }
    plain->first->bias.fill_(2);
    expect();
    convert(kDouble);
    for (const auto& p : plain->parameters()) at::Tensor(p).mul_(3);
    for (const auto& p : sharded->parameters()) at::Tensor(p).mul_(3);
    expect();
    convert(kFloat);
    for (const auto& p : plain->parameters())
      at::Tensor(p).set_requires_grad(true);
    sharded->first->weight.requires_grad_(false);
    const torch::AutoGradMode grad(true);
    LossIn(kFloat, sharded, 1).backward();
    EXPECT_FALSE(sharded->parameters()[0].grad().defined());
    EXPECT_TRUE(sharded->parameters()[1].grad().defined());
  });
}

// bfloat16 parameters, a policy that would reduce in it, and float since.
TEST(ParityMixedPrecisionTraining, ClampReduceDtype) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    model->to(kBFloat16);
    const auto policy =
        MixedPrecisionPolicy().param_dtype(kBFloat16).reduce_dtype(kBFloat16);
    fully_shard(model, rank.options().mp_policy(policy));
    model->to(kFloat);
    EXPECT_EQ(model->first->weight.scalar_type(), kBFloat16);
    call(model, Input(rank.rank, {4, 5})).to(kFloat).pow(2).sum().backward();
    for (const auto& p : model->parameters()) {
      EXPECT_EQ(p.scalar_type(), kFloat);
      EXPECT_EQ(p.grad().scalar_type(), kFloat);
      // Reduced in bfloat16.
      EXPECT_TRUE(p.grad().equal(p.grad().to(kBFloat16).to(kFloat)));
    }
    EXPECT_EQ(
        describe(model).trees.at(0).groups.at(0).parameters.at(0).reduce_dtype,
        kBFloat16);
    const std::string text = to_string(describe(model));
    EXPECT_NE(text.find("'first.weight' [7, 5] Float, gathered in BFloat16, "
                        "reduced in BFloat16: rows"),
              std::string::npos)
        << text;
    EXPECT_EQ(policy.reduce_dtype(), kBFloat16);
  });
}

TEST(DtypeChangeTest, ThePolicyIsAskedAgainAboutTheWhole) {
  RunRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    std::vector<std::string> asked;
    c10::ScalarType answer = kFloat;
    fully_shard(
        model,
        rank.options().mp_policy(
            MixedPrecisionPolicy()
                .param_dtype(kBFloat16)
                .param_dtype_override_fn(
                    [&](const std::string& fqn, const at::Tensor& parameter)
                        -> std::optional<c10::ScalarType> {
                      asked.push_back(c10::str(fqn, parameter.sizes(),
                                               parameter.scalar_type()));
                      return answer;
                    })));
    asked.clear();
    LossIn(kFloat, model, 1).backward();
    ExpectThrows<c10::ValueError>([&] { model->to(kDouble); },
                                  {"'first.weight'", "Float", "Double"});
    ExpectDtypes(model, kFloat);
    answer = kDouble;
    asked.clear();
    model->zero_grad();
    model->to(kDouble);
    EXPECT_EQ(asked.size(), 6U);
    EXPECT_EQ(asked[0], "first.weight[7, 5]Double");
    LossIn(kDouble, model, 1).backward();
    ExpectDtypes(model, kDouble);
  });
}

TEST(DtypeChangeTest, WhatWasSetOnTheGroupAndItsParametersStays) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    FSDPModule handle = fully_shard(model, rank.options());
    handle.set_gradient_divide_factor(4);
    int shard_hooks = 0;
    model->parameters()[0].register_hook(
        [&](const at::Tensor& gradient) { return ++shard_hooks, gradient; });
    model->first->weight.retain_grad();
    model->third->bias.requires_grad_(false);
    LossIn(kFloat, model, 7).backward();
    const at::Tensor before = model->parameters()[0].grad().clone();
    model->to(kDouble);
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), kDouble);
    model->zero_grad();
    LossIn(kDouble, model, 7).backward();
    EXPECT_TRUE(torch::allclose(model->parameters()[0].grad(),
                                before.to(kDouble), 1e-4, 1e-5));
    EXPECT_EQ(shard_hooks, 2);
    EXPECT_TRUE(model->first->weight.grad().defined());
    EXPECT_FALSE(model->parameters()[5].grad().defined());
    LossIn(kDouble, model, 7).backward();  // added
    EXPECT_TRUE(torch::allclose(model->parameters()[0].grad(),
                                2 * before.to(kDouble), 1e-4, 1e-5));
  });
}

TEST(DtypeChangeTest, KeepsAPart) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, Groups::kPerModule, rank.options().reshard_after_forward(2));
    plain->to(kDouble);
    for (int i = 0; i < 2; ++i) {
      sharded->to(i == 0 ? kFloat : kDouble);
      if (i == 0) LossIn(kFloat, sharded, 1).backward();
    }
    sharded->zero_grad();
    ExpectSameBackward(
        rank, plain, sharded,
        [](Mlp& m, int r) { return LossIn(kDouble, m, r); }, 1e-12);
  });
}

TEST(DtypeChangeTest, GraphsFromBeforeThrowAndTrainingGoesOn) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, Groups::kPerModule, rank.options());
    const at::Tensor loss = LossIn(kFloat, sharded, 1);
    sharded->to(kDouble);
    plain->to(kDouble);
    ExpectThrows([&] { loss.backward(); },
                 {"modified by an inplace operation"});
    sharded->zero_grad();
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& m, int r) { return LossIn(kDouble, m, r); });
  });
}

TEST(DtypeChangeTest, WhereItCantBeDone) {
  RunRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    FSDPModule handle = fully_shard(model, rank.options());
    const auto convert = [&] { model->to(kDouble); };
    handle.set_requires_gradient_sync(false);
    LossIn(kFloat, model, 1).backward();
    ExpectThrows<c10::ValueError>(
        convert, {"dtype", "'first.weight'", "pending",
                  "synchronize_gradients()", "clear_pending_gradients()"});
    handle.clear_pending_gradients();
    {
      const FullParameters whole(model);
      ExpectThrows<c10::ValueError>(convert, {"dtype", "FullParameters scope"});
    }
    {
      const ForwardScope scope(model);
      ExpectThrows<c10::ValueError>(convert, {"dtype", "inside of a forward"});
    }
    ExpectThrows<c10::ValueError>(
        [&] {
          at::Tensor p = model->parameters()[0];
          p.set_data(torch::ones({7, 5}, torch::kLong));
        },
        {"'first.weight'", "Long", "floating", "requires_grad_(false)"});
    ExpectDtypes(model, kFloat);
    handle.set_requires_gradient_sync(true);
    LossIn(kFloat, model, 1).backward();
  });
}

TEST(DtypeChangeTest, WhatToMakesIsForSetDataAlone) {
  RunRanks(1, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model, rank.options());
    const at::Tensor p = model->parameters()[0];
    const at::Tensor converted = p.to(kDouble);
    ExpectThrows<c10::ValueError>(
        [&] { converted.pow(2); },
        {"reads the shard of parameter 'first.weight'", "module's member"});
    ExpectThrows<c10::ValueError>([&] { converted.sum(); }, {"sum", "rows"});
    EXPECT_TRUE(p.to(kFloat).is_same(p));
    const AllowShardMath allowed;
    EXPECT_EQ(p.to(kDouble).grad_fn()->name(), "ToCopyBackward0");
  });
}

TEST(DtypeChangeTest, ToTheSameDtypeWarnsOfNothing) {
  RunRanks(1, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model, rank.options());
    const WarningsOfThisThread warnings;
    model->to(kFloat);
    EXPECT_EQ(warnings.text(), "");
    const at::Tensor alias = model->parameters()[0].detach();
    model->to(kFloat);
    EXPECT_EQ(warnings.Count("which other tensors share"), 1);
  });
}

TEST(DtypeChangeTest, RanksThatConvertDifferentlyThrow) {
  RunRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model, rank.options());
    if (rank.rank == 0) model->to(kDouble);
    EXPECT_THROW(LossIn(rank.rank == 0 ? kDouble : kFloat, model, 1),
                 c10::DistError);
  });
}

}  // namespace
}  // namespace composable
