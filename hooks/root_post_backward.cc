#include "hooks/root_post_backward.h"

#include <mutex>
#include <utility>
#include <vector>

#include "hooks/reduce.h"
#include "hooks/unshard.h"

namespace composable {
namespace {

void ReshardAll(FSDPStateContext& context) {
  for (FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr) continue;
    if (state->full_parameter_scopes > 0) continue;
    state->pinned = false;
    Reshard(context, *state);
  }
  context.pool.Purge();
  context.current.clear();
  context.running_backward.reset();
}

}  // namespace

void RootPostBackward(FSDPStateContext& context) {
  AbortOnError abort(context);
  FinishReduction(context);
  for (FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr ||
        !state->requires_gradient_sync || !state->reduction()->has_pending()) {
      continue;
    }
    state->reduction()->Pack(
        std::vector<at::Tensor>(state->group()->params().size()), context.pool);
    IssueReduction(context, *state);
    FinishReduction(context);
  }
  context.backward_order.Commit();
  context.seed_backward_order = true;
  ReshardAll(context);
  Transition(&context.training_state, TreeEvent::kEndPass);
  abort.Cancel();
}

void AbortPass(FSDPStateContext& context) noexcept {
  // An observer that throws has been heard already.
  TraceObserver muted = std::exchange(context.observer, nullptr);
  if (context.reducing != nullptr) {
    context.reducing->reduction()->Abandon(context.pool);
    context.reducing = nullptr;
  }
  ReshardAll(context);
  Transition(&context.training_state, TreeEvent::kAbort);
  context.observer = std::move(muted);
}

}  // namespace composable
