// Reports about optimizers, weights and ignored parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/parity/bug_reports.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// --- Optimizers --------------------------------------------------------------

TEST(BugReportTest, OptimizerBuiltAfterAForwardTrains) {
  for (const Groups groups : {Groups::kOne, Groups::kPerModule}) {
    ExactRanks(2, [&](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      Shard(sharded, groups, rank.options());
      const auto before = sharded->parameters();
      MlpLoss(sharded, 1);  // leaves the root gathered
      const auto after = sharded->parameters();
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(before[i].is_same(after[i]));
      }
      torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
      torch::optim::SGD optimizer(after, 0.1);
      for (int step = 0; step < 3; ++step) {
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        ExpectSameBackward(rank, plain, sharded, MlpLoss);
        plain_optimizer.step();
        optimizer.step();
        ExpectParameters(*sharded, *plain);
      }
    });
  }
}

// A third party's optimizer: by pointer, and with coarse steps for parameters
// that have many elements, as 8-bit ones do.
void CoarseStep(const Tensor& parameter, int64_t numel) {
  const Tensor& gradient = parameter.grad();
  if (!gradient.defined() || gradient.numel() == 0) return;
  auto* value = parameter.data_ptr<float>();
  const auto* slope = gradient.data_ptr<float>();
  for (int64_t i = 0; i < parameter.numel(); ++i) {
    const float exact = 0.1F * slope[i];
    value[i] -= numel >= 30 ? std::round(exact * 16) / 16 : exact;
  }
}

TEST(BugReportTest, AThirdPartysOptimizerReadsShardsAndWholeSizes) {
  for (const int world_size : {2, 3}) {
    ExactRanks(world_size, [](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      auto handles = ShardEverySubmodule(sharded, rank.options());
      MlpLoss(sharded, 0);  // makes the tree, which is then one
      std::map<std::string, int64_t> numel;
      const Description description = describe(sharded);
      for (const auto& group : description.trees.at(0).groups) {
        for (const auto& parameter : group.parameters) {
          int64_t product = 1;
          for (const int64_t size : parameter.sizes) product *= size;
          numel[parameter.fqn] = product;
        }
      }
      EXPECT_EQ(numel["second.weight"], 49);
      for (int step = 0; step < 3; ++step) {
        plain->zero_grad();
        sharded->zero_grad();
        ExpectSameBackward(rank, plain, sharded, MlpLoss);
        for (const auto& item : plain->named_parameters()) {
          CoarseStep(item.value(), item.value().numel());
        }
        for (const auto& item : sharded->named_parameters()) {
          CoarseStep(item.value(), numel.at(item.key()));
        }
        for (auto& handle : handles) handle.mark_dirty();
        ExpectParameters(*sharded, *plain);
      }
    });
  }
}

// `second` never gets a gradient, so it has no state.
struct HalfUsedImpl : Module {
  Tensor forward(const Tensor& x) { return first(x); }
  Linear first{register_module("first", Linear(5, 7))};
  Linear second{register_module("second", Linear(7, 3))};
};
TORCH_MODULE(HalfUsed);

TEST(BugReportTest, OptimizerStateOfRowsResumes) {
  ExactRanks(2, [](RankContext& rank) {
    const auto options = torch::optim::AdamOptions(0.01);
    const auto step = [&](HalfUsed& model, torch::optim::Adam& optimizer,
                          int seed) {
      optimizer.zero_grad();
      model(Input(10 * seed + rank.rank, {4, 5})).pow(2).sum().backward();
      optimizer.step();
    };
    HalfUsed model = RankContext::Seeded(1, [] { return HalfUsed(); });
    fully_shard(model, rank.options());
    torch::optim::Adam optimizer(model->parameters(), options);
    for (int i = 0; i < 2; ++i) step(model, optimizer, i);
    const StateDict weights = full_state_dict(model);
    std::stringstream archive;
    torch::save(optimizer, archive);
    step(model, optimizer, 2);

    HalfUsed other = RankContext::Seeded(2, [] { return HalfUsed(); });
    fully_shard(other, rank.options());
    torch::optim::Adam resumed(other->parameters(), options);
    load_full_state_dict(other, weights);
    torch::load(resumed, archive);
    step(other, resumed, 2);
    const StateDict expected = full_state_dict(model);
    const StateDict actual = full_state_dict(other);
    for (const auto& item : expected) {
      EXPECT_TRUE(torch::equal(actual[item.key()], item.value())) << item.key();
    }
    EXPECT_FALSE(
        torch::equal(weights["first.weight"], expected["first.weight"]));
  });
}

// --- Weights -----------------------------------------------------------------

TEST(BugReportTest, LoadingLeavesTheCallersTensorsAlone) {
  ExactRanks(2, [](RankContext& rank) {
    Mlp source = RankContext::Seeded(2, [] { return Mlp(); });
    StateDict weights;
    std::vector<Tensor> values;
    for (const auto& item : source->named_parameters()) {
      weights.insert(item.key(), item.value().detach());
      values.push_back(item.value().detach().clone());
    }
    const StateDict before = weights;
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model->second, rank.options());  // the rest stays plain
    load_full_state_dict(model, weights);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    MlpLoss(model, rank.rank).backward();
    optimizer.step();
    EXPECT_EQ(weights.keys(), before.keys());
    for (size_t i = 0; i < values.size(); ++i) {
      const Tensor now = weights[i].value();
      EXPECT_TRUE(now.is_same(before[i].value()));
      EXPECT_TRUE(torch::equal(now, values[i])) << weights[i].key();
    }
  });
}

TEST(BugReportTest, IgnoredParametersAreSavedAndLoaded) {
  for (const int world_size : {2, 3}) {
    ExactRanks(world_size, [](RankContext& rank) {
      Linear source = RankContext::Seeded(2, [] { return Linear(3, 7); });
      fully_shard(source, rank.options().ignored_params({source->bias}));
      const StateDict weights = full_state_dict(source);
      Linear plain = RankContext::Seeded(2, [] { return Linear(3, 7); });
      EXPECT_TRUE(torch::equal(weights["weight"], plain->weight));
      EXPECT_TRUE(torch::equal(weights["bias"], plain->bias));

      Linear target = RankContext::Seeded(1, [] { return Linear(3, 7); });
      fully_shard(target, rank.options().ignored_params({target->bias}));
      const Tensor bias = target->bias;
      load_full_state_dict(target, weights);
      EXPECT_TRUE(target->bias.is_same(bias));
      EXPECT_FALSE(IsShard(target->bias));
      ExpectParameters(*target, *plain);
    });
  }
}

// --- Ignored -----------------------------------------------------------------

// Where an ignored parameter is, is not fully_shard's business.
struct PartElsewhereImpl : Module {
  Linear here{register_module("here", Linear(3, 7))};
  Tensor elsewhere{
      register_parameter("elsewhere", torch::empty({7}, torch::kMeta))};
};
TORCH_MODULE(PartElsewhere);

TEST(BugReportTest, IgnoredParametersAreNotMoved) {
  ExactRanks(2, [](RankContext& rank) {
    PartElsewhere model =
        RankContext::Seeded(1, [] { return PartElsewhere(); });
    const Tensor before = model->elsewhere;
    fully_shard(model, rank.options().ignored_params({before}));
    EXPECT_TRUE(model->elsewhere.is_same(before));
    EXPECT_TRUE(model->named_parameters()["elsewhere"].is_same(before));
    EXPECT_TRUE(before.is_meta());
    EXPECT_TRUE(IsShard(model->here->parameters()[0]));
    // What is used trains on.
    model->here(Input(rank.rank, {2, 3})).sum().backward();
    EXPECT_TRUE(model->here->parameters()[0].grad().defined());
  });
}

}  // namespace
}  // namespace composable
