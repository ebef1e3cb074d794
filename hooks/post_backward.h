// All gradients of a group have arrived.
//
// Algorithm: PyTorch FSDP's _post_backward_hook. The trigger is the gradient
// sink (hooks/gradient_sink.h), which the engine runs once, when it knows that
// no further gradient of this backward can come.
#pragma once

#include <memory>
#include <vector>

#include "state/fsdp_state.h"

namespace composable {

// Packs `gradients` (one per parameter, undefined where there is none), frees
// the whole parameters, and issues the reduce-scatter, or keeps the gradients
// if the state does not sync. Makes room for it first: see Note [Reductions in
// flight].
//
// Returns what autograd is to pass on to each shard: nothing, but in
// autograd::grad the reduced gradients of those that were asked for, after
// waiting for them. In backward(inputs = ...) only the shards in `inputs` get a
// gradient; with none of them there, but members, throws c10::ValueError.
std::vector<at::Tensor> PostBackward(const std::shared_ptr<FSDPState>& state,
                                     std::vector<at::Tensor> gradients);

}  // namespace composable
