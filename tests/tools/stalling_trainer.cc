// A rank to be killed: trains for ever, and falls asleep in a forward of its
// own where it is told to.
//
//   stalling_trainer [SLEEPER]   rank SLEEPER sleeps in its third step, while
//                                the others wait for it in a collective
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "composable/composable.h"
#include "examples/support/run_main.h"

namespace {

bool asleep_next = false;

struct BlockImpl : torch::nn::Module {
  BlockImpl() { fc = register_module("fc", torch::nn::Linear(64, 64)); }
  torch::Tensor forward(const torch::Tensor& x) {
    if (asleep_next) {
      std::cout << "asleep" << std::endl;
      std::this_thread::sleep_for(std::chrono::minutes(2));
    }
    return torch::tanh(fc(x));
  }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Block);

int Train(int sleeper) {
  composable::init_process_group();
  torch::manual_seed(0);
  torch::nn::Sequential net(Block{}, Block{}, Block{});
  for (const auto& block : *net) composable::fully_shard(*block.ptr());
  composable::fully_shard(net);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int step = 1;; ++step) {
    asleep_next = step == 3 && composable::rank() == sleeper;
    net->forward(torch::randn({4, 64})).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    std::cout << "step " << step << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return examples::RunMain(
      [&] { return Train(argc > 1 ? std::atoi(argv[1]) : -1); });
}
