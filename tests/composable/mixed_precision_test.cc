// Parameters that are gathered and reduced in other dtypes than they are kept.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "hooks/dtype_mismatch.h"
#include "state/fsdp_state.h"
#include "state/param_dtypes.h"
#include "tests/composable/cast_reference.h"
#include "tests/support/errors.h"

namespace composable {
namespace {

using torch::kBFloat16;
using torch::kFloat;
using torch::kHalf;

at::Tensor MlpOutputLoss(const at::Tensor& y) {
  return y.to(kFloat).pow(2).sum();
}

// --- Numbers -------------------------------------------------------------------

struct Combination {
  std::string name;
  MixedPrecisionPolicy policy;
  CastDtypes expected;
};

class CombinationTest : public testing::TestWithParam<Combination> {};

TEST_P(CombinationTest, TrainsAsCastByHandBitByBit) {
  for (const Groups groups : {Groups::kOne, Groups::kPerModule}) {
    RunRanks(2, [&](RankContext& rank) {
      const auto make = [] { return Mlp(); };
      auto [plain, sharded] = MakePair(make);
      const auto& [name, policy, dtypes] = GetParam();
      CastReference<Mlp> reference(plain, make, dtypes);
      Shard(sharded, groups, WithPolicy(rank, policy));
      const auto options = torch::optim::AdamWOptions(0.01);
      torch::optim::AdamW plain_optimizer(plain->parameters(), options);
      torch::optim::AdamW optimizer(sharded->parameters(), options);
      for (int step = 0; step < 4; ++step) {
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        const at::Tensor expected =
            reference.Backward(rank, [&](Mlp& m, int r) {
              const at::Tensor x = Input(10 * step + r, {4, 5});
              return MlpOutputLoss(m(x.to(dtypes.compute)));
            });
        const at::Tensor loss =
            MlpOutputLoss(call(sharded, Input(10 * step + rank.rank, {4, 5})));
        EXPECT_EQ(sharded->first->weight.scalar_type(), dtypes.compute);
        loss.backward();
        EXPECT_TRUE(torch::equal(loss.detach(), expected)) << name;
        for (const auto& parameter : sharded->parameters()) {
          EXPECT_EQ(parameter.scalar_type(), kFloat);
          EXPECT_EQ(parameter.grad().scalar_type(), kFloat);
        }
        ExpectGradients(*sharded, *plain, 0);
        plain_optimizer.step();
        optimizer.step();
        ExpectParameters(*sharded, *plain);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, CombinationTest,
    testing::Values(
        Combination{"Bf16", Policy(kBFloat16), {kBFloat16, kFloat}},
        Combination{"Bf16ReducedInFp32",
                    Policy(kBFloat16, kFloat),
                    {kBFloat16, kFloat}},
        Combination{"Bf16ReducedInBf16",
                    Policy(kBFloat16, kBFloat16),
                    {kBFloat16, kBFloat16}},
        Combination{"Bf16AsIn211",
                    Policy(kBFloat16).default_reduce_dtype(
                        DefaultReduceDtype::kParamDtype),
                    {kBFloat16, kBFloat16}},
        Combination{
            "Fp16ReducedInFp32", Policy(kHalf, kFloat), {kHalf, kFloat}},
        Combination{"Fp16ReducedInFp16", Policy(kHalf, kHalf), {kHalf, kHalf}},
        Combination{
            "Fp16ReducedInBf16", Policy(kHalf, kBFloat16), {kHalf, kBFloat16}},
        Combination{"Fp32ReducedInBf16",
                    Policy(std::nullopt, kBFloat16),
                    {kFloat, kBFloat16}},
        Combination{
            "OriginalDtypeNamed", Policy(kFloat, kFloat), {kFloat, kFloat}}),
    [](const auto& info) { return info.param.name; });

TEST(MixedPrecisionTest, OneRank) {
  RunRanks(1, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    fully_shard(sharded, WithPolicy(rank, Policy(kBFloat16)));
    const auto loss = [](Mlp& m, int r) {
      return MlpOutputLoss(m(Input(r, {4, 5}).to(kBFloat16)));
    };
    // example-begin tests/composable/cast_reference.h
    composable::CastReference<composable::Mlp> reference(
        plain, make, {torch::kBFloat16, torch::kFloat});
    reference.Backward(rank, loss);  // plain's gradients are set
    // example-end
    loss(sharded, 0).backward();
    ExpectGradients(*sharded, *plain, 0);
  });
}

// It needs a default process group.
[[maybe_unused]] void ShardAsTheHeaderSays(torch::nn::Linear& block) {
  // example-begin state/mixed_precision_policy.h
  composable::fully_shard(block, composable::FullyShardOptions().mp_policy(
                                     composable::MixedPrecisionPolicy()
                                         .param_dtype(torch::kBFloat16)
                                         .reduce_dtype(torch::kFloat)));
  // example-end
}

TEST(MixedPrecisionTest, HeaderExample) {
  const torch::nn::Linear fc(2, 2);
  const auto policy = Policy(kBFloat16);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-value"
  // example-begin state/param_dtypes.h
  composable::ParamDtypes dtypes =
      composable::ResolveDtypes(policy, "fc.weight", fc->weight);
  dtypes.gathered;  // kBFloat16
  // example-end
#pragma GCC diagnostic pop
  EXPECT_EQ(dtypes.gathered, kBFloat16);
  EXPECT_EQ(dtypes.reduce, kFloat);
}

// The guard compiles this; see DtypeMismatchTest for what it does.
[[maybe_unused]] void ExplainMismatch(const c10::OperatorHandle& op,
                                      c10::DispatchKeySet keys,
                                      torch::jit::Stack* stack) {
  // example-begin hooks/dtype_mismatch.h
  try {
    op.redispatchBoxed(keys, stack);
  } catch (const c10::Error& error) {
    composable::ThrowIfDtypeMismatch(op, *stack, error);
    throw;
  }
  // example-end
}

// --- Bytes ---------------------------------------------------------------------

TEST(MixedPrecisionTest, BytesOfGathersAndReductionsHalve) {
  RunRanks(2, [](RankContext& rank) {
    const auto bytes = [&](const MixedPrecisionPolicy& policy) {
      torch::nn::Linear model(64, 64);
      fully_shard(model, WithPolicy(rank, policy));
      call(model, torch::ones({2, 64})).sum().backward();
      return fsdp_stats(model);
    };
    const FSDPStats plain = bytes({});
    const FSDPStats wide = bytes(Policy(kBFloat16));
    const FSDPStats narrow = bytes(Policy(kBFloat16).default_reduce_dtype(
        DefaultReduceDtype::kParamDtype));
    EXPECT_EQ(plain.num_gathers, wide.num_gathers);
    EXPECT_EQ(2 * wide.gathered_bytes, plain.gathered_bytes);
    EXPECT_EQ(2 * wide.peak_unsharded_bytes, plain.peak_unsharded_bytes);
    EXPECT_EQ(wide.sharded_param_bytes, plain.sharded_param_bytes);
    EXPECT_EQ(wide.reduced_bytes, plain.reduced_bytes);
    // Flags and alignment apart.
    EXPECT_NEAR(2.0 * narrow.reduced_bytes, plain.reduced_bytes, 128);
  });
}

// --- Several dtypes in one group -----------------------------------------------

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    fc->to(kBFloat16);
    quantized = register_parameter(
        "quantized", torch::arange(12).view({3, 4}).to(torch::kChar),
        /*requires_grad=*/false);
    short_floats = register_parameter(
        "short_floats", torch::ones({5}).to(torch::kFloat8_e4m3fn),
        /*requires_grad=*/false);
    frozen = register_parameter("frozen", torch::full({4}, 0.5).to(kBFloat16),
                                /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor wide = norm(x.to(norm->weight.scalar_type()));
    const at::Tensor y = fc(wide.to(kBFloat16)) * frozen;
    return y.to(kFloat).matmul(quantized.to(kFloat).t()).sum() *
           short_floats.to(kFloat).sum();
  }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(6, 4))};
  torch::nn::LayerNorm norm{register_module(
      "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))};
  at::Tensor quantized, short_floats, frozen;
};
TORCH_MODULE(Mixed);

TEST(MixedDtypesTest, OneGroupWithoutPolicy) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mixed(); });
    fully_shard(sharded, rank.options());
    const auto loss = [](Mixed& m, int r) { return m(Input(r, {3, 6})); };
    ExpectSameBackward(rank, plain, sharded, loss);
    ExpectSameBackward(rank, plain, sharded, loss);
    EXPECT_EQ(sharded->fc->weight.scalar_type(), kBFloat16);
    EXPECT_EQ(sharded->named_parameters()["fc.weight"].grad().scalar_type(),
              kBFloat16);
    // One reduction of the group, and no frozen byte in it: 28 and 12 elements,
    // flags, alignment.
    EXPECT_EQ(fsdp_stats(sharded).num_reductions, 2);
    EXPECT_LE(fsdp_stats(sharded).reduced_bytes, 2 * 2 * 2 * 128);
  });
}

TEST(MixedDtypesTest, IntegersAreNotCast) {
  RunRanks(2, [](RankContext& rank) {
    Mixed model;
    fully_shard(model, WithPolicy(rank, Policy(kFloat)));
    const at::NoGradGuard no_grad;
    const auto weights = full_state_dict(model);
    EXPECT_TRUE(torch::equal(weights["quantized"],
                             torch::arange(12).view({3, 4}).to(torch::kChar)));
    EXPECT_EQ(model->quantized.scalar_type(), torch::kChar);
    EXPECT_EQ(model->fc->weight.scalar_type(), kFloat);
    // Frozen parameters keep their bytes (LoRA).
    EXPECT_EQ(model->named_parameters()["frozen"].scalar_type(), kBFloat16);
    EXPECT_EQ(weights["fc.weight"].scalar_type(), kBFloat16);
  });
}

TEST(MixedDtypesTest, OverrideKeepsNormsWide) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] {
      return torch::nn::Sequential(
          torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
          torch::nn::Linear(6, 4));
    };
    auto [plain, sharded] = MakePair(make);
    std::vector<std::string> asked;
    const auto keep =
        [&](const std::string& fqn,
            const at::Tensor& parameter) -> std::optional<c10::ScalarType> {
      asked.push_back(fqn);
      if (fqn.rfind("0.", 0) == 0) return parameter.scalar_type();
      return std::nullopt;
    };
    fully_shard(
        sharded,
        WithPolicy(rank, Policy(kBFloat16).param_dtype_override_fn(keep)));
    EXPECT_EQ(asked, (std::vector<std::string>{"0.weight", "0.bias", "1.weight",
                                               "1.bias"}));
    const auto loss = [](const at::Tensor& norm_weight,
                         const at::Tensor& norm_bias, const at::Tensor& weight,
                         const at::Tensor& bias, int r) {
      const at::Tensor x =
          at::layer_norm(Input(r, {3, 6}), {6}, norm_weight, norm_bias);
      return at::linear(x.to(kBFloat16), weight, bias).to(kFloat).pow(2).sum();
    };
    BackwardOfAllRanks(*plain, rank.world_size, [&](int r) {
      const auto p = plain->parameters();
      loss(p[0], p[1], p[2].to(kBFloat16), p[3].to(kBFloat16), r).backward();
    });
    auto norm = std::dynamic_pointer_cast<torch::nn::LayerNormImpl>(sharded[0]);
    auto fc = std::dynamic_pointer_cast<torch::nn::LinearImpl>(sharded[1]);
    EXPECT_EQ(norm->weight.scalar_type(), kFloat);
    loss(norm->weight, norm->bias, fc->weight, fc->bias, rank.rank).backward();
    ExpectGradients(*sharded, *plain, 0);
  });
}

TEST(MixedDtypesTest, OverrideMayNotInventDtypes) {
  RunRanks(1, [](RankContext& rank) {
    torch::nn::Linear model(2, 2);
    const auto half = [](const std::string&,
                         const at::Tensor&) -> std::optional<c10::ScalarType> {
      return kHalf;
    };
    ExpectThrows<c10::ValueError>(
        [&] {
          fully_shard(
              model, WithPolicy(rank, Policy(kBFloat16).param_dtype_override_fn(
                                          half)));
        },
        {"param_dtype_override_fn", "'weight'", "Half",
         "BFloat16 (param_dtype)", "Float (its own)"});
    // The module is as it was.
    EXPECT_EQ(model->weight.scalar_type(), kFloat);
    fully_shard(model, rank.options());
  });
}

TEST(MixedDtypesTest, RanksMustAgreeOnOverrides) {
  RunRanks(2, [](RankContext& rank) {
    torch::nn::Linear model(4, 4);
    const auto differs =
        [&](const std::string&,
            const at::Tensor& parameter) -> std::optional<c10::ScalarType> {
      if (rank.rank == 1) return parameter.scalar_type();
      return std::nullopt;
    };
    ExpectThrows<c10::DistError>(
        [&] {
          fully_shard(
              model,
              WithPolicy(rank, Policy(kHalf).param_dtype_override_fn(differs)));
        },
        {"rank 0", "rank 1", "bytes per rank"});
  });
}

TEST(MixedPrecisionTest, PolicyIsChecked) {
  RunRanks(1, [](RankContext& rank) {
    torch::nn::Linear model(2, 2);
    const auto shard = [&](const MixedPrecisionPolicy& policy) {
      return [&, policy] { fully_shard(model, WithPolicy(rank, policy)); };
    };
    ExpectThrows<c10::ValueError>(shard(Policy(torch::kInt)),
                                  {"floating param_dtype", "Int"});
    ExpectThrows<c10::ValueError>(shard(Policy(kFloat, torch::kLong)),
                                  {"floating reduce_dtype", "Long"});
    ExpectThrows<c10::ValueError>(shard(Policy(kFloat, kFloat, torch::kBool)),
                                  {"floating output_dtype", "Bool"});
    ExpectThrows<c10::ValueError>(shard(Policy(kFloat, torch::kFloat8_e5m2)),
                                  {"reduce_dtype of float", "Float8_e5m2"});
  });
}

// --- Accumulation --------------------------------------------------------------

TEST(MixedPrecisionTest, PendingGradientsAddUpInTheReduceDtype) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    CastReference<Mlp> reference(plain, make, {kBFloat16, kFloat});
    const auto handle =
        fully_shard(sharded, WithPolicy(rank, Policy(kBFloat16, kFloat)));
    FSDPModule mutable_handle = handle;
    const auto loss_of = [](Mlp& m, const at::Tensor& x) {
      return MlpOutputLoss(m(x.to(kBFloat16)));
    };
    constexpr int kMicrobatches = 3;
    for (int k = 0; k < kMicrobatches; ++k) {
      for (int r = 0; r < 2; ++r) {
        reference.Microbatch(r, [&](Mlp& m, int) {
          return loss_of(m, Input(10 * k + r, {4, 5}));
        });
      }
      mutable_handle.set_requires_gradient_sync(k == kMicrobatches - 1);
      loss_of(sharded, Input(10 * k + rank.rank, {4, 5})).backward();
      if (k == 0) {
        int64_t elements = 0;
        for (const auto& p : plain->parameters()) elements += p.numel();
        EXPECT_GE(mutable_handle.pending_gradient_bytes(), 4 * elements);
      }
    }
    reference.Reduce(2);
    ExpectGradients(*sharded, *plain, 0);
  });
}

// Two branches; the second is used in the last microbatch only (B6), or never
// (W10).
TEST(MixedPrecisionTest, BranchThatJoinsLate) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    CastReference<Mlp> reference(plain, make, {kBFloat16, kFloat});
    FSDPModule handle =
        fully_shard(sharded, WithPolicy(rank, Policy(kBFloat16, kFloat)));
    const auto loss_of = [](Mlp& m, const at::Tensor& x, bool both) {
      at::Tensor y = m->first(x.to(kBFloat16));
      if (both) y = m->second(y);
      return MlpOutputLoss(y);
    };
    for (const bool both : {false, true}) {
      for (int r = 0; r < 2; ++r) {
        reference.Microbatch(r, [&](Mlp& m, int) {
          return loss_of(m, Input(r + (both ? 10 : 0), {4, 5}), both);
        });
      }
      handle.set_requires_gradient_sync(both);
      loss_of(sharded, Input(rank.rank + (both ? 10 : 0), {4, 5}), both)
          .backward();
    }
    reference.Reduce(2);
    ExpectGradients(*sharded, *plain, 0);
    EXPECT_FALSE(sharded->named_parameters()["third.weight"].grad().defined());
  });
}

TEST(MixedPrecisionTest, RanksThatUseDifferentParameters) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    for (const auto reduce : {kBFloat16, kHalf}) {
      plain->zero_grad();
      Mlp model = RankContext::Seeded(1, make);
      CastReference<Mlp> reference(plain, make, {kBFloat16, reduce});
      fully_shard(model, WithPolicy(rank, Policy(kBFloat16, reduce)));
      const auto loss = [](Mlp& m, int r) {
        const at::Tensor x = Input(r, {4, r == 0 ? 5 : 7}).to(kBFloat16);
        return MlpOutputLoss(r == 0 ? m->first(x) : m->second(x));
      };
      reference.Backward(rank, loss);
      loss(model, rank.rank).backward();
      ExpectGradients(*model, *plain, 0);
    }
  });
}

TEST(MixedPrecisionTest, FrozenAtTheFirstForward) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    CastReference<Mlp> reference(plain, make, {kBFloat16, kFloat});
    for (auto& p : sharded->parameters()) p.requires_grad_(false);
    fully_shard(sharded, WithPolicy(rank, Policy(kBFloat16)));
    call(sharded, Input(0, {4, 5}));
    for (auto& p : sharded->parameters()) p.requires_grad_(true);
    reference.Backward(rank, [](Mlp& m, int r) {
      return MlpOutputLoss(m(Input(r, {4, 5}).to(kBFloat16)));
    });
    MlpOutputLoss(call(sharded, Input(rank.rank, {4, 5}))).backward();
    ExpectGradients(*sharded, *plain, 0);
    EXPECT_EQ(sharded->parameters()[0].grad().scalar_type(), kFloat);
  });
}

// --- Gradient dtypes -----------------------------------------------------------

// A weight gradient of another dtype than the weight's, as fused kernels make.
class WideWeightGradient
    : public torch::autograd::Function<WideWeightGradient> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]),
            gradients[0].to(kFloat).t().matmul(saved[0].to(kFloat))};
  }
};

at::Tensor WideGradientOf(const at::Tensor& x) {  // of sum(x w^T)
  return torch::ones({x.size(0), 4}).t().matmul(x.to(kFloat));
}

at::Tensor RowsOfBoth(const at::Tensor& shard, int64_t columns) {
  at::Tensor sum;
  for (int r = 0; r < 2; ++r) {
    const at::Tensor g = WideGradientOf(Input(r, {3, columns}).to(kBFloat16));
    sum = sum.defined() ? sum + g : g;
  }
  return LocalRows(shard, sum / 2);
}

TEST(GradDtypeTest, WideGradientsOfShortParametersArriveUncast) {
  RunRanks(2, [](RankContext& rank) {
    for (const bool after : {false, true}) {
      torch::nn::Linear model(torch::nn::LinearOptions(6, 4).bias(false));
      model->to(kBFloat16);
      if (!after) model->weight.set_grad_dtype(kFloat);
      // Set before, it decides what is reduced in; set after, reduce_dtype has
      // to.
      FSDPModule handle = fully_shard(
          model,
          WithPolicy(rank, after ? Policy(std::nullopt, kFloat) : Policy({})));
      if (after) model->weight.set_grad_dtype(kFloat);
      const at::Tensor shard = model->parameters()[0];
      EXPECT_EQ(shard.grad_dtype(), kFloat);
      const at::Tensor x = Input(rank.rank, {3, 6}).to(kBFloat16);
      const auto backward = [&] {
        WideWeightGradient::apply(x, model->weight).to(kFloat).sum().backward();
      };
      backward();
      EXPECT_EQ(shard.grad().scalar_type(), kFloat);
      EXPECT_TRUE(torch::equal(shard.grad(), RowsOfBoth(shard, 6)))
          << after << shard.grad() << RowsOfBoth(shard, 6);
      handle.set_requires_gradient_sync(false);
      backward();
      handle.set_requires_gradient_sync(true);
      backward();
      EXPECT_TRUE(
          torch::allclose(shard.grad(), 3 * RowsOfBoth(shard, 6), 1e-6));
    }
  });
}

TEST(GradDtypeTest, SeveralInOneGroup) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    CastReference<Mlp> reference(plain, make, {kBFloat16, kFloat});
    sharded->first->weight.set_grad_dtype(kBFloat16);
    sharded->second->weight.set_grad_dtype(std::nullopt);
    fully_shard(sharded, WithPolicy(rank, Policy(kBFloat16, kFloat)));
    auto parameters = sharded->named_parameters();
    EXPECT_EQ(parameters["second.weight"].grad_dtype(), std::nullopt);
    // Of a shard, later.
    parameters["third.weight"].set_grad_dtype(torch::kDouble);
    const auto loss = [](Mlp& m, int r) {
      return MlpOutputLoss(m(Input(r, {4, 5}).to(kBFloat16)));
    };
    for (int i = 0; i < 2; ++i) {
      reference.Backward(rank, loss);
      loss(sharded, rank.rank).backward();
    }
    const auto expected = plain->named_parameters();
    for (const auto& item : parameters) {
      c10::ScalarType dtype = kFloat;
      if (item.key() == "first.weight") dtype = kBFloat16;
      if (item.key() == "third.weight") dtype = torch::kDouble;
      const at::Tensor& gradient = item.value().grad();
      ASSERT_EQ(gradient.scalar_type(), dtype) << item.key();
      const at::Tensor rows =
          LocalRows(item.value(), expected[item.key()].grad());
      // Two gradients were added in the dtype, which bfloat16 rounds twice.
      EXPECT_TRUE(torch::allclose(gradient.to(kFloat), rows,
                                  dtype == kBFloat16 ? 1e-2 : 1e-6))
          << item.key();
    }
  });
}

TEST(GradDtypeTest, AnyStaysInTheReduceDtype) {
  RunRanks(2, [](RankContext& rank) {
    torch::nn::Linear model(6, 4);
    model->weight.set_grad_dtype(std::nullopt);
    fully_shard(model, WithPolicy(rank, Policy(kBFloat16)));
    const auto backward = [&] {
      MlpOutputLoss(call(model, Input(rank.rank, {3, 6}))).backward();
    };
    backward();
    // Unset and "any": reduced as autograd produced it.
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), kBFloat16);
    EXPECT_EQ(model->parameters()[1].grad().scalar_type(), kFloat);
    backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), kBFloat16);
  });
}

TEST(GradDtypeTest, ChangeWhileThereIsAGradientThrows) {
  RunRanks(1, [](RankContext& rank) {
    torch::nn::Linear model(2, 2);
    fully_shard(model, rank.options());
    model(torch::ones({1, 2})).sum().backward();
    ExpectThrows<c10::ValueError>(
        [&] { model->parameters()[0].set_grad_dtype(kHalf); },
        {"set_grad_dtype(Half)", "'weight'", "gradient of Float", "Clear"});
    model->zero_grad();
    model->parameters()[0].set_grad_dtype(kHalf);
    model(torch::ones({1, 2})).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), kHalf);
  });
}

TEST(GradDtypeTest, AutogradGradOfShards) {
  RunRanks(2, [](RankContext& rank) {
    torch::nn::Linear model(6, 4);
    fully_shard(model, WithPolicy(rank, Policy(kBFloat16)));
    model->parameters()[1].set_grad_dtype(torch::kDouble);
    const at::Tensor loss =
        MlpOutputLoss(call(model, Input(rank.rank, {3, 6})));
    const auto gradients =
        torch::autograd::grad({loss}, model->parameters(), {}, true);
    loss.backward();
    EXPECT_EQ(gradients[0].scalar_type(), kFloat);
    EXPECT_EQ(gradients[1].scalar_type(), torch::kDouble);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(torch::equal(gradients[i], model->parameters()[i].grad()));
    }
  });
}

// --- Values --------------------------------------------------------------------

TEST(MixedPrecisionTest, StateDictsHoldTheMasters) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, WithPolicy(rank, Policy(kBFloat16)));
    call(sharded, Input(0, {4, 5}));
    const auto weights = full_state_dict(sharded);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(weights[item.key()], item.value()));
    }
    StateDict doubled;
    for (const auto& item : weights) {
      doubled.insert(item.key(), item.value() * 2);
    }
    load_full_state_dict(sharded, doubled);
    EXPECT_TRUE(torch::equal(full_state_dict(sharded)["first.weight"],
                             2 * plain->first->weight));
    const at::NoGradGuard no_grad;
    const ForwardScope scope(sharded);
    EXPECT_TRUE(torch::equal(sharded->first->weight.clone(),
                             (2 * plain->first->weight).to(kBFloat16)));
  });
}

TEST(MixedPrecisionTest, AFailedCallGivesTheMemberItsDtypeBack) {
  RunRanks(1, [](RankContext& rank) {
    torch::nn::Linear model(torch::nn::LinearOptions(2, 2).bias(false));
    const at::Tensor values = model->weight.detach().clone();
    {
      std::vector<OwnedParam> owned{
          {model->weight, "weight", {{model.ptr(), "weight"}}}};
      const auto state = std::make_shared<FSDPState>(
          Modules{ModuleRef(model).ptr()}, rank.options(),
          std::make_unique<FSDPParamGroup>(
              owned, Communicator(rank.group, c10::kCPU), Policy(kBFloat16)));
      owned.clear();
      state->group()->Attach(
          state, [] { return MakeNode<torch::autograd::Error>("never run"); });
      EXPECT_EQ(model->weight.scalar_type(), kBFloat16);
      state->Rollback();
    }
    EXPECT_EQ(model->weight.scalar_type(), kFloat);
    EXPECT_TRUE(torch::equal(model->weight, values));
    EXPECT_TRUE(model->parameters()[0].is_same(model->weight));
  });
}

// --- Without a boundary --------------------------------------------------------

TEST(DtypeMismatchTest, NamesTheParameterAndTheFix) {
  RunRanks(1, [](RankContext& rank) {
    Mlp model;
    fully_shard(model, WithPolicy(rank, Policy(kBFloat16)));
    ExpectThrows<c10::TypeError>(
        [&] {
          model(Input(0, {4, 5}));
        },
        {"aten::", "'first.", "BFloat16", "Float", "COMPOSABLE_MODULE",
         "composable::call", "The operator says: "});
    // An error of another kind stays what it is.
    const std::string text = ErrorOf([&] {
      model(Input(0, {4, 6}).to(kBFloat16));
    });
    EXPECT_EQ(text.find("MixedPrecisionPolicy"), std::string::npos) << text;
    EXPECT_NE(text, "no error");
    // And the module goes on.
    model(Input(0, {4, 5}).to(kBFloat16)).to(kFloat).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST(DtypeMismatchTest, WithoutAPolicyTheOperatorsErrorStays) {
  RunRanks(1, [](RankContext& rank) {
    torch::nn::Linear model(4, 4);
    fully_shard(model, rank.options());
    const std::string text = ErrorOf([&] {
      model(torch::ones({1, 4}, torch::kDouble));
    });
    EXPECT_NE(text.find("dtype"), std::string::npos) << text;
    EXPECT_EQ(text.find("MixedPrecisionPolicy"), std::string::npos) << text;
  });
}

// --- Buffers -------------------------------------------------------------------

TEST(CastBuffersTest, PoliciesLeaveBuffersAlone) {
  RunRanks(1, [](RankContext& rank) {
    torch::nn::BatchNorm1d norm(3);
    fully_shard(norm, WithPolicy(rank, Policy(kBFloat16)));
    EXPECT_EQ(norm->running_mean.scalar_type(), kFloat);
    EXPECT_EQ(norm->weight.scalar_type(), kBFloat16);
  });
}

TEST(CastBuffersTest, GivesBackWhatWasNotWritten) {
  torch::nn::Sequential model(torch::nn::BatchNorm1d(3),
                              torch::nn::BatchNorm1d(3));
  auto first = std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(model[0]);
  auto second = std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(model[1]);
  const at::Tensor odd = torch::tensor({0.1F, 0.2F, 0.3F});
  first->running_mean.copy_(odd);
  second->running_mean.copy_(odd);
  const at::Tensor member = first->running_mean;
  std::vector<std::string> asked;
  CastBuffers cast = cast_buffers(
      model,
      [&](const std::string& fqn,
          const at::Tensor& buffer) -> std::optional<c10::ScalarType> {
        asked.push_back(fqn);
        if (buffer.is_floating_point()) return kBFloat16;
        return std::nullopt;
      });
  EXPECT_EQ(asked.size(), 6U);
  EXPECT_EQ(asked[0], "0.running_mean");
  EXPECT_EQ(cast.size(), 4U);
  EXPECT_TRUE(member.is_same(first->running_mean));
  EXPECT_EQ(member.scalar_type(), kBFloat16);
  EXPECT_EQ(first->num_batches_tracked.scalar_type(), torch::kLong);
  // Batch norm writes statistics without a version counter.
  second->to(kBFloat16);
  second->forward(torch::ones({4, 3}).to(kBFloat16));
  const at::Tensor written = second->running_mean.clone();
  EXPECT_FALSE(torch::equal(written, odd.to(kBFloat16)));
  cast.restore();
  EXPECT_TRUE(member.is_same(first->running_mean));
  EXPECT_TRUE(torch::equal(first->running_mean, odd));
  EXPECT_TRUE(torch::equal(second->running_mean, written.to(kFloat)));
  first->running_mean.zero_();
  cast.restore();  // nothing
  EXPECT_TRUE(torch::equal(first->running_mean, torch::zeros({3})));
}

TEST(CastBuffersTest, HeaderExample) {
  torch::nn::BatchNorm1d model(3);
  // example-begin composable/cast_buffers.h
  composable::CastBuffers cast = composable::cast_buffers(
      model,
      [](const std::string& fqn,
         const at::Tensor& buffer) -> std::optional<c10::ScalarType> {
        if (fqn == "running_mean") return buffer.scalar_type();
        if (buffer.is_floating_point()) return torch::kBFloat16;
        return std::nullopt;
      });
  // ... forwards ...
  cast.restore();
  // example-end
  EXPECT_EQ(model->running_var.scalar_type(), kFloat);
}

TEST(CastBuffersTest, AThrowingFunctionChangesNothing) {
  torch::nn::BatchNorm1d norm(3);
  int calls = 0;
  EXPECT_THROW((void)cast_buffers(norm,
                                  [&](const std::string&, const at::Tensor&)
                                      -> std::optional<c10::ScalarType> {
                                    TORCH_CHECK_VALUE(++calls < 2, "no");
                                    return kHalf;
                                  }),
               c10::ValueError);
  EXPECT_EQ(norm->running_mean.scalar_type(), kFloat);
}

}  // namespace
}  // namespace composable
