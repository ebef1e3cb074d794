// LibTorch's calls on tensors that are no operators, handed on unchanged: a base
// to override some of them.
//
//   class Mine final : public composable::internal::ForwardingVariableHooks {
//     using ForwardingVariableHooks::ForwardingVariableHooks;
//     void retain_grad(const at::TensorBase& self) const override {
//       std::cout << "retain_grad\n";
//       ForwardingVariableHooks::retain_grad(self);
//     }
//   };
//   at::impl::SetVariableHooks(new Mine(at::impl::GetVariableHooks()));
#pragma once

#include <ATen/core/VariableHooksInterface.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "state/compatibility.h"

namespace composable::internal {

class ForwardingVariableHooks : public at::impl::VariableHooksInterface {
 public:
  explicit ForwardingVariableHooks(at::impl::VariableHooksInterface* next)
      : next_(next) {}

  at::TensorBase tensor_data(const at::TensorBase& self) const override {
    return next_->tensor_data(self);
  }
  at::TensorBase variable_data(const at::TensorBase& self) const override {
    return next_->variable_data(self);
  }
  const NodePtr& grad_fn(const at::TensorBase& self) const override {
    return next_->grad_fn(self);
  }
  unsigned _register_hook(const at::TensorBase& self,
                          std::function<at::TensorBase(const at::TensorBase&)>
                              hook) const override {
    return next_->_register_hook(self, std::move(hook));
  }
  void remove_hook(const at::TensorBase& self, unsigned pos) const override {
    next_->remove_hook(self, pos);
  }
  bool is_view(const at::TensorBase& self) const override {
    return next_->is_view(self);
  }
  const at::TensorBase& base(const at::TensorBase& self) const override {
    return next_->base(self);
  }
  const std::string& name(const at::TensorBase& self) const override {
    return next_->name(self);
  }
  bool is_leaf(const at::TensorBase& self) const override {
    return next_->is_leaf(self);
  }
  int64_t output_nr(const at::TensorBase& self) const override {
    return next_->output_nr(self);
  }
  void set_data(const at::TensorBase& self,
                const at::TensorBase& data) const override {
    next_->set_data(self, data);
  }
  at::TensorBase data(const at::TensorBase& self) const override {
    return next_->data(self);
  }
  int64_t _version(const at::TensorBase& self) const override {
    return next_->_version(self);
  }
  void retain_grad(const at::TensorBase& self) const override {
    next_->retain_grad(self);
  }
  bool retains_grad(const at::TensorBase& self) const override {
    return next_->retains_grad(self);
  }
  void _backward(const at::Tensor& self, at::TensorList inputs,
                 const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph,
                 bool create_graph) const override {
    next_->_backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& self, bool on) const override {
    next_->requires_grad_(self, on);
  }
  void basic_autograd_not_implemented_fallback(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys,
      torch::jit::Stack* stack) const override {
    next_->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(
      const at::TensorBase& self) const override {
    return next_->grad_dtype(self);
  }
  void set_grad_dtype(
      const at::TensorBase& self,
      const std::optional<c10::ScalarType>& dtype) const override {
    next_->set_grad_dtype(self, dtype);
  }

 private:
  at::impl::VariableHooksInterface* next_;
};

}  // namespace composable::internal
