#include "state/gradient_divide.h"

#include <cmath>

namespace composable {
namespace {

// A power of two near the square root.
double BeforeOf(double factor) {
  double before = 1;
  while (std::fmod(factor, before) == 0 && factor / before > before) {
    before *= 2;
  }
  return before;
}

}  // namespace

GradientDivide GradientDivide::For(c10::ScalarType dtype, int64_t ranks,
                                   std::optional<double> factor,
                                   bool force_sum) {
  const double by = factor.value_or(static_cast<double>(ranks));
  if (dtype == c10::kFloat || dtype == c10::kBFloat16) {
    if (force_sum) return {.after = by};
    return {.reduction = by};
  }
  const double before = BeforeOf(by);
  return {.before = before, .after = by / before};
}

}  // namespace composable
