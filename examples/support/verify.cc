#include "examples/support/verify.h"

#include <absl/strings/str_format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>

#include "examples/support/progress.h"

namespace examples {

History TrainUnsharded(const GPTConfig& config, const TrainingOptions& options,
                       const ByteBatches& batches) {
  std::cerr << "verify: training the same model unsharded in one process"
            << std::endl;
  torch::manual_seed(options.seed);
  GPT model(config);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(options.lr));
  const ByteBatchesOptions& size = batches.options();
  Progress progress(std::cerr, {.steps = size.steps,
                                .tokens_per_step = batches.GlobalTokens(),
                                .log_every = size.steps,
                                .terminal = isatty(STDERR_FILENO) == 1});
  History history;
  for (at::Tensor batch : batches) {
    auto loss = model->loss(batch);
    loss.backward();
    history.grad_norms.push_back(
        torch::nn::utils::clip_grad_norm_(model->parameters(), options.clip));
    optimizer.step();
    optimizer.zero_grad();
    history.losses.push_back(loss.item<double>());
    progress.Step(history.losses.back());
  }
  return history;
}

double MaxRelativeDifference(const std::vector<double>& a,
                             const std::vector<double>& b) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (a.size() != b.size()) return kInfinity;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference =
        a[i] == b[i] ? 0 : std::abs(a[i] - b[i]) / std::abs(b[i]);
    if (std::isnan(difference)) return kInfinity;
    largest = std::max(largest, difference);
  }
  return largest;
}

bool Agrees(const History& history, const History& expected) {
  bool passed = true;
  const auto compare = [&](const char* what, const std::vector<double>& got,
                           const std::vector<double>& want, double tolerance) {
    const double difference = MaxRelativeDifference(got, want);
    const bool equal = difference <= tolerance;
    passed = passed && equal;
    std::cerr << absl::StrFormat(
        "verify: %s: largest relative difference of %d %s is %.2e, tolerance "
        "%.0e\n",
        equal ? "passed" : "FAILED", want.size(), what, difference, tolerance);
  };
  compare("losses", history.losses, expected.losses, kLossTolerance);
  compare("gradient norms", history.grad_norms, expected.grad_norms,
          kNormTolerance);
  return passed;
}

}  // namespace examples
