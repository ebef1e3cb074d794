#include "collectives/cluster_environment.h"

#include <cstdint>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "collectives/host_list.h"

namespace composable {
namespace {

constexpr char kLoopback[] = "127.0.0.1";
constexpr uint64_t kFirstPort = 12000;
constexpr uint64_t kPorts = 16000;
// Slurm numbers steps from 0; these and above are the batch script and the
// shell of an allocation.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

uint16_t PortFrom(uint64_t number) {
  return static_cast<uint16_t>(kFirstPort + number % kPorts);
}

// FNV-1a: the same in every process.
uint64_t HashOf(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  return hash;
}

std::string Value(const LaunchVariables& variables, const char* name) {
  return absl::StrCat(name, "=", variables.Text(name));
}

struct RankVariables {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;  // nullptr: there is none
};

LaunchEnvironment ReadRank(const LaunchVariables& variables,
                           const RankVariables& names) {
  LaunchEnvironment env;
  env.launcher = names.launcher;
  env.world_size = variables.Number(names.size, 1, kMostRanks);
  const std::string of_size =
      absl::StrCat(" (", Value(variables, names.size), ")");
  env.rank = variables.Number(names.rank, 0, env.world_size - 1, of_size);
  int local_size = env.world_size;
  std::string of_local_size = of_size;
  if (names.local_size != nullptr && variables.Has(names.local_size)) {
    local_size = variables.Number(names.local_size, 1, env.world_size, of_size);
    of_local_size = absl::StrCat(" (", Value(variables, names.local_size), ")");
  }
  env.local_rank =
      variables.Number(names.local_rank, 0, local_size - 1, of_local_size);
  return env;
}

// MPI's launchers tell whether all ranks are here, and no more.
std::string MpiAddress(const LaunchVariables& variables,
                       const RankVariables& names, const char* command) {
  if (variables.Has("MASTER_ADDR")) return variables.Text("MASTER_ADDR");
  if (variables.Text(names.local_size) == variables.Text(names.size)) {
    return kLoopback;
  }
  const std::string here = variables.Has(names.local_size)
                               ? Value(variables, names.local_size)
                               : absl::StrCat(names.local_size, " not set");
  variables.Fail(absl::StrCat(
      "the environment variable MASTER_ADDR is not set, and only where all "
      "ranks are on one host it can be derived (",
      here, ", ", Value(variables, names.size), "). Name the host of rank 0: `",
      command, "`."));
}

bool HasPort(const LaunchVariables& variables) {
  return variables.Has("MASTER_PORT");
}

uint16_t PortOf(const LaunchVariables& variables) {
  return static_cast<uint16_t>(variables.Number("MASTER_PORT", 1, 65535));
}

constexpr RankVariables kOpenMpi = {
    "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr RankVariables kPmi = {"PMI", "PMI_RANK", "PMI_SIZE",
                                "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

// A rank of a job step, started by srun.
bool IsOfStep(const LaunchVariables& variables, const std::string& step) {
  int64_t number = 0;
  if (absl::SimpleAtoi(step, &number)) return number < kFirstSpecialStep;
  return variables.Has("SLURM_STEP_NUM_TASKS");
}

// Refuses a program that a batch script or a shell runs once for several tasks.
void RequireSingleTask(const LaunchVariables& variables) {
  for (const char* name :
       {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES"}) {
    if (!variables.Has(name)) continue;
    if (variables.Number(name, 1, kMostRanks) == 1) return;
    variables.Fail(absl::StrCat(
        Value(variables, "SLURM_PROCID"), " and ", Value(variables, name),
        ", but SLURM_STEP_ID and SLURM_STEP_NUM_TASKS, which srun sets, are "
        "not those of a step: a batch script or a shell seems to have started "
        "the program once, and nobody the other ranks."));
  }
}

std::string SlurmAddress(const LaunchVariables& variables) {
  if (variables.Has("MASTER_ADDR")) return variables.Text("MASTER_ADDR");
  const char* name =
      variables.FirstSet("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
  if (!variables.Has(name)) {
    variables.Fail(
        "neither MASTER_ADDR nor SLURM_STEP_NODELIST, from which it is "
        "derived, is set.");
  }
  const auto hosts = ParseHostList(variables.Text(name));
  if (!hosts) {
    variables.Fail(absl::StrCat("expected ", name,
                                " to be a list of hosts such as "
                                "node[003-005,7],gpu1, got '",
                                variables.Text(name),
                                "'. MASTER_ADDR, where set, is used instead."));
  }
  return hosts->count == 1 ? kLoopback : hosts->first;
}

}  // namespace

bool IsOpenMpi(const LaunchVariables& any) {
  return any.Has(kOpenMpi.rank) || any.Has(kOpenMpi.size);
}

bool IsPmi(const LaunchVariables& any) {
  if (!any.Has(kPmi.rank)) return false;
  const bool srun = any.Text(kPmi.rank) == any.Text("SLURM_PROCID") &&
                    (any.Text(kPmi.size) == any.Text("SLURM_STEP_NUM_TASKS") ||
                     !any.Has(kPmi.size));
  return !srun;
}

LaunchEnvironment ReadOpenMpi(const EnvironmentLookup& lookup) {
  const LaunchVariables variables(
      lookup,
      "The launcher was taken for Open MPI by OMPI_COMM_WORLD_RANK or _SIZE: "
      "start the program with `mpirun -n 2 BINARY`, or set RANK, WORLD_SIZE, "
      "MASTER_ADDR and MASTER_PORT, which are read first.");
  LaunchEnvironment env = ReadRank(variables, kOpenMpi);
  env.address =
      MpiAddress(variables, kOpenMpi, "mpirun -x MASTER_ADDR=HOST -n 2 BINARY");
  // Open MPI 4 and 5.
  const char* job =
      variables.FirstSet("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE");
  if (variables.Has(job)) {
    env.job = absl::StrCat("openmpi-", variables.Text(job));
  }
  if (HasPort(variables)) {
    env.port = PortOf(variables);
  } else if (!env.job.empty()) {
    env.port = PortFrom(HashOf(env.job));
  } else {
    variables.Fail(
        "the environment variable MASTER_PORT is not set, nor is one of "
        "OMPI_MCA_ess_base_jobid and PMIX_NAMESPACE, from which it is derived. "
        "Name a free port: `mpirun -x MASTER_PORT=29500 -n 2 BINARY`.");
  }
  return env;
}

LaunchEnvironment ReadPmi(const EnvironmentLookup& lookup) {
  const LaunchVariables variables(
      lookup,
      "The launcher was taken for that of MPICH or Intel MPI by PMI_RANK: "
      "start the program with `mpiexec -n 2 BINARY`, or set RANK, WORLD_SIZE, "
      "MASTER_ADDR and MASTER_PORT, which are read first.");
  LaunchEnvironment env = ReadRank(variables, kPmi);
  env.address =
      MpiAddress(variables, kPmi, "mpiexec -genv MASTER_ADDR HOST -n 2 BINARY");
  if (!HasPort(variables)) {
    variables.Fail(
        "the environment variable MASTER_PORT is not set, and PMI tells "
        "nothing from which it can be derived. Name a free port: `mpiexec "
        "-genv MASTER_PORT 29500 -n 2 BINARY`.");
  }
  env.port = PortOf(variables);
  return env;
}

LaunchEnvironment ReadSlurm(const EnvironmentLookup& lookup) {
  const LaunchVariables variables(
      lookup,
      "The launcher was taken for Slurm by SLURM_PROCID: start the program "
      "with `srun -n 2 BINARY`, or set RANK, WORLD_SIZE, MASTER_ADDR and "
      "MASTER_PORT, which are read first.");
  const char* job_id = variables.FirstSet("SLURM_JOB_ID", "SLURM_JOBID");
  const std::string step =
      variables.Text(variables.FirstSet("SLURM_STEP_ID", "SLURM_STEPID"));
  LaunchEnvironment env;
  if (IsOfStep(variables, step)) {
    // Within srun SLURM_NTASKS is the step's, too.
    const char* size =
        variables.FirstSet("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
    env = ReadRank(variables,
                   {"Slurm", "SLURM_PROCID", size, "SLURM_LOCALID", nullptr});
  } else {
    RequireSingleTask(variables);
    env.launcher = "Slurm";
    env.rank = variables.Number("SLURM_PROCID", 0, 0);
  }
  env.address = env.world_size == 1 && !variables.Has("MASTER_ADDR")
                    ? kLoopback
                    : SlurmAddress(variables);
  uint64_t job = 0;
  uint64_t step_number = 0;
  (void)absl::SimpleAtoi(step, &step_number);
  if (absl::SimpleAtoi(variables.Text(job_id), &job)) {
    env.job = absl::StrCat("slurm-", job, ".", step_number);
  }
  if (HasPort(variables)) {
    env.port = PortOf(variables);
  } else if (!env.job.empty()) {
    // Steps of one job, and of jobs with consecutive numbers, are apart.
    env.port = PortFrom(job * 31 + step_number);
  } else {
    variables.Fail(
        "neither MASTER_PORT nor SLURM_JOB_ID, from which it is derived, is "
        "set to a number.");
  }
  return env;
}

}  // namespace composable
