#include "state/param_dtypes.h"

#include <c10/util/Exception.h>

#include <optional>

namespace composable {
namespace {

using c10::ScalarType;

bool CanReduce(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double ||
         dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

ScalarType GatheredDtype(const MixedPrecisionPolicy& policy,
                         const std::string& fqn, const at::Tensor& parameter) {
  const ScalarType original = parameter.scalar_type();
  const auto wanted = policy.param_dtype();
  if (!policy.param_dtype_override_fn()) return wanted.value_or(original);
  const auto answer = policy.param_dtype_override_fn()(fqn, parameter);
  TORCH_CHECK_VALUE(!answer || answer == wanted || answer == original,
                    "param_dtype_override_fn gave parameter '", fqn,
                    "' the dtype ", *answer, ": expected std::nullopt, ",
                    wanted ? c10::str(*wanted, " (param_dtype) or ") : "",
                    original, " (its own).");
  return answer.value_or(wanted.value_or(original));
}

// What `default_reduce_dtype` means for a parameter.
ScalarType ReduceDtype(const MixedPrecisionPolicy& policy, ScalarType gathered,
                       const at::Tensor& parameter) {
  if (policy.default_reduce_dtype() == DefaultReduceDtype::kParamDtype) {
    return gathered;
  }
  return parameter.grad_dtype().value_or(gathered);
}

}  // namespace

void CheckPolicy(const MixedPrecisionPolicy& policy) {
  const auto check = [](const char* name, std::optional<ScalarType> dtype) {
    TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype),
                      "MixedPrecisionPolicy: expected a floating ", name,
                      ", got ", *dtype, ".");
  };
  check("param_dtype", policy.param_dtype());
  check("reduce_dtype", policy.reduce_dtype());
  check("output_dtype", policy.output_dtype());
  TORCH_CHECK_VALUE(!policy.reduce_dtype() || CanReduce(*policy.reduce_dtype()),
                    "MixedPrecisionPolicy: expected a reduce_dtype of float, "
                    "double, bfloat16 or half, got ",
                    *policy.reduce_dtype(), ".");
}

ParamDtypes ResolveDtypes(const MixedPrecisionPolicy& policy,
                          const std::string& fqn, const at::Tensor& parameter) {
  ParamDtypes dtypes;
  dtypes.original = parameter.scalar_type();
  dtypes.gathered = dtypes.original;
  dtypes.reduce = dtypes.original;
  if (!c10::isFloatingType(dtypes.original)) return dtypes;
  dtypes.gathered = GatheredDtype(policy, fqn, parameter);
  dtypes.reduce = policy.reduce_dtype().value_or(
      ReduceDtype(policy, dtypes.gathered, parameter));
  // Collectives can't add numbers of 8 bits.
  if (!CanReduce(dtypes.reduce)) dtypes.reduce = ScalarType::Float;
  return dtypes;
}

}  // namespace composable
