#include "state/contract_registry.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace composable {
namespace {

struct Entry {
  std::string api;
  std::weak_ptr<ComposableState> state;
  std::shared_ptr<ComposableState> kept;
};

struct ModuleEntries {
  std::weak_ptr<const torch::nn::Module> module;
  std::vector<Entry> entries;
};

}  // namespace

struct ContractRegistry::Tables {
  mutable absl::Mutex mutex;
  absl::flat_hash_map<const torch::nn::Module*, ModuleEntries> modules
      ABSL_GUARDED_BY(mutex);

  const std::vector<Entry>* Live(const torch::nn::Module& module) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex) {
    const auto it = modules.find(&module);
    if (it == modules.end() || it->second.module.expired()) return nullptr;
    return &it->second.entries;
  }
};

ContractRegistry::ContractRegistry() : tables_(std::make_unique<Tables>()) {}

ContractRegistry& ContractRegistry::Get() {
  static auto* instance = new ContractRegistry;  // outlives static modules
  return *instance;
}

void ContractRegistry::Add(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
    const std::string& api, const std::shared_ptr<ComposableState>& state) {
  // Destroyed after the lock is released: a state may call back.
  std::vector<ModuleEntries> dead;
  absl::MutexLock lock(&tables_->mutex);
  for (auto it = tables_->modules.begin(); it != tables_->modules.end();) {
    const auto present = it++;
    if (present->second.module.expired()) {
      dead.push_back(std::move(present->second));
      tables_->modules.erase(present);
    }
  }
  for (const auto& module : modules) {
    const auto* entries = tables_->Live(*module);
    TORCH_CHECK_VALUE(
        entries == nullptr ||
            std::none_of(entries->begin(), entries->end(),
                         [&](const Entry& entry) { return entry.api == api; }),
        api, " was applied to this module of type ", module->name(),
        " while it was being applied. Each composable API can be applied to a "
        "module once.");
  }
  // What may throw comes first.
  std::vector<Entry> added;
  std::vector<ModuleEntries*> slots;
  tables_->modules.reserve(tables_->modules.size() + modules.size());
  for (const auto& module : modules) {
    auto& slot = tables_->modules[module.get()];
    slot.module = module;
    slot.entries.reserve(slot.entries.size() + 1);
    slots.push_back(&slot);
    added.push_back({api, state, state->owned_by_modules() ? nullptr : state});
  }
  for (size_t i = 0; i < added.size(); ++i) {
    slots[i]->entries.push_back(std::move(added[i]));
  }
}

std::shared_ptr<ComposableState> ContractRegistry::Find(
    const torch::nn::Module& module, const std::string& api) const {
  absl::ReaderMutexLock lock(&tables_->mutex);
  if (const auto* entries = tables_->Live(module)) {
    for (const auto& entry : *entries) {
      if (entry.api == api) return entry.state.lock();
    }
  }
  return nullptr;
}

bool ContractRegistry::Applied(const torch::nn::Module& module,
                               const std::string& api) const {
  absl::ReaderMutexLock lock(&tables_->mutex);
  if (const auto* entries = tables_->Live(module)) {
    for (const auto& entry : *entries) {
      if (entry.api == api) return true;
    }
  }
  return false;
}

std::vector<std::string> ContractRegistry::Apis(
    const torch::nn::Module& module) const {
  std::vector<std::string> apis;
  absl::ReaderMutexLock lock(&tables_->mutex);
  if (const auto* entries = tables_->Live(module)) {
    for (const auto& entry : *entries) apis.push_back(entry.api);
  }
  return apis;
}

}  // namespace composable
