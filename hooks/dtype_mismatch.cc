#include "hooks/dtype_mismatch.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

std::vector<at::Tensor> TensorsOf(const c10::OperatorHandle& op,
                                  const torch::jit::Stack& stack) {
  std::vector<at::Tensor> tensors;
  const size_t count = op.schema().arguments().size();
  if (stack.size() < count) return tensors;
  for (const c10::IValue& value : torch::jit::last(stack, count)) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        tensors.push_back(tensor);
      }
    }
  }
  return tensors;
}

// Its group, if `tensor` is a whole parameter that a policy has cast, or a view
// of one.
std::shared_ptr<FSDPState> FindCast(const at::Tensor& tensor,
                                    std::string* fqn) {
  GuardedStorage found;
  if (!tensor.defined() || !internal::HasGuard(tensor) ||
      !FindGuardedStorage(tensor, &found) || found.is_shard) {
    return nullptr;
  }
  auto state = found.state.lock();
  if (state == nullptr) return nullptr;
  const FSDPParamGroup& group = *state->group();
  if (!group.segments()[found.segment].is_cast()) return nullptr;
  const int param = group.FindParam(found.segment, tensor.storage_offset());
  *fqn = group.params()[param].fqn;
  return state;
}

}  // namespace

void ThrowIfDtypeMismatch(const c10::OperatorHandle& op,
                          const torch::jit::Stack& stack,
                          const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("type") == std::string::npos) return;
  const auto tensors = TensorsOf(op, stack);
  for (const at::Tensor& parameter : tensors) {
    std::string fqn;
    if (FindCast(parameter, &fqn) == nullptr) continue;
    for (const at::Tensor& other : tensors) {
      if (!other.defined() || !c10::isFloatingType(other.scalar_type()) ||
          other.scalar_type() == parameter.scalar_type()) {
        continue;
      }
      TORCH_CHECK_TYPE(
          false, op.schema().name(), " reads parameter '", fqn, "', which is ",
          parameter.scalar_type(),
          " by the MixedPrecisionPolicy of its module, together with a tensor "
          "of ",
          other.scalar_type(),
          ". Inputs are cast where the module is called through a boundary: "
          "declare it with COMPOSABLE_MODULE, or call it by "
          "composable::call(module, input), and leave cast_forward_inputs on. "
          "Or cast the input. The operator says: ",
          text);
    }
  }
}

}  // namespace composable
