#include "state/reduction_chain.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <utility>

#include "state/tensor_access.h"

namespace composable {

int64_t ReductionChain::ranks() const {
  const Communicator* replicate = group_.replicate_communicator();
  return static_cast<int64_t>(group_.communicator().size()) *
         (replicate == nullptr ? 1 : replicate->size());
}

at::Tensor ReductionChain::Allocate(int64_t numel, c10::ScalarType dtype) {
  at::Tensor memory = settings.custom->allocate(numel, dtype, c10::kCPU);
  TORCH_CHECK_VALUE(
      memory.defined() && memory.dim() == 1 && memory.is_contiguous() &&
          memory.device().is_cpu() && memory.scalar_type() == dtype &&
          memory.numel() == numel,
      "allocate() of a custom reduce-scatter: expected ", numel,
      " contiguous elements of ", dtype, " on the CPU, got ",
      memory.defined() ? c10::str(memory.sizes(), " of ", memory.scalar_type(),
                                  " on ", memory.device())
                       : std::string("an undefined tensor"),
      ".");
  return memory;
}

at::Tensor ReductionChain::AllocatePayload(int64_t numel,
                                           c10::ScalarType dtype) {
  if (settings.custom == nullptr || group_.communicator().size() == 1) {
    return {};
  }
  return Allocate(numel, dtype);
}

void ReductionChain::Issue(std::vector<Input> inputs, bool alone) {
  TORCH_INTERNAL_ASSERT(stage_ == Stage::kNone);
  Communicator& communicator =
      settings.separate ? *settings.separate : group_.communicator();
  links_.resize(inputs.size());
  stage_ = Stage::kReduceScatter;
  alone_ = alone;
  for (size_t k = 0; k < inputs.size(); ++k) {
    Link& link = links_[k];
    at::Tensor& payload = inputs[k].payload;
    if (!payload.defined()) continue;
    link.shard_numel = inputs[k].shard_numel;
    link.replicate_label = std::move(inputs[k].replicate_label);
    link.divide =
        GradientDivide::For(payload.scalar_type(), ranks(),
                            settings.divide_factor, settings.force_sum);
    if (link.divide.before != 1) payload.div_(link.divide.before);
    const int64_t numel = payload.numel() / communicator.size();
    link.output = settings.custom != nullptr && communicator.size() > 1
                      ? Allocate(numel, payload.scalar_type())
                      : at::empty({numel}, payload.options());
    link.pending = communicator.ReduceScatter(link.output, payload,
                                              inputs[k].label, settings.custom);
  }
}

bool ReductionChain::Advance() {
  TORCH_INTERNAL_ASSERT(stage_ == Stage::kReduceScatter);
  stage_ = Stage::kAllReduce;
  all_reduced_bytes_ = 0;
  for (Link& link : links_) {
    if (link.pending != nullptr) link.pending->Wait();
    link.pending.reset();
  }
  Communicator* replicate = group_.replicate_communicator();
  if (replicate == nullptr) return false;
  for (Link& link : links_) {
    if (!link.output.defined()) continue;
    if (!alone_ && !settings.requires_all_reduce) {
      LeavePartial(link);
      continue;
    }
    if (!alone_) TakePartial(link);
    if (replicate->size() == 1) continue;
    link.pending = replicate->StartAllReduce(
        link.output, Communicator::Reduction::kSum, link.replicate_label);
    all_reduced_bytes_ += link.output.nbytes();
  }
  return all_reduced_bytes_ > 0;
}

// A partial may stem from another division before.
void ReductionChain::TakePartial(Link& link) const {
  if (!link.partial.defined()) return;
  const double scale = link.partial_divided_by / link.divide.before;
  if (scale != 1) link.partial.mul_(scale);
  link.output.add_(link.partial);
  link.partial.reset();
}

void ReductionChain::LeavePartial(Link& link) const {
  TakePartial(link);
  // What a custom reduce-scatter allocates may be used again.
  link.partial = settings.custom == nullptr ? link.output : link.output.clone();
  link.partial_divided_by = link.divide.before;
  link.output.reset();
}

void ReductionChain::Finish() {
  if (stage_ == Stage::kReduceScatter) Advance();
  TORCH_INTERNAL_ASSERT(stage_ == Stage::kAllReduce);
  for (Link& link : links_) {
    if (link.pending != nullptr) link.pending->Wait();
    link.pending.reset();
    if (!link.output.defined()) continue;
    const at::Tensor shard = internal::MakeTensor(
        internal::StorageOf(link.output), link.output.scalar_type(),
        {link.shard_numel}, {1}, link.output.storage_offset());
    if (link.divide.reduction != 1) shard.div_(link.divide.reduction);
    if (settings.all_reduce_hook) settings.all_reduce_hook(shard);
    if (link.divide.after != 1) shard.div_(link.divide.after);
  }
}

at::Tensor ReductionChain::output(size_t k) const {
  return k < links_.size() ? links_[k].output : at::Tensor();
}

void ReductionChain::Abandon() {
  for (Link& link : links_) {
    link.pending.reset();  // waits
    link.output.reset();
  }
  stage_ = Stage::kNone;
}

size_t ReductionChain::partial_bytes() const {
  size_t bytes = 0;
  for (const Link& link : links_) {
    if (link.partial.defined()) bytes += link.partial.nbytes();
  }
  return bytes;
}

at::Tensor ReductionChain::partial(size_t k) const {
  return k < links_.size() ? links_[k].partial : at::Tensor();
}

void ReductionChain::ClearPartial() {
  for (Link& link : links_) link.partial.reset();
}

}  // namespace composable
