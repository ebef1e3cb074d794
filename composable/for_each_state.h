// The one rule of recursion for what a handle sets.
//
//   ForEachState(state, recurse, [](FSDPState& state) { ... })
//
// With `recurse`, every state of the modules and below, in the order of
// Module::modules(); else the state alone.
#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "state/fsdp_state.h"

namespace composable {

// Each once.
inline std::vector<std::shared_ptr<FSDPState>> StatesOf(
    const std::shared_ptr<FSDPState>& state, bool recurse) {
  if (!recurse) return {state};
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& root : state->modules()) {
    for (const auto& module : root->modules()) {
      auto found = FindFSDPState(*module);
      if (found != nullptr &&
          std::find(states.begin(), states.end(), found) == states.end()) {
        states.push_back(std::move(found));
      }
    }
  }
  return states;
}

// With the tree of each locked.
template <typename Visit>
void ForEachState(const std::shared_ptr<FSDPState>& state, bool recurse,
                  Visit visit) {
  for (const auto& found : StatesOf(state, recurse)) {
    const auto lock = found->LockTree();
    visit(*found);
  }
}

}  // namespace composable
