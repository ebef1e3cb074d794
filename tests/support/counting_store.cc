#include "tests/support/counting_store.h"

#include <c10/util/Exception.h>

#include <utility>

namespace composable {

CountingStore::CountingStore(c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)) {}

void CountingStore::Fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_ = why;
}

c10d::Store& CountingStore::Call() {
  ++calls_;
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  return *store_;
}

c10::intrusive_ptr<c10d::Store> CountingStore::clone() {
  return c10::make_intrusive<CountingStore>(store_->clone());
}

void CountingStore::set(const std::string& key,
                        const std::vector<uint8_t>& value) {
  Call().set(key, value);
}

std::vector<uint8_t> CountingStore::compareSet(
    const std::string& key, const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return Call().compareSet(key, expected, desired);
}

std::vector<uint8_t> CountingStore::get(const std::string& key) {
  return Call().get(key);
}

int64_t CountingStore::add(const std::string& key, int64_t value) {
  return Call().add(key, value);
}

bool CountingStore::deleteKey(const std::string& key) {
  return Call().deleteKey(key);
}

bool CountingStore::check(const std::vector<std::string>& keys) {
  ++looks_;
  c10d::Store& store = Call();
  --calls_;
  return store.check(keys);
}

int64_t CountingStore::getNumKeys() { return store_->getNumKeys(); }

void CountingStore::wait(const std::vector<std::string>& keys) {
  Call().wait(keys);
}

void CountingStore::wait(const std::vector<std::string>& keys,
                         const std::chrono::milliseconds& timeout) {
  Call().wait(keys, timeout);
}

}  // namespace composable
