#include "hooks/post_forward.h"

#include <algorithm>
#include <utility>

namespace composable {

void PostForward(FSDPStateContext& context, FSDPStates needed) {
  const bool backward = context.training_state != TrainingState::kForward;
  for (FSDPState* state : context.resident) {
    if (state->left || state->prefetched || Contains(needed, state)) continue;
    if (backward && state->group()->has_gradient_edges()) continue;
    const bool above = std::any_of(
        needed.begin(), needed.end(),
        [&](const FSDPState* other) { return state->IsAncestorOf(*other); });
    if (!above) state->left = true;
  }
}

bool IsCurrent(const FSDPStateContext& context, FSDPStates needed,
               bool grad_mode) {
  if (context.current_grad_mode != grad_mode ||
      context.current.size() != needed.size()) {
    return false;
  }
  for (size_t i = 0; i < needed.size(); ++i) {
    const FSDPParamGroup& group = *needed[i]->group();
    if (context.current[i] != needed[i] || group.dirty() ||
        group.sharded_state() != ShardedState::kUnsharded) {
      return false;
    }
  }
  return true;
}

bool SetCurrent(FSDPStateContext& context, FSDPStates needed, bool grad_mode) {
  bool held = false;
  context.current.assign(needed.begin(), needed.end());
  context.current_grad_mode = grad_mode;
  for (FSDPState* state : needed) {
    state->left = false;
    state->prefetched = false;
    state->last_touch = ++context.touches;
    held |= std::exchange(state->held, false);
  }
  return held;
}

}  // namespace composable
