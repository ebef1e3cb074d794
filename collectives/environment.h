// What a launcher told this process: its rank, the size of the job and where
// the store is.
//
// Use it to read the variables of torchrun, tools/run, mpirun or srun before a
// process group is made:
//
//   composable::LaunchEnvironment env = composable::ReadLaunchEnvironment();
//   std::cout << "rank " << env.rank << " of " << env.world_size << "\n";
//
// The first launcher of this list whose variables are there is believed; those
// of the others may be those of the surrounding job, and are not read:
//
//   torchrun   RANK or WORLD_SIZE        also set by tools/run
//   Open MPI   OMPI_COMM_WORLD_RANK or OMPI_COMM_WORLD_SIZE
//   PMI        PMI_RANK                  mpiexec of MPICH and Intel MPI
//   Slurm      SLURM_PROCID              srun
//
// torchrun's must be complete. For the others MASTER_ADDR and MASTER_PORT may
// be left out where they follow from the launcher's: see cluster_environment.h.
#pragma once

#include <cstdint>
#include <string>

#include "collectives/launch_variables.h"

namespace composable {

struct LaunchEnvironment {
  std::string launcher;  // "torchrun", "Open MPI", "PMI" or "Slurm"
  int rank = 0;          // 0 <= rank < world_size
  int world_size = 1;
  int local_rank = 0;   // on this host; torchrun: rank if LOCAL_RANK is absent
  std::string address;  // host of the store
  uint16_t port = 0;
  // TORCHELASTIC_USE_AGENT_STORE: the launcher hosts the store and every rank
  // is a client of it. Otherwise rank 0 hosts it.
  bool agent_store = false;
  int restart_count = 0;  // TORCHELASTIC_RESTART_COUNT, 0 if absent
  // The same for all ranks of a job, and different for two jobs that may have
  // derived the same port; empty where the launcher says nothing of the kind.
  std::string job;
};

// Throws c10::ValueError, naming the variable, what was found, the launcher
// that was believed and the command that sets it, if one is missing, not a
// number in its range, or at odds with another.
LaunchEnvironment ReadLaunchEnvironment();
LaunchEnvironment ReadLaunchEnvironment(const EnvironmentLookup& lookup);

}  // namespace composable
