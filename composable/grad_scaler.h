// Loss scaling for gradients of low precision, over ranks: torch.amp.GradScaler
// for shards.
//
//   composable::GradScaler scaler;
//   for (auto& batch : *loader) {
//     scaler.scale(model->loss(batch)).backward();
//     scaler.unscale_(optimizer);   // only to clip
//     composable::clip_grad_norm_(model->parameters(), 1.0);
//     scaler.step(optimizer);       // skips it if a gradient is inf or NaN
//     scaler.update();
//     optimizer.zero_grad();
//   }
//
// Whether a gradient is inf or NaN is decided over all ranks of the meshes of the
// optimizer's shards, replicas included, so all of them skip a step and change their scale alike, also where only one rank's rows are
// not finite, or a rank has no gradients. Every rank must make the same calls,
// with optimizers of the same parameters. An optimizer that holds no shard decides
// on each rank alone.
//
// Thread-compatible.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <optional>

namespace torch::optim {
class Optimizer;
}

namespace composable {

struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536;
  TORCH_ARG(double, growth_factor) = 2;     // above 1
  TORCH_ARG(double, backoff_factor) = 0.5;  // in (0, 1)
  // Steps without inf or NaN after which the scale grows.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  // false: all calls do nothing but step(), which steps.
  TORCH_ARG(bool, enabled) = true;
};

// What a checkpoint keeps.
struct GradScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  int64_t growth_interval = 0;
  int64_t growth_tracker = 0;  // steps since the scale last changed
};

class GradScaler {
 public:
  // Throws c10::ValueError for factors out of range.
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  // loss * get_scale().
  at::Tensor scale(const at::Tensor& loss) const;

  // (collective) Divides the gradients of the optimizer's parameters by the
  // scale. At most once between two update() calls; step() does it if nobody
  // has. Throws c10::ValueError for a second time, and for gradients in half
  // precision, which can't hold what is left.
  void unscale_(torch::optim::Optimizer& optimizer);

  // (collective if it unscales) Steps, unless a gradient on any rank is inf or
  // NaN. Returns whether it stepped. At most once between two update() calls.
  bool step(torch::optim::Optimizer& optimizer);

  // Ends an iteration: with inf or NaN, in any optimizer, the scale backs off;
  // else it grows after every growth_interval of them. Or sets it to
  // `new_scale`. Throws c10::ValueError if nothing was unscaled.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const;  // 1 if it is not enabled
  bool is_enabled() const { return enabled_; }
  double get_growth_factor() const { return state_.growth_factor; }
  void set_growth_factor(double factor);
  double get_backoff_factor() const { return state_.backoff_factor; }
  void set_backoff_factor(double factor);
  int64_t get_growth_interval() const { return state_.growth_interval; }
  void set_growth_interval(int64_t interval);

  // Between update() and the next unscale_().
  GradScalerState state_dict() const { return state_; }
  void load_state_dict(const GradScalerState& state);

 private:
  struct PerOptimizer {
    bool unscaled = false;
    bool stepped = false;
    bool found_inf = false;
  };

  bool enabled_;
  GradScalerState state_;
  std::map<const torch::optim::Optimizer*, PerOptimizer> optimizers_;
};

}  // namespace composable
