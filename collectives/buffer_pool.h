// The memory that gathered parameters and packed gradients live in.
//
//   composable::BufferPool pool;
//   composable::BufferPool::Buffer* buffer = pool.Acquire(bytes);
//   std::memset(buffer->data, 0, bytes);
//   pool.Release(buffer);    // kept for the next Acquire
//   pool.Purge();            // between iterations: give the memory back
//
// Note [Idle buffers cost nothing]
// A buffer is address space that is reserved once; only the bytes that were
// asked for since the last Purge are backed by memory. Purge tells the kernel
// that it may take the memory of idle buffers (MADV_FREE): it does so as soon
// as anyone needs memory, and until then using the buffer again costs neither
// an allocation nor a page fault. (Until it is taken, the memory still shows in
// the process's resident size; smaps has it as LazyFree.) So a training loop
// allocates no memory for gathers after its first iteration, and between
// iterations holds only shards. What is backed is reported to LibTorch's memory
// profiler, as its own allocators do.
//
// Thread-compatible: the owner serialises calls. Buffers are 4096-byte aligned.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace composable {

class BufferPool {
 public:
  struct Buffer {
    void* data = nullptr;
    size_t capacity = 0;   // reserved bytes
    size_t requested = 0;  // bytes of the present holder; 0 while idle
    size_t committed = 0;  // bytes backed since the last Purge
    bool idle = true;
  };

  BufferPool() = default;
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Buffers reserved from now on hold at least `bytes`, so that any group that
  // fits can take any of them.
  void set_min_capacity(size_t bytes) { min_capacity_ = bytes; }

  // The smallest idle buffer that holds `bytes`, or a new one. Its contents
  // are unspecified. Throws c10::OutOfMemoryError if none can be reserved.
  Buffer* Acquire(size_t bytes);
  void Release(Buffer* buffer);

  // Gives the memory of idle buffers back; their address space stays.
  void Purge();

  // Bytes that memory stands behind: in use, or idle and not yet purged.
  size_t committed_bytes() const { return committed_; }
  size_t committed_peak_bytes() const { return committed_peak_; }
  // Address space reservations made so far.
  size_t reservations() const { return buffers_.size(); }

  // Released buffers are filled with 0xff bytes (NaN in every floating type),
  // so that a read through a stale pointer shows. For tests.
  static void SetPoisonForTest(bool on);

 private:
  void Commit(Buffer* buffer, size_t bytes);

  std::vector<std::unique_ptr<Buffer>> buffers_;
  size_t min_capacity_ = 0;
  size_t committed_ = 0;
  size_t committed_peak_ = 0;
};

}  // namespace composable
