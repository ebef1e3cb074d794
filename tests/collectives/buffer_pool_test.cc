#include "collectives/buffer_pool.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

namespace composable {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kBig = size_t{8} << 20;

// Bytes of memory that the kernel can't take back at will, behind the mapping
// that contains `address`.
int64_t HeldBytes(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  int64_t rss = -1;
  int64_t lazy = 0;
  while (std::getline(smaps, line)) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    int64_t kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      inside = begin <= wanted && wanted < end;
    } else if (inside && std::sscanf(line.c_str(), "Rss: %ld", &kib) == 1) {
      rss = kib * 1024;
    } else if (inside &&
               std::sscanf(line.c_str(), "LazyFree: %ld", &kib) == 1) {
      lazy = kib * 1024;
    }
  }
  EXPECT_GE(rss, 0) << "no mapping of " << address;
  return rss - lazy;
}

struct PoisonScope {
  PoisonScope() { BufferPool::SetPoisonForTest(true); }
  ~PoisonScope() { BufferPool::SetPoisonForTest(false); }
};

TEST(BufferPoolTest, BuffersAreAlignedAndDistinct) {
  BufferPool pool;
  auto* a = pool.Acquire(100);
  auto* b = pool.Acquire(100);
  EXPECT_NE(a, b);
  for (auto* buffer : {a, b}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data) % kPage, 0u);
    EXPECT_EQ(buffer->capacity % kPage, 0u);
    EXPECT_GE(buffer->capacity, 100u);
    EXPECT_EQ(buffer->requested, 100u);
    EXPECT_FALSE(buffer->idle);
    std::memset(buffer->data, 1, buffer->capacity);
  }
  EXPECT_GE(std::abs(static_cast<char*>(a->data) - static_cast<char*>(b->data)),
            static_cast<std::ptrdiff_t>(a->capacity));
  EXPECT_EQ(pool.reservations(), 2u);
}

TEST(BufferPoolTest, ReleasedBuffersAreUsedAgain) {
  BufferPool pool;
  auto* buffer = pool.Acquire(kPage);
  void* data = buffer->data;
  pool.Release(buffer);
  EXPECT_TRUE(buffer->idle);
  EXPECT_EQ(buffer->requested, 0u);
  for (int i = 0; i < 3; ++i) {
    auto* again = pool.Acquire(i == 0 ? 1 : kPage);
    EXPECT_EQ(again, buffer);
    EXPECT_EQ(again->data, data);
    pool.Release(again);
  }
  EXPECT_EQ(pool.reservations(), 1u);
}

TEST(BufferPoolTest, TakesTheSmallestThatFits) {
  BufferPool pool;
  auto* large = pool.Acquire(16 * kPage);
  auto* small = pool.Acquire(2 * kPage);
  auto* middle = pool.Acquire(4 * kPage);
  for (auto* buffer : {large, small, middle}) pool.Release(buffer);
  EXPECT_EQ(pool.Acquire(3 * kPage), middle);
  EXPECT_EQ(pool.Acquire(3 * kPage), large);
  EXPECT_EQ(pool.Acquire(kPage), small);
  EXPECT_EQ(pool.reservations(), 3u);
  pool.Acquire(kPage);
  EXPECT_EQ(pool.reservations(), 4u);
}

TEST(BufferPoolTest, OfEqualBuffersTakesTheOneWithMemory) {
  BufferPool pool;
  auto* a = pool.Acquire(4 * kPage);
  auto* b = pool.Acquire(4 * kPage);
  pool.Release(a);
  pool.Purge();  // a has no memory any more
  pool.Release(b);
  EXPECT_EQ(pool.Acquire(4 * kPage), b);
}

TEST(BufferPoolTest, MinimalCapacityMakesBuffersInterchangeable) {
  BufferPool pool;
  pool.set_min_capacity(10 * kPage);
  auto* buffer = pool.Acquire(100);
  EXPECT_EQ(buffer->capacity, 10 * kPage);
  // Address space, not memory.
  EXPECT_EQ(pool.committed_bytes(), 100u);
  pool.Release(buffer);
  EXPECT_EQ(pool.Acquire(10 * kPage), buffer);
  EXPECT_EQ(pool.reservations(), 1u);
}

TEST(BufferPoolTest, CountsWhatIsCommitted) {
  BufferPool pool;
  EXPECT_EQ(pool.committed_bytes(), 0u);
  auto* a = pool.Acquire(1000);
  auto* b = pool.Acquire(500);
  EXPECT_EQ(pool.committed_bytes(), 1500u);
  pool.Release(a);
  EXPECT_EQ(pool.committed_bytes(), 1500u);  // idle, not purged
  a = pool.Acquire(200);                     // part of what is there
  EXPECT_EQ(pool.committed_bytes(), 1500u);
  pool.Release(a);
  a = pool.Acquire(3000);  // 2000 more
  EXPECT_EQ(pool.committed_bytes(), 3500u);
  pool.Release(a);
  pool.Purge();
  EXPECT_EQ(pool.committed_bytes(), 500u);  // b is in use
  EXPECT_EQ(b->committed, 500u);
  EXPECT_EQ(a->committed, 0u);
  pool.Release(b);
  pool.Purge();
  EXPECT_EQ(pool.committed_bytes(), 0u);
  EXPECT_EQ(pool.committed_peak_bytes(), 3500u);
  EXPECT_EQ(pool.reservations(), 2u);  // the address space stays
}

TEST(BufferPoolTest, ReservationTakesNoMemory) {
  BufferPool pool;
  pool.set_min_capacity(size_t{1} << 34);  // 16 GiB
  auto* buffer = pool.Acquire(kPage);
  std::memset(buffer->data, 1, kPage);
  EXPECT_LE(HeldBytes(buffer->data), static_cast<int64_t>(64 * kPage));
}

TEST(BufferPoolTest, PurgeGivesMemoryBack) {
  BufferPool pool;
  auto* idle = pool.Acquire(kBig);
  std::memset(idle->data, 1, kBig);
  EXPECT_GE(HeldBytes(idle->data), static_cast<int64_t>(kBig));
  pool.Release(idle);
  EXPECT_GE(HeldBytes(idle->data), static_cast<int64_t>(kBig));
  pool.Purge();
  EXPECT_LE(HeldBytes(idle->data), static_cast<int64_t>(kBig / 16));
  // And takes it again where it is written.
  auto* again = pool.Acquire(kBig);
  ASSERT_EQ(again, idle);
  std::memset(again->data, 2, kBig);
  EXPECT_GE(HeldBytes(again->data), static_cast<int64_t>(kBig));
}

TEST(BufferPoolTest, PurgeSparesWhatIsInUse) {
  BufferPool pool;
  auto* buffer = pool.Acquire(kBig);
  std::memset(buffer->data, 7, kBig);
  pool.Purge();
  EXPECT_GE(HeldBytes(buffer->data), static_cast<int64_t>(kBig));
  const auto* bytes = static_cast<const unsigned char*>(buffer->data);
  for (size_t i = 0; i < kBig; i += kPage) ASSERT_EQ(bytes[i], 7);
}

TEST(BufferPoolTest, DestructorUnmaps) {
  void* data = nullptr;
  {
    BufferPool pool;
    data = pool.Acquire(kBig)->data;
    unsigned char in_core = 0;
    ASSERT_EQ(mincore(data, kPage, &in_core), 0);
  }
  unsigned char in_core = 0;
  EXPECT_NE(mincore(data, kPage, &in_core), 0);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(BufferPoolTest, PoisonShowsReadsOfReleasedBuffers) {
  const PoisonScope poison;
  BufferPool pool;
  auto* buffer = pool.Acquire(100 * sizeof(float));
  auto* values = static_cast<float*>(buffer->data);
  for (int i = 0; i < 100; ++i) values[i] = 1.0F;
  pool.Release(buffer);
  for (int i = 0; i < 100; ++i) EXPECT_NE(values[i], values[i]) << i;  // NaN
}

TEST(BufferPoolTest, WithoutPoisonNothingIsWritten) {
  BufferPool pool;
  auto* buffer = pool.Acquire(sizeof(float));
  *static_cast<float*>(buffer->data) = 1.0F;
  pool.Release(buffer);
  EXPECT_EQ(*static_cast<float*>(buffer->data), 1.0F);
}

TEST(BufferPoolTest, ReleasingTwiceIsABug) {
  BufferPool pool;
  auto* buffer = pool.Acquire(1);
  pool.Release(buffer);
  EXPECT_THROW(pool.Release(buffer), c10::Error);
}

TEST(BufferPoolTest, ImpossibleSizeIsAnErrorThatSaysWhatToDo) {
  BufferPool pool;
  try {
    pool.Acquire(std::numeric_limits<size_t>::max() / 4);
    FAIL() << "no error";
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("bytes for gathered parameters"), std::string::npos);
    EXPECT_NE(text.find("Shard smaller modules"), std::string::npos) << text;
  }
  EXPECT_EQ(pool.reservations(), 0u);
  EXPECT_EQ(pool.committed_bytes(), 0u);
}

TEST(BufferPoolTest, NoBytesAtAll) {
  BufferPool pool;
  auto* buffer = pool.Acquire(0);
  EXPECT_NE(buffer->data, nullptr);
  pool.Release(buffer);
  pool.Purge();
  EXPECT_EQ(pool.committed_bytes(), 0u);
}

}  // namespace
}  // namespace composable
