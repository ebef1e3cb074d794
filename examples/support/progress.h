// Says how a training run is getting on.
//
// On a terminal: one line, redrawn in place, with a bar, the loss, tokens per
// second and the time left. Elsewhere (a log file, a pipe): one plain line
// every `log_every` steps, and for the first and the last step.
//
//   Progress progress(std::cerr, {.steps = 20, .tokens_per_step = 1024,
//                                 .terminal = isatty(STDERR_FILENO) == 1});
//   for (const double loss : losses) progress.Step(loss);
#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

namespace examples {

struct ProgressOptions {
  int64_t steps = 0;            // of the whole run
  int64_t tokens_per_step = 0;  // of all ranks together
  int64_t log_every = 1;        // steps between two lines of a log
  bool terminal = false;        // draw a bar instead of lines
  bool quiet = false;           // write nothing: for all ranks but one
};

// The figures of a line, without the bar:
// `step  5/20  loss 3.2145  1234 tokens/s  1:07 left`.
std::string ProgressLine(const ProgressOptions& options, int64_t step,
                         double loss, double seconds);

// `[=====>              ]`, `width` columns wide between the brackets.
std::string ProgressBar(int64_t step, int64_t steps, int width);

// Thread-compatible. `out` must outlive it.
class Progress {
 public:
  Progress(std::ostream& out, const ProgressOptions& options);

  // Call once after every step, with its loss.
  void Step(double loss);

 private:
  std::ostream& out_;
  const ProgressOptions options_;
  const std::chrono::steady_clock::time_point start_;
  int64_t step_ = 0;  // steps done
};

}  // namespace examples
