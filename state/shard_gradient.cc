#include "state/shard_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "state/tensor_access.h"

namespace composable {
namespace {

class ShardAccumulator final : public torch::autograd::AccumulateGrad {
 public:
  explicit ShardAccumulator(const at::Tensor& shard) : AccumulateGrad(shard) {}

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    // Defined where an operator was applied to the shard itself.
    if (gradients[0].defined() && variable.requires_grad()) {
      const at::NoGradGuard no_grad;
      AccumulateShardGradient(variable, gradients[0].clone());
    }
    return {};
  }
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>&
  tensor_pre_hooks() noexcept override {
    return no_hooks_;
  }
  std::unique_ptr<torch::autograd::PostAccumulateGradHook>&
  tensor_post_acc_grad_hooks() const noexcept override {
    return no_hook_;
  }
  std::string name() const override { return "composable::ShardAccumulator"; }

 private:
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> no_hooks_;
  mutable std::unique_ptr<torch::autograd::PostAccumulateGradHook> no_hook_;
};

}  // namespace

NodePtr MakeShardAccumulator(const at::Tensor& shard) {
  NodePtr node = MakeNode<ShardAccumulator>(shard);
  internal::SetAccumulator(shard, node);
  return node;
}

at::Tensor RunShardHooks(const at::Tensor& shard, at::Tensor rows) {
  for (const auto& hook : torch::autograd::impl::hooks(shard)) {
    rows = std::move((*hook)({std::move(rows)})[0]);
  }
  if (!rows.defined()) return rows;
  // A hook may have kept what it got, or given something of its own.
  const bool ours = rows.use_count() == 1 &&
                    rows.strides() == shard.strides() &&
                    rows.is_non_overlapping_and_dense();
  return ours ? rows
              : at::empty_like(shard, shard.options().dtype(rows.dtype()))
                    .copy_(rows);
}

void AccumulateShardGradient(const at::Tensor& shard, at::Tensor rows) {
  rows = RunShardHooks(shard, std::move(rows));
  if (!rows.defined()) return;  // a hook took it
  at::Tensor& gradient = internal::GradientOf(shard);
  if (gradient.defined()) {
    gradient.add_(rows);
  } else {
    internal::AddGuard(rows);
    gradient = std::move(rows);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(shard)) {
    (*hook)(shard);
  }
}

}  // namespace composable
