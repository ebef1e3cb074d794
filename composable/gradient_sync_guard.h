// No gradient sync while a scope is open: accumulation over microbatches.
//
//   {
//     const composable::GradientSyncGuard no_sync(model, false);
//     model->loss(first).backward();    // gradients are kept
//   }
//   model->loss(second).backward();     // those of both are reduced
//
// As set_requires_gradient_sync it sets requires_all_reduce too. Each group gets
// back what it had of both, also when an exception leaves the scope.
#pragma once

#include <memory>
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
  struct Before {
    std::weak_ptr<FSDPState> state;
    bool gradient_sync = true;
    bool all_reduce = true;
  };
  std::vector<Before> before_;
};

}  // namespace composable
