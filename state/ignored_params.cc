#include "state/ignored_params.h"

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace composable {
namespace {

struct Table {
  absl::Mutex mutex;
  // How many hold it.
  absl::flat_hash_map<const c10::TensorImpl*, int> holders
      ABSL_GUARDED_BY(mutex);
};

Table& Global() {
  static auto* table = new Table;  // modules of static life time use it at exit
  return *table;
}

}  // namespace

IgnoredParams::IgnoredParams(const std::vector<at::Tensor>& params) {
  params_.reserve(params.size());
  absl::MutexLock lock(&Global().mutex);
  for (const at::Tensor& param : params) {
    params_.emplace_back(param.getIntrusivePtr());
    ++Global().holders[param.unsafeGetTensorImpl()];
  }
}

IgnoredParams::~IgnoredParams() {
  absl::MutexLock lock(&Global().mutex);
  for (const auto& param : params_) {
    const auto it = Global().holders.find(param._unsafe_get_target());
    if (--it->second == 0) Global().holders.erase(it);
  }
}

bool IgnoredParams::Contains(const at::TensorBase& tensor) {
  absl::ReaderMutexLock lock(&Global().mutex);
  return Global().holders.contains(tensor.unsafeGetTensorImpl());
}

}  // namespace composable
