// An operator of a forward is about to read sharded parameters.
//
//   composable::PreForward(context, {state_of_block_3});
//
// Algorithm: PyTorch FSDP's _pre_forward and _pre_forward_unshard. Here the
// trigger is the operator, not a module's hook, so every method that reads a
// parameter counts as a forward.
#pragma once

#include "hooks/unshard.h"
#include "state/fsdp_state.h"

namespace composable {

// On return the whole parameters of all of `needed` may be read, and the gather
// of what comes next is on its way. The context's mutex must be held.
void PreForward(FSDPStateContext& context, FSDPStates needed);

}  // namespace composable
