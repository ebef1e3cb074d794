#include "state/segment_plan.h"

#include <algorithm>
#include <numeric>

namespace composable {
namespace {

// Moves each owner's parameters together.
std::vector<int> AssignOwners(const std::vector<FSDPParam>& params,
                              std::vector<int>& indices, int64_t itemsize,
                              std::vector<int64_t>& owned_bytes) {
  std::vector<int> owner_of(params.size(), -1);
  std::vector<int> unowned;
  for (const int i : indices) {
    if (const auto& owner = params[i].placement.owner) {
      owner_of[i] = *owner;
      owned_bytes[*owner] += params[i].numel() * itemsize;
    } else {
      unowned.push_back(i);
    }
  }
  std::stable_sort(unowned.begin(), unowned.end(), [&](int a, int b) {
    return params[a].numel() > params[b].numel();
  });
  for (const int i : unowned) {
    const auto least = std::min_element(owned_bytes.begin(), owned_bytes.end());
    owner_of[i] = static_cast<int>(least - owned_bytes.begin());
    *least += params[i].numel() * itemsize;
  }
  std::stable_sort(indices.begin(), indices.end(),
                   [&](int a, int b) { return owner_of[a] < owner_of[b]; });
  std::vector<int> owners;
  owners.reserve(indices.size());
  for (const int i : indices) owners.push_back(owner_of[i]);
  return owners;
}

}  // namespace

SegmentKind SegmentKindOf(const FSDPParam& param) {
  if (param.extension != nullptr) return SegmentKind::kExtended;
  switch (param.placement.kind) {
    case Placement::Kind::kRagged:
      return SegmentKind::kRagged;
    case Placement::Kind::kShard:
      return SegmentKind::kChunked;
    case Placement::Kind::kOwned:
      return SegmentKind::kOwned;
    case Placement::Kind::kReplicate:
      return SegmentKind::kReplicated;
  }
  return SegmentKind::kRagged;
}

SegmentPlan PlanSegment(const SegmentOf& segment, int rank, int world_size,
                        std::vector<FSDPParam>& params,
                        std::vector<int>& indices,
                        std::vector<int64_t>& owned_bytes) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(segment.dtype));
  const ShardLayoutOptions options = {.world_size = world_size,
                                      .itemsize = itemsize};
  if (segment.kind == SegmentKind::kRagged ||
      segment.kind == SegmentKind::kOwned) {
    std::vector<int> owners;
    if (segment.kind == SegmentKind::kOwned) {
      owners = AssignOwners(params, indices, itemsize, owned_bytes);
    }
    std::vector<ParamExtent> extents;
    for (const int i : indices) extents.push_back(params[i].extent());
    SegmentPlan plan{.layout =
                         segment.kind == SegmentKind::kOwned
                             ? ShardLayout::PlanOwned(extents, owners, options)
                             : ShardLayout::Plan(extents, options)};
    plan.whole_numel = plan.layout.unsharded_numel();
    for (size_t k = 0; k < indices.size(); ++k) {
      params[indices[k]].Place(segment.index, k, plan.layout, rank);
    }
    return plan;
  }
  std::vector<int64_t> numels;
  for (const int i : indices) {
    numels.push_back(params[i].ChunksFor(world_size).numel());
  }
  SegmentPlan plan{.layout = ShardLayout::Interleave(numels, options)};
  const FSDPParam& first = params[indices.front()];
  const bool is_one_run = segment.kind == SegmentKind::kChunked &&
                          indices.size() == 1 && first.placement.dim == 0 &&
                          first.is_contiguous();
  plan.staged = segment.kind != SegmentKind::kReplicated && !is_one_run;
  const int64_t unit = 16 / std::gcd(int64_t{16}, itemsize);
  for (size_t k = 0; k < indices.size(); ++k) {
    FSDPParam& param = params[indices[k]];
    // Of copies, those of rank 0 are read.
    param.PlaceChunk(
        segment.index, k, plan.layout, rank,
        plan.staged ? plan.whole_numel : plan.layout.placement(k).offset);
    plan.whole_numel += (param.numel() + unit - 1) / unit * unit;
  }
  if (!plan.staged) plan.whole_numel = plan.layout.unsharded_numel();
  return plan;
}

}  // namespace composable
