#include "composable/contract.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/str_join.h"

namespace composable::internal {

ContractGuard::ContractGuard(const char* api, const Modules& modules)
    : api_(api), modules_(modules) {
  TORCH_CHECK_VALUE(!modules.empty(), api,
                    ": expected at least one module, got an empty list.");
  for (const auto& module : modules) {
    TORCH_CHECK_VALUE(!ContractRegistry::Get().Applied(*module, api), api,
                      " was already applied to this module of type ",
                      module->name(),
                      ". Each composable API can be applied to a module once.");
    names_.push_back(NamesOf(*module));
  }
}

ContractGuard::Names ContractGuard::NamesOf(const torch::nn::Module& module) {
  Names names;
  for (const auto& item : module.named_parameters()) {
    names.parameters.push_back(item.key());
  }
  for (const auto& item : module.named_buffers()) {
    names.buffers.push_back(item.key());
  }
  for (const auto& item : module.named_modules()) {
    names.modules.push_back(item.key());
  }
  return names;
}

void ContractGuard::CheckSame(const torch::nn::Module& module, const char* kind,
                              const std::vector<std::string>& before,
                              const std::vector<std::string>& after) const {
  if (before == after) return;
  const auto difference = [](std::vector<std::string> from,
                             std::vector<std::string> what) {
    std::sort(from.begin(), from.end());
    std::sort(what.begin(), what.end());
    std::vector<std::string> rest;
    std::set_difference(from.begin(), from.end(), what.begin(), what.end(),
                        std::back_inserter(rest));
    return rest;
  };
  const auto gone = difference(before, after);
  const auto came = difference(after, before);
  const bool reordered = gone.empty() && came.empty();
  TORCH_CHECK_VALUE(false, api_, " must not change the names of ", kind, " of ",
                    module.name(), ", but ",
                    reordered
                        ? std::string("their order changed")
                        : "[" + absl::StrJoin(gone, ", ") + "] went and [" +
                              absl::StrJoin(came, ", ") + "] came",
                    ".");
}

void ContractGuard::Commit(
    const std::shared_ptr<ComposableState>& state) const {
  TORCH_CHECK_VALUE(state != nullptr, api_,
                    ": expected its body to return a state, got null.");
  try {
    for (size_t i = 0; i < modules_.size(); ++i) {
      const auto& module = *modules_[i];
      const Names now = NamesOf(module);
      CheckSame(module, "parameters", names_[i].parameters, now.parameters);
      CheckSame(module, "buffers", names_[i].buffers, now.buffers);
      CheckSame(module, "submodules", names_[i].modules, now.modules);
    }
    ContractRegistry::Get().Add(modules_, api_, state);
  } catch (...) {
    state->Rollback();
    throw;
  }
  state->Commit();
}

}  // namespace composable::internal
