#include "state/storage_registry.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace composable {
namespace {

struct Table {
  absl::Mutex mutex;
  absl::flat_hash_map<const c10::StorageImpl*, GuardedStorage> entries
      ABSL_GUARDED_BY(mutex);
};

Table& Global() {
  static auto* table = new Table;  // modules of static life time use it at exit
  return *table;
}

}  // namespace

void RegisterGuardedStorage(const c10::StorageImpl* storage,
                            GuardedStorage entry) {
  absl::MutexLock lock(&Global().mutex);
  Global().entries[storage] = std::move(entry);
}

void UnregisterGuardedStorage(const c10::StorageImpl* storage) {
  absl::MutexLock lock(&Global().mutex);
  Global().entries.erase(storage);
}

bool FindGuardedStorage(const at::TensorBase& tensor, GuardedStorage* entry) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  absl::ReaderMutexLock lock(&Global().mutex);
  const auto it = Global().entries.find(storage);
  if (it == Global().entries.end()) return false;
  *entry = it->second;
  return true;
}

}  // namespace composable
