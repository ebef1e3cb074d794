// How many collectives a step issues, and how many bytes each carries, as the
// backend sees them: counterparts of PyTorch's communication counts, which count
// calls only. Expected bytes are worked out here from the shapes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/composable/semantics.h"
#include "tests/parity/counting_backend.h"

namespace composable {
namespace {

using torch::Tensor;

constexpr int64_t kWorld = 2;
constexpr int64_t kWidth = 8;
constexpr int64_t kGroups = 3;
// A layer has 8 rows of weights and one of biases, so each rank holds 5: the last
// one of rank 1 is padding.
constexpr int64_t kElements = 5 * kWidth * kWorld;
constexpr int64_t kGatherBytes = kElements * 4;

// What all ranks together give to the reduction of a group: each rank's part is
// `elements` of gradients and a flag for each of `parameters`, in multiples of 16
// bytes.
int64_t PayloadBytes(int64_t elements, int64_t parameters) {
  const int64_t bytes = (elements / kWorld + parameters) * 4;
  return (bytes + 15) / 16 * 16 * kWorld;
}
const int64_t kPayloadBytes = PayloadBytes(kElements, 2);

// Three equal layers, each a group, and a root without parameters. The input
// needs no gradient, so backward does not read the first layer.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < kGroups; ++i) {
      layers.push_back(register_module("l" + std::to_string(i),
                                       torch::nn::Linear(kWidth, kWidth)));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Stack);

struct Counting {
  explicit Counting(RankContext& rank, FullyShardOptions options = {})
      : rank(rank), counted(CountCollectives(rank.group)) {
    options.mesh(counted.group).forward_prefetch(false);
    for (auto& layer : model->layers) {
      layers.push_back(fully_shard(layer, options));
    }
    root.push_back(fully_shard(model, options));
  }
  Tensor Loss(int64_t seed) {
    return model(Input(seed + rank.rank, {4, kWidth})).pow(2).sum();
  }
  // Expects what was issued since the last call.
  void Expect(int64_t gathers, int64_t reductions, const std::string& what) {
    const CollectiveCounts now = *counted.counts;
    EXPECT_EQ(now.all_gathers - last.all_gathers, gathers) << what;
    EXPECT_EQ(now.reduce_scatters - last.reduce_scatters, reductions) << what;
    EXPECT_EQ(now.all_reduces, 0) << what;
    EXPECT_EQ(now.gathered_bytes - last.gathered_bytes, gathers * kGatherBytes)
        << what;
    EXPECT_EQ(now.scattered_bytes - last.scattered_bytes,
              reductions * kPayloadBytes)
        << what;
    last = now;
  }

  RankContext& rank;
  Counted counted;
  Stack model = RankContext::Seeded(1, [] { return Stack(); });
  std::vector<FSDPModule> layers;
  std::vector<FSDPModule> root;
  CollectiveCounts last;
};

TEST(ParityCommunicationBytes, OfForwardAndBackward) {
  RunRanks(kWorld, [](RankContext& rank) {
    for (const auto& freed :
         {std::optional<bool>(true), std::optional<bool>(false),
          std::optional<bool>()}) {
      for (const int64_t limit : {1, 2, 3}) {
        FullyShardOptions options;
        if (freed) options.reshard_after_forward(*freed);
        Counting t(rank, options.limit_all_gathers(limit));
        for (int step = 0; step < 3; ++step) {
          const std::string what = "limit " + std::to_string(limit) + " step " +
                                   std::to_string(step);
          const Tensor loss = t.Loss(step);
          t.Expect(kGroups, 0, "forward, " + what);
          loss.backward();
          // Upstream: 3, or 0 if nothing is freed. The first layer is not read,
          // which the first iteration has to find out, and those that are left
          // last keep their slots.
          int64_t gathers = std::max<int64_t>(0, kGroups - 1 - limit);
          if (step == 0 && limit == 2) ++gathers;
          if (!freed.value_or(true)) gathers = 0;
          t.Expect(gathers, kGroups, "backward, " + what);
        }
      }
    }
  });
}

TEST(ParityCommunicationBytes, OfEvaluationAndMicrobatches) {
  RunRanks(kWorld, [](RankContext& rank) {
    Counting t(rank, FullyShardOptions().reshard_after_forward(false));
    {
      const torch::NoGradGuard no_grad;
      t.Loss(0);
    }
    t.Expect(kGroups, 0, "evaluation");
    t.root[0].set_requires_gradient_sync(false);
    t.root[0].set_reshard_after_backward(false);
    for (int i = 0; i < 3; ++i) t.Loss(i).backward();
    t.Expect(0, 0, "three microbatches over what is there");
    t.root[0].set_requires_gradient_sync(true);
    t.root[0].set_reshard_after_backward(true);
    t.Loss(3).backward();
    t.Expect(0, kGroups, "the last, with the sum of all four");
    t.Loss(4).backward();
    t.Expect(kGroups, kGroups, "the next step");
    // Only the middle one reduces.
    t.layers[0].set_requires_gradient_sync(false);
    t.layers[2].set_requires_gradient_sync(false);
    t.Loss(5).backward();
    t.Expect(kGroups, 1, "some without sync");
    t.root[0].set_requires_gradient_sync(true);
    t.root[0].synchronize_gradients();
    t.Expect(0, 2, "what was kept");
  });
}

// mixed_requires_grad_per_group: what is frozen is gathered and not reduced.
TEST(ParityFrozenPayload, IsThatOfTheBiases) {
  RunRanks(kWorld, [](RankContext& rank) {
    for (const bool before : {true, false}) {  // frozen before it is sharded
      const auto counted = CountCollectives(rank.group);
      Stack model = RankContext::Seeded(1, [] { return Stack(); });
      const auto freeze = [&] {
        for (auto& item : model->named_parameters()) {
          item.value().set_requires_grad(item.key().find("bias") !=
                                         std::string::npos);
        }
      };
      if (before) freeze();
      auto options = FullyShardOptions().mesh(counted.group);
      for (auto& layer : model->layers) fully_shard(layer, options);
      fully_shard(model, options);
      if (!before) freeze();
      for (int step = 0; step < 2; ++step) {
        const CollectiveCounts last = *counted.counts;
        model(Input(rank.rank, {4, kWidth})).pow(2).sum().backward();
        EXPECT_EQ(counted.counts->reduce_scatters - last.reduce_scatters,
                  kGroups);
        // One segment of all parameters where they are frozen later: whole, and
        // of biases alone where it is known as they are sharded.
        const int64_t one = before ? PayloadBytes(kWidth, 1) : kPayloadBytes;
        EXPECT_EQ(counted.counts->scattered_bytes - last.scattered_bytes,
                  kGroups * one);
      }
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(item.value().grad().defined(),
                  item.key().find("bias") != std::string::npos)
            << item.key();
      }
    }
  });
}

// mixed_requires_grad_across_groups: a frozen group issues no reduction.
TEST(ParityFrozenPayload, FrozenGroupsReduceNothing) {
  RunRanks(kWorld, [](RankContext& rank) {
    Counting t(rank, FullyShardOptions().reshard_after_forward(false));
    for (const int frozen : {1, 0, 2}) {
      for (int i = 0; i < kGroups; ++i) {
        for (auto& p : t.model->layers[i]->parameters()) {
          p.requires_grad_(i != frozen);
          p.mutable_grad().reset();
        }
      }
      t.Loss(frozen).backward();
      t.Expect(kGroups, kGroups - 1, "frozen " + std::to_string(frozen));
    }
  });
}

TEST(ParityCommunicationBytes, OneRankIssuesNone) {
  RunRanks(1, [](RankContext& rank) {
    for (const bool freed : {true, false}) {
      Counting t(rank, FullyShardOptions().reshard_after_forward(freed));
      for (int step = 0; step < 2; ++step) t.Loss(step).backward();
      t.root[0].set_requires_gradient_sync(false);
      t.Loss(2).backward();
      t.root[0].set_requires_gradient_sync(true);
      t.Loss(3).backward();
      full_state_dict(t.model);
      clip_grad_norm_(t.model->parameters(), 1.0);
      t.Expect(0, 0, "one rank");
    }
  });
}

// W36: whole values are gathered a group at a time, not a parameter at a time.
TEST(ParityFullStateDict, GathersOnceForEachGroup) {
  RunRanks(kWorld, [](RankContext& rank) {
    Counting t(rank);
    full_state_dict(t.model);
    t.Expect(kGroups, 0, "six parameters");
    t.Loss(1).backward();
    t.last = *t.counted.counts;
    load_full_state_dict(t.model, full_state_dict(t.model));
    t.Expect(kGroups, 0, "and none to load");
  });
}

// Two losses over a shared trunk, one backward each: PyTorch gathers the branch
// that the first one does not reach (a mis-targeted prefetch).
TEST(ParitySplitModel, EachBackwardGathersWhatItReads) {
  RunRanks(kWorld, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Stack(); });
    const auto counted = CountCollectives(rank.group);
    auto options = FullyShardOptions()
                       .mesh(counted.group)
                       .forward_prefetch(false)
                       .limit_all_gathers(1);
    for (auto& layer : model->layers) fully_shard(layer, options);
    FSDPModule root = fully_shard(model, options);
    const auto losses = [](Stack& m, int r) {
      const Tensor trunk = torch::tanh(m->layers[0](Input(r, {4, kWidth})));
      return std::vector<Tensor>{m->layers[1](trunk).pow(2).sum(),
                                 m->layers[2](trunk).pow(2).sum()};
    };
    for (int step = 0; step < 3; ++step) {
      BackwardOfAllRanks(*plain, kWorld, [&, &plain = plain](int r) {
        auto both = losses(plain, step + r);
        both[1].backward({}, /*retain_graph=*/true);
        both[0].backward();
      });
      auto both = losses(model, step + rank.rank);
      CollectiveCounts last = *counted.counts;
      root.set_is_last_backward(false);
      both[1].backward({}, /*retain_graph=*/true);
      EXPECT_EQ(counted.counts->reduce_scatters - last.reduce_scatters, 2);
      last = *counted.counts;
      root.set_is_last_backward(true);
      both[0].backward();
      EXPECT_EQ(counted.counts->reduce_scatters - last.reduce_scatters, 2);
      EXPECT_LE(counted.counts->all_gathers - last.all_gathers, 1);
      EXPECT_EQ(fsdp_stats(model).unsharded_param_bytes, 0);
      ExpectGradients(*model, *plain, 1e-6);  // the trunk's are added in turn
      plain->zero_grad();
      model->zero_grad();
    }
  });
}

}  // namespace
}  // namespace composable
