// The smallest complete sharded training: every rank holds a part of the model
// and sees a part of the data; the whole weights go to a file at the end.
//
//   tools/run --nproc=2 bazel-bin/examples/two_ranks weights.pt
#include <torch/torch.h>

#include <iostream>
#include <string>

#include "composable/composable.h"
#include "examples/support/run_main.h"

namespace {

constexpr int64_t kWidth = 256;
constexpr int kSteps = 60;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 2 * kWidth));
    down = register_module("down", torch::nn::Linear(2 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::gelu(up(x)));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(2, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 4; ++i) blocks->push_back(Block());
    last = register_module("last", torch::nn::Linear(kWidth, 1));
  }
  at::Tensor forward(at::Tensor x) {
    x = first(x);
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return last(x);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Net);

// Points of the plane, and the height to learn above each.
struct Data {
  explicit Data(uint64_t seed, int64_t points = 64) {
    torch::manual_seed(seed);
    x = torch::rand({points, 2}) * 4 - 2;
    y = (torch::sin(2 * x.select(1, 0)) * x.select(1, 1)).unsqueeze(1);
  }
  at::Tensor x, y;
};

template <typename Module>
size_t Bytes(Module& module) {
  size_t bytes = 0;
  for (auto& parameter : module->parameters()) bytes += parameter.nbytes();
  return bytes;
}

// On a sharded model a collective: all ranks call it.
double Loss(Net& model, const Data& data) {
  const torch::NoGradGuard no_grad;
  return torch::mse_loss(model->forward(data.x), data.y).item<double>();
}

int Main(const std::string& path) {
  composable::init_process_group();
  const int rank = composable::rank();

  torch::manual_seed(0);  // the same initial weights on every rank
  Net model;
  const size_t whole = Bytes(model);
  for (auto& block : *model->blocks) composable::fully_shard(block);
  composable::fully_shard(model);
  std::cout << "rank " << rank << " holds " << Bytes(model) << " of " << whole
            << " bytes" << std::endl;

  // After sharding, because the optimizer is to hold the shards.
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < kSteps; ++step) {
    const Data data(1000 * (rank + 1) + step);  // other points on every rank
    auto loss = torch::mse_loss(model->forward(data.x), data.y);
    loss.backward();  // leaves the mean gradient of all ranks
    composable::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (step % 20 == 0 || step == kSteps - 1) {
      std::cout << "rank " << rank << " step " << step << ": loss of its part "
                << loss.item<double>() << std::endl;
    }
  }

  const Data test(/*seed=*/7);
  const double loss = Loss(model, test);
  const auto weights = composable::full_state_dict(model);  // a collective too
  if (rank != 0) return 0;
  {
    Net plain;
    composable::load_full_state_dict(plain, weights);
    torch::save(plain, path);
  }
  Net restored;  // as a program would that knows nothing of sharding
  torch::load(restored, path);
  std::cout << "test loss sharded " << loss << ", from " << path << " "
            << Loss(restored, test) << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return examples::RunMain(
      [&] { return Main(argc > 1 ? argv[1] : "two_ranks.pt"); });
}
