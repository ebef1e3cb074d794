#include "collectives/process_group.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/support/errors.h"

namespace composable {
namespace {

using testing::HasSubstr;

// LibTorch's flight recorder is one for the whole process and not safe for
// ranks that are threads. At size 0 it is off.
const bool kRecorderOff = setenv("TORCH_FR_BUFFER_SIZE", "0", 1) == 0;

c10::intrusive_ptr<c10d::Store> NewStore() {
  return c10::make_intrusive<c10d::HashStore>();
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(fd);
  return ntohs(address.sin_port);
}

void SetLauncherVariables(int rank, int world_size, int port) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(world_size).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  unsetenv("LOCAL_RANK");
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
}

void UnsetLauncherVariables() {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    unsetenv(name);
  }
}

double SumOverRanks(const ProcessGroupPtr& group, double value) {
  std::vector<at::Tensor> tensors{at::full({1}, value, c10::kDouble)};
  group->getBackend(c10::kCPU)->allreduce(tensors)->wait();
  return tensors[0].item<double>();
}

TEST(ProcessGroupTest, FromAStore) {
  ASSERT_TRUE(kRecorderOff);
  const auto store = NewStore();
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      const auto group = init_process_group(store, r, 3);
      EXPECT_EQ(group->getRank(), r);
      EXPECT_EQ(group->getSize(), 3);
      EXPECT_EQ(SumOverRanks(group, r + 1), 6);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(rank(), 0);  // none of them is the default group
  EXPECT_EQ(world_size(), 1);
}

TEST(ProcessGroupTest, SeveralGroupsShareAStoreByTheirPrefix) {
  const auto store = NewStore();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      const auto one = init_process_group(store, r, 2);
      const auto two = init_process_group(
          store, r, 2, ProcessGroupOptions().prefix("second"));
      EXPECT_EQ(SumOverRanks(one, 1), 2);
      EXPECT_EQ(SumOverRanks(two, 2), 4);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Keys that an earlier group has left must not be taken for its successor's.
TEST(ProcessGroupTest, OneAfterTheOtherInOneStore) {
  const auto store = NewStore();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      for (int i = 1; i <= 3; ++i) {
        const auto group = init_process_group(store, r, 2);
        EXPECT_EQ(SumOverRanks(group, i), 2 * i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ProcessGroupTest, WrongArguments) {
  EXPECT_EQ(ErrorOf<c10::ValueError>([] {
              init_process_group(c10::intrusive_ptr<c10d::Store>(), 0, 1);
            }),
            "init_process_group: expected a store, got none.");
  for (const auto& [rank, size] : {std::pair(2, 2), {-1, 2}, {0, 0}}) {
    EXPECT_EQ(ErrorOf<c10::ValueError>([rank = rank, size = size] {
                init_process_group(NewStore(), rank, size);
              }),
              "init_process_group: expected 0 <= rank < world_size, got rank " +
                  std::to_string(rank) + " of " + std::to_string(size) + ".");
  }
}

TEST(ProcessGroupTest, UnknownBackend) {
  for (const char* name : {"mpi", "", "gloo,mpi", "Gloo"}) {
    EXPECT_EQ(ErrorOf<c10::ValueError>([&] {
                init_process_group(NewStore(), 0, 1,
                                   ProcessGroupOptions().backend(name));
              }),
              "init_process_group: expected a backend of 'gloo' or 'nccl', or "
              "both joined by a comma, got '" +
                  std::string(name) + "'.");
  }
}

TEST(ProcessGroupTest, NcclWithoutAGpu) {
  if (at::hasCUDA()) GTEST_SKIP() << "this host has a GPU";
  for (const char* name : {"nccl", "gloo,nccl"}) {
    EXPECT_THAT(
        ErrorOf<c10::ValueError>([&] {
          init_process_group(NewStore(), 0, 1,
                             ProcessGroupOptions().backend(name));
        }),
        testing::AnyOf(
            // A build with CUDA, and one without.
            "init_process_group: the backend 'nccl' needs a GPU, and this host "
            "has none that CUDA can use. Use 'gloo'.",
            "init_process_group: this build has no CUDA, so the backend 'nccl' "
            "is missing. Install the CUDA toolkit and build without "
            "--config=cpu, or use 'gloo'."));
  }
}

TEST(ProcessGroupTest, StartFailsAfterTheTimeoutWhereARankIsMissing) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(ErrorOf<c10::DistError>([] {
              init_process_group(
                  NewStore(), 0, 2,
                  ProcessGroupOptions().timeout(std::chrono::seconds(1)));
            }),
            "no error");
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, std::chrono::milliseconds(900));
  EXPECT_LT(took, std::chrono::seconds(10));
}

// Two ranks, of which each gives up after a second.
std::vector<ProcessGroupPtr> ImpatientGroups() {
  std::vector<ProcessGroupPtr> groups(2);
  // The start has the same timeout, which is short for a busy machine.
  for (int attempt = 1; groups[0] == nullptr || groups[1] == nullptr;
       ++attempt) {
    TORCH_CHECK(attempt <= 10, "the ranks do not come together");
    groups.assign(2, nullptr);
    const auto store = NewStore();
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        try {
          groups[r] = init_process_group(
              store, r, 2,
              ProcessGroupOptions().timeout(std::chrono::seconds(1)));
        } catch (const std::exception&) {
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  return groups;
}

TEST(ProcessGroupTest, CollectiveFailsAfterTheTimeoutWhereARankIsMissing) {
  const auto groups = ImpatientGroups();
  const auto start = std::chrono::steady_clock::now();
  std::string error = "no error";
  try {
    SumOverRanks(groups[0], 1);  // rank 1 is there, and does not take part
  } catch (const std::exception& e) {
    error = e.what();
  }
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_NE(error, "no error");
  EXPECT_GE(took, std::chrono::milliseconds(900));
  EXPECT_LT(took, std::chrono::seconds(10));
}

TEST(DefaultProcessGroupTest, WithoutOne) {
  EXPECT_EQ(ErrorOf<c10::ValueError>([] { default_process_group(); }),
            "There is no default process group. Call "
            "composable::init_process_group() first, or pass one with "
            "FullyShardOptions().mesh(...).");
  EXPECT_EQ(rank(), 0);
  EXPECT_EQ(world_size(), 1);
  destroy_process_group();  // does nothing
}

TEST(DefaultProcessGroupTest, FromTheEnvironmentAndBack) {
  SetLauncherVariables(0, 1, FreePort());
  for (int i = 0; i < 2; ++i) {
    const auto group = init_process_group();
    EXPECT_EQ(default_process_group(), group);
    EXPECT_EQ(rank(), 0);
    EXPECT_EQ(world_size(), 1);
    EXPECT_EQ(SumOverRanks(group, 2), 2);
    EXPECT_EQ(ErrorOf<c10::ValueError>([] { init_process_group(); }),
              "init_process_group: the default process group exists already. "
              "Call destroy_process_group() first, or pass a store, a rank and "
              "a world size for a second group.");
    EXPECT_EQ(default_process_group(), group);  // as it was
    destroy_process_group();
    EXPECT_THROW(default_process_group(), c10::ValueError);
    EXPECT_EQ(SumOverRanks(group, 2), 2);  // ours is still alive
  }
  UnsetLauncherVariables();
}

TEST(DefaultProcessGroupTest, WithoutLauncher) {
  UnsetLauncherVariables();
  EXPECT_THAT(ErrorOf<c10::ValueError>([] { init_process_group(); }),
              HasSubstr("the environment variable WORLD_SIZE is not set"));
  EXPECT_EQ(world_size(), 1);
}

TEST(DefaultProcessGroupTest, AFailedStartLeavesNoDefaultGroup) {
  SetLauncherVariables(0, 2, FreePort());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(ErrorOf<c10::DistError>([] {
              init_process_group(
                  ProcessGroupOptions().timeout(std::chrono::seconds(1)));
            }),
            "no error");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_THROW(default_process_group(), c10::ValueError);
  SetLauncherVariables(0, 1, FreePort());
  init_process_group();
  EXPECT_EQ(world_size(), 1);
  destroy_process_group();
  UnsetLauncherVariables();
}

}  // namespace
}  // namespace composable
