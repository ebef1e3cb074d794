// Placements of parameters, all-gather extensions and ignored parameters: shards
// are the rows that they should be, and training is that of the unsharded model.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <any>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "state/chunks.h"
#include "state/fsdp_state.h"
#include "state/ignored_params.h"
#include "state/segment_plan.h"
#include "state/staged_gather.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names
using Sizes = std::vector<int64_t>;

Sequential Two(int64_t in, int64_t mid, int64_t out) {
  return Sequential(Linear(in, mid), ReLU(), Linear(mid, out));
}

ShardPlacementFn Always(const Placement& placement) {
  return [placement](const std::string& /*fqn*/, const Tensor& /*p*/) {
    return std::optional<Placement>(placement);
  };
}

ShardPlacementFn LargestDim() {
  return [](const std::string& /*fqn*/, const Tensor& p) {
    const auto sizes = p.sizes();
    return std::optional<Placement>(
        Shard(std::max_element(sizes.begin(), sizes.end()) - sizes.begin()));
  };
}

// What torch.chunk and FSDP2 give `rank`.
Tensor ChunkOf(const Tensor& whole, int64_t dim, int rank, int world_size) {
  const int64_t n = whole.size(dim);
  const int64_t size = (n + world_size - 1) / world_size;
  const int64_t begin = std::min(n, rank * size);
  return whole.narrow(dim, begin, std::min(n, begin + size) - begin);
}

template <typename Make>
void ExpectSameSteps(RankContext& rank, Make make,
                     const FullyShardOptions& options, int64_t in,
                     double tolerance = 0) {
  auto [plain, sharded] = MakePair(make);
  fully_shard(sharded, options);
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
  torch::optim::SGD optimizer(sharded->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
    ExpectSameBackward(
        rank, plain, sharded,
        [&](auto& model, int r) {
          return model->forward(Input(10 * step + r, {4, in})).pow(2).sum();
        },
        tolerance);
    plain_optimizer.step();
    optimizer.step();
  }
  ExpectParameters(*sharded, *plain, tolerance);
  const auto values = full_state_dict(sharded);
  for (const auto& item : plain->named_parameters()) {
    EXPECT_TRUE(
        torch::allclose(values[item.key()], item.value(), tolerance, tolerance))
        << item.key();
  }
}

TEST(PlacementTest, ShardZeroHoldsChunksAsFsdp2) {
  for (const int world_size : {1, 2, 3, 4}) {
    ExactRanks(world_size, [](RankContext& rank) {
      for (const Sizes& s : {Sizes{15, 16, 8}, Sizes{15, 7, 3},
                             Sizes{17, 16, 8}, Sizes{3, 1, 1}}) {
        auto [plain, sharded] = MakePair([&] { return Two(s[0], s[1], s[2]); });
        fully_shard(sharded,
                    rank.options().shard_placement_fn(Always(Shard(0))));
        for (const auto& item : sharded->named_parameters()) {
          const Tensor whole = plain->named_parameters()[item.key()].detach();
          const Tensor chunk = ChunkOf(whole, 0, rank.rank, rank.world_size);
          ASSERT_EQ(item.value().sizes(), chunk.sizes()) << item.key();
          EXPECT_TRUE(torch::equal(item.value().detach(), chunk));
        }
      }
    });
  }
}

TEST(PlacementTest, ShardOneIsContiguousAndMayBeUneven) {
  for (const int world_size : {2, 3, 4}) {
    ExactRanks(world_size, [](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return Linear(5, 3); });
      fully_shard(sharded, rank.options().shard_placement_fn(
                               [](const std::string&, const Tensor&) {
                                 return std::optional<Placement>(Shard(-1));
                               }));
      const Tensor shard = sharded->named_parameters()["weight"];
      const Tensor chunk =
          ChunkOf(plain->weight.detach(), 1, rank.rank, rank.world_size);
      EXPECT_EQ(shard.sizes(), chunk.sizes());
      EXPECT_TRUE(torch::equal(shard.detach(), chunk));
      EXPECT_TRUE(shard.is_contiguous());
      EXPECT_TRUE(sharded->weight.is_contiguous());
      sharded(Input(1, {2, 5})).sum().backward();
      EXPECT_TRUE(shard.grad().is_contiguous());
    });
  }
}

class PlacementTraining : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PlacementTraining, testing::Values(1, 2, 3, 4));

TEST_P(PlacementTraining, ShardZero) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    const auto options = rank.options().shard_placement_fn(Always(Shard(0)));
    for (const Sizes& s : {Sizes{15, 16, 8}, Sizes{15, 7, 3}, Sizes{3, 1, 1}}) {
      ExpectSameSteps(
          rank, [&] { return Two(s[0], s[1], s[2]); }, options, s[0]);
    }
    ExpectSameSteps(
        rank, [] { return Linear(LinearOptions(3, 7).bias(false)); }, options,
        3);
  });
}

TEST_P(PlacementTraining, ShardLargestDim) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    for (const bool reshard : {true, false}) {
      ExpectSameSteps(
          rank, [] { return Two(17, 7, 3); },
          rank.options()
              .shard_placement_fn(LargestDim())
              .reshard_after_forward(reshard),
          17);
    }
  });
}

TEST_P(PlacementTraining, OwnedAndRaggedInOneGroup) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    ExpectSameSteps(
        rank, [] { return Two(9, 7, 5); },
        rank.options().shard_placement_fn(
            [](const std::string&, const Tensor& p) {
              return p.dim() == 2 ? std::optional(Owned()) : std::nullopt;
            }),
        9);
  });
}

TEST(PlacementTest, OwnedIsWholeOnOneRankAndBalanced) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Two(4, 4, 4); });
    fully_shard(sharded, rank.options().shard_placement_fn(Always(Owned())));
    int64_t here = 0;
    for (const auto& item : sharded->named_parameters()) {
      const Tensor whole = plain->named_parameters()[item.key()].detach();
      Sizes none = whole.sizes().vec();
      none[0] = 0;
      if (item.value().numel() == 0) {
        EXPECT_EQ(item.value().sizes(), none);
      } else {
        EXPECT_TRUE(torch::equal(item.value().detach(), whole));
      }
      here += item.value().numel();
    }
    EXPECT_EQ(here, 20);
    // Over several calls, too.
    std::vector<int64_t> rows;
    for (int i = 0; i < 2; ++i) {
      Linear one(LinearOptions(4, 4).bias(false));
      fully_shard(one, rank.options().shard_placement_fn(Always(Owned())));
      rows.push_back(one->parameters()[0].size(0));
    }
    EXPECT_EQ(rows[0] + rows[1], 4);
  });
}

TEST(PlacementTest, IsAskedOnceAndBadResultsChangeNothing) {
  ExactRanks(2, [](RankContext& rank) {
    Linear model(4, 3);
    const auto expect = [&](const Placement& placement, const char* text) {
      ExpectThrows<c10::ValueError>(
          [&] {
            fully_shard(model,
                        rank.options().shard_placement_fn(Always(placement)));
          },
          {text, "parameter"});
      EXPECT_EQ(fully_shard.state(model), nullptr);
    };
    expect(Shard(1), "Shard dim 1 is invalid for 1D tensor");
    expect(Owned(2), "expected a rank from 0 to 1");
    std::vector<std::string> asked;
    fully_shard(model, rank.options().shard_placement_fn(
                           [&](const std::string& fqn, const Tensor&) {
                             asked.push_back(fqn);
                             return std::optional(Shard(0));
                           }));
    EXPECT_EQ(asked, (std::vector<std::string>{"weight", "bias"}));
  });
}

struct ScaledImpl : Module {
  ScaledImpl() : inner(register_module("inner", Linear(5, 3))) {
    scale = register_parameter("scale", torch::tensor(0.5F));
  }
  Tensor forward(const Tensor& x) { return inner(x) * scale; }
  Linear inner;
  Tensor scale;
};
TORCH_MODULE(Scaled);

// What travels is not what the shards hold, and is not where the wholes are.
TEST_P(PlacementTraining, StateDictOfWholesThatAreCastAndChunked) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Two(17, 7, 3); });
    fully_shard(
        sharded,
        rank.options()
            .shard_placement_fn(LargestDim())
            .mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
    const auto values = full_state_dict(sharded);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(values[item.key()], item.value())) << item.key();
    }
  });
}
TEST_P(PlacementTraining, ScalarsAreReplicated) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    ExpectSameSteps(
        rank, [] { return Scaled(); }, rank.options(), 5);
    auto [plain, sharded] = MakePair([] { return Scaled(); });
    fully_shard(sharded, rank.options());
    EXPECT_EQ(sharded->named_parameters()["scale"].dim(), 0);
    const auto loss = [](Scaled& model, int r) {
      return model(Input(r, {4, 5})).pow(2).sum();
    };
    ExpectSameBackward(rank, plain, sharded, loss);
    const double expected = utils::clip_grad_norm_(plain->parameters(), 1e9);
    // Other order of addition.
    EXPECT_NEAR(clip_grad_norm_(sharded->parameters(), 1e9), expected,
                1e-5 * expected);
  });
}

// --- All-gather extensions ---------------------------------------------------

struct Bfloat16OnTheWire : AllGatherExtension {
  AllGatherInputs PreAllGather(const Tensor& shard,
                               const AllGatherContext&) override {
    return {{shard.to(torch::kBFloat16)}, {}};
  }
  void PostAllGather(const std::vector<Tensor>& outputs, const std::any&,
                     const AllGatherContext& context,
                     const Tensor& out) override {
    UnstackChunks(outputs[0], context.dim, out);
  }
};

// int8 with a scale per row, and bytes of another size beside.
struct Int8OnTheWire : AllGatherExtension {
  AllGatherInputs PreAllGather(const Tensor& shard,
                               const AllGatherContext&) override {
    const Tensor scale = shard.abs().amax(1, true).clamp_min(1e-12) / 127;
    return {{(shard / scale).round().to(torch::kChar), scale}, {}};
  }
  void PostAllGather(const std::vector<Tensor>& outputs, const std::any&,
                     const AllGatherContext& context,
                     const Tensor& out) override {
    UnstackChunks(outputs[0].to(torch::kFloat) * outputs[1], context.dim, out);
  }
};

template <typename Extension>
FullyShardOptions With(RankContext& rank) {
  return rank.options().all_gather_extension_fn(
      [](const std::string&,
         const Tensor& p) -> std::shared_ptr<AllGatherExtension> {
        return p.dim() == 2 ? std::make_shared<Extension>() : nullptr;
      });
}

class ExtensionTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExtensionTest, testing::Values(1, 2, 3, 4));

TEST_P(ExtensionTest, Bfloat16OnTheWireTrainsAsARoundedModel) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    for (const bool reshard : {true, false}) {
      auto [plain, sharded] = MakePair([] { return Linear(5, 7); });
      fully_shard(sharded,
                  With<Bfloat16OnTheWire>(rank).reshard_after_forward(reshard));
      const Tensor rounded =
          plain->weight.detach().to(torch::kBFloat16).to(torch::kFloat);
      EXPECT_TRUE(torch::equal(full_state_dict(sharded)["weight"], rounded));
      EXPECT_TRUE(torch::equal(
          sharded->named_parameters()["weight"].detach(),
          ChunkOf(plain->weight.detach(), 0, rank.rank, rank.world_size)));
      {
        const torch::NoGradGuard no_grad;
        plain->weight.copy_(rounded);
      }
      ExpectSameBackward(rank, plain, sharded, [](Linear& model, int r) {
        return model(Input(r, {4, 5})).pow(2).sum();
      });
    }
  });
}

TEST_P(ExtensionTest, Int8WithAScalePerRow) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Linear(5, 7); });
    plain->weight.set_requires_grad(false);
    sharded->weight.set_requires_grad(false);
    fully_shard(sharded, With<Int8OnTheWire>(rank));
    const Tensor x = Input(1, {4, 5});
    const auto before = fsdp_stats(sharded);
    const Tensor y = sharded(x);
    const auto after = fsdp_stats(sharded);
    // A step of int8 is 1/127 of a row's largest element.
    EXPECT_TRUE(torch::allclose(y, plain(x), 0.05, 0.05));
    EXPECT_FALSE(torch::equal(y, plain(x)));
    EXPECT_LT(after.gathered_bytes - before.gathered_bytes,
              after.unsharded_param_bytes + 128 * rank.world_size);
    y.sum().backward();
    EXPECT_TRUE(sharded->parameters()[1].grad().defined());
  });
}

struct Changes : Bfloat16OnTheWire {
  AllGatherInputs PreAllGather(const Tensor& shard,
                               const AllGatherContext&) override {
    return {{calls++ == 0 ? shard.clone() : shard.narrow(0, 0, 1)}, {}};
  }
  int calls = 0;
};

TEST(ExtensionErrors, OtherSizesNameTheParameter) {
  ExactRanks(2, [](RankContext& rank) {
    Linear model(5, 7);
    fully_shard(model, With<Changes>(rank));
    ExpectThrows<c10::ValueError>(
        [&] {
          model(Input(1, {2, 5}));
        },
        {"'weight'", "as in the first call"});
  });
}

// --- Examples of headers ---

[[maybe_unused]] void PlacementExample(const Linear& block) {
  // example-begin state/placement.h
  composable::fully_shard(
      block, composable::FullyShardOptions().shard_placement_fn(
                 [](const std::string& fqn, const at::Tensor& parameter)
                     -> std::optional<composable::Placement> {
                   if (fqn == "output.weight") return composable::Shard(1);
                   if (parameter.dim() == 2) return composable::Owned();
                   return std::nullopt;  // RaggedShard()
                 }));
  // example-end
}

// example-begin state/all_gather_extension.h
struct HalfOnTheWire : composable::AllGatherExtension {
  composable::AllGatherInputs PreAllGather(
      const at::Tensor& shard,
      const composable::AllGatherContext& /*context*/) override {
    return {{shard.to(at::kHalf)}, {}};
  }
  void PostAllGather(const std::vector<at::Tensor>& outputs,
                     const std::any& /*metadata*/,
                     const composable::AllGatherContext& context,
                     const at::Tensor& out) override {
    composable::UnstackChunks(outputs[0], context.dim, out);
  }
};
// example-end

[[maybe_unused]] void ExtensionExample(const Linear& block) {
  // example-begin state/all_gather_extension.h
  composable::fully_shard(
      block, composable::FullyShardOptions().all_gather_extension_fn(
                 [](const std::string& /*fqn*/, const at::Tensor& parameter)
                     -> std::shared_ptr<composable::AllGatherExtension> {
                   if (parameter.dim() < 2) return nullptr;  // as it is
                   return std::make_shared<HalfOnTheWire>();
                 }));
  // example-end
}

TEST(PlacementHeaders, Chunks) {
  // example-begin state/chunks.h
  // A [7, 3] parameter over 3 ranks: rows 0 to 2, 3 to 5, and 6.
  const auto chunks = composable::Chunks::Along(0, {7, 3}, /*world_size=*/3);
  const int64_t padded = chunks.numel();    // 9
  const int64_t mine = chunks.numel_of(2);  // 3
  // example-end
  EXPECT_EQ(padded, 9);
  EXPECT_EQ(mine, 3);
}

TEST(PlacementHeaders, IgnoredParams) {
  Scaled model;
  // example-begin state/ignored_params.h
  const composable::IgnoredParams ignored({model->scale});
  composable::IgnoredParams::Contains(model->scale);  // true, while it lives
  // example-end
  EXPECT_TRUE(IgnoredParams::Contains(model->scale));
  EXPECT_FALSE(IgnoredParams::Contains(model->inner->bias));
}

TEST(PlacementHeaders, SegmentPlan) {
  const Tensor tensor = torch::zeros({7, 3});
  std::vector<FSDPParam> params;
  params.emplace_back(
      OwnedParam{.parameter = tensor, .name = "w", .slots = {}});
  std::vector<int> indices = {0};
  std::vector<int64_t> owned_bytes(2);
  // example-begin state/segment_plan.h
  // For all `indices` of one kind:
  composable::SegmentKind kind = composable::SegmentKindOf(params[indices[0]]);
  composable::SegmentPlan plan = composable::PlanSegment(
      {.index = 0, .kind = kind, .dtype = at::kFloat}, /*rank=*/0,
      /*world_size=*/2, params, indices, owned_bytes);
  // example-end
  EXPECT_FALSE(plan.staged);
}

[[maybe_unused]] void StagedGatherExample(
    StagedGather& gather, const Tensor& flat_shard, BufferPool& pool,
    Communicator& communicator,
    const c10::intrusive_ptr<c10::StorageImpl>& whole_storage) {
  // example-begin state/staged_gather.h
  auto transfer = gather.Begin(flat_shard, pool);  // packs what is sent
  auto pending = communicator.AllGather(transfer.output, transfer.input);
  pending->Wait();
  gather.CopyTo(whole_storage);  // one pass over it
  gather.Release(pool);
  // example-end
}

// --- Ignored parameters ------------------------------------------------------

TEST(IgnoredParams, StayPlainUnderOuterCallsAndCountOnce) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Two(5, 7, 3); });
    auto inner = sharded[0]->as<Linear>();
    const Tensor bias = inner->bias;
    fully_shard(sharded->ptr(0), rank.options().ignored_params({bias}));
    fully_shard(sharded, rank.options());
    EXPECT_TRUE(sharded->named_parameters()["0.bias"].is_same(bias));
    EXPECT_FALSE(IsShard(bias));
    // The same input on all ranks: a plain gradient is that of one rank.
    const auto loss = [](Sequential& model) {
      return model->forward(Input(3, {4, 5})).pow(2).sum();
    };
    loss(plain).backward();
    loss(sharded).backward();
    EXPECT_TRUE(torch::equal(bias.grad(), plain[0]->as<Linear>()->bias.grad()));
    const double expected = utils::clip_grad_norm_(plain->parameters(), 1.0);
    EXPECT_NEAR(clip_grad_norm_(sharded->parameters(), 1.0), expected,
                1e-5 * expected);
    const auto values = full_state_dict(sharded);
    EXPECT_TRUE(torch::equal(values["0.bias"], bias));
    load_full_state_dict(sharded, values);
    loss(sharded);  // the tree is checked again
  });
}

TEST(IgnoredParams, WrongOnesAreNamed) {
  ExactRanks(2, [](RankContext& rank) {
    auto model = Two(5, 7, 3);
    fully_shard(model->ptr(0), rank.options());
    const auto expect = [&](const Tensor& tensor, const char* text) {
      ExpectThrows<c10::ValueError>(
          [&] { fully_shard(model, rank.options().ignored_params({tensor})); },
          {"ignored_params[0]", text});
    };
    expect(model[0]->as<Linear>()->weight, "'weight', which an earlier call");
    expect(torch::zeros({2}), "is no parameter of the modules");
    fully_shard(model, rank.options());
  });
}

TEST(IgnoredParams, AWholeSubtree) {
  ExactRanks(2, [](RankContext& rank) {
    auto model = Two(5, 7, 3);
    fully_shard(model->ptr(0),
                rank.options().ignored_params(model->ptr(0)->parameters()));
    EXPECT_EQ(fully_shard.state(model->ptr(0))->group(), nullptr);
    fully_shard(model, rank.options());
    EXPECT_EQ(fully_shard.state(model)->group()->params().size(), 2);
    model->forward(Input(1, {2, 5})).sum().backward();
  });
}

}  // namespace
}  // namespace composable
