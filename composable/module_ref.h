// Anything that a LibTorch user calls a module, as one parameter type.
//
//   void f(const composable::ModuleRef& module);
//   f(linear);                 // a holder made by TORCH_MODULE
//   f(linear.ptr());           // a shared_ptr
//   f(*linear);                // a reference to a module that a holder owns
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <vector>

namespace torch::nn {
class Module;
}

namespace composable {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

class ModuleRef {
 public:
  // Throws c10::ValueError if the holder or pointer is empty.
  template <typename T>
  requires std::convertible_to<std::shared_ptr<T>,
                               std::shared_ptr<torch::nn::Module>>
  ModuleRef(const std::shared_ptr<T>& module)  // NOLINT: implicit
      : ModuleRef(FromShared(module)) {}

  template <typename Holder>
  requires requires(const Holder& holder) {
    { holder.is_empty() } -> std::convertible_to<bool>;
    { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
  }
  ModuleRef(const Holder& holder)  // NOLINT: implicit
      : ModuleRef(FromShared(holder.is_empty() ? nullptr : holder.ptr())) {}

  // Throws c10::ValueError if no shared_ptr owns the module: its state must be
  // able to tell when it is gone.
  ModuleRef(torch::nn::Module& module);  // NOLINT: implicit

  torch::nn::Module& operator*() const { return *module_; }
  torch::nn::Module* operator->() const { return module_.get(); }
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }

 private:
  struct Checked {
    std::shared_ptr<torch::nn::Module> module;
  };
  static Checked FromShared(std::shared_ptr<torch::nn::Module> module);
  explicit ModuleRef(Checked checked) : module_(std::move(checked.module)) {}

  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace composable
