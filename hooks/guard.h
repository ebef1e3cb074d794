// The trigger: every operator that reads or writes a sharded parameter passes
// here first. See Note [Guard key].
//
// The fallback is registered when the library is loaded; fully_shard checks that.
// What it does, for all tensor arguments of an operator at once:
//   whole parameter, read      gathers its group first (PreForward, or
//                              PreBackward where a backward runs); throws
//                              where neither runs, see Note [Forward scopes]
//   whole parameter, written   throws: the write would be lost
//   shard, written             marks its group's gathered values stale, and its
//                              parameter as changed for graphs that used it
//   shard, filled at random    throws
//   shard, given other memory by set_
//                              copies this rank's rows, as set_data does
//   local tensor, summed over, or recorded by autograd
//                              throws, see Note [Local tensors]
// An operator that fails because it got a parameter in the dtype of a
// MixedPrecisionPolicy and another tensor in another throws c10::TypeError,
// which says so; see hooks/dtype_mismatch.h.
// All other errors are c10::ValueError. An operator on a tree in whose operator
// another thread is throws too.
//
// Note [Local tensors]
// A shard, its gradient, and a copy of either hold this rank's rows. Elementwise
// operators on them are what optimizers do; a norm or a dot product of them is a
// number about this rank alone, and a forward that reads them computes with a
// part of the parameter. Nothing but the tensor tells, so all of them carry the
// guard key (clone hands it on), and such operators throw outside of
// AllowShardMath.
//
// Cost: 0.2 to 0.3 us for an operator whose groups are gathered (add, mm and
// linear on 4 x 4 tensors, one core, against the same on a plain parameter).
#pragma once

#include <cstdint>

namespace composable {

// Whether this thread is inside of an operator that passed the guard.
bool InGuardedOperator();

// How many operators of this thread have passed the guard so far. For tests.
int64_t GuardedOperatorCount();

// Throws c10::Error if this process has another fallback for the key already,
// so that operators on sharded parameters would not be seen.
//
//   CheckGuard();  // before anything is sharded
void CheckGuard();

}  // namespace composable
