// What sharded modules did, for reports, tests and tools.
//
//   composable::FSDPStats stats = composable::fsdp_stats(model);
//   std::cout << stats.gathered_bytes << " bytes gathered\n";
#pragma once

#include "composable/module_ref.h"
#include "state/trace.h"

namespace composable {

// Summed over the trees in `module`, which is usually one. Counters start at
// the first use of a tree.
FSDPStats fsdp_stats(const ModuleRef& module);

// Calls `observer` for every unshard, reshard and reduction of the trees in
// `module`; an empty one ends that.
void set_trace_observer(const ModuleRef& module, const TraceObserver& observer);

}  // namespace composable
