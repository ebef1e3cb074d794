// Counterparts of PyTorch's test_fully_shard_mixed_precision.py, of the tests of
// gradient dtypes, and of others about dtypes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/composable/cast_reference.h"

namespace parity_of_dtypes {

using torch::kBFloat16;
using torch::kFloat;
using torch::kHalf;

// Like a dataclass.
struct Structured {
  at::Tensor value;
  at::Tensor index;
};
inline auto tensor_members(Structured& s) { return std::tie(s.value, s.index); }

struct StructuredBlockImpl : torch::nn::Module {
  Structured forward(const Structured& in) {
    EXPECT_EQ(in.value.scalar_type(), fc->weight.scalar_type());
    return {torch::tanh(fc(in.value)), in.index};
  }
  std::pair<std::vector<at::Tensor>, Structured> forward(
      const std::pair<std::vector<at::Tensor>, Structured>& in) {
    return {{fc(in.first[0])}, forward(in.second)};
  }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
};
COMPOSABLE_MODULE(StructuredBlock);

}  // namespace parity_of_dtypes

namespace composable {
namespace {

using parity_of_dtypes::Structured;
using parity_of_dtypes::StructuredBlock;
using torch::kBFloat16;
using torch::kFloat;
using torch::kHalf;
using torch::kLong;

at::Tensor SumOfSquares(const at::Tensor& y) {
  return y.to(kFloat).pow(2).sum();
}

// Ten iterations of training against the same casts by hand, bit by bit; what
// the reductions carry is told by their bytes.
void CheckTraining(c10::ScalarType param, std::optional<c10::ScalarType> reduce,
                   ReshardAfterForward reshard_after_forward,
                   int microbatches) {
  RunRanks(2, [&](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    const CastDtypes dtypes{param, reduce.value_or(kFloat)};
    CastReference<Mlp> reference(plain, make, dtypes);
    const auto handles = ShardEverySubmodule(
        sharded, WithPolicy(rank, Policy(param, reduce))
                     .reshard_after_forward(reshard_after_forward));
    FSDPModule root = handles.back();
    torch::optim::Adam plain_optimizer(plain->parameters(), 0.01);
    torch::optim::Adam optimizer(sharded->parameters(), 0.01);
    for (int iteration = 0; iteration < 10; ++iteration) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      for (int k = 0; k < microbatches; ++k) {
        const auto input = [&](int r) {
          return Input(100 * iteration + 10 * k + r, {4, 5});
        };
        at::Tensor expected;
        for (int r = 0; r < 2; ++r) {
          const at::Tensor loss = reference.Microbatch(r, [&](Mlp& m, int) {
            return SumOfSquares(m(input(r).to(param)));
          });
          if (r == rank.rank) expected = loss;
        }
        root.set_requires_gradient_sync(k == microbatches - 1);
        const at::Tensor loss = SumOfSquares(call(sharded, input(rank.rank)));
        EXPECT_TRUE(torch::equal(loss.detach(), expected)) << iteration;
        loss.backward();
      }
      reference.Reduce(2);
      ExpectGradients(*sharded, *plain, 0);
      for (const auto& parameter : sharded->parameters()) {
        EXPECT_EQ(parameter.grad().scalar_type(), kFloat);
      }
      plain_optimizer.step();
      optimizer.step();
      ExpectParameters(*sharded, *plain);
    }
    const FSDPStats stats = fsdp_stats(sharded);
    int64_t elements = 0;
    for (const auto& p : plain->parameters()) elements += p.numel();
    const auto reduced_itemsize =
        static_cast<int64_t>(c10::elementSize(dtypes.reduce));
    EXPECT_EQ(stats.num_reductions, 30);
    EXPECT_GE(stats.reduced_bytes, 10 * elements * reduced_itemsize);
    // Padding, flags and alignment of six small parameters.
    EXPECT_LE(stats.reduced_bytes,
              10 * (elements * reduced_itemsize + 3 * 2 * 3 * 128));
  });
}

TEST(ParityMixedPrecisionTraining, ComputeDtype) {
  for (const auto param : {kBFloat16, kHalf}) {
    for (const bool reshard : {false, true}) {
      CheckTraining(param, param, reshard, 1);
    }
  }
  CheckTraining(kBFloat16, std::nullopt, std::nullopt, 1);
}

TEST(ParityMixedPrecisionTraining, ReduceDtype) {
  for (const bool reshard : {false, true}) {
    CheckTraining(kBFloat16, kFloat, reshard, 1);
    CheckTraining(kFloat, kBFloat16, reshard, 1);
  }
}

TEST(ParityMixedPrecisionTraining, GradAccWithReduceDtype) {
  for (const bool reshard : {false, true}) {
    CheckTraining(kBFloat16, kFloat, reshard, 4);
  }
  CheckTraining(kBFloat16, kBFloat16, true, 4);
}

TEST(ParityMixedPrecisionTraining, ReduceDtypeAfterFrozenFirstForward) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Mlp(); };
    auto [plain, sharded] = MakePair(make);
    CastReference<Mlp> reference(plain, make, {kBFloat16, kFloat});
    ShardEverySubmodule(sharded, WithPolicy(rank, Policy(kBFloat16, kFloat)));
    for (auto& p : sharded->parameters()) p.requires_grad_(false);
    {
      const at::NoGradGuard no_grad;
      call(sharded, Input(9, {4, 5}));
    }
    for (auto& p : sharded->parameters()) p.requires_grad_(true);
    reference.Backward(rank, [](Mlp& m, int r) {
      return SumOfSquares(m(Input(r, {4, 5}).to(kBFloat16)));
    });
    SumOfSquares(call(sharded, Input(rank.rank, {4, 5}))).backward();
    ExpectGradients(*sharded, *plain, 0);
    EXPECT_EQ(sharded->parameters()[0].grad().scalar_type(), kFloat);
  });
}

TEST(ParityMixedPrecisionTraining, StructuredInputOutput) {
  for (const auto& [param, output] :
       std::vector<std::pair<c10::ScalarType, c10::ScalarType>>{
           {kFloat, kFloat}, {kBFloat16, kFloat}, {kBFloat16, kBFloat16}}) {
    RunRanks(2, [&, param = param, output = output](RankContext& rank) {
      struct ModelImpl : torch::nn::Module {
        at::Tensor Run(const at::Tensor& x, c10::ScalarType output) {
          const at::Tensor index = torch::arange(4);
          Structured s = first(Structured{x, index});
          EXPECT_EQ(s.value.scalar_type(), output);
          EXPECT_TRUE(s.index.is_same(index));
          const auto nested = second(std::make_pair(std::vector{x}, s));
          EXPECT_EQ(nested.first[0].scalar_type(), output);
          return SumOfSquares(nested.first[0]) +
                 SumOfSquares(nested.second.value);
        }
        StructuredBlock first{register_module("first", StructuredBlock())};
        StructuredBlock second{register_module("second", StructuredBlock())};
      };
      const auto model =
          RankContext::Seeded(1, [] { return std::make_shared<ModelImpl>(); });
      const auto plain =
          RankContext::Seeded(1, [] { return std::make_shared<ModelImpl>(); });
      for (auto& block : {model->first, model->second}) {
        fully_shard(block, WithPolicy(rank, Policy(param, kFloat, output)));
      }
      fully_shard(model, rank.options());
      torch::optim::Adam plain_optimizer(plain->parameters(), 0.01);
      torch::optim::Adam optimizer(model->parameters(), 0.01);
      for (int iteration = 0; iteration < 10; ++iteration) {
        const auto input = [&](int r) {
          return Input(10 * iteration + r, {3, 4});
        };
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        BackwardOfAllRanks(*plain, 2, [&](int r) {
          // The same casts on an unsharded model.
          const auto linear = [&](StructuredBlock& block, const at::Tensor& x) {
            return at::linear(x.to(param), block->fc->weight.to(param),
                              block->fc->bias.to(param));
          };
          const at::Tensor s =
              torch::tanh(linear(plain->first, input(r))).to(output);
          const at::Tensor a = linear(plain->second, input(r)).to(output);
          const at::Tensor b = torch::tanh(linear(plain->second, s)).to(output);
          (SumOfSquares(a) + SumOfSquares(b)).backward();
        });
        model->Run(input(rank.rank), output).backward();
        // A weight that is used twice: by hand each use is cast, and the casts
        // of its gradients are added; here they are added before.
        ExpectGradients(*model, *plain, param == kFloat ? 0 : 1e-2);
        plain_optimizer.step();
        optimizer.step();
        // The next iteration begins alike.
        const at::NoGradGuard no_grad;
        const auto weights = full_state_dict(model);
        for (auto& item : plain->named_parameters()) {
          EXPECT_TRUE(
              torch::allclose(item.value(), weights[item.key()], 0.05, 0.03));
          item.value().copy_(weights[item.key()]);
        }
      }
    });
  }
}

// --- Casts ---------------------------------------------------------------------

struct SaveForwardInputsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    seen.push_back(x.scalar_type());
    return torch::relu(fc(cast_own ? x.to(fc->weight.scalar_type()) : x));
  }
  bool cast_own = false;
  std::vector<c10::ScalarType> seen;
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(5, 5))};
};
COMPOSABLE_MODULE(SaveForwardInputs);

struct SaveForwardInputsModelImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    seen.push_back(x.scalar_type());
    return c2(c1(x));
  }
  std::vector<c10::ScalarType> seen;
  SaveForwardInputs c1{register_module("c1", SaveForwardInputs())};
  SaveForwardInputs c2{register_module("c2", SaveForwardInputs())};
};
COMPOSABLE_MODULE(SaveForwardInputsModel);

TEST(ParityMixedPrecisionCasts, Float16OnOneSubmodule) {
  RunRanks(1, [](RankContext& rank) {
    const at::Tensor x = torch::zeros({2, 5});
    {
      SaveForwardInputsModel model;
      fully_shard(model->c2, WithPolicy(rank, Policy(kHalf)));
      fully_shard(model, rank.options());
      model(x).sum().backward();
      EXPECT_EQ(model->seen[0], kFloat);
      EXPECT_EQ(model->c1->seen[0], kFloat);
      EXPECT_EQ(model->c2->seen[0], kHalf);
    }
    {
      SaveForwardInputsModel model;
      model->c2->cast_own = true;
      fully_shard(model->c2,
                  WithPolicy(rank, Policy(kHalf).cast_forward_inputs(false)));
      fully_shard(model, rank.options());
      model(x).sum().backward();
      EXPECT_EQ(model->c1->seen[0], kFloat);
      EXPECT_EQ(model->c2->seen[0], kFloat);
      EXPECT_EQ(model->c2->fc->weight.scalar_type(), kHalf);
    }
    {
      SaveForwardInputsModel model;
      fully_shard(model->c1,
                  WithPolicy(rank, Policy(kHalf, std::nullopt, kFloat)));
      fully_shard(model, rank.options());
      model(x).sum().backward();
      EXPECT_EQ(model->seen[0], kFloat);
      EXPECT_EQ(model->c1->seen[0], kHalf);
      EXPECT_EQ(model->c2->seen[0], kFloat);
    }
  });
}

TEST(ParityMixedPrecisionCasts, SubmodulesWithExternalInputs) {
  struct InnerImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
      seen_x = x.scalar_type();
      seen_y = y.scalar_type();
      return fc(y.to(fc->weight.scalar_type()));
    }
    c10::ScalarType seen_x = at::kByte, seen_y = at::kByte;
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(5, 5))};
  };
  struct OuterImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = torch::ones({2, 5});  // external: float
      return call(inner, fc(x), y);
    }
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(5, 5))};
    std::shared_ptr<InnerImpl> inner{
        register_module("inner", std::make_shared<InnerImpl>())};
  };
  RunRanks(1, [](RankContext& rank) {
    for (const bool cast : {true, false}) {
      const auto model = std::make_shared<OuterImpl>();
      fully_shard(model->inner,
                  WithPolicy(rank, Policy(kHalf).cast_forward_inputs(cast)));
      fully_shard(model, WithPolicy(rank, Policy(kHalf)));
      call(model, torch::ones({2, 5})).sum().backward();
      EXPECT_EQ(model->inner->seen_x, kHalf);
      EXPECT_EQ(model->inner->seen_y, cast ? kHalf : kFloat);
    }
  });
}

// What `call` throws; empty if nothing.
template <typename Call>
std::string ErrorOf(Call call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

void CheckNorms(c10::ScalarType dtype) {
  RunRanks(1, [dtype](RankContext& rank) {
    const auto run = [&](auto norm, const at::Tensor& x) {
      fully_shard(norm, WithPolicy(rank, Policy(dtype)));
      const at::Tensor y = call(norm, x);
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_TRUE(torch::isfinite(y).all().template item<bool>());
      y.sum().backward();
      EXPECT_EQ(norm->parameters()[0].grad().scalar_type(), kFloat);
    };
    run(torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
        Input(0, {4, 8}));
    // Statistics in float beside weights and inputs of 16 bits are taken or
    // refused as by an unsharded module.
    const auto run_batch_norm = [&](auto norm, auto plain, auto outputs,
                                    const at::Tensor& x) {
      fully_shard(norm, WithPolicy(rank, Policy(dtype)));
      plain->weight.set_data(plain->weight.to(dtype));
      plain->bias.set_data(plain->bias.to(dtype));
      EXPECT_EQ(ErrorOf([&] { call(norm, x); }),
                ErrorOf([&] { plain(x.to(dtype)); }));
      // With buffers cast, or a policy that casts outputs only, it works.
      CastBuffers cast =
          cast_buffers(norm, [&](const std::string&, const at::Tensor& buffer) {
            return buffer.is_floating_point() ? std::optional(dtype)
                                              : std::nullopt;
          });
      const at::Tensor y = call(norm, x);
      EXPECT_EQ(y.scalar_type(), dtype);
      y.sum().backward();
      cast.restore();
      EXPECT_EQ(norm->running_mean.scalar_type(), kFloat);
      fully_shard(outputs,
                  WithPolicy(rank, Policy(std::nullopt, std::nullopt, dtype)));
      EXPECT_EQ(call(outputs, x).scalar_type(), dtype);
      // Or with its own parameters left in float, as an override says.
      using Norm = decltype(norm);
      Norm kept(3);
      fully_shard(
          kept, WithPolicy(rank, Policy(dtype).param_dtype_override_fn(
                                     [](const std::string&, const at::Tensor&) {
                                       return std::optional(kFloat);
                                     })));
      const at::Tensor z = call(kept, x);
      z.sum().backward();
      EXPECT_EQ(kept->parameters()[0].grad().scalar_type(), kFloat);
    };
    using torch::nn::BatchNorm1d;
    using torch::nn::BatchNorm2d;
    run_batch_norm(BatchNorm1d(3), BatchNorm1d(3), BatchNorm1d(3),
                   Input(1, {8, 3}));
    run_batch_norm(BatchNorm2d(3), BatchNorm2d(3), BatchNorm2d(3),
                   Input(1, {2, 3, 4, 4}));
  });
}

TEST(ParityMixedPrecisionCasts, NormModulesBf16) { CheckNorms(kBFloat16); }
TEST(ParityMixedPrecisionCasts, NormModulesFp16) { CheckNorms(kHalf); }

TEST(ParityGroupedModules, GroupedModuleCastForwardInputs) {
  RunRanks(1, [](RankContext& rank) {
    SaveForwardInputs a;
    SaveForwardInputs b;
    fully_shard({a, b}, WithPolicy(rank, Policy(kBFloat16)));
    b(a(torch::ones({2, 5})).to(kFloat)).sum().backward();
    EXPECT_EQ(a->seen[0], kBFloat16);
    EXPECT_EQ(b->seen[0], kBFloat16);
  });
}

TEST(ParityMixedDtypeParam, MixedDtypesNoGradParam) {
  struct ModelImpl : torch::nn::Module {
    ModelImpl() {
      integers = register_parameter("integers",
                                    torch::arange(10).to(torch::kInt), false);
      floats = register_parameter(
          "floats", torch::ones({7}).to(torch::kFloat8_e4m3fn), false);
      trained = register_parameter("trained", torch::full({6}, 2.0));
    }
    at::Tensor forward() {
      return trained.sum() * integers.sum() * floats.to(kFloat).sum();
    }
    at::Tensor integers, floats, trained;
  };
  RunRanks(2, [](RankContext& rank) {
    for (const bool reshard : {false, true}) {
      const auto model = std::make_shared<ModelImpl>();
      fully_shard(model, rank.options().reshard_after_forward(reshard));
      const at::Tensor loss = call(model);
      EXPECT_EQ(loss.item<double>(), 12.0 * 45 * 7);
      loss.backward();
      EXPECT_TRUE((model->named_parameters()["trained"].grad() == 45 * 7)
                      .all()
                      .item<bool>());
      EXPECT_FALSE(model->named_parameters()["floats"].grad().defined());
    }
  });
}

}  // namespace
}  // namespace composable
