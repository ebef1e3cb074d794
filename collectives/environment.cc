#include "collectives/environment.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"

namespace composable {
namespace {

constexpr char kHowToLaunch[] =
    "Start the program with `tools/run --nproc=2 BINARY` or `torchrun "
    "--no-python --nproc-per-node=2 BINARY`, which set it, or pass a store, "
    "a rank and a world size to init_process_group.";

const char* Require(const EnvironmentLookup& lookup, const char* name) {
  const char* value = lookup(name);
  TORCH_CHECK_VALUE(value != nullptr && *value != '\0',
                    "init_process_group: ", "the environment variable ", name,
                    " is not set. ", kHowToLaunch);
  return value;
}

int Number(const char* name, const char* text, int least, int most) {
  int value = 0;
  TORCH_CHECK_VALUE(
      absl::SimpleAtoi(text, &value) && value >= least && value <= most,
      "init_process_group: expected ", name, " to be a number from ", least,
      " to ", most, ", got '", text, "'. ", kHowToLaunch);
  return value;
}

}  // namespace

LaunchEnvironment ReadLaunchEnvironment() {
  return ReadLaunchEnvironment(
      [](const char* name) { return std::getenv(name); });
}

LaunchEnvironment ReadLaunchEnvironment(const EnvironmentLookup& lookup) {
  LaunchEnvironment env;
  env.world_size =
      Number("WORLD_SIZE", Require(lookup, "WORLD_SIZE"), 1, 1 << 24);
  env.rank = Number("RANK", Require(lookup, "RANK"), 0, env.world_size - 1);
  const char* local = lookup("LOCAL_RANK");
  env.local_rank = local == nullptr
                       ? env.rank
                       : Number("LOCAL_RANK", local, 0, env.world_size - 1);
  env.address = Require(lookup, "MASTER_ADDR");
  env.port = static_cast<uint16_t>(
      Number("MASTER_PORT", Require(lookup, "MASTER_PORT"), 1, 65535));
  const char* agent = lookup("TORCHELASTIC_USE_AGENT_STORE");
  env.agent_store = agent != nullptr && std::string(agent) == "True";
  if (const char* restarts = lookup("TORCHELASTIC_RESTART_COUNT")) {
    env.restart_count =
        Number("TORCHELASTIC_RESTART_COUNT", restarts, 0, 1 << 24);
  }
  return env;
}

}  // namespace composable
