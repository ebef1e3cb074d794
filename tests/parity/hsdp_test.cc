// Hybrid sharding: shards within a replica, reductions across replicas.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "composable/stats.h"
#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/parity/counting_backend.h"
#include "tests/parity/hybrid_reference.h"

namespace composable {
namespace {

using torch::Tensor;
using torch::nn::Linear;

// Gloo adds more than two addends in an order of its own.
constexpr double kRounding = 1e-6;

FullyShardOptions On(const DeviceMesh& mesh) {
  return FullyShardOptions().mesh(mesh);
}

struct Shape {
  int replicas;
  int shards;
};

class HybridShapeTest : public testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(All, HybridShapeTest,
                         testing::Values(Shape{2, 2}, Shape{4, 1}, Shape{1, 4},
                                         Shape{2, 1}, Shape{1, 2}),
                         [](const auto& info) {
                           return std::to_string(info.param.replicas) + "x" +
                                  std::to_string(info.param.shards);
                         });

TEST_P(HybridShapeTest, GradientsAndCollectivesOfAStep) {
  const auto [replicas, shards] = GetParam();
  RunRanks(replicas * shards, [replicas = replicas,
                               shards = shards](RankContext& rank) {
    const auto made = Grid(rank, replicas, shards);
    const auto across = CountCollectives(made.get_group("replicate"));
    const auto within = CountCollectives(made.get_group("shard"));
    const auto mesh =
        DeviceMesh::from_group({across.group, within.group}, "cpu",
                               {replicas, shards}, made.mesh_dim_names());
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, Groups::kPerModule, On(mesh));
    const bool exact = replicas <= 2 && shards <= 2;
    for (int step = 0; step < 3; ++step) {
      const auto loss = [&](Mlp& model, int r) {
        return MlpLoss(model, 10 * step + r);
      };
      HybridBackward(*plain, replicas, shards,
                     [&, &plain = plain](int r) { loss(plain, r).backward(); });
      *within.counts = *across.counts = {};
      loss(sharded, rank.rank).backward();
      ExpectGradients(*sharded, *plain, exact ? 0 : kRounding);
      // Three groups; the root has no parameters.
      EXPECT_EQ(within.counts->reduce_scatters, shards > 1 ? 3 : 0);
      EXPECT_EQ(within.counts->all_reduces, 0);
      EXPECT_EQ(across.counts->all_reduces, replicas > 1 ? 3 : 0);
      EXPECT_EQ(across.counts->all_gathers, 0);
      EXPECT_EQ(across.counts->reduce_scatters, 0);
      EXPECT_EQ(within.counts->all_gathers > 0, shards > 1);
    }
    const FSDPStats stats = fsdp_stats(sharded);
    EXPECT_EQ(stats.num_reductions, 9);
    EXPECT_EQ(stats.num_all_reductions, replicas > 1 ? 9 : 0);
  });
}

TEST(HybridTest, SharesOfParametersAreThoseOfTheShardGroup) {
  RunRanks(4, [](RankContext& rank) {
    Linear layer = RankContext::Seeded(1, [] { return Linear(8, 6); });
    const int64_t numel = 8 * 6 + 6;
    fully_shard(layer, On(Grid(rank, 2, 2)));
    FSDPParamGroup& group = *fully_shard.state(layer)->group();
    EXPECT_EQ(group.communicator().size(), 2);
    ASSERT_NE(group.replicate_communicator(), nullptr);
    EXPECT_EQ(group.replicate_communicator()->rank(), rank.rank / 2);
    EXPECT_GE(group.sharded_bytes(), numel / 2 * 4);
    EXPECT_LT(group.sharded_bytes(), numel * 4);
  });
}

// --- Training ----------------------------------------------------------------

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t dim)
      : norm(register_module("norm",
                             torch::nn::LayerNorm(std::vector<int64_t>{dim}))) {
    for (int i = 0; i < 3; ++i) {
      mlps.push_back(register_module(
          "mlp" + std::to_string(i),
          torch::nn::Sequential(Linear(dim, 4 * dim), torch::nn::Tanh(),
                                Linear(4 * dim, dim))));
    }
  }
  Tensor forward(Tensor x) {
    x = norm(x);
    for (auto& mlp : mlps) x = mlp->forward(x);
    return x;
  }
  torch::nn::LayerNorm norm;
  std::vector<torch::nn::Sequential> mlps;
};
TORCH_MODULE(Stack);

enum class Accumulate { kEach, kSyncLast, kAllReduceLast };

class ParityHSDPTraining
    : public testing::TestWithParam<std::tuple<int64_t, bool, Accumulate>> {};

INSTANTIATE_TEST_SUITE_P(
    Modes, ParityHSDPTraining,
    testing::Combine(testing::Values(3, 16, 17), testing::Bool(),
                     testing::Values(Accumulate::kEach, Accumulate::kSyncLast,
                                     Accumulate::kAllReduceLast)));

Tensor StackLoss(Stack& model, int64_t dim, int64_t seed) {
  return model(Input(seed, {4, dim})).pow(2).mean();
}

TEST_P(ParityHSDPTraining, TrainParityHsdp) {
  const auto [dim_, reshard_, mode_] = GetParam();
  RunRanks(4, [dim = dim_, reshard = reshard_,
               mode = mode_](RankContext& rank) {
    auto [plain, sharded] = MakePair([&] { return Stack(dim); });
    const auto options = On(Grid(rank, 2, 2)).reshard_after_forward(reshard);
    for (auto& mlp : sharded->mlps) fully_shard(mlp, options);
    auto handle = fully_shard(sharded, options);
    torch::optim::SGD expected(plain->parameters(), 0.1);
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        const bool last = micro == 2;
        if (mode == Accumulate::kSyncLast) {
          handle.set_requires_gradient_sync(last);
        }
        if (mode == Accumulate::kAllReduceLast) {
          handle.set_requires_all_reduce(last);
        }
        const int64_t seed = 100 * step + 10 * micro;
        HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
          StackLoss(plain, dim, seed + r).backward();
        });
        const Tensor loss = StackLoss(sharded, dim, seed + rank.rank);
        const Tensor alone = StackLoss(plain, dim, seed + rank.rank);
        EXPECT_NEAR(loss.item<double>(), alone.item<double>(),
                    1e-5 * std::abs(alone.item<double>()));
        loss.backward();
        if (mode != Accumulate::kEach && !last) {
          // Nothing new to be seen until the last.
          for (const auto& parameter : sharded->parameters()) {
            EXPECT_FALSE(parameter.grad().defined() &&
                         parameter.grad().any().item<bool>());
          }
        }
      }
      // Sums of micro batches are taken in another order.
      ExpectGradients(*sharded, *plain, 1e-5);
      optimizer.step();
      expected.step();
      ExpectParameters(*sharded, *plain, 1e-5);
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
      expected.zero_grad();
    }
  });
}

// --- Accumulation ------------------------------------------------------------

enum class Which { kAll, kRootOnly, kSomeMlps };

class ParityGradientAccumulation
    : public testing::TestWithParam<std::tuple<Which, bool>> {};

INSTANTIATE_TEST_SUITE_P(Modes, ParityGradientAccumulation,
                         testing::Combine(testing::Values(Which::kAll,
                                                          Which::kRootOnly,
                                                          Which::kSomeMlps),
                                          testing::Bool()));

struct RootAndMlpsImpl : torch::nn::Module {
  RootAndMlpsImpl() : lin(register_module("lin", Linear(8, 8))) {
    for (int i = 0; i < 3; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i), Linear(8, 8)));
    }
  }
  Tensor forward(Tensor x) {
    x = lin(x);
    for (auto& mlp : mlps) x = torch::tanh(mlp(x));
    return x;
  }
  Linear lin;
  std::vector<Linear> mlps;
};
TORCH_MODULE(RootAndMlps);

TEST_P(ParityGradientAccumulation, GradientAccumulation) {
  const auto [which_, reduce_scatter_only_] = GetParam();
  RunRanks(4, [which = which_,
               reduce_scatter_only = reduce_scatter_only_](RankContext& rank) {
    constexpr int kMicro = 3;
    constexpr int kGroups = 4;
    auto [plain, sharded] = MakePair([] { return RootAndMlps(); });
    const auto options = On(Grid(rank, 2, 2));
    std::vector<FSDPModule> mlps;
    for (auto& mlp : sharded->mlps) mlps.push_back(fully_shard(mlp, options));
    auto root = fully_shard(sharded, options);
    const auto set = [&](FSDPModule& handle, bool on, bool recurse) {
      if (reduce_scatter_only) {
        handle.set_requires_all_reduce(on, recurse);
      } else {
        handle.set_requires_gradient_sync(on, recurse);
      }
    };
    int others = 0;  // groups that are reduced each time
    if (which == Which::kRootOnly) others = 3;
    if (which == Which::kSomeMlps) others = 2;  // the last MLP and the root
    for (int step = 0; step < 2; ++step) {
      const FSDPStats before = fsdp_stats(sharded);
      for (int micro = 0; micro < kMicro; ++micro) {
        const bool last = micro == kMicro - 1;
        if (which == Which::kAll) set(root, last, true);
        if (which == Which::kRootOnly) set(root, last, false);
        if (which == Which::kSomeMlps) {
          for (int i = 0; i < 2; ++i) set(mlps[i], last, true);
        }
        const int64_t seed = 100 * step + 10 * micro;
        const auto loss = [&](RootAndMlps& model, int r) {
          return model(Input(seed + r, {4, 8})).pow(2).sum();
        };
        HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
          loss(plain, r).backward();
        });
        loss(sharded, rank.rank).backward();
      }
      const FSDPStats after = fsdp_stats(sharded);
      const int synced = kGroups + others * (kMicro - 1);
      EXPECT_EQ(after.num_reductions - before.num_reductions,
                reduce_scatter_only ? kGroups * kMicro : synced);
      EXPECT_EQ(after.num_all_reductions - before.num_all_reductions, synced);
      ExpectGradients(*sharded, *plain, 1e-5);
      sharded->zero_grad();
      plain->zero_grad();
    }
  });
}

// A partial of one micro batch holds other parameters than that of the next.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl()
      : a(register_module("a", Linear(4, 4))),
        b(register_module("b", Linear(4, 4))) {}
  Tensor forward(const Tensor& x, bool use_a, bool use_b) {
    Tensor sum = x.sum() * 0;
    if (use_a) sum = sum + a(x).pow(2).sum();
    if (use_b) sum = sum + b(x).pow(2).sum();
    return sum;
  }
  Linear a, b;
};
TORCH_MODULE(Branches);

TEST(HybridPartialTest, OfOtherParametersThanTheLastBackward) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Branches(); });
    auto handle = fully_shard(sharded, On(Grid(rank, 2, 2)));
    for (const bool first_a : {true, false}) {
      plain->zero_grad();
      sharded->zero_grad();
      for (const bool last : {false, true}) {
        const bool use_a = first_a != last;
        handle.set_requires_all_reduce(last);
        const auto loss = [&](Branches& model, int r) {
          return model(Input(10 * last + r, {2, 4}), use_a, !use_a);
        };
        HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
          loss(plain, r).backward();
        });
        loss(sharded, rank.rank).backward();
      }
      ExpectGradients(*sharded, *plain, 0);
    }
  });
}

TEST(HybridPartialTest, IsCountedClearedAndReducedWithoutAGradientOfItsGroup) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Branches(); });
    const auto options = On(Grid(rank, 2, 2));
    auto a = fully_shard(sharded->a, options);
    auto root = fully_shard(sharded, options);
    const auto backward = [&](Branches& model, int r, bool use_a) {
      model(Input(r, {2, 4}), use_a, !use_a).backward();
    };
    // Dropped.
    root.set_requires_all_reduce(false);
    backward(sharded, rank.rank, true);
    EXPECT_GT(a.pending_gradient_bytes(), 0u);
    EXPECT_FALSE(sharded->a->parameters()[0].grad().defined());
    root.clear_pending_gradients();
    EXPECT_EQ(a.pending_gradient_bytes(), 0u);
    // Kept: a backward that does not reach its group reduces it at its end.
    backward(sharded, rank.rank, true);
    root.set_requires_all_reduce(true);
    backward(sharded, rank.rank, false);
    EXPECT_EQ(a.pending_gradient_bytes(), 0u);
    HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
      backward(plain, r, true);
      backward(plain, r, false);
    });
    ExpectGradients(*sharded, *plain, 0);
  });
}

// Flags tell all replicas that one of them has a gradient.
TEST(HybridTest, AParameterThatOneReplicaUsesHasAGradientOnAllRanks) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Branches(); });
    fully_shard(sharded, On(Grid(rank, 2, 2)));
    const auto loss = [](Branches& model, int r) {
      return model(Input(r, {2, 4}), true, r == 3);
    };
    HybridBackward(*plain, 2, 2,
                   [&, &plain = plain](int r) { loss(plain, r).backward(); });
    loss(sharded, rank.rank).backward();
    ExpectGradients(*sharded, *plain, 0);
    EXPECT_TRUE(sharded->b->parameters()[0].grad().defined());
  });
}

TEST(HybridTest, OneGroupIsOneReductionOfEachKind) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    // example-begin tests/parity/hybrid_reference.h
    fully_shard(sharded, On(composable::Grid(rank, 2, 2)));
    composable::HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
    });
    // example-end
    MlpLoss(sharded, rank.rank).backward();
    ExpectGradients(*sharded, *plain, 0);
    const FSDPStats stats = fsdp_stats(sharded);
    EXPECT_EQ(stats.num_reductions, 1);
    EXPECT_EQ(stats.num_all_reductions, 1);
    EXPECT_EQ(stats.all_reduced_bytes * 2, stats.reduced_bytes);

    Linear model(3, 2);
    const Tensor x = torch::ones({1, 3});
    // example-begin tests/parity/counting_backend.h
    auto counted = composable::CountCollectives(rank.group);
    fully_shard(model, FullyShardOptions().mesh(counted.group));
    model(x).sum().backward();
    EXPECT_EQ(counted.counts->reduce_scatters, 1);
    // example-end
  });
}

TEST(HybridTest, GradOfShardsIsReducedOverReplicasToo) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    fully_shard(sharded, On(Grid(rank, 2, 2)));
    HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
    });
    const auto parameters = sharded->parameters();
    const auto gradients =
        torch::autograd::grad({MlpLoss(sharded, rank.rank)}, parameters);
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(torch::equal(
          gradients[i],
          LocalRows(parameters[i], plain->parameters()[i].grad())));
    }
    EXPECT_EQ(fsdp_stats(sharded).num_all_reductions, 1);
  });
}

// An exception between the legs leaves the next step right.
TEST(HybridTest, AHookThatThrowsEndsTheStepOnly) {
  RunRanks(4, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    const auto handles =
        Shard(sharded, Groups::kPerModule, On(Grid(rank, 2, 2)));
    auto root = handles.back();
    root.set_all_reduce_hook([](const Tensor& /*reduced*/) {
      TORCH_CHECK(false, "a fault of the test");
    });
    ExpectThrows([&] { MlpLoss(sharded, rank.rank).backward(); },
                 {"a fault of the test"});
    root.set_all_reduce_hook(nullptr);
    sharded->zero_grad();
    HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
    });
    MlpLoss(sharded, rank.rank).backward();
    ExpectGradients(*sharded, *plain, 0);
  });
}

// --- Clipping ----------------------------------------------------------------

class ParityClipGradNorm : public testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(Norms, ParityClipGradNorm,
                         testing::Values(1.0, 2.0, 3.0, INFINITY));

void CheckClipping(RankContext& rank, const DeviceMesh& mesh, double order,
                   int replicas, int shards,
                   const std::vector<std::shared_ptr<CollectiveCounts>>& all,
                   int reductions) {
  auto [plain, sharded] = MakePair([] { return Branches(); });
  fully_shard(sharded->a, On(mesh));  // b and the root's stay plain
  HybridBackward(*plain, replicas, shards, [&, &plain = plain](int r) {
    plain(Input(r, {2, 4}), true, false).backward();
  });
  sharded(Input(rank.rank, {2, 4}), true, false).backward();
  // A plain parameter with the same gradient on all ranks; undefined without.
  for (auto* model : {&plain, &sharded}) {
    (*model)->b->bias.mutable_grad() = torch::full({4}, 0.5);
  }
  std::vector<Tensor> flat;
  for (const auto& parameter : plain->parameters()) {
    if (parameter.grad().defined()) {
      flat.push_back(parameter.grad().to(torch::kDouble).flatten());
    }
  }
  const double expected = torch::cat(flat).norm(order).item<double>();
  for (const auto& counts : all) *counts = {};
  const double norm =
      clip_grad_norm_(sharded->parameters(), expected / 2, order);
  EXPECT_NEAR(norm, expected, 1e-6 * expected);
  int posted = 0;
  for (const auto& counts : all) posted += counts->all_reduces;
  EXPECT_EQ(posted, reductions);
  for (auto& parameter : plain->parameters()) {
    if (parameter.grad().defined()) {
      parameter.mutable_grad().mul_(expected / 2 / (expected + 1e-6));
    }
  }
  for (const auto& item : sharded->a->named_parameters()) {
    const Tensor& whole = plain->a->named_parameters()[item.key()].grad();
    EXPECT_TRUE(torch::allclose(item.value().grad(),
                                LocalRows(item.value(), whole), 1e-5));
  }
  EXPECT_TRUE(torch::allclose(sharded->b->bias.grad(), plain->b->bias.grad()));
}

TEST_P(ParityClipGradNorm, ClipGradNorm1D) {
  RunRanks(2, [order = GetParam()](RankContext& rank) {
    const auto counted = CountCollectives(rank.group);
    CheckClipping(rank, counted.group, order, 1, 2, {counted.counts}, 1);
  });
}

TEST_P(ParityClipGradNorm, ClipGradNorm2D) {
  RunRanks(4, [order = GetParam()](RankContext& rank) {
    const auto made = Grid(rank, 2, 2);
    const auto across = CountCollectives(made.get_group(0));
    const auto within = CountCollectives(made.get_group(1));
    CheckClipping(rank,
                  DeviceMesh::from_group({across.group, within.group}, "cpu",
                                         {2, 2}, made.mesh_dim_names()),
                  order, 2, 2, {across.counts, within.counts}, 1);
  });
}

// --- Which mesh --------------------------------------------------------------

TEST(ParityFullyShardMeshArg, InvalidMeshNdim) {
  RunRanks(1, [](RankContext& rank) {
    Linear layer(2, 2);
    const auto mesh =
        init_device_mesh("cpu", {1, 1, 1}, {"a", "b", "c"}, rank.group);
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(layer, On(mesh)); },
        {"fully_shard expects a 1D or 2D DeviceMesh but got "
         "DeviceMesh((a=1, b=1, c=1), 'cpu')"});
    fully_shard(layer, On(mesh["c"]));  // and nothing was left behind
  });
}

TEST(ParityFullyShardMeshArg, TwoDMeshWithoutMeshDimNames) {
  RunRanks(1, [](RankContext& rank) {
    Linear layer(2, 2);
    ExpectThrows<c10::ValueError>(
        [&] {
          fully_shard(layer,
                      On(init_device_mesh("cpu", {1, 1}, {}, rank.group)));
        },
        {"Please init the 2D mesh for HSDP with mesh_dim_names specified"});
  });
}

TEST(ParityFullyShardMeshArg, RankOutsideOfTheMesh) {
  RunRanks(2, [](RankContext& rank) {
    const auto mesh = init_device_mesh("cpu", {1}, {"a"}, rank.group);
    Linear layer(2, 2);
    if (rank.rank == 0) {
      fully_shard(layer, On(mesh));
      return;
    }
    ExpectThrows<c10::ValueError>([&] { fully_shard(layer, On(mesh)); },
                                  {"Rank 1 is not part of DeviceMesh((a=1)"});
  });
}

TEST(ParityFullyShardProcessGroupInit, OneAndTwoDProcessGroupInit) {
  RunRanks(4, [](RankContext& rank) {
    const auto grid = Grid(rank, 2, 2);
    const std::vector<DeviceMesh> meshes = {
        DeviceMesh::from_group(rank.group),
        DeviceMesh::from_group(grid.get_all_groups(), "cpu", {2, 2},
                               {"replicate", "shard"})};
    const std::vector<DeviceMesh> same = {
        init_device_mesh("cpu", {4}, {}, rank.group), grid};
    for (size_t i = 0; i < meshes.size(); ++i) {
      EXPECT_EQ(meshes[i], same[i]);
      EXPECT_EQ(meshes[i].get_coordinate(), same[i].get_coordinate());
      auto [one, other] = MakePair([] { return Mlp(); });
      fully_shard(one, On(meshes[i]));
      fully_shard(other, On(same[i]));
      MlpLoss(one, rank.rank).backward();
      MlpLoss(other, rank.rank).backward();
      for (size_t k = 0; k < one->parameters().size(); ++k) {
        EXPECT_TRUE(torch::equal(one->parameters()[k].grad(),
                                 other->parameters()[k].grad()));
      }
    }
  });
}

}  // namespace
}  // namespace composable
