#include "state/gradient_reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "state/managed_params.h"
#include "state/tensor_access.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"

namespace composable {
namespace {

using Sizes = std::vector<std::vector<int64_t>>;

struct Parameters : torch::nn::Module {
  Parameters(const Sizes& sizes, c10::ScalarType dtype) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      tensors.push_back(register_parameter("p" + std::to_string(i),
                                           at::zeros(sizes[i], dtype)));
    }
  }
  std::vector<at::Tensor> tensors;
};

// A group of parameters, as one rank has it.
struct Rank {
  Rank(const Sizes& sizes, const ProcessGroupPtr& process_group,
       c10::ScalarType dtype = c10::kFloat)
      : module(std::make_shared<Parameters>(sizes, dtype)),
        group(CollectManagedParams({module}, "test").owned,
              Communicator(process_group, c10::kCPU)),
        reduction(group) {
    for (auto& param : group.params()) param.has_edge = true;
  }
  // S.grad()
  const at::Tensor& grad(int i) { return group.params()[i].sharded.grad(); }
  const ShardLayout& layout() { return group.segments()[0].layout; }

  std::shared_ptr<Parameters> module;
  FSDPParamGroup group;
  GradientReduction reduction;
  BufferPool pool;
};

// Both ranks of a group of two, in one thread: a reduction is done when both
// have issued it.
struct TwoRanks {
  explicit TwoRanks(const Sizes& sizes, c10::ScalarType dtype = c10::kFloat)
      : hub(std::make_shared<InProcessHub>(2, std::chrono::seconds(5))) {
    for (int r = 0; r < 2; ++r) {
      ranks.push_back(
          std::make_unique<Rank>(sizes, MakeInProcessGroup(hub, r), dtype));
    }
  }
  Rank& operator[](int r) { return *ranks[r]; }
  void Pack(int r, std::vector<at::Tensor> gradients) {
    ranks[r]->reduction.Pack(std::move(gradients), ranks[r]->pool);
  }
  void Reduce() {
    for (auto& rank : ranks) rank->reduction.Issue();
    for (auto& rank : ranks) rank->reduction.Finish(rank->pool);
  }
  // Parameter i of both ranks, put together.
  at::Tensor Whole(int i) {
    auto& first = *ranks[0];
    const at::Tensor buffer =
        at::zeros({first.layout().unsharded_numel()}, c10::kFloat);
    const auto& param = first.group.params()[i];
    for (int r = 0; r < 2; ++r) {
      const auto range = ranks[r]->group.params()[i].local_range();
      if (range.begin == range.end) continue;
      buffer.narrow(0, param.offset() + range.begin, range.end - range.begin)
          .copy_(ranks[r]->grad(i).flatten());
    }
    return buffer.narrow(0, param.offset(), param.numel());
  }

  std::shared_ptr<InProcessHub> hub;
  std::vector<std::unique_ptr<Rank>> ranks;
};

struct PoisonScope {
  PoisonScope() { BufferPool::SetPoisonForTest(true); }
  ~PoisonScope() { BufferPool::SetPoisonForTest(false); }
};

// Leaves a buffer full of NaN for the next one who asks.
void LeavePoison(BufferPool& pool) { pool.Release(pool.Acquire(1 << 20)); }

void Ignore(const std::string& /*event*/) {}

TEST(GradientReductionTest, MeanOverTheRanks) {
  TwoRanks t({{4, 3}, {5}});
  t.Pack(0, {at::full({4, 3}, 1.0), at::arange(5, c10::kFloat)});
  t.Pack(1, {at::full({4, 3}, 4.0), at::arange(5, c10::kFloat) * 3});
  t.Reduce();
  EXPECT_TRUE(at::equal(t.Whole(0), at::full({12}, 2.5)));
  EXPECT_TRUE(at::equal(t.Whole(1), at::arange(5, c10::kFloat) * 2));
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(t[r].grad(0).sizes(), t[r].group.params()[0].sharded.sizes());
    EXPECT_FALSE(t[r].grad(0).requires_grad());
  }
}

TEST(GradientReductionTest, AddsToWhatIsThere) {
  TwoRanks t({{4, 2}});
  for (int i = 0; i < 3; ++i) {
    t.Pack(0, {at::full({4, 2}, 1.0)});
    t.Pack(1, {at::full({4, 2}, 3.0)});
    t.Reduce();
    EXPECT_TRUE(at::equal(t.Whole(0), at::full({8}, 2.0 * (i + 1))));
  }
}

TEST(GradientReductionTest, GradientIsAddedInPlace) {
  TwoRanks t({{4, 2}});
  const auto once = [&] {
    for (int r = 0; r < 2; ++r) t.Pack(r, {at::ones({4, 2})});
    t.Reduce();
  };
  once();
  const at::Tensor held = t[0].grad(0);
  once();
  EXPECT_TRUE(held.is_same(t[0].grad(0)));
  EXPECT_EQ(held[0][0].item<float>(), 2.0F);
}

// The payload, element by element: per rank its shard, then one flag for each
// parameter, then zeros.
TEST(GradientReductionTest, Payload) {
  const PoisonScope poison;
  const auto backend = MakeManualBackend(2, &Ignore);
  Rank rank({{3, 5}, {7}, {2, 3}}, GroupOf(backend));
  LeavePoison(rank.pool);
  const at::Tensor first = at::arange(15, c10::kFloat).view({3, 5}) + 1;
  const at::Tensor third = at::arange(6, c10::kFloat).view({2, 3}) + 101;
  rank.reduction.Pack({first, at::Tensor(), third}, rank.pool);
  const size_t bytes = rank.reduction.Issue();
  const at::Tensor payload = backend->input(0).clone();
  EXPECT_EQ(bytes, payload.nbytes());
  EXPECT_FALSE(payload.isnan().any().item<bool>()) << payload;

  const ShardLayout& layout = rank.layout();
  const int64_t shard = layout.shard_numel();
  const int64_t chunk = payload.numel() / 2;
  EXPECT_GE(chunk, shard + 3);
  EXPECT_EQ(chunk * sizeof(float) % 16, 0u);
  at::Tensor whole = at::zeros({2 * shard});
  whole.narrow(0, layout.placement(0).offset, 15).copy_(first.flatten());
  whole.narrow(0, layout.placement(2).offset, 6).copy_(third.flatten());
  for (int r = 0; r < 2; ++r) {
    at::Tensor expected = at::zeros({chunk});
    expected.narrow(0, 0, shard).copy_(whole.narrow(0, r * shard, shard));
    expected[shard] = 1;
    expected[shard + 1] = 0;
    expected[shard + 2] = 1;
    EXPECT_TRUE(at::equal(payload.narrow(0, r * chunk, chunk), expected))
        << payload.narrow(0, r * chunk, chunk) << expected;
  }
  backend->Finish(0);
  rank.reduction.Finish(rank.pool);
}

TEST(GradientReductionTest, GapsAreZeroOnAPoisonedBuffer) {
  const PoisonScope poison;
  for (const Sizes& sizes :
       {Sizes{{1}}, Sizes{{3}, {1, 5}, {2, 2}}, Sizes{{5, 7}, {1}, {1}},
        Sizes{{2, 333}}, Sizes{{1, 1}, {64, 3}, {9}}}) {
    for (const int world_size : {2, 3, 4}) {
      for (size_t with = 0; with <= sizes.size(); ++with) {
        const auto backend = MakeManualBackend(world_size, &Ignore);
        Rank rank(sizes, GroupOf(backend));
        LeavePoison(rank.pool);
        std::vector<at::Tensor> gradients(sizes.size());
        double sum = 0;
        for (size_t i = 0; i < with; ++i) {
          gradients[i] = at::ones(sizes[i]);
          sum += static_cast<double>(gradients[i].numel());
        }
        rank.reduction.Pack(std::move(gradients), rank.pool);
        rank.reduction.Issue();
        // Ones, a flag to each rank for each of them, and nothing else.
        EXPECT_EQ(backend->input(0).sum().item<double>(),
                  sum + static_cast<double>(with) * world_size);
        backend->Finish(0);
        rank.reduction.Finish(rank.pool);
      }
    }
  }
}

TEST(GradientReductionTest, AnyRankWithAGradientGivesAllRanksOne) {
  TwoRanks t({{4, 2}, {4}, {6}});
  t.Pack(0, {at::full({4, 2}, 2.0), at::Tensor(), at::Tensor()});
  t.Pack(1, {at::Tensor(), at::full({4}, 6.0), at::Tensor()});
  t.Reduce();
  EXPECT_TRUE(at::equal(t.Whole(0), at::full({8}, 1.0)));
  EXPECT_TRUE(at::equal(t.Whole(1), at::full({4}, 3.0)));
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(t[r].grad(0).defined());
    EXPECT_TRUE(t[r].grad(1).defined());
    EXPECT_FALSE(t[r].grad(2).defined()) << "no rank had one";
  }
}

TEST(GradientReductionTest, SparseGradientsAreMadeDense) {
  TwoRanks t({{6, 2}, {3}});
  const at::Tensor indices = at::full({1, 2}, 1, c10::kLong);
  indices[0][1] = 4;
  // Row 1 twice in one of them: such entries are summed.
  const at::Tensor twice = at::full({1, 2}, 1, c10::kLong);
  t.Pack(0, {at::sparse_coo_tensor(indices, at::full({2, 2}, 8.0), {6, 2}),
             at::ones({3})});
  t.Pack(1, {at::sparse_coo_tensor(twice, at::full({2, 2}, 3.0), {6, 2}),
             at::ones({3})});
  t.Reduce();
  at::Tensor expected = at::zeros({6, 2});
  expected[1] = (8.0 + 6.0) / 2;
  expected[4] = 4.0;
  EXPECT_TRUE(at::equal(t.Whole(0).view({6, 2}), expected)) << t.Whole(0);
}

TEST(GradientReductionTest, GradientsWithOtherStrides) {
  TwoRanks t({{4, 6}});
  const at::Tensor value = at::arange(24, c10::kFloat).view({4, 6});
  t.Pack(0, {value.t().contiguous().t()});
  t.Pack(1, {at::zeros({1}).expand({4, 6})});
  t.Reduce();
  EXPECT_TRUE(at::equal(t.Whole(0).view({4, 6}), value / 2));
}

TEST(GradientReductionTest, TwoDtypesAreTwoPayloads) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      a = register_parameter("a", at::zeros({4, 2}));
      b = register_parameter("b", at::zeros({4}, c10::kDouble));
    }
    at::Tensor a, b;
  };
  const auto module = std::make_shared<Mixed>();
  const auto backend = MakeManualBackend(2, &Ignore);
  FSDPParamGroup group(CollectManagedParams({module}, "test").owned,
                       Communicator(GroupOf(backend), c10::kCPU));
  for (auto& param : group.params()) param.has_edge = true;
  GradientReduction reduction(group);
  BufferPool pool;
  reduction.Pack({at::ones({4, 2}), at::ones({4}, c10::kDouble)}, pool);
  reduction.Issue();
  EXPECT_EQ(backend->issued(), 2u);
  EXPECT_EQ(backend->input(0).scalar_type(), c10::kFloat);
  EXPECT_EQ(backend->input(1).scalar_type(), c10::kDouble);
  backend->Finish(0);
  backend->Finish(1);
  reduction.Finish(pool);
  EXPECT_EQ(group.params()[1].sharded.grad().scalar_type(), c10::kDouble);
}

TEST(GradientReductionTest, HalfPrecisionFlagsAreExact) {
  TwoRanks t({{4, 2}, {4}}, c10::kBFloat16);
  t.Pack(0, {at::full({4, 2}, 2.0, c10::kBFloat16), at::Tensor()});
  t.Pack(1, {at::Tensor(), at::Tensor()});
  t.Reduce();
  EXPECT_TRUE(at::equal(t.Whole(0), at::full({8}, 1.0)));
  EXPECT_FALSE(t[0].grad(1).defined());
  EXPECT_FALSE(t[1].grad(1).defined());
}

TEST(GradientReductionTest, ParameterThatIsFrozenByNowIsLeftAlone) {
  TwoRanks t({{4, 2}, {4}});
  for (int r = 0; r < 2; ++r) t.Pack(r, {at::ones({4, 2}), at::ones({4})});
  for (int r = 0; r < 2; ++r) {
    t[r].group.params()[1].sharded.set_requires_grad(false);
  }
  t.Reduce();
  EXPECT_TRUE(t[0].grad(0).defined());
  EXPECT_FALSE(t[0].grad(1).defined());
}

// Whether this rank's parameters have gradient edges does not count: they follow
// when it reads them.
TEST(GradientReductionTest, SegmentOfFrozenShardsIsNotSent) {
  const auto backend = MakeManualBackend(2, &Ignore);
  Rank rank({{4, 2}, {4}}, GroupOf(backend));
  for (auto& param : rank.group.params()) {
    param.sharded.set_requires_grad(false);
  }
  rank.reduction.Pack({at::Tensor(), at::Tensor()}, rank.pool);
  EXPECT_EQ(rank.reduction.Issue(), 0u);
  rank.reduction.Finish(rank.pool);
  EXPECT_EQ(backend->issued(), 0u);
  EXPECT_FALSE(rank.grad(0).defined());
}

TEST(GradientReductionTest, KeptGradientsAreReducedWithTheNext) {
  TwoRanks t({{4, 2}, {4}, {3}});
  for (int r = 0; r < 2; ++r) {
    auto& rank = t[r];
    EXPECT_FALSE(rank.reduction.has_pending());
    EXPECT_EQ(rank.reduction.pending_bytes(), 0u);
    for (int i = 0; i < 2; ++i) {
      t.Pack(r, {at::full({4, 2}, 1.0 + r),
                 r == 0 ? at::ones({4}) : at::Tensor(), at::Tensor()});
      rank.reduction.Keep(rank.pool);
    }
    EXPECT_TRUE(rank.reduction.has_pending());
    EXPECT_GE(rank.reduction.pending_bytes(),
              static_cast<size_t>(8 + 4 + 3) * sizeof(float));
    EXPECT_FALSE(rank.grad(0).defined());
    t.Pack(r, {at::full({4, 2}, 10.0), at::Tensor(), at::Tensor()});
  }
  t.Reduce();
  // Rank 0: 1 + 1 + 10, rank 1: 2 + 2 + 10.
  EXPECT_TRUE(at::equal(t.Whole(0), at::full({8}, 13.0)));
  EXPECT_TRUE(at::equal(t.Whole(1), at::full({4}, 1.0)));
  EXPECT_FALSE(t[0].grad(2).defined());
  EXPECT_FALSE(t[1].grad(2).defined());
  EXPECT_FALSE(t[0].reduction.has_pending());
  EXPECT_EQ(t[0].reduction.pending_bytes(), 0u);
}

TEST(GradientReductionTest, PendingGradientsCanBeDropped) {
  TwoRanks t({{4, 2}});
  for (int r = 0; r < 2; ++r) {
    t.Pack(r, {at::full({4, 2}, 100.0)});
    t[r].reduction.Keep(t[r].pool);
    t[r].reduction.ClearPending();
    EXPECT_FALSE(t[r].reduction.has_pending());
    t.Pack(r, {at::ones({4, 2})});
  }
  t.Reduce();
  EXPECT_TRUE(at::equal(t.Whole(0), at::ones({8})));
}

TEST(GradientReductionTest, BuffersGoBackToThePool) {
  TwoRanks t({{4, 2}});
  for (int i = 0; i < 3; ++i) {
    for (int r = 0; r < 2; ++r) t.Pack(r, {at::ones({4, 2})});
    t.Reduce();
    for (int r = 0; r < 2; ++r) {
      t.Pack(r, {at::ones({4, 2})});
      t[r].reduction.Abandon(t[r].pool);
    }
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(t[r].pool.reservations(), 1u);
    t[r].pool.Purge();
    EXPECT_EQ(t[r].pool.committed_bytes(), 0u);
  }
}

TEST(GradientReductionTest, AbandonWaitsAndSetsNothing) {
  const auto backend = MakeManualBackend(2, &Ignore);
  backend->set_finish_on_wait(true);
  Rank rank({{4, 2}}, GroupOf(backend));
  rank.reduction.Pack({at::ones({4, 2})}, rank.pool);
  rank.reduction.Issue();
  rank.reduction.Abandon(rank.pool);
  EXPECT_TRUE(backend->waited(0));
  EXPECT_FALSE(rank.grad(0).defined());
  rank.reduction.Abandon(rank.pool);  // does nothing
}

TEST(GradientReductionTest, FailedReductionThrowsAndCanBeRepeated) {
  const auto backend = MakeManualBackend(2, &Ignore);
  backend->set_finish_on_wait(true);
  backend->Fail(0, "the cable is cut");
  Rank rank({{4, 2}}, GroupOf(backend));
  rank.reduction.Pack({at::ones({4, 2})}, rank.pool);
  rank.reduction.Issue();
  EXPECT_THROW(rank.reduction.Finish(rank.pool), c10::DistError);
  EXPECT_FALSE(rank.grad(0).defined());
  rank.reduction.Pack({at::ones({4, 2})}, rank.pool);
  rank.reduction.Issue();
  rank.reduction.Finish(rank.pool);
  EXPECT_TRUE(rank.grad(0).defined());
  EXPECT_EQ(rank.pool.reservations(), 1u);
}

}  // namespace
}  // namespace composable
