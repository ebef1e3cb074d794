// A backward of the tree has ended.
//
// Algorithm: PyTorch FSDP's _post_backward_final_callback.
#pragma once

#include "state/fsdp_state.h"

namespace composable {

// Runs as the engine's callback: waits for the last reduction, reduces what was
// kept without sync and belongs to groups that this backward did not reach, and
// ends the iteration. Gradients of all shards are set on return. After a backward
// that is not the last one, what is kept stays, and whole parameters that the
// backward did not free stay until others need their memory. With manual
// finalization the last reduction is not waited for either. The context's mutex
// must be held.
void RootPostBackward(FSDPStateContext& context);
// Issues the reductions of what groups with gradient sync have kept; the last
// one stays in flight.
void ReduceSynced(FSDPStateContext& context);
// Waits for the last reduction, frees all whole parameters that are not to stay,
// including those gathered in vain, and gives the buffers' memory back.
void EndIteration(FSDPStateContext& context);

// The same after an exception, in forward or backward: waits for what is in
// flight, drops it, and leaves the tree idle and sharded. The context's mutex
// must be held.
void AbortPass(FSDPStateContext& context) noexcept;

// Aborts the pass when a scope is left by an exception.
class AbortOnError {
 public:
  explicit AbortOnError(FSDPStateContext& context) : context_(&context) {}
  ~AbortOnError() {
    if (context_ != nullptr) AbortPass(*context_);
  }
  AbortOnError(const AbortOnError&) = delete;
  AbortOnError& operator=(const AbortOnError&) = delete;
  void Cancel() { context_ = nullptr; }

 private:
  FSDPStateContext* context_;
};

}  // namespace composable
