// Where a tree of sharded modules is in a training iteration, where the
// parameters of a group are, and how both may change.
//
//   composable::Transition(&tree_state, composable::TreeEvent::kBeginForward);
//   composable::CheckGroupTransition(tree_state, composable::ShardedState::kSharded,
//                                    composable::GroupEvent::kIssueUnshard);
//
// Note [Transitions]
// Two tables are the whole truth; every change passes Transition or
// CheckGroupTransition, which throw c10::Error (a broken invariant of this
// library) that names an illegal cell.
//
//   of a tree       begin    end      begin     begin     end       end    abort
//                   forward  forward  backward  reduce    reduce    pass
//   idle            forward   -       pre        -         -         -     idle
//   forward          -       idle     pre        -         -         -     idle
//   pre-backward     -        -        -        post       -        idle   idle
//   post-backward    -        -        -         -        pre        -     idle
//
//   of a group      issue       finish     fail     reshard  reshard
//                                                            post-forward
//   sharded         unsharding   -          -        -        -
//   unsharding       -          unsharded  sharded  sharded   -
//   unsharded        -           -          -       sharded  post-forward
//   post-forward    unsharding   -          -       sharded   -
//
// (A reshard that keeps a part happens in a forward only.)
//
// Forward begins at the first touch of an iteration, backward at the first touch
// or gradient of a backward, also of one whose forward was another pass; a group
// is reduced between begin and end reduce. Forward ends without a backward where
// the root's module boundary ends a pass without gradients; where there is no
// boundary, such a pass has no end but the next backward.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace composable {

// Of a tree.
enum class TrainingState : uint8_t {
  kIdle,
  kForward,
  kPreBackward,
  kPostBackward,
};

// Of a group: kUnsharded has whole parameters; in the others access throws.
// kShardedPostForward holds a part of them: see state/post_forward_shard.h.
enum class ShardedState : uint8_t {
  kSharded,
  kUnsharding,
  kUnsharded,
  kShardedPostForward,
};

enum class TreeEvent : uint8_t {
  kBeginForward,
  kEndForward,
  kBeginBackward,
  kBeginReduce,
  kEndReduce,
  kEndPass,
  kAbort,
};

enum class GroupEvent : uint8_t {
  kIssueUnshard,
  kFinishUnshard,
  kFailUnshard,
  kReshard,
  kReshardPostForward,
};

inline constexpr size_t kTrainingStates = 4;
inline constexpr size_t kShardedStates = 4;
inline constexpr size_t kTreeEvents = 7;
inline constexpr size_t kGroupEvents = 5;

const char* ToString(TrainingState state);
const char* ToString(ShardedState state);
const char* ToString(TreeEvent event);
const char* ToString(GroupEvent event);

// What `event` leads to, or null where it is illegal.
const TrainingState* Next(TrainingState state, TreeEvent event);
const ShardedState* Next(TrainingState tree, ShardedState state,
                         GroupEvent event);

// Makes the change.
void Transition(TrainingState* state, TreeEvent event);
void CheckGroupTransition(TrainingState tree, ShardedState state,
                          GroupEvent event);

// How often each cell was taken in this process. For tests.
struct TransitionCounts {
  std::array<std::array<std::atomic<uint64_t>, kTreeEvents>, kTrainingStates>
      tree{};
  std::array<std::array<std::array<std::atomic<uint64_t>, kGroupEvents>,
                        kShardedStates>,
             kTrainingStates>
      group{};
};
const TransitionCounts& transition_counts();

}  // namespace composable
