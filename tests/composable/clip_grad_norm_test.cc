// clip_grad_norm_ on shards against the norm of the whole gradients, taken in
// double precision (float norms of LibTorch are off by more than the tolerance
// here).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Rows of 1, 3 and 7, and a layer that the loss does not use.
struct UnevenImpl : Module {
  UnevenImpl()
      : first(register_module("first", Linear(5, 7))),
        second(register_module("second", Linear(7, 3))),
        third(register_module("third", Linear(3, 1))),
        unused(register_module("unused", Linear(3, 3))) {}
  Tensor forward(const Tensor& x) {
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
  Linear first, second, third, unused;
};
TORCH_MODULE(Uneven);

Tensor Loss(Uneven& model, int r) {
  return model(Input(r, {4, 5})).pow(2).sum();
}

double ReferenceNorm(const std::vector<Tensor>& parameters, double order) {
  std::vector<Tensor> flat;
  for (const auto& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    flat.push_back(parameter.grad().to(torch::kDouble).flatten());
  }
  if (flat.empty()) return 0;
  return torch::cat(flat).norm(order).item<double>();
}

// The values of all ranks, to compare after they have ended.
class PerRank {
 public:
  explicit PerRank(int world_size) : values_(world_size) {}
  void Set(int rank, double value) { values_[rank] = value; }
  void ExpectAllEqual() const {
    for (const double value : values_) {
      if (std::isnan(values_[0])) {
        EXPECT_TRUE(std::isnan(value));
      } else {
        EXPECT_EQ(value, values_[0]);
      }
    }
  }

 private:
  std::vector<double> values_;
};

class ClipGradNormTest
    : public testing::TestWithParam<std::tuple<int, double, Groups>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  double order() const { return std::get<1>(GetParam()); }
  Groups groups() const { return std::get<2>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    All, ClipGradNormTest,
    testing::Combine(testing::Values(1, 2, 3, 4),
                     testing::Values(1.0, 2.0, 3.0, 0.5, kInfinity),
                     testing::Values(Groups::kOne, Groups::kPerModule)),
    [](const auto& info) {
      const double order = std::get<1>(info.param);
      return "Norm" +
             (std::isinf(order)
                  ? "Inf"
                  : std::to_string(static_cast<int>(order * 10)) + "Tenths") +
             Name(std::get<2>(info.param)) +
             std::to_string(std::get<0>(info.param));
    });

// Backward of both models, then `clip` of the sharded one.
TEST_P(ClipGradNormTest, EqualsUnshardedNormAndScaling) {
  PerRank norms(world_size());
  RunRanks(world_size(), [&](RankContext& rank) {
    for (const double fraction : {0.5, 2.0, 0.0}) {  // of the norm itself
      auto [plain, sharded] = MakePair([] { return Uneven(); });
      Shard(sharded, groups(), rank.options());
      ExpectSameBackward(
          rank, plain, sharded, [](Uneven& m, int r) { return Loss(m, r); },
          1e-5);
      ASSERT_FALSE(sharded->unused->parameters()[0].grad().defined());
      const double expected = ReferenceNorm(plain->parameters(), order());
      const double max_norm = fraction * expected;
      const double norm =
          clip_grad_norm_(sharded->parameters(), max_norm, order());
      EXPECT_NEAR(norm, expected, 1e-6 * expected);
      norms.Set(rank.rank, norm);
      const double scale = std::min(1.0, max_norm / (expected + 1e-6));
      for (auto& parameter : plain->parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(scale);
      }
      ExpectGradients(*sharded, *plain, 1e-5);
    }
  });
  norms.ExpectAllEqual();
}

TEST_P(ClipGradNormTest, StaysWithinTheNormAfterwards) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Uneven(); });
    Shard(model, groups(), rank.options());
    Loss(model, rank.rank).backward();
    const double norm = clip_grad_norm_(model->parameters(), 0.1, order());
    EXPECT_GT(norm, 0.1);
    EXPECT_NEAR(clip_grad_norm_(model->parameters(), 0.1, order()), 0.1, 1e-5);
  });
}

// One element that is not finite, on the shard of one rank.
class NonFinite : public testing::TestWithParam<
                      std::tuple<int, double, double, int, TestBackend>> {};

std::string NonFiniteName(
    const testing::TestParamInfo<NonFinite::ParamType>& info) {
  const auto [world_size, order, value, owner, backend] = info.param;
  return std::string(std::isnan(value) ? "NaN" : "Inf") + "OnRank" +
         std::to_string(owner) + "Of" + std::to_string(world_size) +
         (std::isinf(order) ? "MaxNorm" : "TwoNorm") +
         (backend == TestBackend::kGloo ? "Gloo" : "InProcess");
}

INSTANTIATE_TEST_SUITE_P(
    All, NonFinite,
    testing::Combine(testing::Values(2, 3), testing::Values(2.0, kInfinity),
                     testing::Values(kNaN, kInfinity), testing::Values(0, 1),
                     testing::Values(TestBackend::kGloo,
                                     TestBackend::kInProcess)),
    NonFiniteName);

TEST_P(NonFinite, IsTheNormOnAllRanks) {
  const auto [world_size, order, value, owner, backend] = GetParam();
  RunRanksOptions options;
  options.backend = backend;
  RunRanks(
      world_size,
      [&, order = order, value = value, owner = owner](RankContext& rank) {
        auto model = RankContext::Seeded(1, [] { return Uneven(); });
        fully_shard(model, rank.options());
        Loss(model, rank.rank).backward();
        if (rank.rank == owner) {
          for (const auto& shard : model->parameters()) {
            const Tensor& gradient = shard.grad();
            if (gradient.defined() && gradient.numel() > 0) {
              gradient.flatten()[0].fill_(value);
            }
          }
        }
        ExpectThrows(
            [&] {
              clip_grad_norm_(model->parameters(), 1.0, order,
                              /*error_if_nonfinite=*/true);
            },
            {"clip_grad_norm_", std::isnan(value) ? "nan" : "inf"});
        const double norm = clip_grad_norm_(model->parameters(), 1.0, order);
        EXPECT_EQ(std::isnan(norm), std::isnan(value)) << norm;
        EXPECT_FALSE(std::isfinite(norm));
      },
      options);
}

// Parameters that no call sharded are equal on all ranks and count once.
class MixedClip : public testing::TestWithParam<std::tuple<int, double>> {};

INSTANTIATE_TEST_SUITE_P(All, MixedClip,
                         testing::Combine(testing::Values(2, 3),
                                          testing::Values(2.0, kInfinity)));

TEST_P(MixedClip, PlainAndSharded) {
  const auto [world_size, order] = GetParam();
  RunRanks(world_size, [&, order = order](RankContext& rank) {
    auto [plain, mixed] = MakePair([] { return Uneven(); });
    fully_shard(mixed->second, rank.options());
    // The same input everywhere: the plain parts need no reduction.
    Loss(plain, 5).backward();
    Loss(mixed, 5).backward();
    const double expected = ReferenceNorm(plain->parameters(), order);
    const double norm =
        clip_grad_norm_(mixed->parameters(), 0.5 * expected, order);
    EXPECT_NEAR(norm, expected, 1e-6 * expected);
    for (auto& parameter : plain->parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
    }
    ExpectGradients(*mixed->second, *plain->second, 1e-5);
    EXPECT_TRUE(torch::allclose(mixed->first->weight.grad(),
                                plain->first->weight.grad(), 1e-5));
  });
}

TEST(ClipGradNormDetails, CountsATiedParameterOnce) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Uneven(); });
    fully_shard(sharded, rank.options());
    ExpectSameBackward(rank, plain, sharded,
                       [](Uneven& m, int r) { return Loss(m, r); });
    auto twice = sharded->parameters();
    for (const auto& parameter : sharded->parameters()) {
      twice.push_back(parameter);
    }
    const double expected = ReferenceNorm(plain->parameters(), 2);
    EXPECT_NEAR(clip_grad_norm_(twice, 0.5 * expected), expected,
                1e-6 * expected);
    EXPECT_NEAR(clip_grad_norm_(twice, 1e9), 0.5 * expected, 1e-4 * expected);
  });
}

TEST(ClipGradNormDetails, LowPrecisionAndExtremeGradients) {
  for (const auto dtype : {torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    RunRanks(2, [&](RankContext& rank) {
      auto model = RankContext::Seeded(1, [&] {
        Linear model(5, 7);
        model->to(dtype);
        return model;
      });
      fully_shard(model, rank.options());
      const Tensor x = torch::ones({1, 5}, dtype);
      (model(x).sum() * 1e30).backward();
      // 35 weights and 7 biases have a gradient of 1e30, whose square is not
      // a float.
      EXPECT_NEAR(clip_grad_norm_(model->parameters(), 1.0),
                  std::sqrt(42.0) * 1e30, 1e28);
    });
  }
}

TEST(ClipGradNormDetails, NothingToClip) {
  RunRanks(2, [](RankContext& rank) {
    EXPECT_EQ(clip_grad_norm_({}, 1.0), 0);
    auto model = RankContext::Seeded(1, [] { return Uneven(); });
    fully_shard(model, rank.options());
    EXPECT_EQ(clip_grad_norm_(model->parameters(), 1.0), 0);
    EXPECT_EQ(clip_grad_norm_({Tensor()}, 1.0, kInfinity), 0);
  });
}

TEST(ClipGradNormDetails, RefusesANormTypeOfZeroOrLess) {
  for (const double order : {0.0, -1.0, -kInfinity, kNaN}) {
    ExpectThrows<c10::ValueError>([&] { clip_grad_norm_({}, 1.0, order); },
                                  {"norm_type above 0"});
  }
}

}  // namespace
}  // namespace composable
