// A simulation that trains a network while it runs, and uses it at once.
//
// A coarse solver of Burgers' equation misses what happens below its cells. A
// fine one runs beside it for as long as it is affordable, and a small network
// learns from it, step by step, what the coarse one lacks (a closure). Every
// rank owns a piece of space, and the piece's cells are its part of the batch.
// The solver owns the loop: sharding adds no trainer, no callback and no thread
// that it would have to hand control to.
//
//   tools/run --nproc=2 bazel-bin/examples/solver
#include <torch/torch.h>

#include <cmath>
#include <iomanip>
#include <iostream>

#include "composable/composable.h"
#include "examples/burgers.h"
#include "examples/support/across_ranks.h"
#include "examples/support/run_main.h"

namespace examples {
namespace {

constexpr int64_t kCells = 32;  // of the coarse grid, over all ranks
constexpr int64_t kRatio = 8;   // fine cells, and steps, per coarse one
constexpr double kTimeStep = 0.03;
constexpr int kWindows = 8;          // parts of the run that are reported
constexpr int kStepsPerWindow = 50;  // long enough for errors to grow
constexpr int64_t kReach = 2;  // cells on either side that the closure sees

// The rate of change that a cell lacks, from the cells around it.
struct ClosureImpl : torch::nn::Module {
  explicit ClosureImpl(int64_t width = 64) {
    first = register_module("first", torch::nn::Linear(2 * kReach + 1, width));
    hidden = register_module("hidden", torch::nn::Linear(width, width));
    last = register_module("last", torch::nn::Linear(width, 1));
  }
  at::Tensor forward(const at::Tensor& cells) {  // [n, 2 * kReach + 1] to [n]
    return last(torch::gelu(hidden(torch::gelu(first(cells))))).squeeze(1);
  }
  torch::nn::Linear first{nullptr}, hidden{nullptr}, last{nullptr};
};
TORCH_MODULE(Closure);

// What a coarse cell shows of the fine cells within it.
at::Tensor Coarsen(const at::Tensor& fine) {
  return fine.view({-1, kRatio}).mean(1);
}

double Error(c10d::ProcessGroup& group, const at::Tensor& u,
             const at::Tensor& truth) {
  return std::sqrt(MeanOverRanks(group, torch::mse_loss(u, truth)));
}

int Simulate() {
  auto group = composable::init_process_group();
  const int ranks = composable::world_size();
  TORCH_CHECK_VALUE(kCells % ranks == 0 && kCells / ranks >= kReach,
                    "expected a number of ranks that divides ", kCells,
                    " cells, but got ", ranks);
  const Burgers coarse(group, kCells / ranks);
  const Burgers fine(group, kCells * kRatio / ranks);

  torch::manual_seed(0);
  Closure closure;
  composable::fully_shard(closure->hidden);
  composable::fully_shard(closure);
  torch::optim::Adam optimizer(closure->parameters(),
                               torch::optim::AdamOptions(3e-3));
  const auto neighbourhood = [&](const at::Tensor& u) {
    return coarse.WithHalo(u, kReach).unfold(0, 2 * kReach + 1, 1);
  };

  if (composable::rank() == 0) {
    std::cout << "   time      loss  error alone  error with closure\n";
  }
  at::Tensor truth = 1 + fine.Centers().sin();  // the fine solution
  double t = 0;
  for (int window = 0; window < kWindows; ++window) {
    // Two coarse simulations start from the truth: one alone, one with closure.
    at::Tensor alone = Coarsen(truth), helped = alone;
    double loss_sum = 0;
    for (int step = 0; step < kStepsPerWindow; ++step, t += kTimeStep) {
      const at::Tensor before = Coarsen(truth);
      for (int i = 0; i < kRatio; ++i) {
        constexpr double kFineStep = kTimeStep / kRatio;
        truth = fine.Advance(truth, t + i * kFineStep, kFineStep);
      }

      // Train on what the coarse solver got wrong in this very step.
      const at::Tensor lacking =
          (Coarsen(truth) - coarse.Advance(before, t, kTimeStep)) / kTimeStep;
      auto loss =
          torch::mse_loss(closure->forward(neighbourhood(before)), lacking);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      loss_sum += loss.item<double>();

      // Simulate with the network as it is now.
      const torch::NoGradGuard no_grad;
      alone = coarse.Advance(alone, t, kTimeStep);
      helped = coarse.Advance(helped, t, kTimeStep) +
               closure->forward(neighbourhood(helped)) * kTimeStep;
    }
    auto& options = optimizer.param_groups()[0].options();
    options.set_lr(0.7 * options.get_lr());

    const double loss = MeanOverRanks(
        *group, torch::tensor(loss_sum / kStepsPerWindow, at::kDouble));
    const double error_alone = Error(*group, alone, Coarsen(truth));
    const double error_helped = Error(*group, helped, Coarsen(truth));
    if (composable::rank() != 0) continue;
    std::cout << std::fixed << std::setprecision(2) << std::setw(7) << t
              << std::setprecision(6) << std::setw(10) << loss << std::setw(13)
              << error_alone << std::setw(20) << error_helped << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace examples

int main() { return examples::RunMain(examples::Simulate); }
