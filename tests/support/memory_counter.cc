#include "tests/support/memory_counter.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <utility>

namespace composable {

struct MemoryCounter::Counts {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> pool{0};
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> large{0};
  std::atomic<int64_t> large_from{std::numeric_limits<int64_t>::max()};

  void Add(int64_t bytes) {
    const int64_t now = live += bytes;
    int64_t seen = peak;
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {
    }
  }
};

namespace {

thread_local std::shared_ptr<MemoryCounter::Counts> current;

struct Header {
  std::shared_ptr<MemoryCounter::Counts> owner;
  int64_t bytes = 0;
};
constexpr size_t kHeaderBytes = 64;  // keeps the alignment of LibTorch
static_assert(sizeof(Header) <= kHeaderBytes);

void Free(void* data) {
  if (data == nullptr) return;
  auto* header =
      reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
  if (header->owner != nullptr) header->owner->Add(-header->bytes);
  header->~Header();
  std::free(header);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &Free, c10::Device(c10::kCPU)};
    const size_t padded = (bytes + kHeaderBytes + 63) / 64 * 64;
    auto* header = new (std::aligned_alloc(64, padded)) Header;
    header->owner = current;
    header->bytes = static_cast<int64_t>(bytes);
    if (auto* counts = header->owner.get()) {
      counts->Add(header->bytes);
      ++counts->allocations;
      if (header->bytes >= counts->large_from) ++counts->large;
    }
    void* data = reinterpret_cast<char*>(header) + kHeaderBytes;
    return {data, data, &Free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* destination, const void* source,
                 size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

class ReportedMemory final : public c10::MemoryReportingInfoBase {
 public:
  explicit ReportedMemory(std::shared_ptr<MemoryCounter::Counts> counts)
      : counts_(std::move(counts)) {}
  void reportMemoryUsage(void* /*data*/, int64_t bytes,
                         size_t /*total_allocated*/, size_t /*total_reserved*/,
                         c10::Device /*device*/) override {
    counts_->Add(bytes);
    counts_->pool += bytes;
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  std::shared_ptr<MemoryCounter::Counts> counts_;
};

void InstallAllocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(new CountingAllocator, /*priority=*/255);
  });
}

}  // namespace

struct MemoryCounter::Guard {
  explicit Guard(const std::shared_ptr<Counts>& counts)
      : reports(c10::DebugInfoKind::PROFILER_STATE,
                std::make_shared<ReportedMemory>(counts)) {}
  c10::DebugInfoGuard reports;
};

MemoryCounter::MemoryCounter() : counts_(std::make_shared<Counts>()) {
  InstallAllocator();
  current = counts_;
  guard_ = std::make_unique<Guard>(counts_);
}

MemoryCounter::~MemoryCounter() { current.reset(); }

int64_t MemoryCounter::live() const { return counts_->live; }
int64_t MemoryCounter::peak() const { return counts_->peak; }
int64_t MemoryCounter::pool() const { return counts_->pool; }
int64_t MemoryCounter::allocations() const { return counts_->allocations; }
int64_t MemoryCounter::large_allocations() const { return counts_->large; }

void MemoryCounter::WatchLarge(int64_t bytes) {
  counts_->large = 0;
  counts_->large_from = bytes;
}

void MemoryCounter::ResetPeak() { counts_->peak = counts_->live.load(); }

}  // namespace composable
