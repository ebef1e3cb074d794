#include "collectives/environment.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

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
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 0);
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
      {"LOCAL_RANK", "", "got ''"},
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

}  // namespace
}  // namespace composable
