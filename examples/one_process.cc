// The same training twice, in one process and without a launcher: an ordinary
// LibTorch model, and then the same model after fully_shard.
//
//   bazel-bin/examples/one_process
#include <torch/torch.h>

#include <iomanip>
#include <iostream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "composable/composable.h"
#include "examples/support/run_main.h"

namespace {

// An ordinary module. Nothing in here knows about sharding.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(1, 64));
    hidden = register_module("hidden", torch::nn::Linear(64, 64));
    last = register_module("last", torch::nn::Linear(64, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(hidden(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, hidden{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

// An ordinary training loop. Nor does anything in here.
std::vector<double> Train(Net& model) {
  torch::optim::Adam optimizer(model->parameters(),
                               torch::optim::AdamOptions(1e-2));
  const auto x = torch::linspace(-3, 3, 128).unsqueeze(1);
  const auto y = torch::sin(2 * x);
  std::vector<double> losses;
  for (int step = 0; step < 100; ++step) {
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int Main() {
  torch::manual_seed(0);
  Net plain;
  const auto expected = Train(plain);

  // A group of this process alone: rank 0 of 1. Programs of several processes
  // call init_process_group(), which reads what the launcher says.
  auto group = composable::init_process_group(
      c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*world_size=*/1);
  torch::manual_seed(0);  // the same initial weights
  Net sharded;
  composable::fully_shard(sharded, composable::FullyShardOptions().mesh(group));
  const auto losses = Train(sharded);

  std::cout << "step  ordinary  sharded\n"
            << std::fixed << std::setprecision(6);
  for (size_t step = 0; step < losses.size(); step += 20) {
    std::cout << std::setw(4) << step << "  " << expected[step] << "  "
              << losses[step] << "\n";
  }
  const bool same = losses == expected;
  std::cout << "The losses are " << (same ? "" : "NOT ") << "the same.\n";
  return same ? 0 : 1;
}

}  // namespace

int main() { return examples::RunMain(Main); }
