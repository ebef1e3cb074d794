// A shared library that holds all of //composable and trains one step when its
// one function is called: what a Python extension or a plug-in is.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <typeinfo>
#include <utility>
#include <vector>

#include "composable/composable.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

constexpr double kLearningRate = 0.5;
constexpr int64_t kIn = 6;
constexpr int64_t kHidden = 10;
constexpr int64_t kOut = 3;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(kIn, kHidden));
    down = register_module("down", torch::nn::Linear(kHidden, kIn));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::tanh(up(x)));
  }
  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(kIn, kOut));
  }
  at::Tensor loss(int rank) {
    const at::Tensor steps = torch::linspace(-1, 1, 4 * kIn).view({4, kIn});
    at::Tensor x = steps * (rank + 1);
    const at::Tensor target = torch::cos(x.narrow(1, 0, kOut));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::nn::functional::mse_loss(head(x), target);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

// What one rank's model did.
struct Step {
  double loss_before = 0;
  double loss_after = 0;
  std::vector<at::Tensor> weights;  // full, after the step
  int64_t elements = 0;             // of parameters() of this rank
};

Step Sharded(Model model, const ProcessGroupPtr& group) {
  const auto options = FullyShardOptions().mesh(group);
  for (auto& block : *model->blocks) fully_shard(block, options);
  fully_shard(model, options);
  torch::optim::SGD optimizer(model->parameters(), kLearningRate);
  const int rank = group->getRank();
  Step step;
  at::Tensor loss = model->loss(rank);
  step.loss_before = loss.item<double>();
  loss.backward();
  optimizer.step();
  step.loss_after = model->loss(rank).item<double>();
  for (const auto& item : full_state_dict(model)) {
    step.weights.push_back(item.value());
  }
  for (const auto& shard : model->parameters()) step.elements += shard.numel();
  return step;
}

// Rank 0's step of plain data parallel training over `world_size` ranks.
Step Plain(Model model, int world_size) {
  torch::optim::SGD optimizer(model->parameters(), kLearningRate);
  Step step;
  for (int rank = 0; rank < world_size; ++rank) {
    at::Tensor loss = model->loss(rank);
    if (rank == 0) step.loss_before = loss.item<double>();
    loss.backward();
  }
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad().div_(world_size);
  }
  optimizer.step();
  step.loss_after = model->loss(0).item<double>();
  for (const auto& parameter : model->parameters()) {
    step.weights.push_back(parameter.detach());
    step.elements += parameter.numel();
  }
  return step;
}

Model MakeModel() {
  return RankContext::Seeded(3, [] { return Model(); });
}

// One rank runs in the thread of the caller, several in threads of their own.
Step TrainSharded(int world_size) {
  if (world_size == 1) {
    return Sharded(MakeModel(),
                   init_process_group(c10::make_intrusive<c10d::HashStore>(),
                                      /*rank=*/0, world_size));
  }
  Step first;
  RunRanks(world_size, [&](RankContext& rank) {
    Step step = Sharded(MakeModel(), rank.group);
    if (rank.rank == 0) first = std::move(step);
  });
  return first;
}

bool SameBits(const std::vector<at::Tensor>& a,
              const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace
}  // namespace composable

extern "C" {

struct StepReport {
  double sharded_before;
  double sharded_after;
  double plain_before;
  double plain_after;
  int64_t same_weights;      // 1 if all weights after the step are equal
  int64_t sharded_elements;  // parameters that rank 0 holds
  int64_t plain_elements;
};

// Trains one step on `world_size` ranks of this process. Returns 0, or 1 with
// the message of what was thrown in `error`.
int TrainStep(int world_size, StepReport* report, char* error, size_t size) {
  std::string message;
  try {
    const auto sharded = composable::TrainSharded(world_size);
    const auto plain = composable::Plain(composable::MakeModel(), world_size);
    *report = {sharded.loss_before,
               sharded.loss_after,
               plain.loss_before,
               plain.loss_after,
               composable::SameBits(sharded.weights, plain.weights),
               sharded.elements,
               plain.elements};
    return 0;
  } catch (const c10::Error& thrown) {
    message = thrown.what_without_backtrace();
  } catch (const std::exception& thrown) {
    message = thrown.what();
  }
  std::snprintf(error, size, "%s", message.c_str());
  return 1;
}

// The C++ type of the process's autograd engine, mangled.
const char* EngineType() {
  const auto& engine = torch::autograd::Engine::get_default_engine();
  return typeid(engine).name();
}

}  // extern "C"
