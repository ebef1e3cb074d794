#include "composable/backward_handles.h"

#include <mutex>

#include "hooks/alone.h"
#include "hooks/finalize_backward.h"
#include "hooks/unshard.h"
#include "state/fsdp_state.h"

namespace composable {

void UnshardHandle::wait() {
  const auto state = state_.lock();
  state_.reset();
  const auto context = state == nullptr ? nullptr : state->tree();
  if (context == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "wait() for unshard()");
  FSDPState* needed = state.get();
  WaitUnshard(*context, {&needed, 1});
}

void GradientReductionHandle::wait() {
  const auto context = context_.lock();
  if (context == nullptr || finalization_ == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "wait() for finalize_backward()");
  EndFinalization(*context, *finalization_);
}

}  // namespace composable
