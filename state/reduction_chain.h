// The collectives of one reduction: a reduce-scatter over the shard ranks, then,
// where the group has replicas, an all-reduce of the result over those.
//
//   chain.Issue(inputs, /*alone=*/false);
//   chain.Advance();   // payloads may be reused; all-reduces are on their way
//   chain.Finish();
//   chain.output(0);   // this rank's part of the reduced gradients
//
// Note [Partial reductions]
// With requires_all_reduce off, what the reduce-scatter gave stays as a partial,
// in the dtype that is reduced in, and is added before the next all-reduce. It
// is flags and gradients alike, so what an earlier backward brought a gradient
// for counts too. autograd::grad neither uses nor leaves one.
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/communicator.h"
#include "state/fsdp_param_group.h"
#include "state/gradient_divide.h"
#include "state/reduction_settings.h"

namespace composable {

class ReductionChain {
 public:
  explicit ReductionChain(FSDPParamGroup& group) : group_(group) {}

  ReductionSettings settings;

  // The memory of a payload; undefined if the caller is to take its own.
  at::Tensor AllocatePayload(int64_t numel, c10::ScalarType dtype);

  struct Input {
    at::Tensor payload;       // undefined: this one is left out
    int64_t shard_numel = 0;  // of a rank's chunk; flags follow
    CollectiveLabelPtr label;
    CollectiveLabelPtr replicate_label;
  };
  // Starts the reduce-scatters. `alone`: without partials.
  void Issue(std::vector<Input> inputs, bool alone);
  // Waits for them. True if it has started all-reduces, which Finish waits for.
  bool Advance();
  // Between Issue and Finish: whether Advance was called.
  bool advanced() const { return stage_ == Stage::kAllReduce; }
  // Advances if that has not been done, waits, runs the hook and divides.
  void Finish();
  // Of input k, after Finish; undefined where it was left out or has become a
  // partial.
  at::Tensor output(size_t k) const;
  // Forgets outputs; waits for collectives in flight, and swallows errors.
  void Abandon();

  bool has_partial() const { return partial_bytes() > 0; }
  size_t partial_bytes() const;
  // Of input k: a rank's chunk, flags included; undefined if there is none.
  at::Tensor partial(size_t k) const;
  void ClearPartial();
  // All-reduced bytes of the last Advance.
  size_t all_reduced_bytes() const { return all_reduced_bytes_; }

 private:
  enum class Stage : uint8_t { kNone, kReduceScatter, kAllReduce };
  struct Link {
    int64_t shard_numel = 0;
    CollectiveLabelPtr replicate_label;
    GradientDivide divide;
    at::Tensor output;
    PendingCollectivePtr pending;
    at::Tensor partial;
    double partial_divided_by = 1;
  };
  int64_t ranks() const;
  at::Tensor Allocate(int64_t numel, c10::ScalarType dtype);
  void TakePartial(Link& link) const;
  void LeavePartial(Link& link) const;

  FSDPParamGroup& group_;
  std::vector<Link> links_;
  Stage stage_ = Stage::kNone;
  bool alone_ = false;
  size_t all_reduced_bytes_ = 0;
};

}  // namespace composable
