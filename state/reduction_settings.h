// How the gradients of a group are reduced: what the handle of the module sets.
//
//   composable::ReductionSettings settings;
//   settings.divide_factor = 8;
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "collectives/communicator.h"
#include "collectives/custom_collectives.h"

namespace composable {

// Given this rank's part of the reduced gradients, flat, to be changed in place.
using AllReduceHook = std::function<void(at::Tensor reduced)>;

struct ReductionSettings {
  std::optional<double> divide_factor;  // the number of ranks if not set
  bool force_sum = false;
  // False: reductions over the replicas are put off.
  bool requires_all_reduce = true;
  AllReduceHook all_reduce_hook;
  std::shared_ptr<ReduceScatter> custom;
  // For reduce-scatters instead of the group's own.
  std::optional<Communicator> separate;
};

}  // namespace composable
