// Groups are left when an operator reads others.
//
// Note [Leave rule]
// An operator that reads a set of groups leaves every group that is neither in
// the set nor an ancestor of one in it. Left means evictable, not freed: see
// Note [Slots]. In backward a group with gradients to come is left when its
// sink has run; one without, by this rule. In a recompute inside a backward,
// which runs with gradients enabled, nothing is left.
//
// Algorithm: stands for PyTorch FSDP's _post_forward_reshard, which needs a
// hook at the end of forward that LibTorch modules do not have.
#pragma once

#include "hooks/unshard.h"
#include "state/fsdp_state.h"

namespace composable {

// Marks what `needed` leaves. The context's mutex must be held.
void PostForward(FSDPStateContext& context, FSDPStates needed);

// Whether `needed` is what the last operator read and is still there and
// fresh, so that nothing is to be done.
bool IsCurrent(const FSDPStateContext& context, FSDPStates needed,
               bool grad_mode);
// True if one of `needed` was held by an earlier backward, and now counts
// against the slots.
bool SetCurrent(FSDPStateContext& context, FSDPStates needed, bool grad_mode);

}  // namespace composable
