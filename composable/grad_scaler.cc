#include "composable/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/communicator.h"
#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

// The ranks that share `parameter`: null if it is plain.
std::shared_ptr<FSDPState> SharedBy(const at::Tensor& parameter) {
  GuardedStorage found;
  if (!FindGuardedStorage(parameter, &found) || !found.is_shard) return nullptr;
  return found.state.lock();
}

// Divides the gradients; whether one of them, on this rank, is not finite.
bool Unscale(const std::vector<at::Tensor>& gradients, double scale) {
  at::Tensor found = at::zeros({1}, c10::kFloat);
  const at::Tensor inverse =
      at::full({}, 1 / scale, at::TensorOptions(c10::kFloat));
  std::vector<at::Tensor> same;  // of one dtype
  for (size_t begin = 0; begin < gradients.size();) {
    const auto dtype = gradients[begin].scalar_type();
    const auto end = std::find_if(
        gradients.begin() + static_cast<int64_t>(begin), gradients.end(),
        [&](const at::Tensor& g) { return g.scalar_type() != dtype; });
    same.assign(gradients.begin() + static_cast<int64_t>(begin), end);
    at::_amp_foreach_non_finite_check_and_unscale_(same, found, inverse);
    begin = end - gradients.begin();
  }
  return found.item<float>() != 0;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : enabled_(options.enabled()) {
  TORCH_CHECK_VALUE(options.init_scale() > 0,
                    "GradScaler: expected an init_scale above 0, got ",
                    options.init_scale(), ".");
  state_.scale = options.init_scale();
  set_growth_factor(options.growth_factor());
  set_backoff_factor(options.backoff_factor());
  set_growth_interval(options.growth_interval());
}

void GradScaler::set_growth_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 1,
                    "GradScaler: expected a growth_factor above 1, got ",
                    factor, ".");
  state_.growth_factor = factor;
}

void GradScaler::set_backoff_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0 && factor < 1,
                    "GradScaler: expected a backoff_factor between 0 and 1, "
                    "got ",
                    factor, ".");
  state_.backoff_factor = factor;
}

void GradScaler::set_growth_interval(int64_t interval) {
  TORCH_CHECK_VALUE(interval >= 1,
                    "GradScaler: expected a growth_interval of at least 1, "
                    "got ",
                    interval, ".");
  state_.growth_interval = interval;
}

void GradScaler::load_state_dict(const GradScalerState& state) {
  TORCH_CHECK_VALUE(optimizers_.empty(),
                    "GradScaler: load_state_dict was called between unscale_ "
                    "and update. Call update() first.");
  TORCH_CHECK_VALUE(state.scale > 0 && state.growth_tracker >= 0,
                    "GradScaler: expected a state with a scale above 0 and a "
                    "growth_tracker of at least 0, got ",
                    state.scale, " and ", state.growth_tracker, ".");
  const GradScalerState before = state_;
  try {
    set_growth_factor(state.growth_factor);
    set_backoff_factor(state.backoff_factor);
    set_growth_interval(state.growth_interval);
  } catch (...) {
    state_ = before;
    throw;
  }
  state_ = state;
}

double GradScaler::get_scale() const { return enabled_ ? state_.scale : 1; }

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return enabled_ ? loss * state_.scale : loss;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!enabled_) return;
  PerOptimizer& mine = optimizers_[&optimizer];
  TORCH_CHECK_VALUE(!mine.stepped,
                    "GradScaler: unscale_ was called after step() of the same "
                    "optimizer. Call update() in between.");
  TORCH_CHECK_VALUE(!mine.unscaled,
                    "GradScaler: unscale_ was called twice for one optimizer. "
                    "Call update() in between.");
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard unguarded(internal::kGuardKey);
  std::vector<at::Tensor> gradients;
  std::vector<std::shared_ptr<FSDPState>> owners;  // of `communicators`
  std::vector<Communicator*> communicators;        // one per mesh dimension
  const auto add = [&](Communicator* communicator) {
    const bool is_new = communicator != nullptr &&
                        std::none_of(communicators.begin(), communicators.end(),
                                     [&](const Communicator* other) {
                                       return *other == *communicator;
                                     });
    if (is_new) communicators.push_back(communicator);
    return is_new;
  };
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (auto state = SharedBy(parameter)) {
        const bool shards = add(&state->group()->communicator());
        const bool replicas = add(state->group()->replicate_communicator());
        if (shards || replicas) owners.push_back(std::move(state));
      }
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || gradient.numel() == 0) continue;
      TORCH_CHECK_VALUE(gradient.scalar_type() != c10::kHalf,
                        "GradScaler: expected gradients of float, got Half, "
                        "which can't hold small ones after unscaling. Keep the "
                        "parameters in float.");
      gradients.push_back(gradient);
    }
  }
  bool found_inf = Unscale(gradients, state_.scale);
  for (Communicator* communicator : communicators) {
    const at::Tensor found =
        at::full({1}, found_inf ? 1.0F : 0.0F, at::TensorOptions(c10::kFloat));
    communicator->AllReduce(found, Communicator::Reduction::kMax,
                            MakeCollectiveLabel("GradScaler::unscale_"));
    found_inf = found.item<float>() != 0;
  }
  mine.unscaled = true;
  mine.found_inf = found_inf;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return true;
  }
  PerOptimizer& mine = optimizers_[&optimizer];
  TORCH_CHECK_VALUE(!mine.stepped,
                    "GradScaler: step was called twice for one optimizer. Call "
                    "update() in between.");
  if (!mine.unscaled) unscale_(optimizer);
  if (!mine.found_inf) optimizer.step();
  mine.stepped = true;
  return !mine.found_inf;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!enabled_) return;
  bool found_inf = false;
  bool any = false;
  for (const auto& [optimizer, mine] : optimizers_) {
    any |= mine.unscaled;
    found_inf |= mine.found_inf;
  }
  if (new_scale) {
    TORCH_CHECK_VALUE(*new_scale > 0,
                      "GradScaler: expected a new scale above 0, got ",
                      *new_scale, ".");
    state_.scale = *new_scale;
  } else {
    TORCH_CHECK_VALUE(any,
                      "GradScaler: update was called, but no gradients were "
                      "looked at since the last one. Call step() or unscale_() "
                      "first.");
    if (found_inf) {
      state_.scale *= state_.backoff_factor;
      state_.growth_tracker = 0;
    } else if (++state_.growth_tracker == state_.growth_interval) {
      // As LibTorch's: a scale that would be inf stays.
      const auto grown =
          static_cast<float>(state_.scale * state_.growth_factor);
      if (std::isfinite(grown)) state_.scale *= state_.growth_factor;
      state_.growth_tracker = 0;
    }
  }
  optimizers_.clear();
}

}  // namespace composable
