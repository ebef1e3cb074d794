#include "composable/module_ref.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <utility>

namespace composable {

ModuleRef::Checked ModuleRef::FromShared(
    std::shared_ptr<torch::nn::Module> module) {
  TORCH_CHECK_VALUE(module != nullptr,
                    "expected a module, got an empty holder or pointer. "
                    "Construct the module first.");
  return {std::move(module)};
}

ModuleRef::ModuleRef(torch::nn::Module& module)
    : module_(module.weak_from_this().lock()) {
  TORCH_CHECK_VALUE(module_ != nullptr, "expected the module ", module.name(),
                    " to be owned by a std::shared_ptr or a holder, but it is "
                    "on the stack or a plain member. Make it with "
                    "std::make_shared or through its TORCH_MODULE holder.");
}

}  // namespace composable
