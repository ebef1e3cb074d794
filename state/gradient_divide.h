// By what a sum of gradients over ranks is divided, and when.
//
//   const auto divide = composable::GradientDivide::For(
//       at::kFloat, /*ranks=*/4, /*factor=*/std::nullopt, /*force_sum=*/false);
//   std::cout << divide.reduction << "\n";   // 4: a mean
//
// Note [Gradient division]
// Collectives are sums on every backend, and the division is ours. The factor is
// the number of ranks that are added up, replicas included, or what the user has
// set. float and bfloat16 have the range for the sum, which is divided once, at
// the end. Sums of other types may overflow (half) or come by way of upstream's
// rule for half (double), so they are divided by a power of two before, and by
// the rest after. A division by 1 is left out.
//
// Where upstream's reduction op itself divides (AVG, PREMUL_SUM), ours divides
// before the all-reduce hook runs, so that a hook sees what it sees there; with
// a forced sum, after it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace composable {

struct GradientDivide {
  double before = 1;     // of this rank's part, before it is sent
  double reduction = 1;  // of the sum, before the all-reduce hook
  double after = 1;      // of the sum, after that

  static GradientDivide For(c10::ScalarType dtype, int64_t ranks,
                            std::optional<double> factor, bool force_sum);
};

}  // namespace composable
