// What giving a shard other memory means: set_data(), and so module->to().
//
//   composable::GiveShardData(state, index, other);  // parameter `index`
//
// The values are copied. Data of another dtype changes the parameter's: see Note
// [Dtype changes].
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace composable {

class FSDPState;

// Throws c10::ValueError for data that does not fit and, if its dtype is
// another one, inside of a forward or backward, in a FullParameters scope, or
// while gradients are not reduced.
void GiveShardData(const std::shared_ptr<FSDPState>& state, int index,
                   const at::Tensor& data);

}  // namespace composable
