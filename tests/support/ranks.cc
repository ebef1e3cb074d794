#include "tests/support/ranks.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/support/in_process_backend.h"

namespace composable {
namespace {

// Which ranks have ended, and the first failure.
struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> ended;
  std::string first_failure;
  int running = 0;
};

void AbortOnStuckRanks(const Outcome& outcome) {
  std::fprintf(stderr, "RunRanks: these ranks did not end in time:");
  for (size_t r = 0; r < outcome.ended.size(); ++r) {
    if (!outcome.ended[r]) std::fprintf(stderr, " %zu", r);
  }
  std::fprintf(stderr, "\n%s\n", outcome.first_failure.c_str());
  std::abort();
}

}  // namespace

std::mutex& RankContext::GeneratorMutex() {
  static std::mutex mutex;
  return mutex;
}

void RankContext::Seed(uint64_t seed) { at::manual_seed(seed); }

void RunRanks(int world_size, const std::function<void(RankContext&)>& body,
              const RunRanksOptions& options) {
  // LibTorch's flight recorder is one object of the process and races when the
  // groups of two threads issue their first collectives at once.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto hub = std::make_shared<InProcessHub>(world_size, options.timeout);
  Outcome outcome;
  outcome.ended.assign(world_size, false);
  outcome.running = world_size;
  const auto run = [&](int rank) {
    std::string failure;
    try {
      at::set_num_threads(1);
      RankContext context;
      context.rank = rank;
      context.world_size = world_size;
      context.group = options.backend == TestBackend::kGloo
                          ? init_process_group(
                                store, rank, world_size,
                                ProcessGroupOptions().timeout(options.timeout))
                          : MakeInProcessGroup(hub, rank);
      body(context);
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty())
      hub->Abort("rank " + std::to_string(rank) + " failed");
    const std::lock_guard<std::mutex> lock(outcome.mutex);
    if (!failure.empty() && outcome.first_failure.empty()) {
      outcome.first_failure = "[rank " + std::to_string(rank) + "] " + failure;
    }
    outcome.ended[rank] = true;
    --outcome.running;
    outcome.changed.notify_all();
  };
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock<std::mutex> lock(outcome.mutex);
    if (!outcome.changed.wait_for(lock, options.deadline,
                                  [&] { return outcome.running == 0; })) {
      AbortOnStuckRanks(outcome);
    }
  }
  for (auto& thread : threads) thread.join();
  TORCH_CHECK(outcome.first_failure.empty(), outcome.first_failure);
}

}  // namespace composable
