// The first use of a tree, and the start of each of its iterations.
//
//   auto context = composable::LazyInit(*state);   // idempotent
//
// Algorithm: PyTorch FSDP's _root_pre_forward and _lazy_init, with the root
// taken from the module tree instead of from whichever module runs first.
#pragma once

#include <memory>

#include "state/fsdp_state.h"

namespace composable {

// Finds the root of the tree that `state` belongs to (the topmost module with a
// state that contains it), gives the tree one context, and every state in it
// its FQN, its ancestors and its resolved options. Later calls return the same
// context, until fully_shard is applied further up.
std::shared_ptr<FSDPStateContext> LazyInit(FSDPState& state);

// Note [Freezing after sharding]
// requires_grad_() is called on shards, and no operator shows it. So the whole
// parameters follow their shards when a forward starts, and when an operator of
// a forward with gradients reads them. (Not seen: parameters that are unfrozen
// between two forwards without a backward in between, and are then read by a
// custom autograd Function before any operator reads them. Its first use brings
// no gradient for them.)
//
// Makes the gradient edge of this parameter of `state` follow its shard. The
// context's mutex must be held.
void SyncGradientEdge(FSDPStateContext& context, FSDPState& state, int param);

// Starts a forward if none is running. Throws c10::ValueError if a parameter was
// registered or replaced since the last one, a shard or a member was given other
// memory, or a backward of the tree runs in another thread. The context's mutex
// must be held.
void RootPreForward(FSDPStateContext& context);

// The pool's buffers hold any group that uses slots. To be called when that
// changes.
void SetSlotCapacity(FSDPStateContext& context);

// Makes the next use of the tree find its root again. Throws c10::ValueError if
// a forward or backward of the tree is running.
void ResetTree(const std::shared_ptr<FSDPStateContext>& context);

}  // namespace composable
