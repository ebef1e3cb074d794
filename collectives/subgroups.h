// Process groups of some ranks of another one.
//
//   // Ranks 0 and 2 of `group`, on each of them:
//   auto pair = composable::SubgroupOf(group, {0, 2});
//   auto same = composable::SubgroupOf(group, {0, 2});   // == pair: made once
//
// Note [One group per rank set]
// A process group costs connections, threads and buffers, so equal lists of
// ranks share one, as long as anyone holds it; the list of all ranks in order is
// the parent itself. Only the members take part in making one, all of them at
// the same place of their program. The order of its collectives is checked like
// that of the parent's. See Note [Agreed order].
//
// Thread-safe; the first call for a list blocks until all members make it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/process_group.h"

namespace composable {

// (collective over `ranks`) Ranks are those of `parent`, distinct, and this rank
// is among them; rank i of the result is ranks[i]. Groups of different `purpose`
// are different, for collectives that must not queue behind each other; then
// none is the parent. Throws c10::ValueError for a list that is not so and, if a
// group has to be made, for a parent without a store; c10::DistError if the
// members do not come within the parent's timeout.
ProcessGroupPtr SubgroupOf(const ProcessGroupPtr& parent,
                           const std::vector<int64_t>& ranks,
                           const std::string& purpose = "");

}  // namespace composable
