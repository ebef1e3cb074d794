// Which dtypes a policy gives a parameter. See Note [Dtypes of a parameter].
//
//   composable::ParamDtypes dtypes =
//       composable::ResolveDtypes(policy, "fc.weight", fc->weight);
//   dtypes.gathered;   // kBFloat16
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "state/mixed_precision_policy.h"

namespace composable {

struct ParamDtypes {
  c10::ScalarType original = c10::ScalarType::Undefined;
  c10::ScalarType gathered = c10::ScalarType::Undefined;
  // Of a parameter that is not floating: the original, and of no use.
  c10::ScalarType reduce = c10::ScalarType::Undefined;

  bool operator==(const ParamDtypes& other) const {
    return original == other.original && gathered == other.gathered &&
           reduce == other.reduce;
  }
};

// Throws c10::ValueError if a dtype of the policy is not floating, or none that
// can be reduced.
void CheckPolicy(const MixedPrecisionPolicy& policy);

// Throws c10::ValueError for another answer of param_dtype_override_fn than it
// may give.
ParamDtypes ResolveDtypes(const MixedPrecisionPolicy& policy,
                          const std::string& fqn, const at::Tensor& parameter);

}  // namespace composable
