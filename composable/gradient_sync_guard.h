// No gradient sync while a scope is open: accumulation over microbatches.
//
//   {
//     const composable::GradientSyncGuard no_sync(model, false);
//     model->loss(first).backward();    // gradients are kept
//   }
//   model->loss(second).backward();     // those of both are reduced
//
// Each group gets back what it had before, also when an exception leaves the
// scope.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "composable/module_ref.h"

namespace composable {

class FSDPState;

class GradientSyncGuard {
 public:
  // For all groups in `module`, which need not be sharded itself. Throws
  // c10::ValueError if there are none.
  GradientSyncGuard(const ModuleRef& module, bool requires_sync);
  ~GradientSyncGuard();
  GradientSyncGuard(const GradientSyncGuard&) = delete;
  GradientSyncGuard& operator=(const GradientSyncGuard&) = delete;

 private:
  std::vector<std::pair<std::weak_ptr<FSDPState>, bool>> before_;
};

}  // namespace composable
