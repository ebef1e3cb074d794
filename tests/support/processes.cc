#include "tests/support/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace composable {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGrace(8);  // tools/run needs up to 5 to stop

void Check(int error, const std::string& what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

// What this process may itself have been told by a launcher.
bool IsOfLauncher(const std::string& name) {
  static const std::array<std::string, 6> kNames = {
      "RANK",        "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
      "MASTER_ADDR", "MASTER_PORT"};
  for (const auto& known : kNames) {
    if (name == known) return true;
  }
  for (const char* prefix :
       {"TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_"}) {
    if (name.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

// As "NAME=VALUE".
std::vector<std::string> Environment(const ProcessOptions& options) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable = *entry;
    const std::string name = variable.substr(0, variable.find('='));
    if (!IsOfLauncher(name) && options.environment.count(name) == 0) {
      variables.push_back(variable);
    }
  }
  for (const auto& [name, value] : options.environment) {
    if (value.has_value()) variables.push_back(name + "=" + *value);
  }
  return variables;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (auto& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

class Pipe {
 public:
  Pipe() { Check(pipe2(ends_.data(), O_CLOEXEC) == 0 ? 0 : errno, "pipe2"); }
  ~Pipe() {
    CloseRead();
    CloseWrite();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  int read() const { return ends_[0]; }
  int write() const { return ends_[1]; }
  void CloseRead() { Close(ends_[0]); }
  void CloseWrite() { Close(ends_[1]); }

 private:
  static void Close(int& end) {
    if (end >= 0) close(std::exchange(end, -1));
  }
  std::array<int, 2> ends_{-1, -1};
};

// A process in a process group of its own.
pid_t Spawn(std::vector<std::string> command, const ProcessOptions& options,
            const Pipe& out, const Pipe& err) {
  posix_spawn_file_actions_t actions;
  Check(posix_spawn_file_actions_init(&actions), "posix_spawn");
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null",
                                   O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.write(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.write(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  Check(posix_spawnattr_init(&attributes), "posix_spawn");
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  std::vector<std::string> variables = Environment(options);
  pid_t pid = 0;
  const int error =
      posix_spawnp(&pid, command.front().c_str(), &actions, &attributes,
                   Pointers(command).data(), Pointers(variables).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  Check(error, "can't run " + command.front());
  return pid;
}

// Appends what is there to read; closes the pipe at its end.
void Drain(Pipe& pipe, std::string& text) {
  std::array<char, 4096> buffer;
  const ssize_t count = read(pipe.read(), buffer.data(), buffer.size());
  if (count > 0) {
    text.append(buffer.data(), static_cast<size_t>(count));
  } else if (count == 0 || errno != EINTR) {
    pipe.CloseRead();
  }
}

// Reads both pipes until their ends; false at the deadline.
bool ReadUntil(Clock::time_point deadline, Pipe& out, Pipe& err,
               ProcessResult& result) {
  while (out.read() >= 0 || err.read() >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now());
    if (left.count() <= 0) return false;
    // A negative descriptor is ignored.
    std::array<pollfd, 2> ends = {
        {{out.read(), POLLIN, 0}, {err.read(), POLLIN, 0}}};
    if (poll(ends.data(), ends.size(), static_cast<int>(left.count())) <= 0) {
      continue;
    }
    if (ends[0].revents != 0) Drain(out, result.out);
    if (ends[1].revents != 0) Drain(err, result.err);
  }
  return true;
}

}  // namespace

std::string ProcessResult::output() const {
  std::ostringstream text;
  text << "exit code " << exit_code << " after " << seconds << " s"
       << (timed_out ? ", killed: it did not end in time" : "")
       << "\n--- stdout\n"
       << out << "--- stderr\n"
       << err << "---\n";
  return text.str();
}

ProcessResult RunProcess(const std::vector<std::string>& command,
                         const ProcessOptions& options) {
  Pipe out;
  Pipe err;
  ProcessResult result;
  const auto start = Clock::now();
  const pid_t pid = Spawn(command, options, out, err);
  out.CloseWrite();
  err.CloseWrite();
  if (!ReadUntil(start + options.timeout, out, err, result)) {
    result.timed_out = true;
    kill(-pid, SIGTERM);
    if (!ReadUntil(Clock::now() + kGrace, out, err, result)) {
      kill(-pid, SIGKILL);
    }
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  result.exit_code =
      WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

ProcessResult RunRankProcesses(int nproc, std::vector<std::string> command,
                               const ProcessOptions& options) {
  const std::vector<std::string> launcher = {
      "tools/run", "--nproc=" + std::to_string(nproc),
      "--timeout=" + std::to_string(options.timeout.count()), "--"};
  command.insert(command.begin(), launcher.begin(), launcher.end());
  ProcessOptions longer = options;
  longer.timeout += kGrace;  // so that the launcher says which ranks hang
  return RunProcess(command, longer);
}

std::string ThisProgram() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

std::string PythonWithTorch() {
  const char* path = std::getenv("COMPOSABLE_PYTHON");
  if (path == nullptr || *path == '\0') {
    throw std::runtime_error(
        "COMPOSABLE_PYTHON is not set: run tools/bootstrap, which sets a "
        "Python with PyTorch up and names it in user.bazelrc");
  }
  return path;
}

TemporaryFolder::TemporaryFolder() {
  const char* parent = std::getenv("TEST_TMPDIR");
  path_ = (parent != nullptr ? std::string(parent) : "/tmp") + "/test-XXXXXX";
  Check(mkdtemp(path_.data()) != nullptr ? 0 : errno, "mkdtemp " + path_);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string operator/(const TemporaryFolder& folder, const std::string& name) {
  return folder.path() + "/" + name;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("can't read " + path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes << std::flush;
  if (!out) throw std::runtime_error("can't write " + path);
}

}  // namespace composable
