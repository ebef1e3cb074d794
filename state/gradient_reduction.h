// From the whole gradients that autograd hands over to the reduced gradients
// of this rank's shards.
//
//   reduction.Pack(std::move(gradients), pool);   // frees each as it goes
//   reduction.Issue();                            // reduce-scatter, at once
//   // ... other work ...
//   reduction.Advance(pool);                      // the payload's memory is free
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
// The sum over ranks is divided by their number, unless the settings say
// otherwise: see Note [Gradient division].
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
// Note [zero_grad and pending gradients]
// What is pending belongs to the gradient that the user sees in S.grad(), which
// may be undefined meanwhile; so does what is not all-reduced yet, see Note
// [Partial reductions]. So clearing S.grad(), by zero_grad() of the module
// or the optimizer, with set_to_none or without, or by hand, drops what is
// pending for that parameter, as it would without sharding. Gradients that were
// changed in another way are an error, where the pending ones are next looked at:
// half of the gradient would be changed. Decided by each rank for itself; ranks
// clear the same gradients, as they take the same steps.
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "collectives/buffer_pool.h"
#include "state/fsdp_param_group.h"
#include "state/reduction_chain.h"

namespace composable {

class GradientReduction {
 public:
  explicit GradientReduction(FSDPParamGroup& group);

  // Copies `gradients`, one per parameter of the group and undefined where
  // there is none, into the payload. Sparse ones are made dense.
  void Pack(std::vector<at::Tensor> gradients, BufferPool& pool);

  // Ends a backward without a reduction: adds the payload to what is pending.
  void Keep(BufferPool& pool);
  // What is kept, and can be reduced: see Note [Partial reductions] too, and
  // Note [zero_grad and pending gradients] for the next four.
  bool has_pending();
  bool keeps_any() const {  // maybe cleared
    return !pending_.empty() || chain_.has_partial();
  }
  // Of whole gradients and of partials.
  size_t pending_bytes();
  // This rank's whole gradient of each parameter that is pending; undefined for
  // the others.
  std::vector<at::Tensor> Pending();
  void ClearPending();

  // Adds what is pending and starts the reduction. Returns the bytes sent.
  size_t Issue();
  // Waits for the reduce-scatter and gives its payload back; if the group has
  // replicas, starts the all-reduce over those. Returns the bytes of that.
  size_t Advance(BufferPool& pool);
  bool advanced() const { return chain_.advanced(); }
  // Whether there is an all-reduce to wait for.
  bool all_reduces() const {
    return advanced() && chain_.all_reduced_bytes() > 0;
  }
  bool has_replicas() const {
    return group_.replicate_communicator() != nullptr;
  }
  ReductionSettings& settings() { return chain_.settings; }
  // Waits, advancing if need be, divides, and adds to S.grad() of every parameter that requires one
  // and for which a rank had one. A parameter that is frozen by now is left
  // alone. Runs the hooks of the shards.
  void Finish(BufferPool& pool);
  // Reduces what is packed, without what is pending, and returns the reduced
  // gradients instead, one per parameter, undefined where no rank had one.
  // `all_reduced`: how many bytes went between replicas.
  std::vector<at::Tensor> ReduceNow(BufferPool& pool,
                                    size_t* all_reduced = nullptr);
  // Drops a payload or a reduction in flight.
  void Abandon(BufferPool& pool);

 private:
  class AbandonAtExit;
  struct Part {  // of one segment
    int segment = 0;
    int64_t shard_numel = 0;
    int64_t chunk_numel = 0;  // shard, flags and alignment
    at::Tensor payload;       // over the buffer, while packed
    at::Tensor reduced;       // chunk_numel elements, once that is done
  };
  void PackPart(Part& part, std::vector<at::Tensor>& gradients);
  void WriteFlags(const Part& part);
  void ClearKept();
  // Watches the gradients of the shards exactly while something is kept.
  void UpdateWatches();
  // Drops what was kept of the gradient of a parameter, the `p`-th of part `k`.
  void DropKept(size_t k, size_t p);
  void ForgetEmpty();
  void ReleasePayload(BufferPool& pool);
  // The dtype that the gradient of `param` is left in.
  static c10::ScalarType GradientDtype(const Part& part,
                                       const FSDPParam& param);
  // `alone`: without what is kept.
  void IssueParts(bool alone);
  // Hands the reduced rows of each parameter that has some to `take`.
  void FinishParts(
      const std::function<void(FSDPParam& param, at::Tensor rows)>& take);
  void SetGradient(FSDPParam& param, at::Tensor rows);
  // Drops what the user cleared of what is pending.
  void DropCleared();
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
  ReductionChain chain_;
};

}  // namespace composable
