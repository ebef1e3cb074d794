// Runs the ranks of a test as threads of this process.
//
//   composable::RunRanks(2, [](composable::RankContext& rank) {
//     auto model = rank.Seeded(1, [] { return torch::nn::Linear(4, 4); });
//     composable::fully_shard(model, rank.options());
//     // ...
//   });
//
// Each rank has its own backend over one store. The first exception of any rank
// is thrown to the caller with the rank's number, once all have ended; the
// others end too, because a collective without its peer fails after
// `timeout`. A rank that does not end at all aborts the test with its number.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>

#include "collectives/process_group.h"
#include "state/fully_shard_options.h"

namespace composable {

enum class TestBackend { kGloo, kInProcess };

struct RankContext {
  int rank = 0;
  int world_size = 1;
  ProcessGroupPtr group;

  // Options that shard over the ranks of this test.
  FullyShardOptions options() const { return FullyShardOptions().mesh(group); }

  // Runs `make` with the global generator seeded, one rank at a time, so that
  // all ranks draw the same numbers.
  template <typename Make>
  static auto Seeded(uint64_t seed, Make make) {
    const std::lock_guard<std::mutex> lock(GeneratorMutex());
    Seed(seed);
    return make();
  }

 private:
  static std::mutex& GeneratorMutex();
  static void Seed(uint64_t seed);
};

struct RunRanksOptions {
  TestBackend backend = TestBackend::kGloo;
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  // After this the test is aborted.
  std::chrono::milliseconds deadline = std::chrono::seconds(240);
};

void RunRanks(int world_size, const std::function<void(RankContext&)>& body,
              const RunRanksOptions& options = {});

}  // namespace composable
