// The memory that a group is gathered into: of the tree's pool, or what a custom
// all-gather allocates.
//
//   composable::GatherBuffer buffer;
//   buffer.Acquire(bytes, pool, /*custom=*/nullptr);
//   std::memset(buffer.data(), 0, bytes);
//   buffer.Release(pool);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "collectives/buffer_pool.h"
#include "collectives/custom_collectives.h"

namespace composable {

class GatherBuffer {
 public:
  void Acquire(size_t bytes, BufferPool& pool, CollectiveMemory* custom);
  void Release(BufferPool& pool);
  // Null while there is none.
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  BufferPool::Buffer* pooled_ = nullptr;
  at::Tensor allocated_;
};

}  // namespace composable
