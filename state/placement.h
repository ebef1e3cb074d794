// How one parameter is spread over the ranks.
//
//   composable::fully_shard(
//       block, composable::FullyShardOptions().shard_placement_fn(
//                  [](const std::string& fqn, const at::Tensor& parameter)
//                      -> std::optional<composable::Placement> {
//                    if (fqn == "output.weight") return composable::Shard(1);
//                    if (parameter.dim() == 2) return composable::Owned();
//                    return std::nullopt;  // RaggedShard()
//                  }));
//
// What there is:
//  * RaggedShard(): whole rows, as many on each rank as fill the group's buffer
//    evenly, so a rank may hold none of one parameter and all of another.
//    Gathers and reductions copy nothing. The default.
//  * Shard(dim): chunks of ceil(n / ranks) along `dim`, as FSDP2 cuts, so the
//    last ranks may hold less or nothing: shape (0, ...) where dim is 0. The
//    shard and its gradient are contiguous, the whole parameter keeps its
//    strides. A gather copies the group's chunks into place, once, and needs
//    their memory until then, except for a contiguous Shard(0) that is alone in
//    its group.
//  * Owned(rank): all of it on one rank, shape (0, ...) on the others, for
//    optimizers that need whole matrices, such as Muon. Without a rank, owners
//    are chosen so that the ranks hold about equal bytes, also over several
//    calls on one process group of init_process_group. A group's buffer is as
//    large as its largest rank's part times the ranks, so own about as many
//    equal parameters in one group as there are ranks, or more. Operators that
//    sum over the whole gradient need a composable::AllowShardMath, since the
//    guard can't tell it from a part.
//  * Replicate(): all of it on every rank, and so in every rank's part of the
//    gather and the reduction, for a few elements. What scalars get.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace composable {

struct Placement {
  enum class Kind : uint8_t { kRagged, kShard, kOwned, kReplicate };

  Kind kind = Kind::kRagged;
  int64_t dim = 0;           // of kShard
  std::optional<int> owner;  // of kOwned; none: chosen

  friend bool operator==(const Placement&, const Placement&) = default;
};

inline Placement RaggedShard() { return {}; }
inline Placement Shard(int64_t dim) {
  return {.kind = Placement::Kind::kShard, .dim = dim, .owner = {}};
}
inline Placement Owned(std::optional<int> rank = std::nullopt) {
  return {.kind = Placement::Kind::kOwned, .dim = 0, .owner = rank};
}
inline Placement Replicate() {
  return {.kind = Placement::Kind::kReplicate, .dim = 0, .owner = {}};
}

std::string ToString(const Placement& placement);

// Gets the name of a parameter, counted from the module that fully_shard is
// called on, and the whole parameter. Called once for each parameter of the
// call, tied ones once. Every rank must give the same.
using ShardPlacementFn = std::function<std::optional<Placement>(
    const std::string& fqn, const at::Tensor& parameter)>;

// What `placement` means for `parameter`: dimensions counted from the front, and
// Replicate() for the default of a scalar. Throws c10::ValueError, naming the
// parameter, if it has no such dimension or there is no such rank.
Placement ResolvePlacement(const std::optional<Placement>& placement,
                           const std::string& fqn, const at::Tensor& parameter,
                           int world_size);

}  // namespace composable
