#include "hooks/pre_forward.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "hooks/post_forward.h"
#include "hooks/root_post_backward.h"
#include "hooks/root_pre_forward.h"

namespace composable {

void PreForward(FSDPStateContext& context, FSDPStates needed) {
  RootPreForward(context);
  const bool training = c10::GradMode::is_enabled();
  if (IsCurrent(context, needed, training)) return;
  TORCH_CHECK_VALUE(
      !context.options.rank_dependent() ||
          context.states.front()->open_scopes > 0,
      "Ranks may run different operators (rank_dependent), and '",
      needed.front()->group()->params().front().fqn,
      "' is read outside a forward of the root that runs through its boundary, "
      "so others can't know of it. Call the root by its COMPOSABLE_MODULE "
      "holder, composable::call or in a composable::ForwardScope.");
  AbortOnError abort(context);
  PostForward(context, needed);
  PassOrder& order = context.forward_order;
  for (const FSDPState* state : needed) {
    if (training) order.Record(state->id);
    order.Advance(state->id);
  }
  IssueUnshard(context, needed, order);
  if (!PrefetchListed(context, needed, order) &&
      context.options.forward_prefetch()) {
    Prefetch(context, needed, order);
  }
  WaitUnshard(context, needed);
  if (SetCurrent(context, needed, training)) {
    FreeOverLimit(context, needed, order);
  }
  abort.Cancel();
}

}  // namespace composable
