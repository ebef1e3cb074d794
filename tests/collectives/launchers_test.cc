// Real processes that are started with the variables of a launcher form a
// group, and one that was started wrongly says so at once.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "collectives/process_group.h"
#include "tests/support/processes.h"

namespace composable {
namespace {

using testing::HasSubstr;

// Whether the ranks of another job, had they come to the same store, would
// have been taken for ours.
bool KeysAreOfTheJob(const ProcessGroupPtr& group) {
  const char* job = std::getenv("SLURM_JOB_ID");
  if (job == nullptr || std::getenv("OMPI_COMM_WORLD_RANK")) return true;
  auto* store = dynamic_cast<c10d::PrefixStore*>(group->getStore().get());
  return store->getUnderlyingNonPrefixStore()->check(
      {"composable/slurm-" + std::string(job) + ".0/start0/calls/" +
       std::to_string(rank())});
}

// What each process runs.
int Rank() try {
  const auto group = init_process_group(
      ProcessGroupOptions().timeout(std::chrono::seconds(20)));
  std::vector<at::Tensor> sum{at::full({1}, rank() + 1.0)};
  group->getBackend(c10::kCPU)->allreduce(sum)->wait();
  TORCH_CHECK(KeysAreOfTheJob(group), "keys without the job's name");
  std::cout << "rank " << rank() << " of " << world_size() << " has "
            << sum[0].item<float>() << std::endl;
  return 0;
} catch (const c10::Error& error) {
  std::cout << error.what_without_backtrace() << std::endl;
  return 1;
}

using Environment = decltype(ProcessOptions::environment);

// One that no other run of this test has at the same time.
std::string JobNumber(int offset) {
  return std::to_string(4 * getpid() + offset);
}

std::vector<ProcessResult> RunRanks(const std::vector<Environment>& ranks) {
  std::vector<ProcessResult> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      results[r] =
          RunProcess({ThisProgram(), "--rank"}, {.environment = ranks[r]});
    });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

void ExpectAGroupOfThree(const std::vector<Environment>& ranks) {
  const auto results = RunRanks(ranks);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(results[r].out, "rank " + std::to_string(r) + " of 3 has 6\n")
        << results[r].output();
    EXPECT_EQ(results[r].exit_code, 0);
  }
}

Environment SlurmTask(int rank, const std::string& job) {
  return {{"SLURM_JOB_ID", job},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NUM_TASKS", "3"},
          {"SLURM_NTASKS", "3"},
          {"SLURM_STEP_NODELIST", "node7"},
          {"SLURM_JOB_NODELIST", "node[6-7]"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_LOCALID", std::to_string(rank)}};
}

TEST(Launchers, SlurmOnOneHost) {
  std::vector<Environment> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(SlurmTask(r, JobNumber(0)));
  ExpectAGroupOfThree(ranks);
}

// The list's first host is this machine; nobody here is called as the second.
TEST(Launchers, SlurmMeetsOnTheFirstHostOfTheList) {
  std::vector<Environment> ranks;
  for (int r = 0; r < 3; ++r) {
    Environment task = SlurmTask(r, JobNumber(1));
    task["SLURM_STEP_NODELIST"] = "127.0.0.[1-1],node.invalid";
    ranks.push_back(task);
  }
  ExpectAGroupOfThree(ranks);
}

TEST(Launchers, OpenMpi) {
  std::vector<Environment> ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.push_back({{"OMPI_COMM_WORLD_RANK", std::to_string(r)},
                     {"OMPI_COMM_WORLD_SIZE", "3"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(r)},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                     {"OMPI_MCA_ess_base_jobid", JobNumber(2)},
                     // mpirun within a batch script.
                     {"SLURM_JOB_ID", "1"},
                     {"SLURM_PROCID", "0"},
                     {"SLURM_NTASKS", "3"}});
  }
  ExpectAGroupOfThree(ranks);
}

TEST(Launchers, ABatchScriptWithoutSrunIsRefusedAtOnce) {
  const auto result = RunRanks({{{"SLURM_JOB_ID", "1"},
                                 {"SLURM_PROCID", "0"},
                                 {"SLURM_NTASKS", "3"},
                                 {"SLURM_JOB_NODELIST", "node7"}}})[0];
  EXPECT_EQ(result.exit_code, 1) << result.output();
  EXPECT_LT(result.seconds, 10);
  EXPECT_THAT(result.out, HasSubstr("SLURM_PROCID=0 and SLURM_NTASKS=3, but"));
  EXPECT_THAT(result.out, HasSubstr("`srun -n 2 BINARY`"));
}

TEST(Launchers, APortThatIsTakenIsNamedAtOnce) {
  const int taken = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  ASSERT_EQ(getsockname(taken, reinterpret_cast<sockaddr*>(&address), &size),
            0);
  Environment task = SlurmTask(0, JobNumber(3));
  task["MASTER_PORT"] = std::to_string(ntohs(address.sin6_port));
  const auto result = RunRanks({task})[0];
  close(taken);
  EXPECT_EQ(result.exit_code, 1) << result.output();
  EXPECT_LT(result.seconds, 10);
  EXPECT_THAT(result.out,
              HasSubstr("init_process_group: rank 0 of 3 (by the variables of "
                        "Slurm) has not met the others at 127.0.0.1:" +
                        *task["MASTER_PORT"]));
  EXPECT_THAT(result.out, HasSubstr("MASTER_ADDR and MASTER_PORT choose it. "));
}

}  // namespace
}  // namespace composable

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--rank") return composable::Rank();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
