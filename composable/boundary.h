// Module boundaries: exact points before and after a module's forward.
//
//   struct BlockImpl : torch::nn::Module {
//     at::Tensor forward(const at::Tensor& x) { return fc(x).relu(); }
//     at::Tensor extra_method(const at::Tensor& x) { return fc(x); }
//     torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
//   };
//   COMPOSABLE_MODULE(Block);   // in place of TORCH_MODULE(Block)
//
//   Block block;
//   composable::fully_shard(block);
//   y = block(x);                        // through the boundary
//   y = composable::call(block, x);      // the same, for any module
//   composable::ForwardScope scope(block);
//   y = block->extra_method(x);          // and for any method
//
// Note [Module boundary]
// Sharded modules need no boundary: operators gather what they read. One adds:
//  * A module's group is gathered as its forward begins, and left (its memory
//    is the first to be reused) as it ends, whatever operators run.
//  * Once the root of a tree was called through a boundary, an operator that
//    reads a sharded parameter outside any forward or backward, such as a print
//    on one rank, throws c10::ValueError at once on that rank, instead of
//    waiting for the other ranks. What unshard() of a handle has gathered may be
//    read; full_state_dict, clip_grad_norm_, optimizers and handles work as
//    before. The root is the topmost module that was sharded.
//  * After an exception that leaves the root's forward the tree is sharded, and
//    ready for the next one.
//  * Where the module's own fully_shard had a MixedPrecisionPolicy, floating
//    inputs and outputs are cast; see Note [Arguments that are cast]. A
//    ForwardScope casts nothing.
// See Note [Forward scopes] in hooks/forward_scope.h for the details.
//
// Only calls through the holder or composable::call pass a boundary:
// block->forward(x), Sequential and AnyModule run the module without one.
// A boundary of a module that is not sharded costs one look-up.
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "composable/cast_tensors.h"
#include "hooks/forward_scope.h"

namespace composable {

namespace internal {

template <typename T>
inline constexpr bool kIsModule =
    std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<T>>;

// The module itself. Throws c10::ValueError if `block` is empty.
template <typename Impl>
requires kIsModule<Impl> Impl& ModuleOf(Impl& block) { return block; }

template <typename Impl>
requires kIsModule<Impl> Impl& ModuleOf(const std::shared_ptr<Impl>& block) {
  TORCH_CHECK_VALUE(block != nullptr,
                    "expected a module, got an empty pointer. Construct the "
                    "module first.");
  return *block;
}

template <typename Impl>
Impl& ModuleOf(const torch::nn::ModuleHolder<Impl>& block) {
  TORCH_CHECK_VALUE(!block.is_empty(),
                    "expected a module, got an empty holder. Construct the "
                    "module first.");
  return *block.ptr();
}

// The forward of `module`, with floating inputs cast to `dtype`.
template <typename Result, typename Module, typename... Args>
Result ForwardOfCast(Module& module, [[maybe_unused]] c10::ScalarType dtype,
                     Args&&... args) {
  std::tuple<CastArgument<Args>...> inputs{CastArgument<Args>(args, dtype)...};
  const auto forward = [&]() -> Result {
    return std::apply(
        [&](auto&... input) -> Result {
          return module.forward(input.get()...);
        },
        inputs);
  };
  const auto give_back = [&] {
    std::apply([](auto&... input) { (input.Return(), ...); }, inputs);
  };
  if constexpr (std::is_void_v<Result>) {
    forward();
    give_back();
  } else if constexpr (std::is_reference_v<Result>) {
    const bool is_copied = std::apply(
        [](auto&... input) { return (input.is_copied() || ...); }, inputs);
    if (is_copied) {
      ThrowCannotCast<std::remove_cvref_t<Result>>(
          "forward returns a reference");
    }
    return forward();
  } else if constexpr (std::is_move_constructible_v<Result>) {
    Result result = forward();
    give_back();
    return result;
  } else {
    return forward();
  }
}

}  // namespace internal

// Runs forward of `block`, a holder, a shared_ptr or a module, through its
// boundary. Arguments, result and exceptions are those of forward.
template <typename Block, typename... Args>
auto call(Block&& block, Args&&... args)
    -> decltype(internal::ModuleOf(block).forward(
        std::forward<Args>(args)...)) {
  auto& module = internal::ModuleOf(block);
  const internal::ForwardScope scope(module);
  if (!scope.input_dtype() && !scope.output_dtype()) {
    return module.forward(std::forward<Args>(args)...);
  }
  using Result = decltype(module.forward(std::forward<Args>(args)...));
  const auto forward = [&]() -> Result {
    if (!scope.input_dtype()) {
      return module.forward(std::forward<Args>(args)...);
    }
    return internal::ForwardOfCast<Result>(module, *scope.input_dtype(),
                                           std::forward<Args>(args)...);
  };
  if (!scope.output_dtype()) return forward();
  return internal::CastResult<Result>(forward, *scope.output_dtype());
}

// While it lives, the calling thread is in a forward of `block`: for methods
// other than forward. Every rank must open it.
class ForwardScope {
 public:
  template <typename Block>
  requires requires(Block& block) { internal::ModuleOf(block); }
  explicit ForwardScope(Block&& block) : scope_(internal::ModuleOf(block)) {}

 private:
  internal::ForwardScope scope_;
};

// LibTorch's holder, except that calling it passes the boundary, and that
// calling an empty one throws c10::ValueError.
template <typename Contained>
class ModuleHolder : public torch::nn::ModuleHolder<Contained> {
 public:
  using torch::nn::ModuleHolder<Contained>::ModuleHolder;

  template <typename... Args>
  auto operator()(Args&&... args)
      -> decltype(std::declval<Contained&>().forward(
          std::forward<Args>(args)...)) {
    return composable::call(*this, std::forward<Args>(args)...);
  }
};

}  // namespace composable

// As TORCH_MODULE_IMPL and TORCH_MODULE.
#define COMPOSABLE_MODULE_IMPL(Name, ImplType)                          \
  class Name : public composable::ModuleHolder<ImplType> { /* NOLINT */ \
   public:                                                              \
    using composable::ModuleHolder<ImplType>::ModuleHolder;             \
    using Impl [[maybe_unused]] = ImplType;                             \
  }
#define COMPOSABLE_MODULE(Name) COMPOSABLE_MODULE_IMPL(Name, Name##Impl)
