#include "state/tree_snapshot.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "state/ignored_params.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {

bool TreeSnapshot::IsSame(const Entry& entry) {
  const auto module = entry.module.lock();
  if (module == nullptr) return true;  // gone, with its parameters
  const auto& parameters = internal::Parameters(*module);
  const auto& children = internal::Children(*module);
  if (parameters.size() != entry.parameters.size() ||
      children.size() != entry.children.size()) {
    return false;
  }
  size_t i = 0;
  for (const auto& item : parameters) {
    if (item.value().unsafeGetTensorImpl() != entry.parameters[i++]) {
      return false;
    }
  }
  i = 0;
  for (const auto& item : children) {
    if (item.value().get() != entry.children[i++]) return false;
  }
  return true;
}

void TreeSnapshot::Check(
    const std::vector<std::weak_ptr<torch::nn::Module>>& roots) {
  if (!entries_.empty() &&
      std::all_of(entries_.begin(), entries_.end(), &IsSame)) {
    return;
  }
  entries_.clear();
  for (const auto& root : roots) {
    if (const auto module = root.lock()) Visit(module, "");
  }
}

void TreeSnapshot::Visit(const std::shared_ptr<torch::nn::Module>& module,
                         const std::string& prefix) {
  Entry entry;
  entry.module = module;
  for (const auto& item : internal::Parameters(*module)) {
    const at::Tensor& tensor = item.value();
    entry.parameters.push_back(tensor.unsafeGetTensorImpl());
    if (!tensor.defined() || tensor.numel() == 0) continue;
    GuardedStorage found;
    if (FindGuardedStorage(tensor, &found) && found.is_shard) continue;
    if (IgnoredParams::Contains(tensor)) continue;
    entries_.clear();
    TORCH_CHECK_VALUE(
        false, "Parameter '", prefix, item.key(), "' of module ",
        module->name(),
        " was registered, or put in the place of another, "
        "after fully_shard was applied to a module above it: it is neither "
        "sharded nor are its gradients reduced. Register it before "
        "fully_shard, or apply fully_shard to the new module.");
  }
  for (const auto& item : internal::Children(*module)) {
    entry.children.push_back(item.value().get());
    if (item.value() != nullptr) {
      Visit(item.value(), prefix + item.key() + ".");
    }
  }
  entries_.push_back(std::move(entry));
}

}  // namespace composable
