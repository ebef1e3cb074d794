// ShardLayout: where each parameter of a group lies in one flat buffer that is
// cut into equal shards, one per rank.
//
// Parameters are placed one after the other, in the given order, in a buffer of
// world_size * S elements; rank r owns elements [r * S, (r + 1) * S). S is the
// same on every rank, so one even all-gather or reduce-scatter serves the whole
// group without copies, and every parameter is one contiguous slice of the
// buffer. Rank boundaries fall in the gaps between parameters or on row edges
// inside them, so a rank's part of a parameter is a whole number of rows, maybe
// none. PlanOwned lets no boundary fall inside a parameter; Interleave gives up
// contiguous parameters for equal chunks on every rank.
//
// Use it when a group of parameters of one dtype is sharded; plan each dtype,
// and trainable and frozen parameters, separately. Every rank must plan from
// the same input: the plan depends on nothing else.
//
//   // Linear(64, 128): weight [128, 64] and bias [128], float32, 2 ranks.
//   const std::vector<composable::ParamExtent> params = {
//       {.numel = 128 * 64, .rows = 128}, {.numel = 128, .rows = 128}};
//   const auto layout = composable::ShardLayout::Plan(
//       params, {.world_size = 2, .itemsize = 4});
//   const composable::ShardRange mine = layout.range(0, /*rank=*/1);
//   const int64_t row = layout.placement(0).granularity;  // 64
//   const int64_t first = mine.begin / row;               // 65
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace composable {

// The size of one parameter. `rows` is the size of the dimension along which
// the parameter may be cut; it is at least 1 and divides `numel`. An empty
// parameter (numel == 0) may have any number of rows, zero included.
struct ParamExtent {
  int64_t numel;
  int64_t rows;
};

struct ShardLayoutOptions {
  int64_t world_size;  // At least 1.
  int64_t itemsize;    // Bytes per element, at least 1.
};

// Where a parameter lies. `offset` counts elements of the unsharded buffer.
// Every rank boundary inside the parameter is a multiple of `granularity`
// elements from `offset`; the granularity is numel / rows, or 1 where the
// parameter is cut between elements instead (and for an empty parameter).
struct ParamPlacement {
  int64_t offset;
  int64_t granularity;
};

// The elements [begin, end) of a parameter, counted from the parameter's own
// start. Empty where begin == end.
struct ShardRange {
  int64_t begin;
  int64_t end;
};

// An immutable plan. Cheap to copy (two vectors of num_params() entries) and
// safe to read from several threads.
class ShardLayout {
 public:
  // Plans the layout. Deterministic, in integer arithmetic only.
  //
  // Let u be the fewest elements that fill a multiple of 16 bytes, that is,
  // 16 / gcd(16, itemsize), and `total` the sum of all numel. Guaranteed:
  //  * Order: parameters keep the given order and do not overlap; padding goes
  //    between them (or to the ends), never inside.
  //  * Bound: world_size * S <= total + total / 20 + world_size * u. So padding
  //    is at most 5 % of total and u elements per rank.
  //  * Alignment: S is a multiple of u.
  //
  // Two more alignments are applied where they are cheap: S a multiple of 128
  // bytes, and every parameter's start a multiple of u. The first of these that
  // is found at its price is taken: both, for at most 1 % more S; starts only,
  // for at most 1 % or one u more, whichever is larger; 128 bytes only, for at
  // most 1 %; neither. Where not all starts can be aligned, those are, in
  // order, for which S leaves room.
  //
  // Row granularity is kept for all parameters where a layout within the bound
  // is found. If none is, the parameters that stand in the way fall back to
  // granularity 1: shapes are admitted to row granularity by ascending row
  // size, and parameters of the same shape are treated alike. Before the two
  // alignments above, S is the smallest found for the chosen granularities and
  // the given order. The search is exhaustive where the bound leaves few
  // candidates (small groups); where it leaves many, it samples them, more
  // densely near the lower bound.
  //
  // If total == 0 (or there are no parameters), S is 0 and all offsets are 0.
  //
  // Cost: O(n log n) to prepare and O(n) for each S that is tried. At most 24
  // searches try about max(100000 / n, 2 log2(S)) values each.
  //
  // Throws std::invalid_argument if world_size or itemsize is below 1,
  // world_size is above 2^31, a numel is negative, rows does not divide numel,
  // or the sizes add up to more than 2^56 elements.
  static ShardLayout Plan(absl::Span<const ParamExtent> params,
                          const ShardLayoutOptions& options);

  // Each parameter whole on one rank. `owners`, one per parameter, ascend. A
  // rank's parameters follow each other, each from a multiple of u on, and S is
  // the smallest multiple of u that the fullest rank fits in. Throws
  // std::invalid_argument as Plan, and for an owner out of order or range.
  static ShardLayout PlanOwned(absl::Span<const ParamExtent> params,
                               absl::Span<const int> owners,
                               const ShardLayoutOptions& options);

  // A chunk of each parameter on every rank: chunk_numels[i] elements, at the
  // same offset in each shard, a multiple of u. The buffer then holds pieces of
  // parameters in turns: is_interleaved(). `offset` of a placement counts from
  // the start of a shard, and range() counts elements of the padded parameter,
  // world_size * chunk_numels[i]. A lone parameter gets no padding. Throws
  // std::invalid_argument as Plan.
  static ShardLayout Interleave(absl::Span<const int64_t> chunk_numels,
                                const ShardLayoutOptions& options);
  bool is_interleaved() const { return interleaved_; }

  // S: the elements of one rank's shard, padding included.
  int64_t shard_numel() const { return shard_numel_; }
  // world_size() * shard_numel().
  int64_t unsharded_numel() const { return world_size_ * shard_numel_; }
  int64_t world_size() const { return world_size_; }
  size_t num_params() const { return placements_.size(); }

  // Throws std::out_of_range unless i < num_params().
  const ParamPlacement& placement(size_t i) const;

  // The part of parameter i that `rank` owns. Over all ranks, in order, the
  // ranges tile [0, numel) exactly: each begins where the one before ends.
  // Throws std::out_of_range unless i < num_params() and 0 <= rank <
  // world_size().
  ShardRange range(size_t i, int64_t rank) const;

  // Elements of the unsharded buffer that belong to no parameter.
  int64_t padding() const;

  // A hash of the whole plan (world size, S, every size, offset and
  // granularity), the same on every rank: compare it across ranks to detect
  // groups that were built differently. Do not store it; it may change between
  // versions.
  uint64_t fingerprint() const;

 private:
  ShardLayout() = default;

  int64_t world_size_ = 1;
  int64_t shard_numel_ = 0;
  bool interleaved_ = false;
  std::vector<int64_t> numels_;
  std::vector<ParamPlacement> placements_;
};

}  // namespace composable
