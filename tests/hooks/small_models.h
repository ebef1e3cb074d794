// Small sharded models for tests of the hooks, over a communicator whose other
// rank holds what this one holds. Waits finish what they wait for.
//
//   SmallRank rank;
//   auto net = rank.Shard(3);
//   at::sum(net->at(0)->weight);
//   IsSharded(net->at(0));   // false
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "composable/fully_shard.h"
#include "composable/stats.h"
#include "state/fsdp_state.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"

namespace composable {

// Layers "l0", "l1", ... of 4 inputs and 4 outputs, one after the other.
struct Net : torch::nn::Module {
  explicit Net(int count) {
    for (int i = 0; i < count; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i), torch::nn::Linear(4, 4)));
    }
  }
  torch::nn::Linear& at(int i) { return layers[i]; }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

struct SmallRank {
  SmallRank()
      : backend(MakeManualBackend(2, [](const std::string& /*event*/) {})) {
    backend->set_finish_on_wait(true);
  }
  FullyShardOptions options() const {
    return FullyShardOptions().mesh(GroupOf(backend));
  }
  // Each layer is a group; the net itself owns none.
  std::shared_ptr<Net> Shard(int layers, FullyShardOptions root = {}) const {
    auto net = std::make_shared<Net>(layers);
    for (auto& layer : net->layers) fully_shard(layer, options());
    fully_shard(net, root.mesh(options().mesh()));
    return net;
  }

  c10::intrusive_ptr<ManualBackend> backend;
};

inline FSDPState& StateOf(const ModuleRef& module) {
  return *fully_shard.state(module);
}
inline bool IsSharded(const ModuleRef& module) {
  return StateOf(module).group()->is_sharded();
}

}  // namespace composable
