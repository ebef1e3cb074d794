#include "examples/support/plot_axis.h"

#include <absl/strings/str_format.h>

#include <algorithm>
#include <cmath>

namespace examples {
namespace {

constexpr double kMostIntervals = 6;  // between the ticks of a linear axis
constexpr double kLargest = 1e300;    // so that no difference overflows
constexpr double kMargin = 1.05;      // beside a single value
constexpr double kSmallest = 1e-300;  // so that no step underflows

// The least of 1, 2, 5 times a power of ten that is no less than `step`.
double NiceStep(double step) {
  const double power = std::pow(10, std::floor(std::log10(step)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= step) return factor * power;
  }
  return 10 * power;
}

}  // namespace

bool PlotAxis::CanShow(double value, Scale scale) {
  if (!std::isfinite(value) || std::abs(value) > kLargest) return false;
  return scale == Scale::kLinear || value >= kSmallest;
}

PlotAxis::PlotAxis(const std::vector<double>& values, Scale scale, bool whole)
    : scale_(scale), low_(scale == Scale::kLog ? 0.1 : 0) {
  if (!values.empty()) {
    const auto [least, most] =
        std::minmax_element(values.begin(), values.end());
    low_ = *least;
    high_ = *most;
  }
  // Narrower ranges leave no digits for labels that differ.
  const double size = std::max(std::abs(low_), std::abs(high_));
  if (high_ - low_ < std::max(1e-9 * size, kSmallest)) {
    if (scale == Scale::kLog) {
      low_ /= kMargin;
      high_ *= kMargin;
    } else {
      const double margin = size > kSmallest ? (kMargin - 1) * size : 0.5;
      low_ -= margin;
      high_ += margin;
    }
  }
  if (scale == Scale::kLog) AddLogTicks();
  if (ticks_.size() < 2) {
    ticks_.clear();
    AddLinearTicks(whole ? 1 : 0);
  }
}

double PlotAxis::Position(double value) const {
  if (scale_ == Scale::kLinear) return (value - low_) / (high_ - low_);
  // No ratio, which may overflow.
  return (std::log(value) - std::log(low_)) /
         (std::log(high_) - std::log(low_));
}

void PlotAxis::AddLinearTicks(double least_step) {
  const double step =
      std::max(least_step, NiceStep((high_ - low_) / kMostIntervals));
  const double size = std::max(std::abs(low_), std::abs(high_));
  const int digits = static_cast<int>(std::floor(std::log10(size)) -
                                      std::floor(std::log10(step))) +
                     1;
  constexpr double kRounding = 1e-6;  // of a step
  const double last = std::floor(high_ / step + kRounding);
  for (double i = std::ceil(low_ / step - kRounding); i <= last; ++i) {
    const double value = i == 0 ? 0 : i * step;  // not -0
    ticks_.push_back(
        {value, absl::StrFormat("%.*g", std::max(digits, 6), value)});
  }
}

// Powers of ten, or, within two of them, also 2 and 5 times one.
void PlotAxis::AddLogTicks() {
  const int first = static_cast<int>(std::floor(std::log10(low_)));
  const int last = static_cast<int>(std::ceil(std::log10(high_)));
  const int stride = (last - first) / 8 + 1;
  const bool fine = std::log10(high_) - std::log10(low_) < 2;
  for (int power = first; power <= last; power += stride) {
    for (const int factor : {1, 2, 5}) {
      if (factor > 1 && !fine) break;
      const double value = factor * std::pow(10, power);
      if (value < low_ || value > high_) continue;
      ticks_.push_back({value, absl::StrFormat("%.3g", value)});
    }
  }
}

}  // namespace examples
