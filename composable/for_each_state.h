// The one rule of recursion for what a handle sets.
//
//   ForEachState(state, recurse, [](FSDPState& state) { ... })
//
// With `recurse`, every state of the modules and below, in the order of
// Module::modules(); else the state alone.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "state/fsdp_state.h"

namespace composable {

template <typename Visit>
void ForEachState(const std::shared_ptr<FSDPState>& state, bool recurse,
                  Visit visit) {
  if (!recurse) {
    visit(*state);
    return;
  }
  for (const auto& root : state->modules()) {
    for (const auto& module : root->modules()) {
      if (const auto found = FindFSDPState(*module)) visit(*found);
    }
  }
}

}  // namespace composable
