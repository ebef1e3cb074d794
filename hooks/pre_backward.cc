#include "hooks/pre_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>

#include "hooks/post_forward.h"
#include "hooks/root_post_backward.h"

namespace composable {

void EnterBackward(const std::shared_ptr<FSDPStateContext>& context) {
  if (context->training_state == TrainingState::kIdle ||
      context->training_state == TrainingState::kForward) {
    context->training_state = TrainingState::kPreBackward;
    context->current.clear();
    context->forward_order.Commit();
    if (context->seed_backward_order) {
      context->backward_order.SeedWithReverseOf(context->forward_order);
    }
    context->backward_order.Begin();
    for (FSDPState* state : context->resident) {
      // Gathered ahead in forward, and not read there.
      if (std::exchange(state->prefetched, false)) state->left = true;
    }
  }
  if (!context->running_backward.expired()) return;
  const auto running = std::make_shared<char>();
  context->running_backward = running;
  std::weak_ptr<FSDPStateContext> weak = context;
  torch::autograd::Engine::get_default_engine().queue_callback([weak, running] {
    if (const auto context = weak.lock()) RootPostBackward(*context);
  });
}

void PreBackward(const std::shared_ptr<FSDPStateContext>& context,
                 FSDPStates needed) {
  EnterBackward(context);
  const bool recompute = c10::GradMode::is_enabled();
  if (IsCurrent(*context, needed, recompute)) return;
  if (!recompute) PostForward(*context, needed);
  PassOrder& order = context->backward_order;
  for (const FSDPState* state : needed) {
    order.Record(state->id);
    order.Advance(state->id);
  }
  IssueUnshard(*context, needed, order);
  if (context->options.backward_prefetch() == BackwardPrefetch::kBackwardPre) {
    Prefetch(*context, needed, order);
  }
  WaitUnshard(*context, needed);
  SetCurrent(*context, needed, recompute);
}

}  // namespace composable
