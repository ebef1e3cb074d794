#include "collectives/environment.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace composable {
namespace {

using Variables = std::map<std::string, std::string>;
using testing::HasSubstr;

Variables Complete() {
  return {{"RANK", "1"},
          {"WORLD_SIZE", "4"},
          {"MASTER_ADDR", "10.0.0.7"},
          {"MASTER_PORT", "29500"}};
}

LaunchEnvironment Read(const Variables& variables) {
  return ReadLaunchEnvironment([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

std::string ErrorOf(const Variables& variables) {
  try {
    Read(variables);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(EnvironmentTest, ReadsAllVariables) {
  Variables variables = Complete();
  variables["LOCAL_RANK"] = "0";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "2";
  const LaunchEnvironment env = Read(variables);
  EXPECT_EQ(env.launcher, "torchrun");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.job, "");
  EXPECT_EQ(env.address, "10.0.0.7");
  EXPECT_EQ(env.port, 29500);
  EXPECT_TRUE(env.agent_store);
  EXPECT_EQ(env.restart_count, 2);
}

TEST(EnvironmentTest, OptionalVariablesHaveDefaults) {
  const LaunchEnvironment env = Read(Complete());
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_FALSE(env.agent_store);
  EXPECT_EQ(env.restart_count, 0);
}

TEST(EnvironmentTest, OnlyTrueMeansThatTheLauncherHostsTheStore) {
  for (const char* value : {"False", "", "0", "true"}) {
    Variables variables = Complete();
    variables["TORCHELASTIC_USE_AGENT_STORE"] = value;
    EXPECT_FALSE(Read(variables).agent_store) << value;
  }
}

TEST(EnvironmentTest, EachRequiredVariableIsNamedWhereItIsMissing) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    const std::string expected =
        std::string("init_process_group: the environment variable ") + name +
        " is not set. Start the program with `tools/run --nproc=2 BINARY` or "
        "`torchrun --no-python --nproc-per-node=2 BINARY`, which set it, or "
        "pass a store, a rank and a world size to init_process_group.";
    Variables variables = Complete();
    variables.erase(name);
    EXPECT_EQ(ErrorOf(variables), expected);
    variables[name] = "";
    EXPECT_EQ(ErrorOf(variables), expected);
  }
}

TEST(EnvironmentTest, NumbersOutOfRange) {
  const struct {
    const char* name;
    const char* value;
    const char* expected;
  } kCases[] = {
      {"RANK", "4", "expected RANK to be a number from 0 to 3, got '4'"},
      {"RANK", "-1", "expected RANK to be a number from 0 to 3, got '-1'"},
      {"RANK", "one", "expected RANK to be a number from 0 to 3, got 'one'"},
      {"RANK", "1x", "got '1x'"},
      {"RANK", "99999999999999", "got '99999999999999'"},
      {"WORLD_SIZE", "0", "expected WORLD_SIZE to be a number from 1 to "},
      {"WORLD_SIZE", "two", "got 'two'"},
      {"LOCAL_RANK", "4", "expected LOCAL_RANK to be a number from 0 to 3"},
      {"LOCAL_RANK", "x", "got 'x'"},
      {"TORCHELASTIC_RESTART_COUNT", "-1",
       "expected TORCHELASTIC_RESTART_COUNT to be a number from 0 to"},
      {"MASTER_PORT", "0",
       "expected MASTER_PORT to be a number from 1 to 65535"},
      {"MASTER_PORT", "65536", "got '65536'"},
      {"MASTER_PORT", "http", "got 'http'"},
  };
  for (const auto& c : kCases) {
    Variables variables = Complete();
    variables[c.name] = c.value;
    const std::string error = ErrorOf(variables);
    EXPECT_THAT(error, HasSubstr(c.expected)) << c.name << "=" << c.value;
    EXPECT_THAT(error, HasSubstr("tools/run --nproc=2"));
  }
}

TEST(EnvironmentTest, LimitsAreInside) {
  Variables variables = Complete();
  variables["RANK"] = "3";
  variables["MASTER_PORT"] = "65535";
  EXPECT_EQ(Read(variables).rank, 3);
  EXPECT_EQ(Read(variables).port, 65535);
  variables["RANK"] = "0";
  variables["MASTER_PORT"] = "1";
  EXPECT_EQ(Read(variables).rank, 0);
  EXPECT_EQ(Read(variables).port, 1);
}

// --- Open MPI, PMI and Slurm -------------------------------------------------

// What mpirun of Open MPI 4 sets on one host.
Variables OpenMpi() {
  return {{"OMPI_COMM_WORLD_RANK", "1"},
          {"OMPI_COMM_WORLD_SIZE", "4"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
          {"OMPI_MCA_ess_base_jobid", "866516993"},
          {"PMIX_NAMESPACE", "866516993"},
          {"PMIX_RANK", "1"}};
}

// What mpiexec of MPICH sets.
Variables Pmi() {
  return {{"PMI_RANK", "3"},
          {"PMI_SIZE", "4"},
          {"MPI_LOCALRANKID", "3"},
          {"MPI_LOCALNRANKS", "4"},
          {"MASTER_PORT", "29500"}};
}

// What srun sets in a step of 5 tasks on 3 hosts, in a job of 8.
Variables Slurm() {
  return {{"SLURM_JOB_ID", "1234"},
          {"SLURM_JOB_NODELIST", "node[001-008]"},
          {"SLURM_JOB_NUM_NODES", "8"},
          {"SLURM_STEP_ID", "2"},
          {"SLURM_STEP_NODELIST", "node[003-004,7]"},
          {"SLURM_STEP_NUM_TASKS", "5"},
          {"SLURM_NTASKS", "5"},
          {"SLURM_PROCID", "3"},
          {"SLURM_LOCALID", "1"}};
}

// Within a batch script that asked for as many tasks.
Variables SlurmBatch(const std::string& tasks) {
  return {{"SLURM_JOB_ID", "1234"},     {"SLURM_JOB_NODELIST", "node[1-2]"},
          {"SLURM_JOB_NUM_NODES", "2"}, {"SLURM_NTASKS", tasks},
          {"SLURM_PROCID", "0"},        {"SLURM_LOCALID", "0"}};
}

Variables With(Variables variables, const Variables& others) {
  for (const auto& [name, value] : others) variables[name] = value;
  return variables;
}

Variables Without(Variables variables, const std::vector<std::string>& names) {
  for (const auto& name : names) variables.erase(name);
  return variables;
}

TEST(EnvironmentTest, ReadsEachLauncher) {
  const struct {
    const char* what;
    Variables variables;
    LaunchEnvironment expected;
  } kCases[] = {
      {"mpirun on one host",
       OpenMpi(),
       {.launcher = "Open MPI",
        .rank = 1,
        .world_size = 4,
        .local_rank = 1,
        .address = "127.0.0.1",
        .port = 0,
        .job = "openmpi-866516993"}},
      {"mpirun of Open MPI 5",
       With(Without(OpenMpi(), {"OMPI_MCA_ess_base_jobid"}),
            {{"PMIX_NAMESPACE", "prterun-host-77@1"}}),
       {.launcher = "Open MPI",
        .rank = 1,
        .world_size = 4,
        .local_rank = 1,
        .address = "127.0.0.1",
        .port = 0,
        .job = "openmpi-prterun-host-77@1"}},
      {"mpirun on several hosts, told where rank 0 is",
       With(OpenMpi(), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"MASTER_ADDR", "node7"},
                        {"MASTER_PORT", "1234"}}),
       {.launcher = "Open MPI",
        .rank = 1,
        .world_size = 4,
        .local_rank = 1,
        .address = "node7",
        .port = 1234,
        .job = "openmpi-866516993"}},
      {"mpiexec of MPICH",
       Pmi(),
       {.launcher = "PMI",
        .rank = 3,
        .world_size = 4,
        .local_rank = 3,
        .address = "127.0.0.1",
        .port = 29500,
        .job = ""}},
      {"srun on several hosts",
       Slurm(),
       {.launcher = "Slurm",
        .rank = 3,
        .world_size = 5,
        .local_rank = 1,
        .address = "node003",
        .port = 12000 + (1234 * 31 + 2) % 16000,
        .job = "slurm-1234.2"}},
      {"srun on one host",
       With(Slurm(), {{"SLURM_STEP_NODELIST", "node7"}}),
       {.launcher = "Slurm",
        .rank = 3,
        .world_size = 5,
        .local_rank = 1,
        .address = "127.0.0.1",
        .port = 12000 + (1234 * 31 + 2) % 16000,
        .job = "slurm-1234.2"}},
      {"srun, old names",
       With(Without(Slurm(), {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS",
                              "SLURM_STEP_NODELIST", "SLURM_JOB_ID"}),
            {{"SLURM_STEPID", "0"}, {"SLURM_JOBID", "70000"}}),
       {.launcher = "Slurm",
        .rank = 3,
        .world_size = 5,
        .local_rank = 1,
        .address = "node001",
        .port = 12000 + 70000 * 31 % 16000,
        .job = "slurm-70000.0"}},
      {"srun, told where rank 0 is",
       With(Slurm(), {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "99"}}),
       {.launcher = "Slurm",
        .rank = 3,
        .world_size = 5,
        .local_rank = 1,
        .address = "10.0.0.1",
        .port = 99,
        .job = "slurm-1234.2"}},
      {"a batch script of one task",
       SlurmBatch("1"),
       {.launcher = "Slurm",
        .rank = 0,
        .world_size = 1,
        .local_rank = 0,
        .address = "127.0.0.1",
        .port = 12000 + 1234 * 31 % 16000,
        .job = "slurm-1234.0"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.what);
    const LaunchEnvironment env = Read(c.variables);
    EXPECT_EQ(env.launcher, c.expected.launcher);
    EXPECT_EQ(env.rank, c.expected.rank);
    EXPECT_EQ(env.world_size, c.expected.world_size);
    EXPECT_EQ(env.local_rank, c.expected.local_rank);
    EXPECT_EQ(env.address, c.expected.address);
    if (c.expected.port != 0) {
      EXPECT_EQ(env.port, c.expected.port);
    } else {
      EXPECT_GE(env.port, 12000);
      EXPECT_LE(env.port, 27999);
    }
    EXPECT_EQ(env.job, c.expected.job);
    EXPECT_FALSE(env.agent_store);
    EXPECT_EQ(env.restart_count, 0);
  }
}

TEST(EnvironmentTest, TheFirstLauncherOfTheListIsBelieved) {
  // A real torchrun, mpirun or mpiexec within a task or a batch script.
  const Variables all = With(With(With(Slurm(), Pmi()), OpenMpi()), Complete());
  EXPECT_EQ(Read(all).launcher, "torchrun");
  Variables rest = Without(all, {"RANK", "WORLD_SIZE"});
  EXPECT_EQ(Read(rest).launcher, "Open MPI");
  EXPECT_EQ(Read(rest).address, "10.0.0.7");
  rest = Without(rest, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"});
  EXPECT_EQ(Read(rest).launcher, "PMI");
  EXPECT_EQ(Read(With(SlurmBatch("8"), OpenMpi())).launcher, "Open MPI");
  // srun with its own PMI says the same twice, and knows the hosts.
  EXPECT_EQ(Read(With(rest, {{"PMI_SIZE", "5"}})).launcher, "Slurm");
  rest = Without(rest, {"PMI_RANK"});
  EXPECT_EQ(Read(rest).launcher, "Slurm");
}

TEST(EnvironmentTest, JobsOfOneHostGetPortsOfTheirOwn) {
  std::set<uint16_t> ports;
  for (int job = 0; job < 20; ++job) {
    for (int step = 0; step < 20; ++step) {
      ports.insert(
          Read(With(Slurm(), {{"SLURM_JOB_ID", std::to_string(job)},
                              {"SLURM_STEP_ID", std::to_string(step)}}))
              .port);
    }
    ports.insert(
        Read(With(OpenMpi(), {{"OMPI_MCA_ess_base_jobid",
                               std::to_string((7000 + job) << 16 | 1)}}))
            .port);
  }
  EXPECT_GE(ports.size(), 418);
  EXPECT_GE(*ports.begin(), 12000);
  EXPECT_LE(*ports.rbegin(), 27999);
}

constexpr char kIsOpenMpi[] =
    " The launcher was taken for Open MPI by OMPI_COMM_WORLD_RANK or _SIZE: "
    "start the program with `mpirun -n 2 BINARY`, or set RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT, which are read first.";
constexpr char kIsPmi[] =
    " The launcher was taken for that of MPICH or Intel MPI by PMI_RANK: start "
    "the program with `mpiexec -n 2 BINARY`, or set RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT, which are read first.";
constexpr char kIsSlurm[] =
    " The launcher was taken for Slurm by SLURM_PROCID: start the program with "
    "`srun -n 2 BINARY`, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
    "which are read first.";

TEST(EnvironmentTest, WhatIsMissingOrAtOddsIsNamed) {
  const std::string is_missing = "the environment variable ";
  const std::string not_a_step =
      ", but SLURM_STEP_ID and SLURM_STEP_NUM_TASKS, which srun sets, are not "
      "those of a step: a batch script or a shell seems to have started the "
      "program once, and nobody the other ranks.";
  const struct {
    Variables variables;
    std::string expected;
    const char* advice;
  } kCases[] = {
      // Open MPI
      {Without(OpenMpi(), {"OMPI_COMM_WORLD_RANK"}),
       is_missing + "OMPI_COMM_WORLD_RANK is not set.", kIsOpenMpi},
      {Without(OpenMpi(), {"OMPI_COMM_WORLD_SIZE"}),
       is_missing + "OMPI_COMM_WORLD_SIZE is not set.", kIsOpenMpi},
      {Without(OpenMpi(), {"OMPI_COMM_WORLD_LOCAL_RANK"}),
       is_missing + "OMPI_COMM_WORLD_LOCAL_RANK is not set.", kIsOpenMpi},
      {With(OpenMpi(), {{"OMPI_COMM_WORLD_RANK", "4"}}),
       "expected OMPI_COMM_WORLD_RANK to be a number from 0 to 3 "
       "(OMPI_COMM_WORLD_SIZE=4), got '4'.",
       kIsOpenMpi},
      {With(OpenMpi(), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "5"}}),
       "expected OMPI_COMM_WORLD_LOCAL_SIZE to be a number from 1 to 4 "
       "(OMPI_COMM_WORLD_SIZE=4), got '5'.",
       kIsOpenMpi},
      {With(OpenMpi(), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}),
       "expected OMPI_COMM_WORLD_LOCAL_RANK to be a number from 0 to 1 "
       "(OMPI_COMM_WORLD_LOCAL_SIZE=2), got '2'.",
       kIsOpenMpi},
      {With(OpenMpi(), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
       is_missing +
           "MASTER_ADDR is not set, and only where all ranks are on one host "
           "it can be derived (OMPI_COMM_WORLD_LOCAL_SIZE=2, "
           "OMPI_COMM_WORLD_SIZE=4). Name the host of rank 0: `mpirun -x "
           "MASTER_ADDR=HOST -n 2 BINARY`.",
       kIsOpenMpi},
      {Without(OpenMpi(), {"OMPI_COMM_WORLD_LOCAL_SIZE"}),
       is_missing +
           "MASTER_ADDR is not set, and only where all ranks are on one host "
           "it can be derived (OMPI_COMM_WORLD_LOCAL_SIZE not set, "
           "OMPI_COMM_WORLD_SIZE=4). Name the host of rank 0: `mpirun -x "
           "MASTER_ADDR=HOST -n 2 BINARY`.",
       kIsOpenMpi},
      {Without(OpenMpi(), {"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"}),
       is_missing +
           "MASTER_PORT is not set, nor is one of OMPI_MCA_ess_base_jobid and "
           "PMIX_NAMESPACE, from which it is derived. Name a free port: "
           "`mpirun -x MASTER_PORT=29500 -n 2 BINARY`.",
       kIsOpenMpi},
      // PMI
      {Without(Pmi(), {"PMI_SIZE"}), is_missing + "PMI_SIZE is not set.",
       kIsPmi},
      {With(Pmi(), {{"PMI_RANK", "4"}}),
       "expected PMI_RANK to be a number from 0 to 3 (PMI_SIZE=4), got '4'.",
       kIsPmi},
      {With(Pmi(), {{"MPI_LOCALNRANKS", "1"}, {"MPI_LOCALRANKID", "0"}}),
       is_missing +
           "MASTER_ADDR is not set, and only where all ranks are on one host "
           "it can be derived (MPI_LOCALNRANKS=1, PMI_SIZE=4). Name the host "
           "of rank 0: `mpiexec -genv MASTER_ADDR HOST -n 2 BINARY`.",
       kIsPmi},
      {Without(Pmi(), {"MASTER_PORT"}),
       is_missing +
           "MASTER_PORT is not set, and PMI tells nothing from which it can be "
           "derived. Name a free port: `mpiexec -genv MASTER_PORT 29500 -n 2 "
           "BINARY`.",
       kIsPmi},
      // Slurm
      {With(Slurm(), {{"SLURM_PROCID", "5"}}),
       "expected SLURM_PROCID to be a number from 0 to 4 "
       "(SLURM_STEP_NUM_TASKS=5), got '5'.",
       kIsSlurm},
      {With(Slurm(), {{"SLURM_LOCALID", "5"}}),
       "expected SLURM_LOCALID to be a number from 0 to 4 "
       "(SLURM_STEP_NUM_TASKS=5), got '5'.",
       kIsSlurm},
      {Without(Slurm(), {"SLURM_LOCALID"}),
       is_missing + "SLURM_LOCALID is not set.", kIsSlurm},
      {Without(Slurm(), {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}),
       is_missing + "SLURM_STEP_NUM_TASKS is not set.", kIsSlurm},
      {Without(Slurm(), {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}),
       "neither MASTER_ADDR nor SLURM_STEP_NODELIST, from which it is derived, "
       "is set.",
       kIsSlurm},
      {With(Slurm(), {{"SLURM_STEP_NODELIST", "node[1-"}}),
       "expected SLURM_STEP_NODELIST to be a list of hosts such as "
       "node[003-005,7],gpu1, got 'node[1-'. MASTER_ADDR, where set, is used "
       "instead.",
       kIsSlurm},
      {Without(Slurm(), {"SLURM_JOB_ID"}),
       "neither MASTER_PORT nor SLURM_JOB_ID, from which it is derived, is set "
       "to a number.",
       kIsSlurm},
      // Slurm without srun: other ranks would never come.
      {SlurmBatch("4"), "SLURM_PROCID=0 and SLURM_NTASKS=4" + not_a_step,
       kIsSlurm},
      {Without(SlurmBatch("1"), {"SLURM_NTASKS"}),
       "SLURM_PROCID=0 and SLURM_JOB_NUM_NODES=2" + not_a_step, kIsSlurm},
      {With(SlurmBatch("4"),
            {{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}}),
       "SLURM_PROCID=0 and SLURM_NTASKS=4" + not_a_step, kIsSlurm},
      // The shell of salloc, where that is a step of its own.
      {With(SlurmBatch("4"),
            {{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
       "SLURM_PROCID=0 and SLURM_NTASKS=4" + not_a_step, kIsSlurm},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(ErrorOf(c.variables),
              "init_process_group: " + c.expected + c.advice);
  }
}

TEST(EnvironmentTest, AnErrorAboutTorchrunSaysWhatElseIsThere) {
  const std::string missing = "the environment variable WORLD_SIZE is not set.";
  const struct {
    Variables variables;
    std::string expected;
  } kCases[] = {
      {{}, missing + " Start the program with `tools/run"},
      // The shell of salloc.
      {Without(SlurmBatch("4"), {"SLURM_PROCID"}),
       missing +
           " (SLURM_JOB_ID is set, but SLURM_PROCID is not: within an "
           "allocation of Slurm, `srun BINARY` starts ranks.) Start the "},
      {{{"PMIX_RANK", "0"}},
       missing +
           " (PMIX_RANK is set, but PMIx has no variable for the number of "
           "ranks.) Start the "},
      {With(Slurm(), {{"RANK", "3"}}),
       missing +
           " (SLURM_PROCID is set, too, but is only read where neither RANK "
           "nor WORLD_SIZE is.) Start the "},
      {With(OpenMpi(), {{"WORLD_SIZE", "4"}}),
       "the environment variable RANK is not set. (OMPI_COMM_WORLD_RANK is "
       "set, too, but is only read where neither RANK nor WORLD_SIZE is.) "
       "Start the "},
  };
  for (const auto& c : kCases) {
    EXPECT_THAT(ErrorOf(c.variables),
                testing::StartsWith("init_process_group: " + c.expected));
  }
}

}  // namespace
}  // namespace composable
