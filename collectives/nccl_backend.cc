// The only file that includes NCCL. Linked where the CUDA toolkit was found.
// The backend's options hold a struct of NCCL's, so nccl.h must be of the library
// that LibTorch loads (third_party/cuda).
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "collectives/backends.h"

namespace composable {

c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(c10::cuda::device_count() > 0,
                    "init_process_group: the backend 'nccl' needs a GPU, and "
                    "this host has none that CUDA can use. Use 'gloo'.");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size,
                                                     options);
}

}  // namespace composable
