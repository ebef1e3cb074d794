#include "hooks/post_backward.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "hooks/alone.h"
#include "hooks/pre_backward.h"
#include "hooks/reduce.h"
#include "hooks/root_post_backward.h"
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

// Which shards the running graph task asks for.
enum class Wanted : uint8_t {
  kAll,       // backward()
  kSome,      // backward(inputs = ...)
  kCaptured,  // autograd::grad
};

// Drops gradients that were not asked for.
Wanted DropUnwanted(const FSDPParamGroup& group,
                    std::vector<at::Tensor>& gradients) {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return Wanted::kAll;
  Wanted wanted = Wanted::kSome;
  bool any = false;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto it = asked->find(group.params()[i].accumulator.get());
    if (it == asked->end() || !it->second.should_execute()) {
      gradients[i].reset();
      continue;
    }
    any = true;
    if (it->second.captures_ != nullptr) wanted = Wanted::kCaptured;
  }
  TORCH_CHECK_VALUE(
      any, "backward(inputs = ...) was given a member such as that of '",
      group.params().front().fqn,
      "', which is a whole parameter; its reduced gradient belongs to the "
      "shard. Take the inputs from module->parameters().");
  return wanted;
}

}  // namespace

std::vector<at::Tensor> PostBackward(const std::shared_ptr<FSDPState>& state,
                                     std::vector<at::Tensor> gradients) {
  const auto context = LazyInit(*state);
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "a backward reduces '", state->fqn, "'");
  TORCH_CHECK_VALUE(!IsFinishingReduction(*context),
                    "A hook on a shard runs a backward that reaches '",
                    state->fqn,
                    "', of the same tree of sharded modules, while that is "
                    "being reduced. Run it after the backward, or in a hook on "
                    "an activation.");
  EnterBackward(context);
  AbortOnError abort(*context);
  const Wanted wanted = DropUnwanted(*state->group(), gradients);
  Transition(&context->training_state, TreeEvent::kBeginReduce);
  MakeRoomForReduction(*context, *state);
  if (!state->reshard_after_backward &&
      state->group()->sharded_state() == ShardedState::kUnsharded) {
    state->held = true;
  } else if (MayBeReadAgain(*state->group())) {
    state->left = true;
  } else {
    Reshard(*context, *state);
  }
  std::vector<at::Tensor> for_shards(gradients.size());
  state->reduction()->Pack(std::move(gradients), context->pool);
  if (wanted == Wanted::kCaptured) {
    for_shards = ReduceNow(*context, *state);
  } else if (state->requires_gradient_sync) {
    IssueReduction(*context, *state);
  } else {
    state->reduction()->Keep(context->pool);
  }
  if (context->options.backward_prefetch() == BackwardPrefetch::kBackwardPost &&
      state->backward_prefetch.empty()) {
    FSDPState* done = state.get();
    Prefetch(*context, {&done, 1}, context->backward_order);
  }
  Transition(&context->training_state, TreeEvent::kEndReduce);
  abort.Cancel();
  return for_shards;
}

}  // namespace composable
