#include "hooks/finalize_backward.h"

#include <c10/util/Exception.h>

#include <string>

#include "hooks/join.h"
#include "hooks/reduce.h"
#include "hooks/root_post_backward.h"

namespace composable {
namespace {

bool IsOpen(const FSDPStateContext& context) {
  const auto finalization = context.finalization.lock();
  return finalization != nullptr && !finalization->done;
}

}  // namespace

std::shared_ptr<BackwardFinalization> FinalizeBackward(
    FSDPStateContext& context, bool async_op) {
  TORCH_CHECK_VALUE(
      context.manual_finalization,
      "finalize_backward(): manual finalization is not enabled, so each "
      "backward ends by itself. Call set_manual_backward_finalization(true) "
      "before the backwards.");
  TORCH_CHECK_VALUE(!context.is_in_backward(),
                    "finalize_backward() was called inside a backward of the "
                    "tree. Call it after the backward.");
  CheckNoOpenFinalization(context, "finalize_backward()");
  AbortOnError abort(context);
  ReduceSynced(context);
  JoinCall(context);
  std::shared_ptr<BackwardFinalization> finalization;
  if (async_op && !context.reducing.empty()) {
    finalization = std::make_shared<BackwardFinalization>();
    context.finalization = finalization;
  } else {
    EndIteration(context);
  }
  abort.Cancel();
  return finalization;
}

void EndFinalization(FSDPStateContext& context,
                     BackwardFinalization& finalization) {
  TORCH_CHECK_VALUE(!finalization.dropped,
                    "wait(): the handle of finalize_backward() was invalidated "
                    "by an exception, or by reset_iter_state(): the gradients "
                    "that were being reduced are lost.");
  if (finalization.done) return;
  AbortOnError abort(context);
  EndIteration(context);
  finalization.done = true;
  abort.Cancel();
}

void CheckNoOpenFinalization(const FSDPStateContext& context,
                             const char* what) {
  TORCH_CHECK_VALUE(!IsOpen(context), what,
                    " of sharded modules came before wait() of the handle that "
                    "finalize_backward(/*async_op=*/true) returned. Call "
                    "wait() first.");
}

void CheckMayBeginForward(const FSDPStateContext& context) {
  CheckNoOpenFinalization(context, "A forward");
  TORCH_CHECK_VALUE(
      !context.unfinalized || !context.has_reduced,
      "A forward of sharded modules has started, but finalize_backward() was "
      "not called after the last backward, which has reduced gradients: manual "
      "finalization is enabled. Call finalize_backward() after each backward "
      "with gradient sync; for microbatches before that turn the sync off with "
      "set_requires_gradient_sync(false).");
}

void CheckMayWriteShards(const FSDPState& state, const std::string& writer) {
  const FSDPStateContext& context = *state.context;
  TORCH_CHECK_VALUE(
      !context.unfinalized || context.is_in_backward() ||
          IsFinishingReduction(context),
      writer, " writes the shards of '", state.fqn,
      "', but finalize_backward() was not called after the last backward: "
      "manual finalization is enabled, and the gradients are incomplete. Call ",
      IsOpen(context) ? "wait() on the handle that finalize_backward() returned"
                      : "finalize_backward()",
      " before optimizer.step(), or reset_iter_state() to drop the iteration.");
}

}  // namespace composable
