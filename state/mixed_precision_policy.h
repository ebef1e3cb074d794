// The dtypes that a group of parameters is gathered, used and reduced in.
//
//   composable::fully_shard(
//       block, composable::FullyShardOptions().mp_policy(
//                  composable::MixedPrecisionPolicy()
//                      .param_dtype(torch::kBFloat16)
//                      .reduce_dtype(torch::kFloat)));
//
// Note [Dtypes of a parameter]
// A floating parameter has four:
//   original   what it had when it was sharded: its shard's, so the optimizer's
//   gathered   what it is gathered and used in: param_dtype, else the original
//   reduce     what its gradients are summed over ranks in, and added up in
//              while they are not synchronised: reduce_dtype; unset: see
//              DefaultReduceDtype
//   gradient   of the shard's grad(): what set_grad_dtype() said, before or
//              after fully_shard. Unset: the original. std::nullopt ("any"): it
//              stays in the reduce dtype
// A gradient may arrive in any of them, or another: it is cast once, while it
// is packed for the reduction. Parameters of one group may differ in all four.
// Parameters that are not floating are never cast, nor are buffers (see
// composable/cast_buffers.h).
//
// Inputs and outputs are cast where a module is called through a boundary: by
// its COMPOSABLE_MODULE holder or composable::call. Under autocast, autocast
// decides for each operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace composable {

// What an unset reduce_dtype means.
enum class DefaultReduceDtype : uint8_t {
  // The dtype that set_grad_dtype() gave the parameter before it was sharded,
  // else its original one: as PyTorch 2.15. Where that was set to "any": the
  // gathered one.
  kGradDtype,
  // The gathered one: as PyTorch 2.11. With param_dtype half the bytes, and the
  // precision of that.
  kParamDtype
};

// The dtype that parameter `fqn`, a name relative to the module, is to be
// gathered in: std::nullopt or param_dtype, or the parameter's own, which keeps
// it. Called once for each floating parameter. Must answer alike on all ranks.
using ParamDtypeOverrideFn = std::function<std::optional<c10::ScalarType>(
    const std::string& fqn, const at::Tensor& parameter)>;

struct MixedPrecisionPolicy {
  TORCH_ARG(std::optional<c10::ScalarType>, param_dtype) = std::nullopt;
  // kFloat, kDouble, kBFloat16 or kHalf.
  TORCH_ARG(std::optional<c10::ScalarType>, reduce_dtype) = std::nullopt;
  // Floating outputs of the modules are cast to it.
  TORCH_ARG(std::optional<c10::ScalarType>, output_dtype) = std::nullopt;
  // Floating inputs of the modules are cast to param_dtype.
  TORCH_ARG(bool, cast_forward_inputs) = true;
  TORCH_ARG(ParamDtypeOverrideFn, param_dtype_override_fn) = nullptr;
  TORCH_ARG(DefaultReduceDtype,
            default_reduce_dtype) = DefaultReduceDtype::kGradDtype;
};

}  // namespace composable
