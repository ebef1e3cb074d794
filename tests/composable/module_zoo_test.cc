// Model code untouched: stock modules and usual ways of calling them, sharded
// into several groups on 2 and 3 ranks, against the same module unsharded.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/support/gradient_check.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

class ModuleZoo : public testing::TestWithParam<int> {
 protected:
  template <typename Make, typename Draw, typename Run>
  void Check(Make make, Draw draw, Run run) {
    RunRanks(GetParam(),
             [&](RankContext& rank) { CheckGradients(rank, make, draw, run); });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, ModuleZoo, testing::Values(1, 2, 3));

using Inputs = std::vector<Tensor>;
using Mid = std::function<void()>;

auto Draw(std::vector<int64_t> sizes) {
  return [sizes] { return Inputs{torch::randn(sizes)}; };
}
auto DrawInts(int64_t high, std::vector<int64_t> sizes) {
  return [=] { return Inputs{torch::randint(high, sizes)}; };
}
// Calls the holder and squares what comes out.
const auto kCall = [](auto& m, const Inputs& in, const Mid& mid) {
  Tensor y = m(in[0]);
  mid();
  return y.pow(2).sum();
};
const auto kForward = [](auto& m, const Inputs& in, const Mid& mid) {
  Tensor y = m->forward(in[0]);
  mid();
  return y.pow(2).sum();
};
const auto kFirstOfTuple = [](auto& m, const Inputs& in, const Mid& mid) {
  Tensor y = std::get<0>(m(in[0]));
  mid();
  return y.pow(2).sum();
};

TEST_P(ModuleZoo, LSTM) {
  Check(
      [] { return LSTM(LSTMOptions(5, 7).num_layers(2).bidirectional(true)); },
      Draw({3, 2, 5}), kFirstOfTuple);
}
TEST_P(ModuleZoo, GRU) {
  Check([] { return GRU(GRUOptions(5, 7)); }, Draw({3, 2, 5}), kFirstOfTuple);
}
TEST_P(ModuleZoo, MultiheadAttention) {
  Check([] { return MultiheadAttention(MultiheadAttentionOptions(8, 2)); },
        Draw({3, 2, 8}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          Tensor y = std::get<0>(m(in[0], in[0], in[0]));
          mid();
          return y.pow(2).sum();
        });
}
TEST_P(ModuleZoo, TransformerEncoderLayer) {
  Check(
      [] {
        return TransformerEncoderLayer(
            TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(
                0.0));
      },
      Draw({3, 2, 8}), kCall);
}
TEST_P(ModuleZoo, ConvolutionAndBatchNorm) {
  Check(
      [] {
        return Sequential(Conv2d(Conv2dOptions(3, 4, 3)), BatchNorm2d(4),
                          ReLU(), Flatten(), Linear(4 * 36, 2));
      },
      Draw({2, 3, 8, 8}), kForward);
}
TEST_P(ModuleZoo, ConvTranspose1d) {
  Check([] { return ConvTranspose1d(ConvTranspose1dOptions(3, 4, 3)); },
        Draw({2, 3, 8}), kCall);
}
TEST_P(ModuleZoo, EmbeddingBag) {
  Check([] { return EmbeddingBag(EmbeddingBagOptions(10, 4)); },
        DrawInts(10, {3, 4}), kCall);
}
TEST_P(ModuleZoo, EmbeddingTiedToOutput) {
  Check([] { return Sequential(Embedding(10, 4)); }, DrawInts(10, {3, 4}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          Tensor h = m->forward(in[0]);
          Tensor w = m[0]->template as<Embedding>()->weight;
          mid();
          Tensor y = torch::matmul(h, w.t());
          mid();
          return y.pow(2).sum();
        });
}
TEST_P(ModuleZoo, Bilinear) {
  Check([] { return Bilinear(BilinearOptions(3, 4, 5)); },
        [] {
          return Inputs{torch::randn({2, 3}), torch::randn({2, 4})};
        },
        [](auto& m, const Inputs& in, const Mid& mid) {
          Tensor y = m(in[0], in[1]);
          mid();
          return y.pow(2).sum();
        });
}
TEST_P(ModuleZoo, GroupNormAndPReLU) {
  Check(
      [] {
        return Sequential(Conv1d(Conv1dOptions(4, 4, 1)),
                          GroupNorm(GroupNormOptions(2, 4)),
                          PReLU(PReLUOptions().num_parameters(4)));
      },
      Draw({2, 4, 6}), kForward);
}
TEST_P(ModuleZoo, DoubleBackward) {
  Check([] { return Linear(4, 4); }, Draw({3, 4}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          Tensor x = in[0].detach().clone().requires_grad_(true);
          Tensor y = torch::tanh(m(x));
          mid();
          Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
          mid();
          return g.pow(2).sum();
        });
}
TEST_P(ModuleZoo, StackAndCatOfParameters) {
  Check([] { return Sequential(Linear(4, 4), Linear(4, 4)); }, Draw({2, 4}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          auto& a = *m[0]->template as<Linear>();
          auto& b = *m[1]->template as<Linear>();
          Tensor w = torch::stack({a.weight, b.weight}).sum(0);
          mid();
          Tensor z = torch::cat({a.bias, b.bias});
          mid();
          return torch::matmul(in[0], w).pow(2).sum() + z.pow(2).sum();
        });
}
TEST_P(ModuleZoo, EinsumIndexSelectChunk) {
  Check([] { return Linear(4, 8); }, Draw({1}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          auto c = m->weight.chunk(2, 0);
          mid();
          Tensor q = torch::einsum("ij,kj->ik", {c[0], c[1]});
          mid();
          Tensor r = m->weight.index({torch::tensor({0, 3})});
          mid();
          Tensor e = m->weight.select(0, 2).clone();
          mid();
          return (q.pow(2).sum() + r.pow(2).sum() + e.sum() + m->bias.sum()) *
                 in[0].sum();
        });
}
TEST_P(ModuleZoo, Autocast) {
  Check([] { return Linear(4, 8); }, Draw({3, 4}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          at::autocast::set_autocast_enabled(at::kCPU, true);
          Tensor y = m(in[0]);
          mid();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          at::autocast::clear_cache();
          return y.to(torch::kFloat).pow(2).sum();
        });
}
TEST_P(ModuleZoo, InferenceModeThenTraining) {
  Check([] { return Linear(4, 4); }, Draw({2, 4}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          {
            const c10::InferenceMode inference;
            Tensor y = m(in[0]);
            mid();
          }
          Tensor y = m(in[0]);
          mid();
          return y.pow(2).sum();
        });
}
TEST_P(ModuleZoo, StockSequential) {
  Check([] { return Sequential(Linear(4, 6), Tanh(), Linear(6, 3)); },
        Draw({5, 4}), kForward);
}

// A module whose submodules are called through type erasure.
struct ErasedImpl : Module {
  ErasedImpl() : any(Linear(4, 3)) { register_module("any", any.ptr()); }
  Tensor forward(const Tensor& x) { return any.forward(x); }
  AnyModule any;
};
TORCH_MODULE(Erased);

TEST_P(ModuleZoo, AnyModule) {
  Check([] { return Erased(); }, Draw({5, 4}), kCall);
}

// A parent that reads its child's weight, and has a second method.
struct ReadsChildImpl : Module {
  ReadsChildImpl() : child(register_module("child", Linear(4, 3))) {
    scale = register_parameter("scale", torch::ones({3}));
  }
  Tensor forward(const Tensor& x) {
    return torch::addmm(child->bias, x, child->weight.t()) * scale;
  }
  Tensor Encode(const Tensor& x) { return child(x).tanh() * scale; }
  Linear child;
  Tensor scale;
};
TORCH_MODULE(ReadsChild);

TEST_P(ModuleZoo, ParentReadsChildsWeight) {
  Check([] { return ReadsChild(); }, Draw({5, 4}), kCall);
}
TEST_P(ModuleZoo, SecondMethodInsteadOfForward) {
  Check([] { return ReadsChild(); }, Draw({5, 4}),
        [](auto& m, const Inputs& in, const Mid& mid) {
          Tensor y = m->Encode(in[0]);
          mid();
          return y.pow(2).sum();
        });
}

}  // namespace
}  // namespace composable
