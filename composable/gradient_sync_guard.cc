#include "composable/gradient_sync_guard.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <mutex>

#include "state/fsdp_state.h"

namespace composable {

GradientSyncGuard::GradientSyncGuard(const ModuleRef& module,
                                     bool requires_sync) {
  for (const auto& child : module->modules()) {
    const auto state = FindFSDPState(*child);
    if (state == nullptr) continue;
    const auto lock = state->LockTree();
    before_.emplace_back(state, state->requires_gradient_sync);
    state->requires_gradient_sync = requires_sync;
  }
  TORCH_CHECK_VALUE(!before_.empty(), "GradientSyncGuard: expected a module ",
                    "with sharded modules in it, got ", module->name(),
                    ", in which nothing is. Call fully_shard first.");
}

GradientSyncGuard::~GradientSyncGuard() {
  // A state of several modules is there several times: the first entry counts.
  for (auto it = before_.rbegin(); it != before_.rend(); ++it) {
    const auto state = it->first.lock();
    if (state == nullptr) continue;
    const auto lock = state->LockTree();
    state->requires_gradient_sync = it->second;
  }
}

}  // namespace composable
