// Gathers and frees groups within the tree's limit, for the hooks that know
// when.
//
// Note [Slots]
// Groups that may be resharded between forward and backward share
// limit_all_gathers slots. A group that is left keeps its slot until another
// group needs it. The group whose next use in the pass is furthest away gives
// way, so prefetch never throws out what is needed before its own target. A
// gather that an operator waits for always gets memory, over the limit if need
// be. In forward, a group with reshard_after_forward(k) that gives way keeps its
// part. All decisions follow from the sequence of uses alone, never from timing,
// so all ranks decide alike.
//
// The mutex of the context must be held.
#pragma once

#include "absl/types/span.h"
#include "state/fsdp_state.h"

namespace composable {

using FSDPStates = absl::Span<FSDPState* const>;

inline bool Contains(FSDPStates states, const FSDPState* state) {
  for (const FSDPState* s : states) {
    if (s == state) return true;
  }
  return false;
}

// Issues the gathers of those of `needed` that are sharded or stale, making
// room first. `order` tells which other groups are needed soon.
void IssueUnshard(FSDPStateContext& context, FSDPStates needed,
                  const PassOrder& order);
void WaitUnshard(FSDPStateContext& context, FSDPStates needed);

// Frees the whole parameters of `state`, and the part that it keeps, waiting for its gather if one is in
// flight.
void Reshard(FSDPStateContext& context, FSDPState& state);

// Takes part in a gather that other ranks need; see Note [Joining].
void GatherForOthers(FSDPStateContext& context, FSDPState& state);

// Makes left groups give way while more groups use slots than there are: after
// one that did not count before.
void FreeOverLimit(FSDPStateContext& context, FSDPStates needed,
                   const PassOrder& order);

// Issues the gathers of the groups that the user listed for those of `needed`,
// whatever the limit: left groups make room, and where there are none, memory
// grows. False if there is no list. Throws c10::ValueError for a group of
// another tree.
bool PrefetchListed(FSDPStateContext& context, FSDPStates needed,
                    const PassOrder& order);

// Issues the gathers of the next groups in `order`, as far as slots allow.
void Prefetch(FSDPStateContext& context, FSDPStates needed, PassOrder& order);

}  // namespace composable
