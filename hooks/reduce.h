// Issues and finishes the reductions of groups, for the hooks that know when.
//
// Note [Reductions in flight]
// As many reductions of a tree may hold a payload at one time as
// set_reduce_scatter_max_input_buffers allows, one by default. The oldest gives
// its payload back when the next one needs it. Then its gradients are set or,
// where it has replicas, the all-reduce between those starts, and gradients are
// set when the next payload but one is needed, or at the end of the backward: so
// an all-reduce overlaps with the reduce-scatter after it. All follows from the
// sequence of reductions, never from timing.
//
// The mutex of the context must be held.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/types/span.h"
#include "state/fsdp_state.h"

namespace composable {

// Makes room for another payload, that of `next`, whose reductions before have
// then ended. Runs the hooks of the shards whose gradients it sets.
void MakeRoomForReduction(FSDPStateContext& context, const FSDPState& next);

// Waits for all reductions in flight and sets their gradients. Runs the hooks of
// the shards.
void FinishReductions(FSDPStateContext& context);

// Whether this thread is in a reduction of the tree that ends: in a hook of a shard.
bool IsFinishingReduction(const FSDPStateContext& context);

// Issues the reduction of what `state` has packed.
void IssueReduction(FSDPStateContext& context, FSDPState& state);

// Takes part in a reduction of `state` without gradients of this rank, but those
// that it has kept; see Note [Joining].
void ReduceForOthers(FSDPStateContext& context, FSDPState& state);

// Reduces what the groups of `states` have pending, one after the other; the
// last one stays in flight.
void ReducePending(FSDPStateContext& context,
                   absl::Span<FSDPState* const> states);
// Reduces what `state` has packed and returns the rows of each parameter,
// instead of adding them to the shards' gradients.
std::vector<at::Tensor> ReduceNow(FSDPStateContext& context, FSDPState& state);

}  // namespace composable
