#include "hooks/post_backward.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "hooks/pre_backward.h"
#include "hooks/reduce.h"
#include "hooks/root_pre_forward.h"
#include "hooks/unshard.h"

namespace composable {
namespace {

// Parameters whose gradients do not come through the sink may still be read by
// this backward, after the sink has run.
bool MayBeReadAgain(const FSDPParamGroup& group) {
  return !std::all_of(group.params().begin(), group.params().end(),
                      [](const FSDPParam& param) { return param.has_edge; });
}

}  // namespace

void PostBackward(const std::shared_ptr<FSDPState>& state,
                  std::vector<at::Tensor> gradients) {
  const auto context = LazyInit(*state);
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  EnterBackward(context);
  context->training_state = TrainingState::kPostBackward;
  FinishReduction(*context);
  if (MayBeReadAgain(*state->group())) {
    state->left = true;
  } else {
    Reshard(*context, *state);
  }
  state->reduction()->Pack(std::move(gradients), context->pool);
  if (state->requires_gradient_sync) {
    IssueReduction(*context, *state);
  } else {
    state->reduction()->Keep(context->pool);
  }
  if (context->options.backward_prefetch() == BackwardPrefetch::kBackwardPost) {
    FSDPState* done = state.get();
    Prefetch(*context, {&done, 1}, context->backward_order);
  }
  context->training_state = TrainingState::kPreBackward;
}

}  // namespace composable
