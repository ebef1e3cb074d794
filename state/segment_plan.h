// Which parameters of a group travel together, and where they lie.
//
//   // For all `indices` of one kind:
//   composable::SegmentKind kind = composable::SegmentKindOf(params[indices[0]]);
//   composable::SegmentPlan plan = composable::PlanSegment(
//       {.index = 0, .kind = kind, .dtype = at::kFloat}, /*rank=*/0,
//       /*world_size=*/2, params, indices, owned_bytes);
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/fsdp_param.h"
#include "state/shard_layout.h"

namespace composable {

// Parameters of different kinds are in different segments.
enum class SegmentKind : uint8_t {
  kRagged,
  kOwned,
  kChunked,   // Shard(dim)
  kExtended,  // with an all-gather extension
  kReplicated,
};

SegmentKind SegmentKindOf(const FSDPParam& param);

struct SegmentPlan {
  ShardLayout layout;  // of the gathered buffer
  int64_t whole_numel = 0;
  bool staged = false;  // the whole parameters are not the gathered buffer
};

struct SegmentOf {
  int index = 0;  // in the group
  SegmentKind kind = SegmentKind::kRagged;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

// Plans `segment`, of the parameters `indices` of `params`, puts `indices` into
// the order of their places, and places the parameters. Owned() goes to the rank
// that has the least in `owned_bytes`, largest first, and what every rank gets
// is added there.
SegmentPlan PlanSegment(const SegmentOf& segment, int rank, int world_size,
                        std::vector<FSDPParam>& params,
                        std::vector<int>& indices,
                        std::vector<int64_t>& owned_bytes);

}  // namespace composable
