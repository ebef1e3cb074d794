// Under --config=tsan: what absl::Mutex guards is no race (see
// third_party/absl/tsan_mutex.cc).
#include <gtest/gtest.h>

#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace {

TEST(AbseilMutexTest, HandsOverBetweenThreads) {
  absl::Mutex mutex;
  absl::CondVar taken;
  absl::Notification done;
  bool offered = false;
  int value = 0;
  std::thread taker([&] {
    for (int i = 0; i < 100; ++i) {
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&offered));
      ++value;
      offered = false;
      taken.SignalAll();
    }
    done.Notify();
  });
  for (int i = 0; i < 100; ++i) {
    absl::MutexLock lock(&mutex);
    ++value;
    offered = true;
    while (offered) taken.WaitWithTimeout(&mutex, absl::Seconds(1));
  }
  done.WaitForNotification();
  EXPECT_EQ(value, 200);
  taker.join();
}

}  // namespace
