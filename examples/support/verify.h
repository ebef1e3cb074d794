// The check behind --verify: the same training without sharding.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/gpt.h"
#include "examples/support/byte_text.h"
#include "examples/support/history.h"

namespace examples {

// What, beside the model and the batches, decides how a training run goes.
struct TrainingOptions {
  uint64_t seed = 0;  // of the initial weights
  double lr = 3e-4;  // AdamW's learning rate; the rest of it as LibTorch has it
  double clip = 1.0;  // largest norm of all gradients together
};

// Largest relative difference between the losses of a correct sharded run and
// those of an unsharded one.
//
// Both compute the same sums in another order: what is a mean over W * B
// sequences here is a mean of W means there, in the loss and in every gradient.
// That is worth a few ulp of float, about 1e-7, at each step, and AdamW carries
// it on to the next. Runs of many hundred steps may drift further; a stale
// weight or a missing gradient shows long before.
inline constexpr double kLossTolerance = 1e-5;

// The same for gradient norms. LibTorch adds up a norm in float: it is off by
// 4e-6 for a tensor of 0.4 M elements and by 7e-4 for one of 16 M, and by
// another amount when ranks add up parts of it. A wrong factor, which this is
// to find, is never that close to 1.
inline constexpr double kNormTolerance = 1e-3;

// Trains an unsharded GPT in this process alone, with LibTorch alone. No
// collectives: call it on one rank, once the others no longer wait for it.
History TrainUnsharded(const GPTConfig& config, const TrainingOptions& options,
                       const ByteBatches& batches);

// Largest |a - b| / |b| over all steps; infinite when the lengths differ or a
// value is not a number.
double MaxRelativeDifference(const std::vector<double>& a,
                             const std::vector<double>& b);

// Says on standard error how far `history` is from `expected`, and returns
// whether every loss and every norm agrees within its tolerance. The norms are
// there because losses alone can't tell a gradient that is too large by a
// factor: neither AdamW nor clipping minds one.
bool Agrees(const History& history, const History& expected);

}  // namespace examples
