#include "state/post_forward_shard.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace composable {

PostForwardShard::PostForwardShard(Communicator communicator)
    : communicator_(std::move(communicator)) {}

void PostForwardShard::Keep(const std::vector<at::Tensor>& wholes) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  slices_.clear();
  for (const at::Tensor& whole : wholes) {
    TORCH_INTERNAL_ASSERT(whole.numel() % communicator_.size() == 0);
    const int64_t part = whole.numel() / communicator_.size();
    slices_.push_back(
        whole.narrow(0, communicator_.rank() * part, part).clone());
  }
}

size_t PostForwardShard::bytes() const {
  size_t bytes = 0;
  for (const at::Tensor& slice : slices_) bytes += slice.nbytes();
  return bytes;
}

PendingCollectivePtr PostForwardShard::Gather(
    size_t index, const at::Tensor& whole, const CollectiveLabelPtr& label,
    const std::shared_ptr<AllGather>& custom) {
  return communicator_.AllGather(whole, slices_[index], label, custom);
}

}  // namespace composable
