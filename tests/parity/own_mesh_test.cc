// A module that is sharded over a mesh of its own inside of a tree over all ranks:
// what per-parameter meshes are for in PyTorch (experts).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <any>
#include <memory>
#include <string>
#include <vector>

#include "state/all_gather_extension.h"
#include "tests/composable/semantics.h"
#include "tests/parity/hybrid_reference.h"

namespace composable {
namespace {

// Four addends, in an order that is not that of the reference.
constexpr double kRounding = 1e-6;

struct OwnMesh {
  OwnMesh(RankContext& rank, const DeviceMesh& mesh) {
    const auto [first, second] = MakePair([] { return Mlp(); });
    plain = first;
    model = second;
    fully_shard(model->second, FullyShardOptions().mesh(mesh));
    fully_shard(model, rank.options());
  }
  Mlp plain{nullptr};
  Mlp model{nullptr};
};

TEST(ParityShardPlacementFnOwnMesh, AGridOfAllRanksAveragesOverAllOfThem) {
  RunRanks(4, [](RankContext& rank) {
    OwnMesh t(rank, Grid(rank, 2, 2));
    for (int step = 0; step < 3; ++step) {
      BackwardOfAllRanks(*t.plain, 4, [&](int r) {
        MlpLoss(t.plain, 10 * step + r).backward();
      });
      MlpLoss(t.model, 10 * step + rank.rank).backward();
      ExpectGradients(*t.model, *t.plain, kRounding);
    }
    EXPECT_EQ(fsdp_stats(t.model).num_all_reductions, 3);
  });
}

// Experts of other values in each row of the grid: their gradients are means over
// the ranks of the row, and those of the rest over all.
TEST(ParityShardPlacementFnOwnMesh, OneDimensionOfItAveragesOverThatAlone) {
  RunRanks(4, [](RankContext& rank) {
    const DeviceMesh grid = Grid(rank, 2, 2);
    OwnMesh t(rank, grid["shard"]);
    MlpLoss(t.model, rank.rank).backward();
    BackwardOfAllRanks(*t.plain, 4,
                       [&](int r) { MlpLoss(t.plain, r).backward(); });
    ExpectGradients(*t.model->first, *t.plain->first, kRounding);
    ExpectGradients(*t.model->third, *t.plain->third, kRounding);
    t.plain->zero_grad();
    BackwardOfAllRanks(*t.plain, 2, [&](int r) {
      MlpLoss(t.plain, rank.rank / 2 * 2 + r).backward();
    });
    ExpectGradients(*t.model->second, *t.plain->second, 0);
  });
}

// What an extension is told of the mesh is the group that gathers.
TEST(ParityAllGatherExtensions, HsdpMesh) {
  struct Recording : AllGatherExtension {
    AllGatherInputs PreAllGather(const at::Tensor& shard,
                                 const AllGatherContext& context) override {
      world_size = context.world_size;
      rank = context.rank;
      return {{shard.clone()}, {}};
    }
    void PostAllGather(const std::vector<at::Tensor>& outputs,
                       const std::any& /*metadata*/,
                       const AllGatherContext& context,
                       const at::Tensor& out) override {
      UnstackChunks(outputs[0], context.dim, out);
    }
    int world_size = 0;
    int rank = -1;
  };
  RunRanks(4, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    const auto extension = std::make_shared<Recording>();
    fully_shard(model->second,
                FullyShardOptions()
                    .mesh(Grid(rank, 2, 2))
                    .all_gather_extension_fn(
                        [&](const std::string& /*fqn*/, const at::Tensor& p)
                            -> std::shared_ptr<AllGatherExtension> {
                          if (p.dim() < 2) return nullptr;
                          return extension;
                        }));
    ExpectSameBackward(
        rank, plain->second, model->second,
        [](torch::nn::Linear& m, int r) {
          return m(Input(r, {4, 7})).pow(2).sum();
        },
        kRounding);
    EXPECT_EQ(extension->world_size, 2);
    EXPECT_EQ(extension->rank, rank.rank % 2);
  });
}

}  // namespace
}  // namespace composable
