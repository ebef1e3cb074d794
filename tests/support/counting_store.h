// A store that counts what one rank asks of it, and can be made to fail.
//
//   auto shared = c10::make_intrusive<c10d::HashStore>();
//   auto store = c10::make_intrusive<composable::CountingStore>(shared);
//   store->add("key", 1);
//   store->calls();   // all but looks
//   store->Fail("the host is gone");
//
// Thread-safe.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace composable {

class CountingStore final : public c10d::Store {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store);

  // Since the last Reset(). Looks are calls of check().
  int64_t calls() const { return calls_; }
  int64_t looks() const { return looks_; }
  void Reset() { calls_ = looks_ = 0; }
  // Every call fails from now on.
  void Fail(const std::string& why);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  c10d::Store& Call();

  const c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> looks_{0};
  std::mutex mutex_;
  std::string failure_;  // guarded by mutex_
};

}  // namespace composable
