// The unsharded model that hybrid sharding over a grid of ranks is compared
// with.
//
//   fully_shard(sharded, On(composable::Grid(rank, 2, 2)));
//   composable::HybridBackward(*plain, 2, 2, [&, &plain = plain](int r) {
//     MlpLoss(plain, r).backward();
//   });
#pragma once

#include <vector>

#include "tests/composable/semantics.h"

namespace composable {

inline DeviceMesh Grid(RankContext& rank, int64_t replicas, int64_t shards) {
  return init_device_mesh("cpu", {replicas, shards}, {"replicate", "shard"},
                          rank.group);
}

// Adds the mean of all ranks' gradients, added up as the grid does: over the
// shards of each replica, then over replicas. Exact for up to two of each.
template <typename Backward>
void HybridBackward(torch::nn::Module& plain, int replicas, int shards,
                    Backward backward, double factor = 0) {
  auto parameters = plain.parameters();
  std::vector<at::Tensor> before;
  for (const auto& parameter : parameters) before.push_back(parameter.grad());
  std::vector<at::Tensor> totals(parameters.size());
  const auto add = [](at::Tensor& to, const at::Tensor& what) {
    if (what.defined()) to = to.defined() ? to + what : what.clone();
  };
  for (int replica = 0; replica < replicas; ++replica) {
    std::vector<at::Tensor> sums(parameters.size());
    for (int shard = 0; shard < shards; ++shard) {
      for (auto& parameter : parameters) parameter.mutable_grad().reset();
      backward(replica * shards + shard);
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) {
        add(sums[i], parameters[i].grad());
      }
    }
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) add(totals[i], sums[i]);
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = before[i];
    if (totals[i].defined()) {
      const at::Tensor mean =
          totals[i] / (factor == 0 ? replicas * shards : factor);
      gradient = gradient.defined() ? gradient + mean : mean;
    }
    parameters[i].mutable_grad() = gradient;
  }
}

}  // namespace composable
