// Whole weights, out of and into sharded modules.
//
//   auto weights = composable::full_state_dict(model);   // fqn -> full tensor
//   composable::load_full_state_dict(other_model, weights);
//
// Works on any mix of sharded and plain modules, so weights move between
// numbers of ranks and into unsharded models.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>

#include <string>
#include <vector>

#include "composable/module_ref.h"

namespace composable {

using StateDict = torch::OrderedDict<std::string, at::Tensor>;

// (collective) The parameters and buffers of `module` by FQN, in the order of
// its modules, as new tensors on every rank. Gathers one group at a time: the
// peak above the result is the largest group. Not in the middle of a forward or
// backward.
StateDict full_state_dict(const ModuleRef& module);

// Names that a load did not use, each in its order.
struct LoadResult {
  std::vector<std::string> missing;     // of the module, and not loaded
  std::vector<std::string> unexpected;  // of the state dict
};

// Copies whole values into the module's parameters (each rank its own rows) and
// buffers; those on the meta device get memory first. No communication: every
// rank passes the same `state_dict`. Throws c10::ValueError, listing all names
// and shapes that differ, before anything is changed; with `strict` false,
// missing and unexpected names are skipped and returned.
LoadResult load_full_state_dict(const ModuleRef& module,
                                const StateDict& state_dict,
                                bool strict = true);

}  // namespace composable
