// Process groups for sharded training: one per process from the launcher's
// environment, or any number from a store.
//
//   auto group = composable::init_process_group();  // torchrun, mpirun, srun
//   // ... train ...
//   composable::destroy_process_group();            // optional
//
// A group is c10d's own type: Gloo serves CPU tensors, and NCCL serves CUDA
// tensors where the build has CUDA. Every collective of ours fails after
// `timeout` instead of waiting for ever for a rank that is gone.
//
// Thread rules: thread-safe. A program that uses several groups from several
// threads must set TORCH_FR_BUFFER_SIZE=0 before it makes the first one:
// LibTorch's flight recorder is one object of the process, and races when two
// groups issue their first collectives at once. Source of the store's rules:
// torch.distributed's env:// rendezvous, which decides in the same way who
// hosts the store.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/arg.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace composable {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct ProcessGroupOptions {
  // How long a collective, or the start of the group, may take before every
  // rank that still waits throws.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::seconds(30);
  // "gloo" (CPU tensors), "nccl" (CUDA tensors), or "gloo,nccl" for both.
  TORCH_ARG(std::string, backend) = "gloo";
  // Keys of this group in a store shared with others start with this.
  TORCH_ARG(std::string, prefix) = "composable";
};

// Makes the default process group from RANK, WORLD_SIZE, MASTER_ADDR and
// MASTER_PORT, or where neither of the first two is set from the variables of
// Open MPI, PMI or Slurm: environment.h lists them. With
// TORCHELASTIC_USE_AGENT_STORE=True every rank is a client of the launcher's
// store; otherwise rank 0 hosts it. Throws c10::ValueError if a variable is
// missing or wrong or a default group exists already, and c10::DistError if the
// other ranks do not come within the timeout.
ProcessGroupPtr init_process_group(const ProcessGroupOptions& options = {});

// Makes a group of `world_size` ranks that meet in `store`, which is not the
// default one. Pass it to FullyShardOptions().mesh(...).
ProcessGroupPtr init_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                   int rank, int world_size,
                                   const ProcessGroupOptions& options = {});

// The group made by init_process_group(), or throws c10::ValueError that says
// how to make one.
ProcessGroupPtr default_process_group();

// Forgets the default group. Modules sharded over it keep it alive.
void destroy_process_group();

// Rank and size of the default group; 0 and 1 where there is none.
int rank();
int world_size();

}  // namespace composable
