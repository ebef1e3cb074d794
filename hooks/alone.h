// One thread at a time uses a tree of sharded modules.
//
//   std::lock_guard<std::recursive_mutex> lock(context->mutex);
//   composable::CheckAlone(*context, "reshard()");
//
// The mutex orders what happens between operators. What an operator reads must
// stay while it runs, without the mutex; so whatever may free it asks first.
#pragma once

#include <c10/util/StringUtil.h>

#include <memory>
#include <string>

#include "state/fsdp_state.h"

namespace composable {

// False if an operator of another thread reads whole parameters of the tree,
// other than one of the same backward. The context's mutex must be held.
bool IsAlone(const FSDPStateContext& context);

[[noreturn]] void ThrowNotAlone(const std::string& what);

// Throws c10::ValueError then, that names what the parts of `what` say.
template <typename... What>
void CheckAlone(const FSDPStateContext& context, const What&... what) {
  if (!IsAlone(context)) ThrowNotAlone(c10::str(what...));
}

// Counts an operator of this thread, until it is destroyed.
class RunningOperator {
 public:
  explicit RunningOperator(std::shared_ptr<FSDPStateContext> context);
  ~RunningOperator();
  RunningOperator(RunningOperator&& other) noexcept = default;
  RunningOperator& operator=(RunningOperator&&) = delete;
  RunningOperator(const RunningOperator&) = delete;
  RunningOperator& operator=(const RunningOperator&) = delete;

 private:
  std::shared_ptr<FSDPStateContext> context_;  // null: moved from
};

}  // namespace composable
