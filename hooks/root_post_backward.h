// A backward of the tree has ended.
//
// Algorithm: PyTorch FSDP's _post_backward_final_callback.
#pragma once

#include "state/fsdp_state.h"

namespace composable {

// Runs as the engine's callback: waits for the last reduction, reduces what was
// kept without sync and belongs to groups that this backward did not reach,
// frees all whole parameters, including those gathered in vain, and gives the
// buffers' memory back. Gradients of all shards are set on return.
void RootPostBackward(FSDPStateContext& context);

// The same after an exception: waits for what is in flight, drops it, and
// leaves the tree idle and sharded. The context's mutex must be held.
void AbortBackward(FSDPStateContext& context);

}  // namespace composable
