// The variables of the launchers of clusters: mpirun, mpiexec and srun.
//
// ReadLaunchEnvironment() chooses among these; use it instead:
//
//   composable::LaunchEnvironment env = composable::ReadLaunchEnvironment();
//
// Where MASTER_ADDR is not set, the store is at 127.0.0.1 if all ranks are on
// one host. On several hosts Slurm's list of the step's hosts begins with that
// of rank 0. MPI tells no rank where rank 0 is: an error asks for MASTER_ADDR.
//
// Where MASTER_PORT is not set, it is derived from the number of the job and
// step (Slurm), or from the name that Open MPI gave the job, so that jobs that
// share a host hardly ever meet on one port. It is from 12000 to 27999: neither
// privileged, nor one of those that systems hand out to clients.
#pragma once

#include "collectives/environment.h"
#include "collectives/launch_variables.h"

namespace composable {

inline constexpr int kMostRanks = 1 << 24;

bool IsOpenMpi(const LaunchVariables& any);
// False where PMI only repeats what Slurm says: srun's own PMI.
bool IsPmi(const LaunchVariables& any);

// Each throws c10::ValueError as ReadLaunchEnvironment does. ReadSlurm also
// where the program was not started by srun, but once for several tasks, as by
// a line of a batch script: the other ranks would never come.
LaunchEnvironment ReadOpenMpi(const EnvironmentLookup& lookup);
LaunchEnvironment ReadPmi(const EnvironmentLookup& lookup);
LaunchEnvironment ReadSlurm(const EnvironmentLookup& lookup);

}  // namespace composable
