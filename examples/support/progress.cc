#include "examples/support/progress.h"

#include <absl/strings/str_format.h>

#include <algorithm>
#include <cmath>
#include <ostream>

namespace examples {
namespace {

constexpr int kBarWidth = 24;  // columns; the whole line then fits into 80

std::string Duration(double seconds) {
  const int64_t s = std::llround(seconds);
  if (s < 3600) return absl::StrFormat("%d:%02d", s / 60, s % 60);
  return absl::StrFormat("%d:%02d:%02d", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

std::string ProgressLine(const ProgressOptions& options, int64_t step,
                         double loss, double seconds) {
  const double done = static_cast<double>(step);
  const double steps_left = static_cast<double>(options.steps - step);
  const double tokens = done * static_cast<double>(options.tokens_per_step);
  const double rate = seconds > 0 ? tokens / seconds : 0;
  const double left = step > 0 ? seconds / done * steps_left : 0;
  const int digits = static_cast<int>(std::to_string(options.steps).size());
  return absl::StrFormat("step %*d/%d  loss %.4f  %.0f tokens/s  %s left",
                         digits, step, options.steps, loss, rate,
                         Duration(left));
}

std::string ProgressBar(int64_t step, int64_t steps, int width) {
  const auto filled = static_cast<size_t>(
      steps > 0 ? width * std::min(step, steps) / steps : 0);
  std::string bar(filled, '=');
  if (filled < static_cast<size_t>(width)) bar += '>';
  bar.resize(static_cast<size_t>(width), ' ');
  return "[" + bar + "]";
}

Progress::Progress(std::ostream& out, const ProgressOptions& options)
    : out_(out), options_(options), start_(std::chrono::steady_clock::now()) {}

void Progress::Step(double loss) {
  ++step_;
  if (options_.quiet) return;
  const bool last = step_ == options_.steps;
  const std::chrono::duration<double> passed =
      std::chrono::steady_clock::now() - start_;
  const std::string line = ProgressLine(options_, step_, loss, passed.count());
  if (options_.terminal) {
    constexpr const char* kClearLine = "\r\x1b[K";
    out_ << kClearLine << ProgressBar(step_, options_.steps, kBarWidth) << ' '
         << line << (last ? "\n" : "") << std::flush;
  } else if (step_ == 1 || last ||
             step_ % std::max<int64_t>(options_.log_every, 1) == 0) {
    out_ << line << std::endl;
  }
}

}  // namespace examples
