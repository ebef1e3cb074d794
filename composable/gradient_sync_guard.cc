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
    GradientReduction* reduction = state->reduction();
    before_.push_back(
        {state, state->requires_gradient_sync,
         reduction == nullptr || reduction->settings().requires_all_reduce});
    state->requires_gradient_sync = requires_sync;
    if (reduction != nullptr) {
      reduction->settings().requires_all_reduce = requires_sync;
    }
  }
  TORCH_CHECK_VALUE(!before_.empty(), "GradientSyncGuard: expected a module ",
                    "with sharded modules in it, got ", module->name(),
                    ", in which nothing is. Call fully_shard first.");
}

GradientSyncGuard::~GradientSyncGuard() {
  // A state of several modules is there several times: the first entry counts.
  for (auto it = before_.rbegin(); it != before_.rend(); ++it) {
    const auto state = it->state.lock();
    if (state == nullptr) continue;
    const auto lock = state->LockTree();
    state->requires_gradient_sync = it->gradient_sync;
    if (GradientReduction* reduction = state->reduction()) {
      reduction->settings().requires_all_reduce = it->all_reduce;
    }
  }
}

}  // namespace composable
