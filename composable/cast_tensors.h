// Casts the floating tensors in the arguments and results of a forward.
//
//   const std::vector<at::Tensor> args = {torch::ones({2}), torch::arange(2)};
//   if (composable::internal::NeedsCast(args, torch::kBFloat16)) {
//     auto copy = args;
//     composable::internal::CastTensors(copy, torch::kBFloat16);
//   }
//
// Integers, and tensors that are of the dtype already, stay what they are. The
// casts are differentiable. What can be in an argument: see
// Note [Types that hold tensors].
//
// Note [Arguments that are cast]
// What the caller keeps is not changed: an lvalue is copied, containers and
// all, but only if something in it needs a cast. forward gets the copy in the
// place of the argument, as an lvalue or rvalue, const or not, as the argument
// is. Where it is not const, what forward did to the copy (other than to the
// memory of tensors that were cast) is done to the argument afterwards, so that
// a reference through which forward returns something keeps its meaning. An
// argument that needs a cast but can't be copied, or that holds the tensor
// behind a pointer, throws c10::TypeError; and so does a forward that returns a
// reference, which may be to the copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <optional>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "composable/tensor_members.h"

namespace composable::internal {

inline bool NeedsCast(const at::Tensor& tensor, c10::ScalarType dtype) {
  return tensor.defined() && c10::isFloatingType(tensor.scalar_type()) &&
         tensor.scalar_type() != dtype;
}

// Throws c10::TypeError for a class that is not known.
template <typename T>
bool NeedsCast(const T& value, c10::ScalarType dtype) {
  bool found = false;
  VisitTensors(value, [&](const at::Tensor& tensor) {
    found = found || NeedsCast(tensor, dtype);
  });
  return found;
}

template <typename T>
[[noreturn]] void ThrowCannotCast(const char* why) {
  TORCH_CHECK_TYPE(false, "A floating tensor in a ",
                   c10::demangle(typeid(T).name()), " is to be cast, but ", why,
                   ". Cast it before the call, or pass it and return it by "
                   "value.");
}

struct CastTensor {
  at::Tensor original;
  at::Tensor cast;
};
using CastLog = std::vector<CastTensor>;

// Replaces the tensors in `value`. Appends to `log`, if there is one.
template <typename T>
void CastTensors(T& value, c10::ScalarType dtype, CastLog* log = nullptr) {
  VisitTensors(value, [&](auto& tensor) {
    if (!NeedsCast(static_cast<const at::Tensor&>(tensor), dtype)) return;
    if constexpr (std::is_const_v<std::remove_reference_t<decltype(tensor)>>) {
      ThrowCannotCast<T>(
          "it can't be replaced there: that is const, or refers "
          "to it");
    } else {
      at::Tensor cast = tensor.to(dtype);
      if (log != nullptr) log->push_back({tensor, cast});
      tensor = std::move(cast);
    }
  });
}

// Puts the tensors that were replaced back where they still are.
template <typename T>
void UndoCasts(T& value, const CastLog& log) {
  VisitTensors(value, [&](auto& tensor) {
    if constexpr (!std::is_const_v<std::remove_reference_t<decltype(tensor)>>) {
      for (const CastTensor& entry : log) {
        if (tensor.is_same(entry.cast)) {
          tensor = entry.original;
          return;
        }
      }
    }
  });
}

// One argument of a forward, of which `Arg` is what a forwarding reference
// deduced. See Note [Arguments that are cast].
template <typename Arg>
class CastArgument {
  using Value = std::remove_cvref_t<Arg>;
  using Declared = std::remove_reference_t<Arg>;
  static constexpr bool kIsOurs =
      !std::is_lvalue_reference_v<Arg> && !std::is_const_v<Declared>;
  static constexpr bool kMayHoldTensors = !HoldsNoTensors<Value>();
  static constexpr bool kIsCopied =
      kMayHoldTensors && !kIsOurs && std::is_copy_constructible_v<Value>;

 public:
  CastArgument(Declared& argument, c10::ScalarType dtype)
      : argument_(argument) {
    if constexpr (kMayHoldTensors) {
      if (!NeedsCast(argument, dtype)) return;
      if constexpr (kIsOurs) {
        CastTensors(argument, dtype);
      } else if constexpr (kIsCopied) {
        copy_.emplace(argument);
        CastTensors(*copy_, dtype, &log_);
      } else {
        ThrowCannotCast<Value>("it can't be copied");
      }
    }
  }

  Arg&& get() {
    if constexpr (kIsCopied) {
      if (copy_) return static_cast<Arg&&>(*copy_);
    }
    return static_cast<Arg&&>(argument_);
  }

  bool is_copied() const {
    if constexpr (kIsCopied) return copy_.has_value();
    return false;
  }

  // After the forward.
  void Return() {
    if constexpr (kIsCopied && std::is_lvalue_reference_v<Arg> &&
                  std::is_assignable_v<Declared&, Value>) {
      if (!copy_) return;
      UndoCasts(*copy_, log_);
      argument_ = *std::move(copy_);
    }
  }

 private:
  struct Nothing {};
  Declared& argument_;
  std::conditional_t<kIsCopied, std::optional<Value>, Nothing> copy_;
  CastLog log_;
};

// What `forward` returns, cast. `Result` is its type.
template <typename Result, typename Forward>
Result CastResult(const Forward& forward, c10::ScalarType dtype) {
  using Value = std::remove_cvref_t<Result>;
  if constexpr (std::is_void_v<Result> || HoldsNoTensors<Value>()) {
    return forward();
  } else if constexpr (std::is_reference_v<Result>) {
    Result result = forward();
    if (NeedsCast(result, dtype)) {
      ThrowCannotCast<Value>("forward returns a reference to it");
    }
    return static_cast<Result>(result);
  } else if constexpr (!std::is_move_constructible_v<Value>) {
    ThrowCannotCast<Value>("what forward returns can't be moved");
  } else {
    Value result = forward();
    if (NeedsCast(result, dtype)) CastTensors(result, dtype);
    return result;
  }
}

}  // namespace composable::internal
