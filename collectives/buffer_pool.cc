#include "collectives/buffer_pool.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace composable {
namespace {

constexpr size_t kPage = 4096;
std::atomic<bool> poison{false};

size_t RoundUp(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Of two idle buffers that hold `bytes`: the one of smaller capacity, then the
// one that needs less new memory, then the one that wastes less.
bool IsBetter(const BufferPool::Buffer& a, const BufferPool::Buffer& b,
              size_t bytes) {
  if (a.capacity != b.capacity) return a.capacity < b.capacity;
  const bool a_backed = a.committed >= bytes;
  const bool b_backed = b.committed >= bytes;
  if (a_backed != b_backed) return a_backed;
  return a_backed ? a.committed < b.committed : a.committed > b.committed;
}

void GiveBack(void* data, size_t bytes) {
  if (madvise(data, bytes, MADV_FREE) != 0) {
    madvise(data, bytes, MADV_DONTNEED);  // kernels without MADV_FREE
  }
}

}  // namespace

BufferPool::~BufferPool() {
  for (const auto& buffer : buffers_) {
    if (buffer->committed != 0) {
      committed_ -= buffer->committed;
      c10::reportMemoryUsageToProfiler(buffer->data,
                                       -static_cast<int64_t>(buffer->committed),
                                       committed_, 0, c10::Device(c10::kCPU));
    }
    munmap(buffer->data, buffer->capacity);
  }
}

BufferPool::Buffer* BufferPool::Acquire(size_t bytes) {
  Buffer* best = nullptr;
  for (const auto& buffer : buffers_) {
    if (!buffer->idle || buffer->capacity < bytes) continue;
    if (best == nullptr || IsBetter(*buffer, *best, bytes)) best = buffer.get();
  }
  if (best == nullptr) {
    const size_t capacity = RoundUp(std::max({bytes, min_capacity_, kPage}));
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK_WITH(
        OutOfMemoryError, data != MAP_FAILED, "expected to reserve ", capacity,
        " bytes for gathered parameters, got: ", std::strerror(errno),
        ". Shard smaller modules, or use more ranks.");
    buffers_.push_back(std::make_unique<Buffer>());
    best = buffers_.back().get();
    best->data = data;
    best->capacity = capacity;
  }
  Commit(best, bytes);
  best->idle = false;
  best->requested = bytes;
  return best;
}

void BufferPool::Commit(Buffer* buffer, size_t bytes) {
  if (bytes <= buffer->committed) return;
  const size_t more = bytes - buffer->committed;
  buffer->committed = bytes;
  committed_ += more;
  committed_peak_ = std::max(committed_peak_, committed_);
  c10::reportMemoryUsageToProfiler(buffer->data, static_cast<int64_t>(more),
                                   committed_, 0, c10::Device(c10::kCPU));
}

void BufferPool::Release(Buffer* buffer) {
  TORCH_INTERNAL_ASSERT(!buffer->idle);
  if (poison.load(std::memory_order_relaxed)) {
    std::memset(buffer->data, 0xff, buffer->requested);
  }
  buffer->idle = true;
  buffer->requested = 0;
}

void BufferPool::Purge() {
  for (const auto& buffer : buffers_) {
    if (!buffer->idle || buffer->committed == 0) continue;
    GiveBack(buffer->data, RoundUp(buffer->committed));
    committed_ -= buffer->committed;
    c10::reportMemoryUsageToProfiler(buffer->data,
                                     -static_cast<int64_t>(buffer->committed),
                                     committed_, 0, c10::Device(c10::kCPU));
    buffer->committed = 0;
  }
}

void BufferPool::SetPoisonForTest(bool on) { poison.store(on); }

}  // namespace composable
