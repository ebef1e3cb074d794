// An operator of a backward is about to read sharded parameters, or a gradient
// has arrived.
//
//   composable::PreBackward(context, {state_of_block_3});
//
// Saved tensors are whole parameters or views of them, so backward passes the
// same guard as forward and gathers exactly the groups that it reads, when it
// reads them.
//
// Algorithm: PyTorch FSDP's _pre_backward_hook; BackwardPrefetch as in its
// default BACKWARD_PRE.
#pragma once

#include <memory>

#include "hooks/unshard.h"
#include "state/fsdp_state.h"

namespace composable {

// On return the whole parameters of all of `needed` may be read. The context's
// mutex must be held.
void PreBackward(const std::shared_ptr<FSDPStateContext>& context,
                 FSDPStates needed);

// Starts the backward of the tree if it has not started, and queues its end on
// the running graph task; a task nested in that one queues nothing.
void EnterBackward(const std::shared_ptr<FSDPStateContext>& context);

}  // namespace composable
