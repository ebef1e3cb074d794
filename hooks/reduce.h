// Issues and finishes the reductions of groups, for the hooks that know when.
//
// One reduction of a tree is in flight at a time: there is one payload buffer.
// It is waited for when the next one needs the buffer, or at the end of the
// backward.
//
// The mutex of the context must be held.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/types/span.h"
#include "state/fsdp_state.h"

namespace composable {

// Waits for the reduction in flight, if there is one, and sets its gradients.
// Runs the hooks of the shards.
void FinishReduction(FSDPStateContext& context);

// Whether this thread is in FinishReduction of the tree: in a hook of a shard.
bool IsFinishingReduction(const FSDPStateContext& context);

// Issues the reduction of what `state` has packed.
void IssueReduction(FSDPStateContext& context, FSDPState& state);

// Reduces what the groups of `states` have pending, one after the other; the
// last one stays in flight.
void ReducePending(FSDPStateContext& context,
                   absl::Span<FSDPState* const> states);
// Reduces what `state` has packed and returns the rows of each parameter,
// instead of adding them to the shards' gradients.
std::vector<at::Tensor> ReduceNow(FSDPStateContext& context, FSDPState& state);

}  // namespace composable
