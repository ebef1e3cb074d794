#include "hooks/unshard.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "hooks/missing_values.h"

namespace composable {
namespace {

int64_t SlotsInUse(const FSDPStateContext& context) {
  return std::count_if(context.resident.begin(), context.resident.end(),
                       [](const FSDPState* s) { return s->uses_slot(); });
}

// Frees the left group whose next use is furthest away, if that is at position
// `earliest` or later. False if there is none.
bool EvictOne(FSDPStateContext& context, FSDPStates needed,
              const PassOrder& order, size_t earliest) {
  FSDPState* victim = nullptr;
  size_t victim_use = 0;
  for (FSDPState* s : context.resident) {
    if (!s->uses_slot() || !s->left || Contains(needed, s)) continue;
    const size_t use = order.NextUse(s->id);
    if (victim == nullptr || use > victim_use ||
        (use == victim_use && s->last_touch < victim->last_touch)) {
      victim = s;
      victim_use = use;
    }
  }
  if (victim == nullptr || victim_use < earliest) return false;
  Reshard(context, *victim);
  return true;
}

void Issue(FSDPStateContext& context, FSDPState& state) {
  state.group()->IssueUnshard(context.pool);
  context.AccountIssued(state);
  state.left = false;
  context.Trace(TraceEvent::kUnshard, state);
}

// An operator over many groups must not put them all on the wire at once.
void WaitForRoomInFlight(FSDPStateContext& context) {
  for (size_t i = 0;
       context.stats.gathers_in_flight >= context.options.limit_all_gathers() &&
       i < context.resident.size();
       ++i) {
    FSDPState* oldest = context.resident[i];
    WaitUnshard(context, {&oldest, 1});
  }
}

}  // namespace

void IssueUnshard(FSDPStateContext& context, FSDPStates needed,
                  const PassOrder& order) {
  CheckHasValues(needed);
  for (FSDPState* state : needed) {
    FSDPParamGroup& group = *state->group();
    if (!group.is_sharded() && group.dirty()) Reshard(context, *state);
    if (!group.is_sharded()) continue;
    while (state->uses_slot() &&
           SlotsInUse(context) >= context.options.limit_all_gathers() &&
           EvictOne(context, needed, order, /*earliest=*/0)) {
    }
    WaitForRoomInFlight(context);
    Issue(context, *state);
  }
}

void WaitUnshard(FSDPStateContext& context, FSDPStates needed) {
  for (FSDPState* state : needed) {
    FSDPParamGroup& group = *state->group();
    if (group.sharded_state() != ShardedState::kUnsharding) continue;
    try {
      group.WaitUnshard(context.pool);
    } catch (...) {
      context.AccountFreed(*state, ShardedState::kUnsharding,
                           GroupEvent::kFailUnshard);
      throw;
    }
    context.AccountWaited();
    context.Trace(TraceEvent::kUnshardWait, *state);
  }
}

void Reshard(FSDPStateContext& context, FSDPState& state) {
  FSDPParamGroup& group = *state.group();
  state.left = false;
  state.prefetched = false;
  if (group.is_sharded()) return;
  const ShardedState before = group.sharded_state();
  group.Reshard(context.pool);
  context.AccountFreed(state, before);
  context.Trace(TraceEvent::kReshard, state);
}

void Prefetch(FSDPStateContext& context, FSDPStates needed, PassOrder& order) {
  // What was gathered ahead and is not used in this pass makes room.
  for (FSDPState* s : context.resident) {
    if (s->prefetched && order.NextUse(s->id) == PassOrder::kNever) {
      s->left = true;
    }
  }
  const int64_t limit = context.options.limit_all_gathers();
  absl::InlinedVector<FSDPState*, 8> seen;
  for (size_t i = order.next_position(); i < order.size(); ++i) {
    FSDPState* next = context.states[order.at(i)];
    if (next == nullptr || Contains(needed, next) || Contains(seen, next)) {
      continue;
    }
    seen.push_back(next);
    if (static_cast<int64_t>(seen.size()) >= limit) return;
    FSDPParamGroup& group = *next->group();
    if (!group.has_all_values()) continue;
    if (!group.is_sharded() && group.dirty()) Reshard(context, *next);
    if (!group.is_sharded()) continue;
    if (context.stats.gathers_in_flight >= limit) return;
    if (next->uses_slot() && SlotsInUse(context) >= limit &&
        !EvictOne(context, needed, order, /*earliest=*/i + 1)) {
      return;
    }
    Issue(context, *next);
    next->prefetched = true;
  }
}

}  // namespace composable
