// Runs programs as real processes, one or as ranks through tools/run, and keeps
// what they wrote.
//
//   composable::TemporaryFolder folder;
//   composable::ProcessResult result = composable::RunRankProcesses(
//       2, {"examples/train_gpt", "--losses=" + folder / "l.json"});
//   EXPECT_EQ(result.exit_code, 0) << result.output();
//
// Paths of programs are those of Bazel's targets, relative to the working
// folder that Bazel runs tests in: list the programs, and //tools:run, in the
// test's `data`.
//
// A program that does not end in time is killed with all its ranks, and so is
// one whose test dies. Thread-safe.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace composable {

struct ProcessResult {
  // As a shell has it: 128 + the signal's number where a signal ended it.
  int exit_code = 0;
  bool timed_out = false;
  double seconds = 0;
  std::string out;
  std::string err;

  // All of the above, for messages of tests.
  std::string output() const;
};

struct ProcessOptions {
  // What differs from this process's environment; without a value: unset. The
  // variables by which launchers tell a rank about itself are always unset.
  std::map<std::string, std::optional<std::string>> environment = {};
  std::chrono::seconds timeout = std::chrono::seconds(45);
};

// Runs `command` (a path with a slash, or a name on PATH, and arguments) to its
// end. Standard input is empty. Throws std::system_error if it can't be
// started.
ProcessResult RunProcess(const std::vector<std::string>& command,
                         const ProcessOptions& options = {});

// Runs `command` as `nproc` ranks through tools/run, which puts "[rank0]: " and
// so on before their lines where there are several.
ProcessResult RunRankProcesses(int nproc, std::vector<std::string> command,
                               const ProcessOptions& options = {});

// The path of this test's own program.
std::string ThisProgram();

// The Python with PyTorch that tools/bootstrap has set up. Throws
// std::runtime_error that says how to get one.
std::string PythonWithTorch();

// A new folder below the test's own, removed with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The path of `name` in `folder`.
std::string operator/(const TemporaryFolder& folder, const std::string& name);

// Throw std::runtime_error with the path.
std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& bytes);

}  // namespace composable
