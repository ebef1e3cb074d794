// CPUOffloadPolicy: no effect on CPUs, refused on a mesh of CUDA devices.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

TEST(OffloadPolicyTest, ChangesNoValueOnCpus) {
  ExactRanks(2, [](RankContext& rank) {
    for (const bool pin_memory : {true, false}) {
      auto [plain, sharded] = MakePair([] { return Mlp(); });
      Shard(sharded, Groups::kPerModule,
            rank.options().offload_policy(CPUOffloadPolicy(pin_memory)));
      torch::optim::SGD optimizer(sharded->parameters(), 0.1);
      torch::optim::SGD expected(plain->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        ExpectSameBackward(rank, plain, sharded, MlpLoss);
        optimizer.step();
        expected.step();
        ExpectParameters(*sharded, *plain);
      }
    }
  });
}

TEST(OffloadPolicyTest, IsDescribed) {
  RunRanks(1, [](RankContext& rank) {
    Mlp model;
    fully_shard(model->first,
                rank.options().offload_policy(CPUOffloadPolicy()));
    fully_shard(model->second,
                rank.options().offload_policy(CPUOffloadPolicy(false)));
    fully_shard(model, rank.options());
    const auto description = describe(model);
    const auto& groups = description.trees.at(0).groups;
    EXPECT_EQ(groups.at(0).offload_policy, "none");
    EXPECT_EQ(groups.at(1).offload_policy, "cpu, pin_memory");
    EXPECT_EQ(groups.at(2).offload_policy, "cpu");
    EXPECT_NE(to_string(description).find("offload_policy: cpu, pin_memory\n"),
              std::string::npos);
    const auto json = nlohmann::json::parse(to_json(description));
    EXPECT_EQ(json["trees"][0]["groups"][2]["offload_policy"], "cpu");
  });
}

TEST(OffloadPolicyTest, IsRefusedOnAMeshOfCudaDevices) {
  RunRanks(1, [](RankContext& rank) {
    const DeviceMesh cuda(rank.group, "cuda");
    Mlp model;
    for (const bool pin_memory : {true, false}) {
      ExpectThrows<c10::NotImplementedError>(
          [&] {
            fully_shard(model, FullyShardOptions().mesh(cuda).offload_policy(
                                   CPUOffloadPolicy(pin_memory)));
          },
          {"offload_policy is CPUOffloadPolicy", "'cuda'",
           "Leave offload_policy at OffloadPolicy()"});
    }
    EXPECT_EQ(fully_shard.state(model), nullptr);
    EXPECT_NO_THROW(CheckOffloadPolicy(OffloadPolicy(), cuda));
  });
}

}  // namespace
}  // namespace composable
