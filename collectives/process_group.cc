#include "collectives/process_group.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "collectives/agreement.h"
#include "collectives/backends.h"
#include "collectives/environment.h"

namespace composable {
namespace {

struct DefaultGroup {
  absl::Mutex mutex;
  ProcessGroupPtr group ABSL_GUARDED_BY(mutex);
};

// Never destroyed: modules of static life time may still use the group.
DefaultGroup& Default() {
  static auto* instance = new DefaultGroup;
  return *instance;
}

c10::intrusive_ptr<c10d::Store> MakeStore(const LaunchEnvironment& env,
                                          const ProcessGroupOptions& options) {
  c10d::TCPStoreOptions store_options;
  store_options.port = env.port;
  store_options.isServer = env.rank == 0 && !env.agent_store;
  store_options.numWorkers = static_cast<size_t>(env.world_size);
  store_options.waitWorkers = !env.agent_store;
  store_options.timeout = options.timeout();
  store_options.multiTenant = true;
  try {
    return c10::make_intrusive<c10d::TCPStore>(env.address, store_options);
  } catch (const c10::DistError& error) {
    TORCH_CHECK_WITH(
        DistError, false, "init_process_group: rank ", env.rank, " of ",
        env.world_size, " (by the variables of ", env.launcher,
        ") has not met the others at ", env.address, ":", env.port,
        ": are all ranks started, and is that an address and a free port of "
        "rank 0's host? MASTER_ADDR and MASTER_PORT choose it. ",
        error.what_without_backtrace());
  }
}

}  // namespace

ProcessGroupPtr init_process_group(const ProcessGroupOptions& options) {
  {
    absl::MutexLock lock(&Default().mutex);
    TORCH_CHECK_VALUE(Default().group == nullptr,
                      "init_process_group: the default process group exists "
                      "already. Call destroy_process_group() first, or pass a "
                      "store, a rank and a world size for a second group.");
  }
  const LaunchEnvironment env = ReadLaunchEnvironment();
  ProcessGroupOptions of_this_start = options;
  // A launcher that starts the job again may keep the store, and a rank that
  // comes to another job's store must not be taken for one of that job.
  of_this_start.prefix(absl::StrCat(options.prefix(),
                                    env.job.empty() ? "" : "/", env.job,
                                    "/start", env.restart_count));
  auto group = init_process_group(MakeStore(env, options), env.rank,
                                  env.world_size, of_this_start);
  absl::MutexLock lock(&Default().mutex);
  Default().group = group;
  return group;
}

ProcessGroupPtr init_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                   int rank, int world_size,
                                   const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(store != nullptr,
                    "init_process_group: expected a store, got none.");
  TORCH_CHECK_VALUE(world_size >= 1 && rank >= 0 && rank < world_size,
                    "init_process_group: expected 0 <= rank < world_size, got "
                    "rank ",
                    rank, " of ", world_size, ".");
  // Every rank counts its own calls, so the n-th groups of all ranks meet, and
  // never the keys that an earlier group has left.
  const int64_t generation =
      store->add(absl::StrCat(options.prefix(), "/calls/", rank), 1);
  auto prefixed = c10::make_intrusive<AgreedStore>(
      absl::StrCat(options.prefix(), "/", generation), store,
      options.timeout());
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(prefixed, rank, world_size);
  for (absl::string_view name : absl::StrSplit(options.backend(), ',')) {
    if (name == "gloo") {
      group->setBackend(
          c10::kCPU, c10d::ProcessGroup::BackendType::GLOO,
          MakeGlooBackend(prefixed, rank, world_size, options.timeout()));
      group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    } else if (name == "nccl") {
      group->setBackend(
          c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL,
          MakeNcclBackend(prefixed, rank, world_size, options.timeout()));
      group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
    } else {
      TORCH_CHECK_VALUE(false,
                        "init_process_group: expected a backend of 'gloo' or "
                        "'nccl', or both joined by a comma, got '",
                        options.backend(), "'.");
    }
  }
  return group;
}

ProcessGroupPtr default_process_group() {
  absl::MutexLock lock(&Default().mutex);
  TORCH_CHECK_VALUE(Default().group != nullptr,
                    "There is no default process group. Call "
                    "composable::init_process_group() first, or pass one with "
                    "FullyShardOptions().mesh(...).");
  return Default().group;
}

void destroy_process_group() {
  ProcessGroupPtr last;
  absl::MutexLock lock(&Default().mutex);
  std::swap(last, Default().group);
}

int rank() {
  absl::MutexLock lock(&Default().mutex);
  return Default().group == nullptr ? 0 : Default().group->getRank();
}

int world_size() {
  absl::MutexLock lock(&Default().mutex);
  return Default().group == nullptr ? 1 : Default().group->getSize();
}

}  // namespace composable
