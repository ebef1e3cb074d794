// The part of a group's whole parameters that a rank keeps between forward and
// backward, for reshard_after_forward(k).
//
//   composable::PostForwardShard part(communicator_of_k_ranks);
//   part.Keep({whole_bytes});            // copies this rank's k-th of it
//   auto gather = part.Gather(0, whole_bytes, label, nullptr);
//   gather->Wait();                      // the same whole again
//   part.Drop();
//
// The k ranks are neighbours in the group's shard ranks. Each keeps the slice of
// the gathered buffer at its place among them, which belongs to S / k shards. So
// keeping costs one copy, and gathering none: the slices, one after the other,
// are the buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "collectives/collective_label.h"
#include "collectives/communicator.h"

namespace composable {

class PostForwardShard {
 public:
  explicit PostForwardShard(Communicator communicator);

  // `wholes`: flat gathered buffers whose sizes k divides.
  void Keep(const std::vector<at::Tensor>& wholes);
  void Drop() { slices_.clear(); }
  bool kept() const { return !slices_.empty(); }
  size_t bytes() const;

  // Fills `whole` from the k ranks' `index`-th slices.
  PendingCollectivePtr Gather(size_t index, const at::Tensor& whole,
                              const CollectiveLabelPtr& label,
                              const std::shared_ptr<AllGather>& custom);

  int size() const { return communicator_.size(); }

 private:
  Communicator communicator_;
  std::vector<at::Tensor> slices_;
};

}  // namespace composable
