// Explains why an operator failed: a parameter that a MixedPrecisionPolicy casts
// has met a tensor of another dtype.
//
//   try {
//     op.redispatchBoxed(keys, stack);
//   } catch (const c10::Error& error) {
//     composable::ThrowIfDtypeMismatch(op, *stack, error);
//     throw;
//   }
//
// Where a module is called through a boundary, its inputs are cast. Without one
// they are not, and the operator's own error does not say so.
#pragma once

#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

namespace c10 {
class OperatorHandle;
}

namespace composable {

// `stack` is what the failed `op` has left: its arguments, as far as they are
// still there. Throws c10::TypeError, which names the parameter, both dtypes and
// the fix, if the error speaks of types and the arguments have that fault.
void ThrowIfDtypeMismatch(const c10::OperatorHandle& op,
                          const torch::jit::Stack& stack,
                          const c10::Error& error);

}  // namespace composable
