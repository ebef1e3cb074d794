// The autograd node that receives the gradients of all parameters of a group.
//
//   group->Attach(state, composable::GradientSinkFactory(state));
//
// Note [Gradient sink]
// All whole parameters of a group are outputs of this one node, so the engine
// itself waits until every gradient of a backward has arrived, passes undefined
// ones for parameters that were not used, and runs the node once. Views,
// in-place operators, tensors that escape a forward and modules called twice
// need no care of ours. The node has the highest sequence number, as
// AccumulateGrad has: with its own, low one the engine would run it after
// everything else, and no reduction would overlap with computation. Its next
// nodes are the accumulators of the shards: see Note [Accumulator of a shard].
#pragma once

#include <functional>
#include <memory>

#include "state/compatibility.h"
#include "state/fsdp_state.h"

namespace composable {

// Makes nodes that run PostBackward of `state`, and own it. The factory itself
// holds it weakly; it may be called while the state lives.
std::function<NodePtr()> GradientSinkFactory(
    const std::shared_ptr<FSDPState>& state);

}  // namespace composable
