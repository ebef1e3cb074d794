// Reports about ranks that differ: in what they start with, reduce or issue.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/parity/bug_reports.h"
#include "tests/parity/counting_backend.h"
#include "tests/parity/hybrid_reference.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// --- Hybrid sharding ---------------------------------------------------------

// Each rank's gradient is its input. bfloat16 has no 257, so a reduction in it
// loses the one, on either leg.
TEST(BugReportTest, BothLegsOfAHybridReductionAreInTheReduceDtype) {
  const std::vector<std::vector<float>> inputs{
      {256, 1, 0, 0}, {256, 0, 1, 0}, {256, 0, 0, 1}, {256, 1, 1, 1}};
  RunRanks(4, [&](RankContext& rank) {
    const auto mesh = Grid(rank, 2, 2);
    for (const auto& values : inputs) {
      Linear layer = RankContext::Seeded(
          1, [] { return Linear(LinearOptions(1, 256).bias(false)); });
      fully_shard(layer, FullyShardOptions().mesh(mesh).mp_policy(
                             MixedPrecisionPolicy()
                                 .param_dtype(torch::kBFloat16)
                                 .reduce_dtype(torch::kFloat)));
      call(layer, torch::full({1, 1}, values[rank.rank])).sum().backward();
      float mean = 0;
      for (const float value : values) mean += value / 4;
      const Tensor gradient = layer->parameters()[0].grad();
      ASSERT_EQ(gradient.scalar_type(), torch::kFloat);
      EXPECT_GT(gradient.numel(), 0);
      EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, mean)))
          << gradient;
    }
  });
}

TEST(BugReportTest, ReplicasOfOtherSeedsStartEqual) {
  RunRanks(4, [](RankContext& rank) {
    const auto mesh = Grid(rank, 2, 2);
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Mlp model = RankContext::Seeded(1 + rank.rank, [] { return Mlp(); });
    ShardEverySubmodule(model, FullyShardOptions().mesh(mesh));
    ExpectParameters(*model, *plain);
    for (const auto& item : full_state_dict(model)) {
      EXPECT_TRUE(
          torch::equal(item.value(), plain->named_parameters()[item.key()]));
    }
  });
}

// Ranks that differ only from the other replica, only from their own, or both:
// all ranks know, and go on together.
TEST(BugReportTest, ReplicasThatDifferAreNamedWhereNothingSyncs) {
  const std::vector<std::vector<int>> differing{{2, 3}, {1}, {3}, {1, 3}};
  RunRanks(4, [&](RankContext& rank) {
    const auto mesh = Grid(rank, 2, 2);
    for (const auto& ranks : differing) {
      Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
      const bool differs =
          std::find(ranks.begin(), ranks.end(), rank.rank) != ranks.end();
      if (differs) {
        const torch::NoGradGuard no_grad;
        model->second->bias[3].add_(1e-3);
      }
      ExpectThrows<c10::ValueError>(
          [&] {
            fully_shard(
                model,
                FullyShardOptions().mesh(mesh).sync_module_states(false));
          },
          {"ranks start with other values",
           "'second.bias' (ranks " + c10::Join(", ", ranks) + ")"});
      EXPECT_FALSE(IsShard(model->parameters()[0]));
    }
  });
}

// --- Order -------------------------------------------------------------------

// Twenty equal models, each at other addresses, issue the same on all ranks.
TEST(BugReportTest, OrderOfCollectivesDoesNotDependOnAddresses) {
  std::mutex mutex;
  std::map<std::string, int> traces;
  RunRanks(3, [&](RankContext& rank) {
    std::vector<std::unique_ptr<char[]>> in_between;
    std::vector<Mlp> kept;
    for (int i = 0; i < 20; ++i) {
      in_between.push_back(
          std::make_unique<char[]>(97 * (i + 1) + 61 * rank.rank));
      Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
      fully_shard({model->third, model->first}, rank.options());
      fully_shard(model, rank.options());
      std::string trace;
      MlpLoss(model, rank.rank).backward();
      set_trace_observer(model, [&](TraceEvent event, const std::string& fqn) {
        trace += std::string(ToString(event)) + " " + fqn + "\n";
      });
      MlpLoss(model, rank.rank).backward();
      set_trace_observer(model, nullptr);
      kept.push_back(model);
      const std::lock_guard<std::mutex> lock(mutex);
      ++traces[trace];
    }
  });
  EXPECT_EQ(traces.size(), 1u);
  for (const auto& [trace, count] : traces) {
    EXPECT_NE(trace.find("reduce"), std::string::npos) << count << "\n"
                                                       << trace;
  }
}

// --- Clipping ----------------------------------------------------------------

struct ClipSetting {
  std::string name;
  double norm_type;
};

class BugReportClip : public testing::TestWithParam<ClipSetting> {};

INSTANTIATE_TEST_SUITE_P(
    All, BugReportClip,
    testing::Values(ClipSetting{"Two", 2}, ClipSetting{"One", 1},
                    ClipSetting{"Infinity",
                                std::numeric_limits<double>::infinity()}),
    [](const auto& info) { return info.param.name; });

TEST_P(BugReportClip, IsOneCollectiveHoweverManyParameters) {
  RunRanks(2, [](RankContext& rank) {
    const auto counted = CountCollectives(rank.group);
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    ShardEverySubmodule(model, FullyShardOptions().mesh(counted.group));
    MlpLoss(model, rank.rank).backward();
    *counted.counts = {};
    clip_grad_norm_(model->parameters(), 0.5, GetParam().norm_type);
    EXPECT_EQ(counted.counts->all_reduces, 1);
    EXPECT_EQ(counted.counts->all_gathers, 0);
    EXPECT_EQ(counted.counts->reduce_scatters, 0);
  });
}

TEST_P(BugReportClip, SkipsOneRanksUndefinedGradientInTheSameCollectives) {
  std::mutex mutex;
  std::map<double, int> norms;
  RunRanks(2, [&](RankContext& rank) {
    const auto counted = CountCollectives(rank.group);
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, FullyShardOptions().mesh(counted.group));
    ExpectSameBackward(rank, plain, sharded, MlpLoss);
    Tensor shard = sharded->named_parameters()["second.weight"];
    // What this rank has of it: the other one has the rest of the whole.
    const Tensor here = shard.grad().clone();
    if (rank.rank == 0) shard.mutable_grad().reset();
    std::vector<Tensor> left;
    for (const auto& item : plain->named_parameters()) {
      const Tensor gradient = item.value().grad();
      if (item.key() != "second.weight") {
        left.push_back(gradient.flatten());
        continue;
      }
      const int64_t begin =
          rank.rank == 0 ? here.numel() : gradient.numel() - here.numel();
      left.push_back(gradient.flatten().slice(0, begin));
    }
    *counted.counts = {};
    const double norm =
        clip_grad_norm_(sharded->parameters(), 1e9, GetParam().norm_type);
    EXPECT_EQ(counted.counts->all_reduces, 1);
    EXPECT_NEAR(norm,
                torch::cat(left).norm(GetParam().norm_type).item<double>(),
                1e-5 * norm);
    const std::lock_guard<std::mutex> lock(mutex);
    ++norms[norm];
  });
  EXPECT_EQ(norms.size(), 1u);
}

// --- The API on one module ---------------------------------------------------

TEST(BugReportTest, AppliedTwiceThroughAnotherHandleIsRefused) {
  RunRanks(1, [](RankContext& rank) {
    Linear model(3, 4);
    fully_shard(model, rank.options());
    const Linear other(model.ptr());
    const std::shared_ptr<Module> base = model.ptr();
    const std::vector<ModuleRef> refs{model, other, base, *model};
    for (const auto& ref : refs) {
      ExpectThrows<c10::ValueError>(
          [&] { fully_shard(ref, rank.options()); },
          {"fully_shard was already applied", "torch::nn::LinearImpl"});
      EXPECT_EQ(fully_shard.state(ref), fully_shard.state(model));
    }
  });
}

TEST(BugReportTest, GroupingSaysWhatWasLeftToTheRoot) {
  RunRanks(2, [](RankContext& rank) {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    // A policy that has missed `second`.
    fully_shard(model->first, rank.options());
    fully_shard(model->third, rank.options());
    fully_shard(model, rank.options());
    MlpLoss(model, 1).backward();
    std::map<std::string, std::vector<std::string>> groups;
    const Description description = describe(model);
    for (const auto& group : description.trees.at(0).groups) {
      for (const auto& parameter : group.parameters) {
        groups[group.fqn].push_back(parameter.fqn);
      }
    }
    const std::map<std::string, std::vector<std::string>> expected{
        {"", {"second.weight", "second.bias"}},
        {"first", {"first.weight", "first.bias"}},
        {"third", {"third.weight", "third.bias"}}};
    EXPECT_EQ(groups, expected);
    const std::string text = to_string(description);
    const size_t root = text.find("group ''");
    ASSERT_NE(root, std::string::npos) << text;
    EXPECT_NE(text.find("reshard_after_forward=false", root),
              std::string::npos);
    EXPECT_NE(text.find("'second.weight'", root), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace composable
