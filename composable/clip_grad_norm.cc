#include "composable/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

// The part of the norm that the shards over one process group hold.
struct Part {
  Communicator* communicator;  // null: plain parameters
  double value = 0;
  std::shared_ptr<FSDPState> keep_alive;
};

class Norm {
 public:
  explicit Norm(double order) : order_(order) {}

  double OfGradient(const at::Tensor& gradient) const {
    if (!gradient.defined() || gradient.numel() == 0) return 0;
    const auto norm =
        at::linalg_vector_norm(gradient, order_, /*dim=*/std::nullopt,
                               /*keepdim=*/false, at::kDouble)
            .item<double>();
    return IsMax() ? norm : std::pow(norm, order_);
  }
  double Combine(double a, double b) const {
    // Not std::max, which loses a NaN.
    return IsMax() ? (a > b || std::isnan(a) ? a : b) : a + b;
  }
  double OverRanks(const Part& part) const {
    if (part.communicator == nullptr) return part.value;
    // A maximum over ranks may drop a NaN, so it travels as a flag.
    const at::Tensor sent = at::zeros({2}, at::kDouble);
    auto* values = sent.mutable_data_ptr<double>();
    values[0] = part.value;
    values[1] = std::isnan(part.value) ? 1 : 0;
    part.communicator->AllReduce(
        sent,
        IsMax() ? Communicator::Reduction::kMax : Communicator::Reduction::kSum,
        MakeCollectiveLabel("clip_grad_norm_"));
    return values[1] != 0 ? std::numeric_limits<double>::quiet_NaN()
                          : values[0];
  }
  double Finish(double value) const {
    return IsMax() ? value : std::pow(value, 1 / order_);
  }

 private:
  bool IsMax() const {
    return order_ == std::numeric_limits<double>::infinity();
  }
  double order_;
};

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters,
                       double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(norm_type > 0,
                    "clip_grad_norm_: expected a norm_type above 0, got ",
                    norm_type, ".");
  const at::NoGradGuard no_grad;
  // Gradients of shards refuse a norm otherwise.
  const c10::impl::ExcludeDispatchKeyGuard unguarded(internal::kGuardKey);
  const Norm norm(norm_type);
  std::vector<Part> parts;
  std::vector<at::Tensor> gradients;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined() ||
        !seen.insert(parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    GuardedStorage found;
    const bool sharded =
        FindGuardedStorage(parameter, &found) && found.is_shard;
    const auto state = sharded ? found.state.lock() : nullptr;
    Communicator* communicator =
        state == nullptr ? nullptr : &state->group()->communicator();
    auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& p) {
      return p.communicator == nullptr || communicator == nullptr
                 ? p.communicator == communicator
                 : *p.communicator == *communicator;
    });
    if (part == parts.end()) {
      part = parts.insert(part, {communicator, 0, state});
    }
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    gradients.push_back(gradient);
    // What every rank holds counts on one.
    const FSDPParam* param = FindShardedEntry(parameter).param;
    if (param != nullptr &&
        param->placement.kind == Placement::Kind::kReplicate &&
        communicator->rank() != 0) {
      continue;
    }
    part->value = norm.Combine(part->value, norm.OfGradient(gradient));
  }
  double total = 0;
  for (const Part& part : parts) {
    total = norm.Combine(total, norm.OverRanks(part));
  }
  total = norm.Finish(total);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total),
              "clip_grad_norm_: the norm of order ", norm_type,
              " of the gradients is ", total,
              ". Look for the step that made it so, or scale anyway with "
              "error_if_nonfinite=false.");
  const double scale = max_norm / (total + 1e-6);
  if (!(scale >= 1)) {
    for (at::Tensor& gradient : gradients) gradient.mul_(scale);
  }
  return total;
}

}  // namespace composable
