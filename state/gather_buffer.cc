#include "state/gather_buffer.h"

#include <c10/util/Exception.h>

#include <utility>

namespace composable {

void GatherBuffer::Acquire(size_t bytes, BufferPool& pool,
                           CollectiveMemory* custom) {
  TORCH_INTERNAL_ASSERT(data_ == nullptr);
  if (custom == nullptr) {
    pooled_ = pool.Acquire(bytes);
    data_ = pooled_->data;
    return;
  }
  at::Tensor memory =
      custom->allocate(static_cast<int64_t>(bytes), c10::kByte, c10::kCPU);
  TORCH_CHECK_VALUE(
      memory.defined() && memory.is_contiguous() && memory.device().is_cpu() &&
          memory.scalar_type() == c10::kByte && memory.nbytes() >= bytes,
      "allocate() of a custom all-gather: expected ", bytes,
      " contiguous elements of ", c10::kByte, " on the CPU, got ",
      memory.defined() ? c10::str(memory.numel(), " of ", memory.scalar_type(),
                                  " on ", memory.device())
                       : std::string("an undefined tensor"),
      ".");
  allocated_ = std::move(memory);
  data_ = allocated_.mutable_data_ptr();
}

void GatherBuffer::Release(BufferPool& pool) {
  if (pooled_ != nullptr) pool.Release(std::exchange(pooled_, nullptr));
  allocated_.reset();
  data_ = nullptr;
}

}  // namespace composable
