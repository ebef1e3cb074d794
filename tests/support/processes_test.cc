// The harness that runs real processes.
#include "tests/support/processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace composable {
namespace {

TEST(Processes, KeepsExitCodeAndBothStreams) {
  const ProcessResult run =
      RunProcess({"bash", "-c", "echo out; echo err >&2; cat; exit 7"});
  EXPECT_EQ(run.exit_code, 7);
  EXPECT_EQ(run.out, "out\n");
  EXPECT_EQ(run.err, "err\n");
  EXPECT_FALSE(run.timed_out);
}

TEST(Processes, ReadsMoreThanAPipeHolds) {
  const ProcessResult run = RunProcess(
      {"bash", "-c", "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero"});
  EXPECT_EQ(run.out.size(), 300000);
  EXPECT_EQ(run.err.size(), 300000);
}

TEST(Processes, SignalsCountAsInAShell) {
  EXPECT_EQ(RunProcess({"bash", "-c", "kill -SEGV $$"}).exit_code, 128 + 11);
}

TEST(Processes, EnvironmentIsThisOneButForWhatIsSaid) {
  setenv("RANK", "3", 1);
  setenv("TORCHELASTIC_RUN_ID", "mine", 1);
  setenv("KEPT", "kept", 1);
  setenv("DROPPED", "dropped", 1);
  const ProcessResult run =
      RunProcess({"bash", "-c",
                  "echo ${RANK-unset} ${TORCHELASTIC_RUN_ID-unset} $KEPT "
                  "${DROPPED-unset} $NEW"},
                 {.environment = {{"DROPPED", std::nullopt}, {"NEW", "new"}}});
  EXPECT_EQ(run.out, "unset unset kept unset new\n");
}

TEST(Processes, KillsWhatDoesNotEndInTime) {
  const ProcessResult run =
      RunProcess({"bash", "-c", "echo before; sleep 60 & wait"},
                 {.timeout = std::chrono::seconds(1)});
  EXPECT_TRUE(run.timed_out);
  EXPECT_EQ(run.exit_code, 128 + 15);
  EXPECT_EQ(run.out, "before\n");
  EXPECT_LT(run.seconds, 5);
  EXPECT_THAT(run.output(), testing::HasSubstr("did not end in time"));
}

TEST(Processes, RanksThatHangAreNamed) {
  const ProcessResult run =
      RunRankProcesses(2, {"bash", "-c", "[ $RANK = 0 ] || sleep 60"},
                       {.timeout = std::chrono::seconds(1)});
  EXPECT_EQ(run.exit_code, 124);
  EXPECT_FALSE(run.timed_out);
  EXPECT_THAT(run.err, testing::HasSubstr("still running: rank 1"));
}

TEST(Processes, AProgramThatIsNotThereThrows) {
  EXPECT_THROW(RunProcess({"./not-there"}), std::system_error);
}

TEST(Processes, TemporaryFolderIsRemoved) {
  std::string path;
  {
    const TemporaryFolder folder;
    path = folder.path();
    WriteFile(folder / "a", "bytes");
    EXPECT_EQ(ReadFile(folder / "a"), "bytes");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THROW(ReadFile(path + "/a"), std::runtime_error);
}

}  // namespace
}  // namespace composable
