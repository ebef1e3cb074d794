// train_gpt as a user runs it: real processes, through tools/run and torchrun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "examples/gpt.h"
#include "tests/examples/svg_plots.h"
#include "tests/support/processes.h"

namespace composable {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

constexpr char kTrainGPT[] = "examples/train_gpt";
constexpr int kSteps = 6;
const examples::GPTConfig kConfig = {
    .seq = 24, .layers = 2, .dim = 36, .heads = 3};

class TrainGPT : public testing::Test {
 protected:
  TrainGPT() {
    std::string text;
    for (int i = 0; i < 100; ++i) {
      text += "Line " + std::to_string(i * i) + " of a text to learn.\n";
    }
    WriteFile(text_, text);
  }

  // A run of a few seconds; `arguments` come last and so win.
  std::vector<std::string> Command(
      const std::vector<std::string>& arguments = {}) const {
    std::vector<std::string> command = {
        kTrainGPT,      "--data=" + text_, "--steps=" + std::to_string(kSteps),
        "--batch=2",    "--seq=24",        "--layers=2",
        "--dim=36",     "--heads=3",       "--lr=0.003",
        "--log_every=2"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return command;
  }

  TemporaryFolder folder_;
  const std::string text_ = folder_ / "text.txt";
  const std::string losses_ = folder_ / "losses.json";
};

// The lines of `text` that match `pattern` as a whole.
std::vector<std::smatch> Matches(const std::vector<std::string>& lines,
                                 const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::smatch> found;
  for (const std::string& line : lines) {
    std::smatch match;
    if (std::regex_match(line, match, regex)) found.push_back(match);
  }
  return found;
}

std::vector<std::string> Lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST_F(TrainGPT, TrainsAndVerifiesOnTwoRanks) {
  const ProcessResult run =
      RunRankProcesses(2, Command({"--verify", "--losses=" + losses_}));
  ASSERT_EQ(run.exit_code, 0) << run.output();

  // The report.
  const auto report = nlohmann::json::parse(ReadFile(losses_));
  ASSERT_EQ(report.size(), 3) << report;
  EXPECT_EQ(report.at("world_size"), 2);
  ASSERT_EQ(report.at("losses").size(), kSteps);
  ASSERT_EQ(report.at("grad_norms").size(), kSteps);
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_TRUE(report["losses"][step].is_number()) << report;
    EXPECT_GT(report["grad_norms"][step].get<double>(), 0) << report;
  }
  const auto losses = report["losses"].get<std::vector<double>>();
  EXPECT_NEAR(losses.front(), std::log(256), 0.5);
  EXPECT_LT(losses.back(), losses.front() - 0.3);

  // The log: one line for the first step, every second one and the last, all of
  // them by rank 0.
  const auto log = Lines(run.err);
  const auto steps = Matches(
      log,
      R"(\[rank0\]: step (\d)/6  loss (\d\.\d{4})  \d+ tokens/s  \d:\d\d left)");
  std::string numbers;
  for (const auto& step : steps) {
    numbers += step[1].str();
    EXPECT_NEAR(std::stod(step[2]), losses[std::stoi(step[1]) - 1], 1e-4);
  }
  // Then the one of the unsharded run.
  EXPECT_EQ(numbers, "124616") << run.output();
  EXPECT_THAT(run.err, Not(HasSubstr("[rank1]: "))) << run.output();

  // The check.
  const auto passed = Matches(
      log,
      R"(\[rank0\]: verify: passed: largest relative difference of 6 (.*) is (.*), tolerance .*)");
  ASSERT_EQ(passed.size(), 2) << run.output();
  EXPECT_EQ(passed[0][1], "losses");
  EXPECT_LE(std::stod(passed[0][2]), 1e-5);
  EXPECT_EQ(passed[1][1], "gradient norms");

  // The table: a header and a row per rank, which together hold the model.
  const auto table = Lines(run.out);
  ASSERT_EQ(table.size(), 3) << run.output();
  EXPECT_EQ(
      Matches(table, R"(\[rank0\]: rank +parameters held +peak unsharded +)"
                     R"(gathered +reduced)")
          .size(),
      1)
      << run.output();
  const auto rows =
      Matches(table, R"(\[rank0\]: +(\d) +(\d+)( +\d+(\.\d)? ([KM]i)?B){3})");
  ASSERT_EQ(rows.size(), 2) << run.output();
  int64_t held = 0;
  for (const auto& row : rows) held += std::stoll(row[2]);
  int64_t expected = 0;
  for (const auto& parameter : examples::GPT(kConfig)->parameters()) {
    expected += parameter.numel();
  }
  EXPECT_EQ(held, expected) << run.output();
}

// --verify can fail: a rank that starts from other weights is found out.
TEST_F(TrainGPT, VerifyFailsWhereRanksDisagree) {
  std::string command;
  for (const auto& argument : Command({"--verify", "--seed=$RANK"})) {
    command += argument + " ";
  }
  const ProcessResult run = RunRankProcesses(2, {"bash", "-c", command});
  EXPECT_EQ(run.exit_code, 1) << run.output();
  EXPECT_THAT(run.err, HasSubstr("verify: FAILED: ")) << run.output();
}

TEST_F(TrainGPT, PlotsTheLossesOfBothRuns) {
  const std::string path = folder_ / "loss.svg";
  const ProcessResult run = RunRankProcesses(
      2, Command({"--verify", "--plot=" + path, "--losses=" + losses_}));
  ASSERT_EQ(run.exit_code, 0) << run.output();
  EXPECT_EQ(
      Matches(Lines(run.err), R"(\[rank\d\]: plot of the losses: .*/loss\.svg)")
          .size(),
      1)
      << run.output();
  const auto plot = ReadSvgPlot(path);
  EXPECT_EQ(plot["legend"],
            (std::vector<std::string>{"sharded over 2 ranks",
                                      "one process, unsharded"}));
  ASSERT_EQ(plot["series"].size(), 2) << plot;
  for (const auto& series : plot["series"]) {
    ASSERT_EQ(series.size(), 1) << plot;
    EXPECT_EQ(series[0].size(), kSteps) << plot;
  }
  // One lies on the other.
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(plot["series"][0][0][step][1].get<double>(),
                plot["series"][1][0][step][1].get<double>(), 0.1);
  }
}

TEST_F(TrainGPT, APlotThatCannotBeWrittenIsAnError) {
  const std::string path = folder_ / "missing/loss.svg";
  const ProcessResult run = RunRankProcesses(2, Command({"--plot=" + path}));
  EXPECT_EQ(run.exit_code, 1) << run.output();
  EXPECT_THAT(run.err, HasSubstr("error: can't write the plot to " + path +
                                 ": No such file or directory"))
      << run.output();
  EXPECT_THAT(run.err, Not(HasSubstr("[rank1]: "))) << run.output();
}

TEST_F(TrainGPT, AloneItReportsOnStandardOutput) {
  const ProcessResult run = RunRankProcesses(1, Command({"--verify"}));
  ASSERT_EQ(run.exit_code, 0) << run.output();
  const auto lines = Lines(run.out);
  ASSERT_EQ(lines.size(), 3) << run.output();
  const auto report = nlohmann::json::parse(lines.back());
  EXPECT_EQ(report.at("world_size"), 1);
  EXPECT_EQ(report.at("losses").size(), kSteps);
}

TEST_F(TrainGPT, WithoutALauncherItNamesTheVariableThatIsMissing) {
  using Variables = std::map<std::string, std::optional<std::string>>;
  const Variables complete = {{"RANK", "0"},
                              {"WORLD_SIZE", "1"},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", "1"}};
  const auto expect_named = [&](const std::string& name,
                                const Variables& environment) {
    const ProcessResult run =
        RunProcess(Command(), {.environment = environment});
    EXPECT_EQ(run.exit_code, 1) << run.output();
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(Lines(run.err).size(), 1) << run.output();
    EXPECT_THAT(run.err, ContainsRegex("error: init_process_group: the "
                                       "environment variable " +
                                       name + " is not set\\."));
    EXPECT_THAT(run.err, HasSubstr("tools/run --nproc=2"));
  };
  for (const auto& [name, value] : complete) {
    Variables environment = complete;
    environment[name] = std::nullopt;
    expect_named(name, environment);
  }
  expect_named("(RANK|WORLD_SIZE)", {});
}

TEST_F(TrainGPT, FailureOfOneRankEndsTheRun) {
  std::string command;
  for (const auto& argument : Command()) {
    if (argument.rfind("--data=", 0) != 0) command += argument + " ";
  }
  command += "--data=" + folder_ / "$RANK.txt";
  WriteFile(folder_ / "0.txt", ReadFile(text_));
  const ProcessResult run = RunRankProcesses(2, {"bash", "-c", command});
  EXPECT_EQ(run.exit_code, 1) << run.output();
  EXPECT_LT(run.seconds, 15) << run.output();
  EXPECT_THAT(run.err, HasSubstr("[rank1]: [rank 1] error: can't read " +
                                 folder_ / "1.txt"))
      << run.output();
  EXPECT_THAT(run.err, HasSubstr("tools/run: rank 1 failed first"))
      << run.output();
}

// --- torchrun ----------------------------------------------------------------

std::vector<std::string> Torchrun(const std::vector<std::string>& command) {
  std::vector<std::string> all = {
      PythonWithTorch(), "-m",          "torch.distributed.run",
      "--standalone",    "--no-python", "--nproc-per-node=2"};
  all.insert(all.end(), command.begin(), command.end());
  return all;
}

// There the launcher hosts the store. Two addends have one sum, so the numbers
// are the same ones, bit by bit.
TEST_F(TrainGPT, TrainsUnderTorchrunAsUnderToolsRun) {
  const std::string other = folder_ / "tools_run.json";
  const ProcessResult tools_run =
      RunRankProcesses(2, Command({"--losses=" + other}));
  ASSERT_EQ(tools_run.exit_code, 0) << tools_run.output();
  const ProcessResult torchrun =
      RunProcess(Torchrun(Command({"--losses=" + losses_})));
  ASSERT_EQ(torchrun.exit_code, 0) << torchrun.output();
  EXPECT_EQ(nlohmann::json::parse(ReadFile(losses_)),
            nlohmann::json::parse(ReadFile(other)));
}

TEST_F(TrainGPT, TorchrunQuotesWhatARankFailedOf) {
  const std::string missing = folder_ / "missing.txt";
  const ProcessResult run =
      RunProcess(Torchrun(Command({"--data=" + missing})));
  EXPECT_EQ(run.exit_code, 1) << run.output();
  EXPECT_LT(run.seconds, 30) << run.output();
  EXPECT_THAT(run.err, HasSubstr("error: can't read " + missing))
      << run.output();
  EXPECT_THAT(run.err, HasSubstr("Root Cause")) << run.output();
  EXPECT_THAT(run.err, HasSubstr("traceback : can't read " + missing))
      << run.output();
}

}  // namespace
}  // namespace composable
