// Where a tree of sharded modules is in a training iteration, and where the
// parameters of a group are.
//
//   composable::ToString(composable::ShardedState::kUnsharding);
#pragma once

#include <cstdint>

namespace composable {

// Of a tree. kIdle -> kForward at the first touch of an iteration;
// -> kPreBackward at the first touch or gradient of a backward;
// <-> kPostBackward while a group's gradients are reduced; -> kIdle when the
// backward has ended.
enum class TrainingState : uint8_t {
  kIdle,
  kForward,
  kPreBackward,
  kPostBackward,
};

// Of a group.
//   value         unsharded storage         moves to
//   kSharded      no memory, access throws  kUnsharding
//   kUnsharding   no memory, access throws  kUnsharded, kSharded if it failed
//   kUnsharded    whole parameters          kSharded
enum class ShardedState : uint8_t {
  kSharded,
  kUnsharding,
  kUnsharded,
};

inline const char* ToString(TrainingState state) {
  switch (state) {
    case TrainingState::kIdle:
      return "idle";
    case TrainingState::kForward:
      return "forward";
    case TrainingState::kPreBackward:
      return "pre-backward";
    case TrainingState::kPostBackward:
      return "post-backward";
  }
  return "?";
}

inline const char* ToString(ShardedState state) {
  switch (state) {
    case ShardedState::kSharded:
      return "sharded";
    case ShardedState::kUnsharding:
      return "unsharding";
    case ShardedState::kUnsharded:
      return "unsharded";
  }
  return "?";
}

}  // namespace composable
