#include "hooks/pre_backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>
#include <utility>

#include "hooks/finalize_backward.h"
#include "hooks/post_forward.h"
#include "hooks/root_post_backward.h"

namespace composable {

namespace {

// Held by the graph task that ends the backward of a tree.
struct RunningBackward {
  std::weak_ptr<FSDPStateContext> tree;
  bool ended = false;

  explicit RunningBackward(const std::shared_ptr<FSDPStateContext>& context)
      : tree(context) {}
  RunningBackward(const RunningBackward&) = delete;
  RunningBackward& operator=(const RunningBackward&) = delete;
  // The task was dropped because a node of it threw.
  ~RunningBackward() {
    const auto context = ended ? nullptr : tree.lock();
    if (context == nullptr) return;
    const std::lock_guard<std::recursive_mutex> lock(context->mutex);
    if (context->running_backward.expired() &&
        (context->training_state == TrainingState::kPreBackward ||
         context->training_state == TrainingState::kPostBackward)) {
      AbortPass(*context);
    }
  }
};

}  // namespace

void EnterBackward(const std::shared_ptr<FSDPStateContext>& context) {
  TORCH_CHECK_VALUE(
      context->full_parameter_scopes == 0,
      "A backward of sharded modules runs while a "
      "composable::FullParameters scope of them is open, at whose "
      "end it would free what the scope holds. Close the scope "
      "first.");
  if (context->training_state == TrainingState::kIdle ||
      context->training_state == TrainingState::kForward) {
    CheckNoOpenFinalization(*context, "A backward");
    Transition(&context->training_state, TreeEvent::kBeginBackward);
    context->current.clear();
    context->forward_order.Commit();
    if (context->seed_backward_order) {
      context->backward_order.SeedWithReverseOf(context->forward_order);
    }
    if (!std::exchange(context->iteration_open, true)) {
      context->backward_order.Begin();
    }
    for (FSDPState* state : context->resident) {
      // Gathered ahead in forward, and not read there.
      if (std::exchange(state->prefetched, false)) state->left = true;
    }
  }
  if (!context->running_backward.expired()) return;
  const auto running = std::make_shared<RunningBackward>(context);
  context->running_backward = running;
  torch::autograd::Engine::get_default_engine().queue_callback([running] {
    running->ended = true;
    const auto tree = running->tree.lock();
    if (tree == nullptr) return;
    const std::lock_guard<std::recursive_mutex> lock(tree->mutex);
    // Else something threw, was caught, and has ended the pass.
    if (tree->running_backward.lock() == running) RootPostBackward(*tree);
  });
}

void PreBackward(const std::shared_ptr<FSDPStateContext>& context,
                 FSDPStates needed) {
  EnterBackward(context);
  const bool recompute = c10::GradMode::is_enabled();
  if (IsCurrent(*context, needed, recompute)) return;
  AbortOnError abort(*context);
  if (!recompute) PostForward(*context, needed);
  PassOrder& order = context->backward_order;
  for (const FSDPState* state : needed) {
    order.Record(state->id);
    order.Advance(state->id);
  }
  IssueUnshard(*context, needed, order);
  if (!PrefetchListed(*context, needed, order) &&
      context->options.backward_prefetch() == BackwardPrefetch::kBackwardPre) {
    Prefetch(*context, needed, order);
  }
  WaitUnshard(*context, needed);
  if (SetCurrent(*context, needed, recompute)) {
    FreeOverLimit(*context, needed, order);
  }
  abort.Cancel();
}

}  // namespace composable
