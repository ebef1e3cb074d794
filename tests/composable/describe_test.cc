// What describe() and the report of a tree say.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hooks/tree_report.h"
#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// The example of the header, and its fields.
TEST(DescribeTest, TextAndJsonOfOneLayer) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(
        1, [] { return Linear(LinearOptions(5, 3).bias(false)); });
    fully_shard(model, rank.options());
    const Description description = describe(model);
    ASSERT_EQ(description.trees.size(), 1u);
    const auto& group = description.trees[0].groups.at(0);
    const auto& weight = group.parameters.at(0);
    EXPECT_EQ(weight.fqn, "weight");
    EXPECT_EQ(weight.sizes, (std::vector<int64_t>{3, 5}));
    const Tensor shard = model->parameters()[0];
    EXPECT_EQ(weight.local_sizes, shard.sizes().vec());
    EXPECT_EQ(weight.local_end - weight.local_begin, shard.numel());
    EXPECT_EQ(group.world_size, 2);
    EXPECT_EQ(group.rank, rank.rank);
    const std::string text = to_string(description);
    if (rank.rank == 0) {
      EXPECT_EQ(text,
                "fully_shard: 1 group, 15 parameters, 8 on this rank (6.2 % "
                "padding)\n"
                "idle, limit_all_gathers=2, backward_pre, forward_prefetch\n"
                "group '' (torch::nn::LinearImpl)\n"
                "    sharded, reshard_after_forward=false, rank 0 of 2, 32 of "
                "128 bytes\n"
                "    'weight' [3, 5] Float: rows [8, 1] here, elements [0, 8) "
                "at offset 0\n");
    }
    const auto json = nlohmann::json::parse(to_json(description));
    const auto& parameter = json["trees"][0]["groups"][0]["parameters"][0];
    EXPECT_EQ(parameter["fqn"], "weight");
    EXPECT_EQ(parameter["sizes"], (std::vector<int64_t>{3, 5}));
    EXPECT_EQ(parameter["dtype"], "Float");
    EXPECT_EQ(parameter["local_end"], weight.local_end);
    EXPECT_EQ(json["trees"][0]["summary"], description.trees[0].summary);
    EXPECT_TRUE(json["plain_parameters"].empty());
  });
}

TEST(DescribeTest, StatesAndOrdersOfATree) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    model->third->bias.requires_grad_(false);
    const auto options = rank.options().limit_all_gathers(3);
    auto handle = fully_shard(model->first, options);
    fully_shard({model->second, model->third}, options);
    fully_shard(model, options);
    handle.set_requires_gradient_sync(false);
    const Tensor loss = MlpLoss(model, rank.rank);
    auto tree = describe(model).trees.at(0);
    EXPECT_EQ(tree.training_state, "forward");
    loss.backward();
    tree = describe(model).trees.at(0);
    EXPECT_EQ(tree.training_state, "idle");
    EXPECT_EQ(tree.limit_all_gathers, 3);
    EXPECT_EQ(tree.forward_order,
              (std::vector<std::string>{"first", "second"}));
    ASSERT_EQ(tree.groups.size(), 3u);
    EXPECT_EQ(tree.groups[0].fqn, "");
    EXPECT_TRUE(tree.groups[0].parameters.empty());
    EXPECT_EQ(tree.groups[1].fqn, "first");
    EXPECT_FALSE(tree.groups[1].requires_gradient_sync);
    EXPECT_GT(tree.groups[1].pending_gradient_bytes, 0);
    EXPECT_EQ(tree.groups[2].modules.size(), 2u);
    EXPECT_EQ(tree.groups[2].parameters.back().fqn, "third.bias");
    EXPECT_FALSE(tree.groups[2].parameters.back().requires_grad);
    handle.unshard();
    const std::string text = to_string(describe(model));
    EXPECT_NE(text.find("    unsharded, reshard_after_forward=true"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("no gradient sync"), std::string::npos) << text;
    EXPECT_NE(text.find("forward order: 'first', 'second'"), std::string::npos)
        << text;
    EXPECT_NE(text.find("'third.bias' [3] Float, frozen"), std::string::npos)
        << text;
  });
}

// Modules that a policy has missed show.
TEST(DescribeTest, PlainParametersAndOnesWithoutValues) {
  RunRanks(1, [](RankContext& rank) {
    Mlp model;
    {
      const MetaDevice meta;
      model->second = model->replace_module("second", Linear(7, 7));
    }
    fully_shard(model->second, rank.options());
    const auto description = describe(model);
    EXPECT_EQ(description.plain_parameters,
              (std::vector<std::string>{"first.weight", "first.bias",
                                        "third.weight", "third.bias"}));
    const std::string text = to_string(description);
    EXPECT_NE(text.find("not sharded: 'first.weight'"), std::string::npos);
    EXPECT_NE(text.find("'weight' [7, 7] Float, without values"),
              std::string::npos)
        << text;
  });
}

TEST(OversizedGroupTest, ComparesWithTheMedianAboveAFloor) {
  constexpr int64_t kMiB = 1 << 20;
  const std::vector<std::pair<std::string, int64_t>> usual = {
      {"(root)", 300 * kMiB}, {"a", 64 * kMiB}, {"b", 64 * kMiB}};
  EXPECT_EQ(OversizedGroup(usual), "");
  EXPECT_EQ(OversizedGroup({{"(root)", 200 * kMiB}, {"a", 1}, {"b", 1}}), "");
  EXPECT_EQ(OversizedGroup({{"(root)", 999 * kMiB}, {"a", 1}}), "");
  const std::string warning = OversizedGroup(
      {{"a", 64 * kMiB}, {"(root)", 1024 * kMiB}, {"b", 64 * kMiB}});
  EXPECT_NE(warning.find("the group '(root)' take 1024 MiB, 16 times the "
                         "median of the 3 groups (64.0 MiB)"),
            std::string::npos)
      << warning;
}

// A model without memory is enough to be warned, once.
TEST(OversizedGroupTest, WarnsWhenATreeIsMade) {
  RunRanks(1, [](RankContext& rank) {
    WarningsOfThisThread warnings;
    ModuleList model;
    {
      const MetaDevice meta;
      model =
          ModuleList(Linear(64, 64), Linear(64, 64), Linear(1 << 14, 1 << 13));
    }
    for (const auto& module : *model) fully_shard(module, rank.options());
    fully_shard(model, rank.options());
    describe(model);
    describe(model);
    EXPECT_EQ(warnings.Count("the parameters of the group '2' take 512 MiB"), 1)
        << warnings.text();
  });
}

}  // namespace
}  // namespace composable
