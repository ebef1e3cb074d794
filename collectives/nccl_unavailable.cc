#include <c10/util/Exception.h>

#include "collectives/backends.h"

namespace composable {

c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, int /*rank*/,
    int /*world_size*/, std::chrono::milliseconds /*timeout*/) {
  TORCH_CHECK_VALUE(false,
                    "init_process_group: this build has no CUDA, so the "
                    "backend 'nccl' is missing. Install the CUDA toolkit and "
                    "build without --config=cpu, or use 'gloo'.");
}

}  // namespace composable
