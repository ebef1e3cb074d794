// Where the gradient of one parameter is in the payload of a reduction.
//
//   const composable::PayloadShape shape{.shard_numel = 12, .chunk_numel = 16};
//   at::Tensor whole = composable::WholeOfPayload(param, shape, payload);
//
// See Note [Gradient payload].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "state/fsdp_param.h"

namespace composable {

// Of one rank's part.
struct PayloadShape {
  int64_t shard_numel = 0;
  int64_t chunk_numel = 0;  // shard, flags and alignment
};

// A copy, of the parameter's sizes and strides and the payload's dtype.
at::Tensor WholeOfPayload(const FSDPParam& param, PayloadShape shape,
                          const at::Tensor& payload);
void ZeroInPayload(const FSDPParam& param, PayloadShape shape,
                   const at::Tensor& payload);

}  // namespace composable
