// The trigger: every operator that reads or writes a sharded parameter passes
// here first. See Note [Guard key].
//
// The fallback is registered when the library is loaded. What it does, for all
// tensor arguments of an operator at once:
//   whole parameter, read     gathers its group first (PreForward, or
//                             PreBackward where a backward runs)
//   whole parameter, written  throws c10::ValueError: the write would be lost
//   shard, written            marks its group's gathered values stale, and its
//                             parameter as changed for graphs that used it
//   shard, read               nothing
//
// Cost: 0.2 to 0.3 us for an operator whose groups are gathered (add, mm and
// linear on 4 x 4 tensors, one core, against the same on a plain parameter).
#pragma once

namespace composable {

// Throws c10::Error if this process has another fallback for the key already,
// so that operators on sharded parameters would not be seen.
//
//   CheckGuard();  // before anything is sharded
void CheckGuard();

}  // namespace composable
