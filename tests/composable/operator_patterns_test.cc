// No operator may read a parameter's memory past the guard. Every pattern runs
// with all groups resharded between its operators and before backward, while
// the memory they left is filled with NaN, and must still give the bits of the
// unsharded module. What writes a parameter, or takes its storage behind the
// guard, must throw.
#include <ATen/ops/_weight_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/buffer_pool.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names
using Inputs = std::vector<Tensor>;
using Mid = std::function<void()>;

struct Pattern {
  std::string name;
  std::function<void(RankContext&)> check;
};

// `run(m, inputs, mid)` is the loss; `mid` reshards all groups.
template <typename Make, typename Run>
Pattern Of(std::string name, Make make, std::vector<int64_t> input, Run run) {
  return {
      std::move(name), [=](RankContext& rank) {
        CheckGradients(
            rank, make,
            [&] { return Inputs{torch::randn(input, torch::requires_grad())}; },
            run);
      }};
}

template <typename Make, typename Run>
Pattern OfIds(std::string name, Make make, Run run) {
  return {std::move(name), [=](RankContext& rank) {
            CheckGradients(
                rank, make,
                [&] {
                  return Inputs{torch::randint(10, {3, 4})};
                },
                run);
          }};
}

auto MakeLinear(int64_t in, int64_t out) {
  return [=] { return Linear(in, out); };
}

const auto kCall = [](auto& m, const Inputs& in, const Mid& mid) {
  Tensor y = m(in[0]);
  mid();
  return y.pow(2).sum();
};

const std::vector<Pattern>& Patterns() {
  static const auto* patterns = new std::vector<Pattern>{
      Of("Linear2d", MakeLinear(7, 5), {3, 7}, kCall),
      Of("Linear3dOfPermutedInput", MakeLinear(7, 5), {7, 3, 2},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor y = m(in[0].permute({1, 2, 0}));
           mid();
           return y.pow(2).sum();
         }),
      Of("TransposedCopy", MakeLinear(7, 5), {3, 7},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor w = m->weight.t().contiguous();
           mid();
           Tensor y = in[0].mm(w);
           mid();
           return y.pow(2).sum();
         }),
      Of("ExpandAndOuterProduct", MakeLinear(7, 5), {5, 7},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor e = m->bias.unsqueeze(1).expand({5, 7});
           mid();
           Tensor y = in[0] * e * m->weight;
           mid();
           return y.sum();
         }),
      Of("BatchedProductsOfViews", MakeLinear(6, 6), {2, 6, 6},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor w = m->weight.unsqueeze(0).expand({2, 6, 6});
           mid();
           Tensor y = torch::baddbmm(m->bias, in[0], w);
           mid();
           Tensor z = torch::bmm(y, w.transpose(1, 2));
           mid();
           return z.pow(2).sum();
         }),
      Of("Einsum", MakeLinear(6, 6), {2, 3, 6},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor y = torch::einsum("bti,oi->bto", {in[0], m->weight});
           mid();
           Tensor z = torch::einsum("bto,o,oi->bi", {y, m->bias, m->weight});
           mid();
           return z.pow(2).sum();
         }),
      Of("WeightAsKeyAndValue", MakeLinear(8, 8), {1, 2, 8, 4},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor k = m->weight.view({1, 8, 2, 4}).transpose(1, 2);
           mid();
           Tensor y = at::scaled_dot_product_attention(in[0], k, k);
           mid();
           return y.pow(2).sum() + m->bias.sum();
         }),
      Of(
          "Conv1dGrouped",
          [] { return Conv1d(Conv1dOptions(4, 6, 3).padding(1).groups(2)); },
          {2, 4, 9}, kCall),
      Of(
          "Conv2dDilatedChannelsLast",
          [] { return Conv2d(Conv2dOptions(4, 6, 3).dilation(2)); },
          {2, 4, 9, 9},
          [](auto& m, const Inputs& in, const Mid& mid) {
            Tensor y = m(in[0].contiguous(at::MemoryFormat::ChannelsLast));
            mid();
            return y.pow(2).sum();
          }),
      Of(
          "Conv3d", [] { return Conv3d(Conv3dOptions(2, 3, 2)); },
          {1, 2, 4, 4, 4}, kCall),
      Of(
          "LSTMBatchFirst",
          [] {
            return LSTM(LSTMOptions(5, 7).num_layers(2).batch_first(true));
          },
          {3, 4, 5},
          [](auto& m, const Inputs& in, const Mid& mid) {
            Tensor y = std::get<0>(m(in[0]));
            mid();
            return y.pow(2).sum();
          }),
      Of(
          "LSTMBidirectionalProjected",
          [] {
            return LSTM(LSTMOptions(5, 7).bidirectional(true).proj_size(3));
          },
          {3, 4, 5},
          [](auto& m, const Inputs& in, const Mid& mid) {
            Tensor y = std::get<0>(m(in[0]));
            mid();
            return y.pow(2).sum();
          }),
      Of(
          "LSTMCellLoop", [] { return LSTMCell(5, 7); }, {3, 5},
          [](auto& m, const Inputs& in, const Mid& mid) {
            std::tuple<Tensor, Tensor> h{torch::zeros({3, 7}),
                                         torch::zeros({3, 7})};
            for (int i = 0; i < 3; ++i) {
              h = m(in[0], h);
              mid();
            }
            return std::get<0>(h).pow(2).sum();
          }),
      Of(
          "Norms",
          [] {
            return Sequential(
                LayerNorm(LayerNormOptions({6})), BatchNorm1d(4),
                InstanceNorm1d(InstanceNorm1dOptions(4).affine(true)),
                GroupNorm(GroupNormOptions(2, 4)));
          },
          {3, 4, 6},
          [](auto& m, const Inputs& in, const Mid& mid) {
            Tensor y = m->forward(in[0]);
            mid();
            return y.pow(3).sum();
          }),
      OfIds(
          "EmbeddingSparse",
          [] { return Embedding(EmbeddingOptions(10, 4).sparse(true)); },
          kCall),
      Of("CdistAndWeightNorm", MakeLinear(6, 5), {3, 6},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor d = torch::cdist(in[0], m->weight);
           mid();
           Tensor w = at::_weight_norm(m->weight, m->bias.unsqueeze(1), 0);
           mid();
           return d.pow(2).sum() + in[0].mm(w.t()).pow(2).sum();
         }),
      Of("AsStridedUnfoldViewAsComplex", MakeLinear(6, 4), {1},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor a = m->weight.as_strided({2, 3}, {6, 2},
                                           m->weight.storage_offset() + 1);
           mid();
           Tensor b = m->weight.unfold(1, 2, 2);
           mid();
           Tensor c = torch::view_as_complex(m->weight.view({4, 3, 2}));
           mid();
           return a.pow(2).sum() + b.pow(3).sum() + torch::abs(c).sum() +
                  m->bias.sum() * in[0].sum();
         }),
      Of("ViewOfAnotherDtype", MakeLinear(6, 4), {1},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor i = m->weight.detach().view(torch::kInt);
           mid();
           Tensor s = i.bitwise_and(1).sum().to(torch::kFloat);
           mid();
           return s + m->weight.pow(2).sum() + m->bias.sum() * in[0].sum();
         }),
      Of("CatStackWhere", MakeLinear(5, 5), {1},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor s = torch::stack({m->weight, m->weight.t()});
           mid();
           Tensor w = torch::where(m->weight > 0, m->weight, m->bias);
           mid();
           Tensor c = torch::cat({m->bias.unsqueeze(0), m->weight});
           mid();
           return s.pow(2).sum() + w.pow(2).sum() +
                  c.pow(3).sum() * in[0].sum();
         }),
      Of("SolveAndDeterminant", MakeLinear(4, 4), {4, 2},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor y = torch::linalg_solve(m->weight + 3 * torch::eye(4), in[0]);
           mid();
           Tensor d = torch::linalg_det(m->weight);
           mid();
           return y.pow(2).sum() + d + m->bias.sum();
         }),
      Of("ContiguousToAlias", MakeLinear(4, 4), {3, 4},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor w = m->weight.contiguous()
                          .to(torch::kFloat)
                          .view_as(m->weight)
                          .alias();
           mid();
           Tensor y = in[0].mm(w);
           mid();
           return y.pow(2).sum() + m->bias.sum();
         }),
      Of(
          "MultiheadAttentionWithBiasOfKeys",
          [] {
            return MultiheadAttention(
                MultiheadAttentionOptions(8, 2).add_bias_kv(true));
          },
          {3, 2, 8},
          [](auto& m, const Inputs& in, const Mid& mid) {
            Tensor y = std::get<0>(m(in[0], in[0], in[0]));
            mid();
            return y.pow(2).sum();
          }),
      Of("SplitsAndTensorLists", MakeLinear(6, 6), {3, 6},
         [](auto& m, const Inputs& in, const Mid& mid) {
           auto rows = m->weight.unbind(0);
           mid();
           auto parts = torch::tensor_split(m->weight, 4, 1);
           mid();
           auto scaled = at::_foreach_mul(rows, 2);
           mid();
           return torch::cat(parts, 1).pow(2).sum() +
                  torch::stack(scaled).pow(3).sum() +
                  (in[0] * rows[2]).pow(2).sum() + m->bias.sum();
         }),
      Of("IndexGatherScatter", MakeLinear(6, 6), {6, 6},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor index = torch::tensor({0, 5, 0});
           Tensor a = m->weight.index_select(0, index);
           mid();
           Tensor b = m->weight.index({
               torch::indexing::Slice(0, 4, 2),
               index,
           });
           mid();
           Tensor c = in[0].index_add(0, index, a);
           mid();
           return a.pow(2).sum() + b.pow(2).sum() + c.pow(3).sum() +
                  torch::take(m->weight, index).sum() + m->bias.max();
         }),
      Of("DropoutAndActivations", MakeLinear(6, 6), {3, 6},
         [](auto& m, const Inputs& in, const Mid& mid) {
           Tensor a = torch::softmax(m->weight, 1);
           mid();
           Tensor b =
               torch::gelu(m->weight) * torch::prelu(in[0], m->bias).sum(0);
           mid();
           return a.pow(2).sum() + b.pow(2).sum() +
                  torch::logsumexp(m->weight, 0).sum();
         }),
  };
  return *patterns;
}

class OperatorPattern : public testing::TestWithParam<std::tuple<int, size_t>> {
 protected:
  void SetUp() override { BufferPool::SetPoisonForTest(true); }
  void TearDown() override { BufferPool::SetPoisonForTest(false); }
};

INSTANTIATE_TEST_SUITE_P(
    All, OperatorPattern,
    testing::Combine(testing::Values(1, 2, 3),
                     testing::Range<size_t>(0, Patterns().size())),
    [](const auto& info) {
      return Patterns()[std::get<1>(info.param)].name +
             std::to_string(std::get<0>(info.param));
    });

TEST_P(OperatorPattern, ReadsNothingBehindTheGuard) {
  RunRanks(std::get<0>(GetParam()), Patterns()[std::get<1>(GetParam())].check);
}

// --- What throws instead -----------------------------------------------------

class PoisonedTest : public testing::Test {
 protected:
  void SetUp() override { BufferPool::SetPoisonForTest(true); }
  void TearDown() override { BufferPool::SetPoisonForTest(false); }
};

using OperatorThatThrows = PoisonedTest;

TEST_F(OperatorThatThrows, EmbeddingWithMaxNormWritesItsWeight) {
  RunRanks(2, [](RankContext& rank) {
    Embedding model = RankContext::Seeded(
        1, [] { return Embedding(EmbeddingOptions(10, 4).max_norm(0.5)); });
    fully_shard(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] {
          model(torch::tensor({1, 2}));
        },
        {"aten::embedding_renorm_", "writes the whole parameter 'weight'",
         "which is sharded"});
  });
}

TEST_F(OperatorThatThrows, UseOfATensorThatTookTheStorage) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(4, 4); });
    auto handle = fully_shard(model, rank.options());
    handle.unshard();
    Tensor alias = torch::empty({0});
    {
      const torch::NoGradGuard no_grad;
      alias.set_(model->weight.storage(), model->weight.storage_offset(),
                 {4, 4}, {4, 1});
    }
    EXPECT_TRUE(torch::equal(alias, model->weight));
    handle.reshard();
    // Without the guard nothing gathers, but the memory is not read either.
    const std::vector<std::string> texts = {"'weight'", "unshard()"};
    ExpectThrows([&] { alias + 1; }, texts);
    ExpectThrows([&] { alias.data_ptr<float>(); }, texts);
    ExpectThrows([&] { Input(1, {3, 4}).mm(alias); }, texts);
  });
}

TEST_F(OperatorThatThrows, BackwardThroughATensorThatTookTheStorage) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(4, 4); });
    auto handle = fully_shard(model, rank.options());
    handle.unshard();
    Tensor alias = torch::empty({0});
    {
      const torch::NoGradGuard no_grad;
      alias.set_(model->weight.storage(), model->weight.storage_offset(),
                 {4, 4}, {4, 1});
    }
    Tensor x = Input(1, {3, 4}).requires_grad_(true);
    Tensor loss = x.mm(alias).pow(2).sum();
    handle.reshard();
    ExpectThrows([&] { loss.backward(); }, {"'weight'", "unshard()"});
  });
}

}  // namespace
}  // namespace composable
