#include "collectives/environment.h"

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "collectives/cluster_environment.h"

namespace composable {
namespace {

constexpr char kHowToLaunch[] =
    "Start the program with `tools/run --nproc=2 BINARY` or `torchrun "
    "--no-python --nproc-per-node=2 BINARY`, which set it, or pass a store, "
    "a rank and a world size to init_process_group.";

// What to add to an error about torchrun's variables where the launcher may be
// another one.
std::string AboutOthers(const EnvironmentLookup& lookup) {
  const LaunchVariables any(lookup, "");
  const bool torchrun = any.Has("RANK") || any.Has("WORLD_SIZE");
  for (const char* other :
       {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (torchrun && any.Has(other)) {
      return absl::StrCat("(", other,
                          " is set, too, but is only read where neither RANK "
                          "nor WORLD_SIZE is.) ");
    }
  }
  if (torchrun) return "";
  if (any.Has("PMIX_RANK")) {
    return "(PMIX_RANK is set, but PMIx has no variable for the number of "
           "ranks.) ";
  }
  const char* job = any.FirstSet("SLURM_JOB_ID", "SLURM_JOBID");
  if (any.Has(job)) {
    return absl::StrCat("(", job,
                        " is set, but SLURM_PROCID is not: within an "
                        "allocation of Slurm, `srun BINARY` starts ranks.) ");
  }
  return "";
}

LaunchEnvironment ReadTorchrun(const EnvironmentLookup& lookup) {
  const LaunchVariables variables(lookup, AboutOthers(lookup) + kHowToLaunch);
  LaunchEnvironment env;
  env.launcher = "torchrun";
  env.world_size = variables.Number("WORLD_SIZE", 1, kMostRanks);
  env.rank = variables.Number("RANK", 0, env.world_size - 1);
  env.local_rank = variables.Has("LOCAL_RANK")
                       ? variables.Number("LOCAL_RANK", 0, env.world_size - 1)
                       : env.rank;
  env.address = variables.Require("MASTER_ADDR");
  env.port = static_cast<uint16_t>(variables.Number("MASTER_PORT", 1, 65535));
  env.agent_store = variables.Text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (variables.Has("TORCHELASTIC_RESTART_COUNT")) {
    env.restart_count =
        variables.Number("TORCHELASTIC_RESTART_COUNT", 0, 1 << 24);
  }
  return env;
}

}  // namespace

LaunchEnvironment ReadLaunchEnvironment() {
  return ReadLaunchEnvironment(
      [](const char* name) { return std::getenv(name); });
}

LaunchEnvironment ReadLaunchEnvironment(const EnvironmentLookup& lookup) {
  const LaunchVariables any(lookup, "");
  if (!any.Has("RANK") && !any.Has("WORLD_SIZE")) {
    if (IsOpenMpi(any)) return ReadOpenMpi(lookup);
    if (IsPmi(any)) return ReadPmi(lookup);
    if (any.Has("SLURM_PROCID")) return ReadSlurm(lookup);
  }
  return ReadTorchrun(lookup);
}

}  // namespace composable
