// The c10d backends that do the work: Gloo for CPU tensors, NCCL for CUDA
// tensors. Each has its own .cc, because their headers are heavy and need
// flags of their own.
//
//   c10::intrusive_ptr<c10d::Backend> gloo =
//       composable::MakeGlooBackend(store, rank, world_size, timeout);
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace composable {

// Connects all ranks over TCP before it returns. The interface is the one of
// GLOO_SOCKET_IFNAME if set, else the loopback if this host's own name does
// not resolve. Throws c10::DistError if a rank does not come in time.
c10::intrusive_ptr<c10d::Backend> MakeGlooBackend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout);

// Throws c10::ValueError if this build has no CUDA or this host no GPU, and
// says which of the two.
c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout);

}  // namespace composable
