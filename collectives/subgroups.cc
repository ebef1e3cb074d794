#include "collectives/subgroups.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "collectives/agreement.h"

namespace composable {
namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

struct Children {
  WeakGroup parent;  // keeps its address from being used again
  absl::flat_hash_map<std::string, WeakGroup> by_key;
};

struct Cache {
  absl::Mutex mutex;
  absl::flat_hash_map<const c10d::ProcessGroup*, Children> children
      ABSL_GUARDED_BY(mutex);

  ProcessGroupPtr Find(const ProcessGroupPtr& parent, const std::string& key) {
    const absl::MutexLock lock(&mutex);
    const auto it = children.find(parent.get());
    if (it == children.end()) return nullptr;
    const auto child = it->second.by_key.find(key);
    return child == it->second.by_key.end() ? nullptr : child->second.lock();
  }
  void Add(const ProcessGroupPtr& parent, const std::string& key,
           const ProcessGroupPtr& child) {
    const absl::MutexLock lock(&mutex);
    for (auto it = children.begin(); it != children.end();) {
      auto here = it++;
      if (here->second.parent.expired()) children.erase(here);
    }
    auto& of_parent =
        children.try_emplace(parent.get(), Children{WeakGroup(parent), {}})
            .first->second;
    of_parent.by_key.insert_or_assign(key, WeakGroup(child));
  }
};

Cache& Groups() {
  static auto* cache = new Cache;
  return *cache;
}

std::string BackendsOf(const c10d::ProcessGroup& group) {
  std::vector<std::string> names;
  for (const c10::Device& device : group.getDeviceTypes()) {
    if (device.type() == c10::kCPU) names.emplace_back("gloo");
    if (device.type() == c10::kCUDA) names.emplace_back("nccl");
  }
  return absl::StrJoin(names, ",");
}

}  // namespace

ProcessGroupPtr SubgroupOf(const ProcessGroupPtr& parent,
                           const std::vector<int64_t>& ranks,
                           const std::string& purpose) {
  TORCH_CHECK_VALUE(parent != nullptr, "expected a process group, got none.");
  const int size = parent->getSize();
  const auto me = std::find(ranks.begin(), ranks.end(), parent->getRank());
  TORCH_CHECK_VALUE(
      me != ranks.end() &&
          std::set<int64_t>(ranks.begin(), ranks.end()).size() ==
              ranks.size() &&
          std::all_of(ranks.begin(), ranks.end(),
                      [&](int64_t r) { return 0 <= r && r < size; }),
      "A subgroup of a process group of ", size,
      " ranks: expected distinct ranks of it, this one (", parent->getRank(),
      ") among them, got [", absl::StrJoin(ranks, ", "), "].");
  if (purpose.empty() && static_cast<int>(ranks.size()) == size &&
      std::is_sorted(ranks.begin(), ranks.end())) {
    return parent;
  }
  const std::string key =
      absl::StrCat("subgroup/", purpose, "/", absl::StrJoin(ranks, ","));
  if (auto known = Groups().Find(parent, key)) return known;
  const auto store = parent->getStore();
  TORCH_CHECK_VALUE(store != nullptr, "A subgroup of ranks [",
                    absl::StrJoin(ranks, ", "),
                    "] can't be made: its process group has no store. Make "
                    "that with composable::init_process_group.");
  ProcessGroupOptions options;
  options.prefix(key).backend(BackendsOf(*parent));
  if (const auto* agreed = dynamic_cast<const AgreedStore*>(store.get())) {
    options.timeout(agreed->timeout());
  }
  auto group = init_process_group(store, static_cast<int>(me - ranks.begin()),
                                  static_cast<int>(ranks.size()), options);
  Groups().Add(parent, key, group);
  return group;
}

}  // namespace composable
