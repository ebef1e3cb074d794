// Where the reduced gradient of a shard goes: through the hooks that the user
// registered on the shard, into its grad().
//
//   composable::AccumulateShardGradient(shard, rows);
//
// Note [Accumulator of a shard]
// Autograd reaches a leaf through its gradient accumulator. That of a shard is a
// node of ours, and the gradient sink of its group lists it among its next
// nodes. So the engine itself knows that a backward to the shard runs the sink:
// backward(inputs = parameters()) and grad(loss, parameters()) work as for any
// leaf, under any engine. The sink hands nothing on to the accumulator, because
// the reduction ends later; and the accumulator has no hooks of its own,
// because the engine would run them with nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include "state/compatibility.h"

namespace composable {

// Makes the accumulator of the leaf `shard` and sets it. It lives as long as
// the result does. It holds `shard`.
NodePtr MakeShardAccumulator(const at::Tensor& shard);

// Runs the tensor hooks of `shard` on `rows`, this backward's gradient, and
// returns what they make of it: undefined, or with the strides of the shard in
// memory that nobody else holds. `rows` is taken over.
at::Tensor RunShardHooks(const at::Tensor& shard, at::Tensor rows);

// RunShardHooks, adds the result to shard.grad(), then runs post-accumulate
// hooks. `rows` is taken over.
void AccumulateShardGradient(const at::Tensor& shard, at::Tensor rows);

}  // namespace composable
