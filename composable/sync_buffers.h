// Makes the buffers of a module, such as the running statistics of BatchNorm,
// equal on all ranks. They are not sharded, and each rank updates its own from
// its part of the batch.
//
//   composable::sync_buffers(model, composable::BufferSync::kMean);
#pragma once

#include <cstdint>

#include "collectives/process_group.h"
#include "composable/module_ref.h"

namespace composable {

enum class BufferSync : uint8_t {
  kBroadcast,  // rank 0's
  kMean        // the mean over ranks; of integers and booleans, rank 0's
};

// (collective) All buffers of `module` that are dense and on the CPU. The ranks
// are those of `process_group`; if that is null, of the first sharded module in
// `module` or, without one, of the default process group.
void sync_buffers(const ModuleRef& module,
                  BufferSync how = BufferSync::kBroadcast,
                  const ProcessGroupPtr& process_group = nullptr);

}  // namespace composable
