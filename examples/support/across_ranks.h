// The two things a report needs from the other ranks. Both are collectives:
// every rank of the group must call them, in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace examples {

// The mean of one number per rank, added up in double precision.
double MeanOverRanks(c10d::ProcessGroup& group, const at::Tensor& value);

// `values` of each rank, by rank. As many values on every rank.
std::vector<std::vector<int64_t>> GatherFromRanks(
    c10d::ProcessGroup& group, const std::vector<int64_t>& values);

}  // namespace examples
