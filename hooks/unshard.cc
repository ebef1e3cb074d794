#include "hooks/unshard.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "hooks/join.h"
#include "hooks/missing_values.h"

namespace composable {
namespace {

int64_t SlotsInUse(const FSDPStateContext& context) {
  return std::count_if(context.resident.begin(), context.resident.end(),
                       [](const FSDPState* s) { return s->uses_slot(); });
}

// A forward leaves a part of what its backward will need, where that is asked
// for.
void Evict(FSDPStateContext& context, FSDPState& state) {
  FSDPParamGroup& group = *state.group();
  if (context.training_state != TrainingState::kForward ||
      !state.reshard_after_forward || !group.keeps_part() || group.dirty() ||
      group.sharded_state() != ShardedState::kUnsharded) {
    Reshard(context, state);
    return;
  }
  state.left = false;
  state.prefetched = false;
  group.ReshardPostForward(context.pool);
  context.AccountFreed(state, ShardedState::kUnsharded,
                       GroupEvent::kReshardPostForward);
  context.stats.kept_part_bytes +=
      static_cast<int64_t>(group.kept_part_bytes());
  context.Trace(TraceEvent::kReshard, state);
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
  Evict(context, *victim);
  return true;
}

void IssueAlone(FSDPStateContext& context, FSDPState& state) {
  FSDPParamGroup& group = *state.group();
  const ShardedState before = group.sharded_state();
  const auto kept = static_cast<int64_t>(group.kept_part_bytes());
  try {
    group.IssueUnshard(context.pool);
  } catch (...) {
    context.stats.kept_part_bytes -= kept;
    throw;
  }
  context.AccountIssued(state, before);
  state.left = false;
  state.listed = false;
  context.Trace(TraceEvent::kUnshard, state);
}

void Issue(FSDPStateContext& context, FSDPState& state) {
  JoinRound round(context, JoinOp::kGather, state.id);
  IssueAlone(context, state);
  round.Finish();
}

// Left groups give way to one more that uses a slot.
void MakeRoomForSlot(FSDPStateContext& context, FSDPStates needed,
                     const PassOrder& order) {
  while (SlotsInUse(context) >= context.options.limit_all_gathers() &&
         EvictOne(context, needed, order, /*earliest=*/0)) {
  }
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
    if (state->uses_slot() || (state->pinned && state->reshard_after_forward)) {
      MakeRoomForSlot(context, needed, order);
    }
    if (!state->pinned) WaitForRoomInFlight(context);
    Issue(context, *state);
  }
}

void GatherForOthers(FSDPStateContext& context, FSDPState& state) {
  FSDPState* others = &state;
  WaitUnshard(context, {&others, 1});
  // A slot stays for what this rank is about to gather itself.
  const bool has_slot =
      !state.uses_slot() ||
      SlotsInUse(context) + 1 < context.options.limit_all_gathers();
  if (!state.group()->is_sharded() || !has_slot) {
    state.group()->GatherForOthers(context.pool);
    return;
  }
  IssueAlone(context, state);
  state.left = true;
}

void FreeOverLimit(FSDPStateContext& context, FSDPStates needed,
                   const PassOrder& order) {
  while (SlotsInUse(context) > context.options.limit_all_gathers() &&
         EvictOne(context, needed, order, /*earliest=*/0)) {
  }
}

void WaitUnshard(FSDPStateContext& context, FSDPStates needed) {
  for (FSDPState* state : needed) {
    FSDPParamGroup& group = *state->group();
    if (group.sharded_state() != ShardedState::kUnsharding) continue;
    context.stats.kept_part_bytes -=
        static_cast<int64_t>(group.kept_part_bytes());
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
  state.held = false;
  const ShardedState before = group.sharded_state();
  if (before == ShardedState::kSharded) return;
  context.stats.kept_part_bytes -=
      static_cast<int64_t>(group.kept_part_bytes());
  group.Reshard(context.pool);
  context.AccountFreed(state, before);
  if (before == ShardedState::kShardedPostForward) return;
  context.Trace(TraceEvent::kReshard, state);
}

bool PrefetchListed(FSDPStateContext& context, FSDPStates needed,
                    const PassOrder& order) {
  if (context.options.rank_dependent()) return true;
  const bool backward = context.training_state != TrainingState::kForward;
  bool any = false;
  for (const FSDPState* state : needed) {
    const auto& list =
        backward ? state->backward_prefetch : state->forward_prefetch;
    any |= !list.empty();
    for (const auto& weak : list) {
      const auto next = weak.lock();
      if (next == nullptr || next->group() == nullptr ||
          Contains(needed, next.get()) ||
          (backward && !next->unshard_in_backward)) {
        continue;
      }
      TORCH_CHECK_VALUE(
          next->context.get() == &context, "The ",
          backward ? "backward" : "forward", " prefetch of '", state->fqn,
          "' lists '", next->group()->params().front().fqn,
          "', of another tree of sharded modules: expected modules below the "
          "same root.");
      FSDPParamGroup& group = *next->group();
      if (!group.is_sharded() && group.dirty()) Reshard(context, *next);
      if (group.is_sharded()) {
        if (next->uses_slot()) MakeRoomForSlot(context, needed, order);
        Issue(context, *next);
      } else if (!next->left) {
        continue;  // in use
      }
      next->left = false;
      next->prefetched = true;
      next->listed = true;
    }
  }
  return any;
}

void Prefetch(FSDPStateContext& context, FSDPStates needed, PassOrder& order) {
  if (context.options.rank_dependent()) return;
  const bool backward = context.training_state != TrainingState::kForward;
  // What was gathered ahead and is not used in this pass makes room.
  for (FSDPState* s : context.resident) {
    if (s->prefetched && !s->listed &&
        order.NextUse(s->id) == PassOrder::kNever) {
      s->left = true;
    }
  }
  const int64_t limit = context.options.limit_all_gathers();
  absl::InlinedVector<FSDPState*, 8> seen;
  for (size_t i = order.next_position(); i < order.size(); ++i) {
    FSDPState* next = context.states[order.at(i)];
    if (next == nullptr || Contains(needed, next) || Contains(seen, next) ||
        (backward && !next->unshard_in_backward)) {
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
