// Cases of bug reports as a table: each runs on all its numbers of ranks.
//
//   const std::vector<composable::BugReport> cases{composable::Matches(
//       "LinearLayer", {1, 2}, [] { return torch::nn::Linear(3, 4); },
//       [](auto& model, const FullyShardOptions& options) {
//         composable::fully_shard(model, options);
//       },
//       [](auto& model, int r) {
//         return model(composable::Input(r, {2, 3})).pow(2).sum();
//       })};
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {

struct BugReport {
  std::string name;
  std::vector<int> world_sizes;
  std::function<void(RankContext&)> check;
};

inline std::string NameOf(const testing::TestParamInfo<BugReport>& info) {
  return info.param.name;
}

inline void RunOnAllWorldSizes(const BugReport& report) {
  for (const int world_size : report.world_sizes) {
    SCOPED_TRACE(world_size);
    ExactRanks(world_size, report.check);
  }
}

// Three backwards of `loss(model, r)`, which add up, and from the second on with
// the order of the first: bit for bit those of the unsharded model. Then nothing
// is gathered any more.
template <typename Make, typename ShardIt, typename Loss>
BugReport Matches(std::string name, std::vector<int> world_sizes, Make make,
                  ShardIt shard, Loss loss) {
  return {std::move(name), std::move(world_sizes), [=](RankContext& rank) {
            auto [plain, sharded] = MakePair(make);
            shard(sharded, rank.options());
            for (int step = 0; step < 3; ++step) {
              ExpectSameBackward(rank, plain, sharded, loss);
            }
            EXPECT_EQ(fsdp_stats(sharded).unsharded_param_bytes, 0);
          }};
}

}  // namespace composable
