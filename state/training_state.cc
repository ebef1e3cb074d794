#include "state/training_state.h"

#include <c10/util/Exception.h>

#include <optional>

namespace composable {
namespace {

using T = TrainingState;
using S = ShardedState;

template <typename Enum>
constexpr size_t Index(Enum value) {
  return static_cast<size_t>(value);
}

constexpr std::optional<T> kNone;

// See Note [Transitions].
constexpr std::optional<T> kTree[kTrainingStates][kTreeEvents] = {
    {T::kForward, kNone, T::kPreBackward, kNone, kNone, kNone, T::kIdle},
    {kNone, T::kIdle, T::kPreBackward, kNone, kNone, kNone, T::kIdle},
    {kNone, kNone, kNone, T::kPostBackward, kNone, T::kIdle, T::kIdle},
    {kNone, kNone, kNone, kNone, T::kPreBackward, kNone, T::kIdle},
};

constexpr std::optional<S> kNever;

constexpr std::optional<S> kGroup[kShardedStates][kGroupEvents] = {
    {S::kUnsharding, kNever, kNever, kNever, kNever},
    {kNever, S::kUnsharded, S::kSharded, S::kSharded, kNever},
    {kNever, kNever, kNever, S::kSharded, S::kShardedPostForward},
    {S::kUnsharding, kNever, kNever, S::kSharded, kNever},
};

TransitionCounts& Counts() {
  static auto* counts = new TransitionCounts;
  return *counts;
}

}  // namespace

const char* ToString(TrainingState state) {
  constexpr const char* kNames[kTrainingStates] = {
      "idle", "forward", "pre-backward", "post-backward"};
  return kNames[Index(state)];
}

const char* ToString(ShardedState state) {
  constexpr const char* kNames[kShardedStates] = {
      "sharded", "unsharding", "unsharded", "sharded post-forward"};
  return kNames[Index(state)];
}

const char* ToString(TreeEvent event) {
  constexpr const char* kNames[kTreeEvents] = {
      "begin forward", "end forward", "begin backward", "begin reduce",
      "end reduce",    "end pass",    "abort"};
  return kNames[Index(event)];
}

const char* ToString(GroupEvent event) {
  constexpr const char* kNames[kGroupEvents] = {
      "issue unshard", "finish unshard", "fail unshard", "reshard",
      "reshard post-forward"};
  return kNames[Index(event)];
}

const TrainingState* Next(TrainingState state, TreeEvent event) {
  const auto& cell = kTree[Index(state)][Index(event)];
  return cell ? &*cell : nullptr;
}

const ShardedState* Next(TrainingState tree, ShardedState state,
                         GroupEvent event) {
  if (event == GroupEvent::kReshardPostForward &&
      tree != TrainingState::kForward) {
    return nullptr;
  }
  const auto& cell = kGroup[Index(state)][Index(event)];
  return cell ? &*cell : nullptr;
}

void Transition(TrainingState* state, TreeEvent event) {
  const TrainingState* next = Next(*state, event);
  TORCH_INTERNAL_ASSERT(next != nullptr,
                        "illegal transition of a tree: ", ToString(event),
                        " in state ", ToString(*state));
  ++Counts().tree[Index(*state)][Index(event)];
  *state = *next;
}

void CheckGroupTransition(TrainingState tree, ShardedState state,
                          GroupEvent event) {
  TORCH_INTERNAL_ASSERT(Next(tree, state, event) != nullptr,
                        "illegal transition of a group: ", ToString(event),
                        " in state ", ToString(state), " of a tree in state ",
                        ToString(tree));
  ++Counts().group[Index(tree)][Index(state)][Index(event)];
}

const TransitionCounts& transition_counts() { return Counts(); }

}  // namespace composable
