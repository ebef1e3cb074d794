// Counts the memory of one rank, from the outside: an allocator installed in
// LibTorch counts tensors, and LibTorch's memory profiler interface counts what
// other allocators report, which here is the buffer pool.
//
//   composable::MemoryCounter counter;          // for this thread's tensors
//   auto t = torch::zeros({1024});
//   counter.live();                             // 4096
//   counter.ResetPeak();
//
// A tensor counts for the thread that made it, wherever it is freed. The
// allocator stays installed until the process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace composable {

class MemoryCounter {
 public:
  struct Counts;

  MemoryCounter();
  ~MemoryCounter();
  MemoryCounter(const MemoryCounter&) = delete;
  MemoryCounter& operator=(const MemoryCounter&) = delete;

  int64_t live() const;  // bytes of tensors and of the pool
  int64_t peak() const;  // of live(), since ResetPeak
  int64_t pool() const;  // bytes of the pool
  void ResetPeak();
  // Tensors allocated since construction.
  int64_t allocations() const;
  // Tensors of at least `bytes` allocated since WatchLarge(bytes).
  int64_t large_allocations() const;
  void WatchLarge(int64_t bytes);

 private:
  std::shared_ptr<Counts> counts_;
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

}  // namespace composable
