// What a launcher told this process: its rank, the size of the job and where
// the store is.
//
// Use it to read torchrun's variables (also set by tools/run) before a process
// group is made:
//
//   composable::LaunchEnvironment env = composable::ReadLaunchEnvironment();
//   std::cout << "rank " << env.rank << " of " << env.world_size << "\n";
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace composable {

struct LaunchEnvironment {
  int rank = 0;         // RANK: 0 <= rank < world_size
  int world_size = 1;   // WORLD_SIZE
  int local_rank = 0;   // LOCAL_RANK, rank if absent
  std::string address;  // MASTER_ADDR: host of the store
  uint16_t port = 0;    // MASTER_PORT
  // TORCHELASTIC_USE_AGENT_STORE: the launcher hosts the store and every rank
  // is a client of it. Otherwise rank 0 hosts it.
  bool agent_store = false;
  int restart_count = 0;  // TORCHELASTIC_RESTART_COUNT, 0 if absent
};

// Looks a variable up; nullptr if it is not set. The default is std::getenv.
using EnvironmentLookup = std::function<const char*(const char*)>;

// Throws c10::ValueError, naming the variable, what was found and the command
// that sets it, if one is missing or not a number in its range.
LaunchEnvironment ReadLaunchEnvironment();
LaunchEnvironment ReadLaunchEnvironment(const EnvironmentLookup& lookup);

}  // namespace composable
