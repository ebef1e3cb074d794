// Gradient clipping that is right on shards.
//
//   loss.backward();
//   double norm = composable::clip_grad_norm_(model->parameters(), 1.0);
//   optimizer.step();
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace composable {

// (collective) Scales the gradients of `parameters` in place so that their norm
// of order `norm_type`, taken over the whole parameters of all ranks, is at
// most `max_norm`. Returns the norm before, the same on every rank.
// `parameters` may mix sharded and plain ones; a plain one is taken as equal on
// all ranks, and a tied one counts once. Undefined gradients are skipped.
//
// norm_type > 0, infinity included; the sum is taken in double precision, then
// as torch::nn::utils::clip_grad_norm_. With `error_if_nonfinite` throws
// c10::Error on every rank if the norm is not finite.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters,
                       double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);

}  // namespace composable
