#include "hooks/root_post_backward.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "hooks/join.h"
#include "hooks/reduce.h"
#include "hooks/unshard.h"

namespace composable {
namespace {

void Free(FSDPStateContext& context, bool all) {
  for (FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr) continue;
    if (state->full_parameter_scopes > 0) continue;
    state->pinned = false;
    if (!all && !state->reshard_after_backward &&
        state->group()->sharded_state() == ShardedState::kUnsharded) {
      state->held = true;
      continue;
    }
    Reshard(context, *state);
  }
  context.pool.Purge();
}

bool HasPending(const FSDPStateContext& context) {
  return std::any_of(context.states.begin(), context.states.end(),
                     [](const FSDPState* state) {
                       return state != nullptr && state->group() != nullptr &&
                              state->reduction()->keeps_any();
                     });
}

}  // namespace

void ReduceSynced(FSDPStateContext& context) {
  std::vector<FSDPState*> synced;
  for (FSDPState* state : context.states) {
    if (state != nullptr && state->requires_gradient_sync) {
      synced.push_back(state);
    }
  }
  ReducePending(context, synced);
}

void EndIteration(FSDPStateContext& context) {
  FinishReductions(context);
  context.backward_order.Commit();
  context.seed_backward_order = true;
  context.iteration_open = false;
  context.unfinalized = false;
  context.has_reduced = false;
  Free(context, /*all=*/false);
  context.current.clear();
}

void RootPostBackward(FSDPStateContext& context) {
  AbortOnError abort(context);
  if (!context.manual_finalization && context.is_last_backward) {
    FinishReductions(context);
    ReduceSynced(context);
  }
  JoinEnd(context, JoinOp::kEndBackward);
  if (context.manual_finalization) {
    context.unfinalized = true;
  } else {
    FinishReductions(context);
  }
  if (context.manual_finalization || !context.is_last_backward) {
    for (FSDPState* state : context.resident) {
      state->held |=
          !state->reshard_after_backward &&
          state->group()->sharded_state() == ShardedState::kUnsharded;
      state->left = !state->pinned && !state->held;
      state->prefetched = false;
    }
    context.current.clear();
  } else {
    EndIteration(context);
  }
  context.running_backward.reset();
  Transition(&context.training_state, TreeEvent::kEndPass);
  abort.Cancel();
}

void AbortPass(FSDPStateContext& context) noexcept {
  // An observer that throws has been heard already.
  TraceObserver muted = std::exchange(context.observer, nullptr);
  for (FSDPState* state : context.reducing) {
    state->reduction()->Abandon(context.pool);
  }
  context.reducing.clear();
  Free(context, /*all=*/true);
  context.current.clear();
  context.running_backward.reset();
  context.iteration_open = false;
  context.has_reduced = false;
  // Microbatches before the one that failed may still be finalized.
  context.unfinalized = context.manual_finalization && HasPending(context);
  if (const auto finalization = context.finalization.lock()) {
    finalization->dropped = !finalization->done;
  }
  context.finalization.reset();
  Transition(&context.training_state, TreeEvent::kAbort);
  context.observer = std::move(muted);
}

}  // namespace composable
