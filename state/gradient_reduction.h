// From the whole gradients that autograd hands over to the reduced gradients
// of this rank's shards.
//
//   reduction.Pack(std::move(gradients), pool);   // frees each as it goes
//   reduction.Issue();                            // reduce-scatter, at once
//   // ... other work ...
//   reduction.Finish(pool);                       // S.grad() is set
//
// Note [Gradient payload]
// Every rank sends all trainable segments, zeros where it has no gradient, so
// that sizes never differ between ranks. Rank r's part of the payload of a
// segment is r's shard of the layout, followed by one flag per parameter: 1 if
// the sender has a gradient for it. Their sum tells each rank whether any rank
// has one, which decides alike everywhere whether S.grad() is set. It is read
// only where this rank itself lacks a gradient.
//
// The sum over ranks is divided by their number after the reduction.
//
// The payload, and what is pending, is of the segment's reduce dtype; gradients
// of any dtype are cast while they are packed. What is reduced is cast to the
// gradient dtype of each shard, at once for a segment that has one. A sum of
// flags may be rounded in a short dtype, but never to 0.
//
// Note [Gradients that no optimizer uses]
// An optimizer that does not hold the shards trains nothing, without an error.
// What shows it: the gradient that a reduction set was cleared, or zeroed, and
// no shard of the group was written since the first reduction. The next one
// then warns, once for a group. (A program that skips its first step on purpose
// sees it too. A group that has been stepped once is not looked at: the other
// half of a GAN clears gradients that it does not use.)
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "collectives/buffer_pool.h"
#include "collectives/communicator.h"
#include "state/fsdp_param_group.h"

namespace composable {

class GradientReduction {
 public:
  explicit GradientReduction(FSDPParamGroup& group);

  // Copies `gradients`, one per parameter of the group and undefined where
  // there is none, into the payload. Sparse ones are made dense.
  void Pack(std::vector<at::Tensor> gradients, BufferPool& pool);

  // Ends a backward without a reduction: adds the payload to what is pending.
  void Keep(BufferPool& pool);
  bool has_pending() const { return !pending_.empty(); }
  size_t pending_bytes() const;
  void ClearPending();

  // Adds what is pending and starts the reduction. Returns the bytes sent.
  size_t Issue();
  // Waits, divides, and adds to S.grad() of every parameter that requires one
  // and for which a rank had one. A parameter that is frozen by now is left
  // alone. Runs the hooks of the shards.
  void Finish(BufferPool& pool);
  // Reduces what is packed, without what is pending, and returns the reduced
  // gradients instead, one per parameter, undefined where no rank had one.
  std::vector<at::Tensor> ReduceNow(BufferPool& pool);
  // Drops a payload or a reduction in flight.
  void Abandon(BufferPool& pool);

 private:
  class AbandonAtExit;
  struct Part {  // of one segment
    int segment = 0;
    int64_t shard_numel = 0;
    int64_t chunk_numel = 0;  // shard, flags and alignment
    at::Tensor payload;       // over the buffer, while packed
    at::Tensor reduced;       // chunk_numel elements, while in flight
  };
  void PackPart(Part& part, std::vector<at::Tensor>& gradients);
  void WriteFlags(const Part& part);
  // The dtype that the gradient of `param` is left in.
  static c10::ScalarType GradientDtype(const Part& part,
                                       const FSDPParam& param);
  void IssueParts();
  // Hands the reduced rows of each parameter that has some to `take`.
  void FinishParts(
      const std::function<void(FSDPParam& param, at::Tensor rows)>& take);
  void SetGradient(FSDPParam& param, at::Tensor rows);
  static bool WasClearedUnused(const FSDPParam& param);
  // No shard of the group was written since the first reduction.
  bool IsUntrained() const;
  bool IsActive(const Part& part) const;

  FSDPParamGroup& group_;
  std::vector<Part> parts_;
  BufferPool::Buffer* buffer_ = nullptr;
  bool graph_wanted_ = false;  // by create_graph
  bool warned_ = false;
  std::optional<uint64_t> writes_at_first_;  // reduction, of the group
  std::vector<bool> has_gradient_;           // of this rank, per parameter
  std::vector<at::Tensor> pending_;  // per part, shaped like the payload
  std::vector<bool> pending_has_gradient_;
  std::vector<PendingCollectivePtr> in_flight_;
};

}  // namespace composable
