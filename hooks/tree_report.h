// What is said once about a tree of sharded modules, when it is first used.
//
//   composable::ReportTree(*context);
//
// On rank 0: one line through LibTorch's log at level INFO, which is off by
// default and on with TORCH_CPP_LOG_LEVEL=INFO in the environment:
//
//   fully_shard: 13 groups, 124.4 M parameters, 62.2 M on this rank (1.2 % padding)
//
// and a warning if one group's parameters are far more than those of the others.
// Such a group costs its size twice at once: whole, and as a reduce buffer.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "state/fsdp_state.h"

namespace composable {

void ReportTree(const FSDPStateContext& context);

// The line; empty for a tree without parameters.
std::string TreeSummary(const FSDPStateContext& context);

// The warning about groups of these names and bytes; empty if there is nothing
// to warn of: no group of 256 MiB or more has more than 8 times the median.
std::string OversizedGroup(
    const std::vector<std::pair<std::string, int64_t>>& groups);

}  // namespace composable
