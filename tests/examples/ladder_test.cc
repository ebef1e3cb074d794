// The small examples as a user runs them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/processes.h"

namespace composable {
namespace {

using testing::HasSubstr;

// A few seconds each where nothing else runs.
const ProcessOptions kPatient = {.timeout = std::chrono::seconds(200)};

// What the groups of `pattern` match, for each line where it is found.
std::vector<std::vector<double>> Numbers(const std::string& text,
                                         const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::vector<double>> found;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    std::smatch match;
    if (!std::regex_search(line, match, regex)) continue;
    std::vector<double> row;
    for (size_t i = 1; i < match.size(); ++i)
      row.push_back(std::stod(match[i]));
    found.push_back(row);
  }
  return found;
}

TEST(OneProcess, TrainsAlikeWithAndWithoutSharding) {
  const ProcessResult run = RunProcess({"examples/one_process"}, kPatient);
  ASSERT_EQ(run.exit_code, 0) << run.output();
  EXPECT_THAT(run.out, HasSubstr("The losses are the same.")) << run.output();
  const auto rows = Numbers(run.out, R"(^ *(\d+)  (\d\.\d{6})  (\d\.\d{6})$)");
  ASSERT_EQ(rows.size(), 5) << run.output();
  for (const auto& row : rows) EXPECT_EQ(row[1], row[2]) << run.output();
  EXPECT_LT(rows.back()[1], 0.1 * rows.front()[1]) << run.output();
}

TEST(TwoRanks, HalvesBytesTrainsAndWritesWholeWeights) {
  const TemporaryFolder folder;
  const std::string path = folder / "weights.pt";
  const ProcessResult run =
      RunRankProcesses(2, {"examples/two_ranks", path}, kPatient);
  ASSERT_EQ(run.exit_code, 0) << run.output();

  const auto bytes =
      Numbers(run.out, R"(rank (\d) holds (\d+) of (\d+) bytes)");
  ASSERT_EQ(bytes.size(), 2) << run.output();
  EXPECT_EQ(bytes[0][1] + bytes[1][1], bytes[0][2]) << run.output();
  EXPECT_NEAR(bytes[0][1], bytes[1][1], 0.01 * bytes[0][2]) << run.output();

  const auto losses =
      Numbers(run.out, R"(rank (\d) step (\d+): loss of its part (\d\.\d+))");
  ASSERT_EQ(losses.size(), 8) << run.output();
  const auto test =
      Numbers(run.out, R"(test loss sharded (\S+), from .*weights.pt (\S+)$)");
  ASSERT_EQ(test.size(), 1) << run.output();
  EXPECT_EQ(test[0][0], test[0][1]) << run.output();
  EXPECT_LT(test[0][0], 0.2 * losses[0][2]) << run.output();
  EXPECT_GT(ReadFile(path).size(), bytes[0][2]);
}

// time, loss, error alone, error with closure.
std::vector<std::vector<double>> SolverTable(const ProcessResult& run) {
  return Numbers(run.out, R"( (\d+\.\d\d) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)$)");
}

TEST(Solver, LearnsWhileItSimulatesTheSameOnOneRankAndOnTwo) {
  const ProcessResult two = RunRankProcesses(2, {"examples/solver"}, kPatient);
  ASSERT_EQ(two.exit_code, 0) << two.output();
  const auto table = SolverTable(two);
  ASSERT_EQ(table.size(), 8) << two.output();
  EXPECT_LT(table.back()[1], 0.2 * table.front()[1]) << two.output();
  for (size_t window = 0; window < table.size(); ++window) {
    if (window < 4) continue;  // it has not learnt enough yet
    EXPECT_LT(table[window][3], 0.3 * table[window][2]) << two.output();
  }

  // A piece of space per rank, or one for all: the same simulation.
  const ProcessResult one = RunRankProcesses(1, {"examples/solver"}, kPatient);
  ASSERT_EQ(one.exit_code, 0) << one.output();
  const auto expected = SolverTable(one);
  ASSERT_EQ(expected.size(), table.size()) << one.output();
  for (size_t window = 0; window < table.size(); ++window) {
    EXPECT_NEAR(table[window][2], expected[window][2], 1e-5);
    EXPECT_NEAR(table[window][1], expected[window][1],
                0.01 * expected[window][1]);
    EXPECT_NEAR(table[window][3], expected[window][3], 1e-3);
  }
}

TEST(Solver, SaysHowManyRanksItCanUse) {
  const ProcessResult run = RunRankProcesses(3, {"examples/solver"}, kPatient);
  EXPECT_EQ(run.exit_code, 1) << run.output();
  EXPECT_THAT(run.err, HasSubstr("expected a number of ranks that divides 32 "
                                 "cells, but got 3"));
}

}  // namespace
}  // namespace composable
