// Finds the tensors in the arguments and results of a module's forward.
//
//   struct Batch {
//     at::Tensor features;
//     std::vector<at::Tensor> masks;
//     int64_t step = 0;
//   };
//   // In the namespace of Batch: the members that hold tensors.
//   auto tensor_members(Batch& b) { return std::tie(b.features, b.masks); }
//
// Then a module whose forward takes a Batch can be called through a boundary
// that casts (see Note [Arguments that are cast]), and others can look into it:
//
//   Batch batch{torch::ones({2}), {torch::ones({3})}};
//   int64_t elements = 0;
//   composable::VisitTensors(
//       batch, [&](const at::Tensor& t) { elements += t.numel(); });
//
// Note [Types that hold tensors]
// Known are tensors, std::optional, pair, tuple and variant, and what looks
// like a container of the standard library (vector, array, deque, list, map,
// unordered_map, and others with the same interface) or torch::OrderedDict, in
// any nesting. Known to hold none are arithmetic types, enums, strings, null
// pointers, modules and their holders, std::function, classes without members,
// and classes that are trivially copyable, which can't own a tensor. (Pointers
// that are members of these are not looked behind.)
//
// For any other class say which of its members hold tensors, by a function
// tensor_members in its namespace, as above; or, if that is not yours, by
//
//   template <>
//   struct composable::TensorMembers<Foreign> {
//     static auto Tie(Foreign& f) { return std::tie(f.value); }
//   };
//
// std::tie() says that there are none. A class that is not known throws
// c10::TypeError, which names it, when it is looked into: that is, where a cast
// of inputs or outputs is asked for, and nowhere else.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>

namespace torch::nn {
class Module;
}

namespace composable {

// To be specialised; see Note [Types that hold tensors].
template <typename T>
struct TensorMembers;

namespace internal {

template <typename T, template <typename...> class Template>
inline constexpr bool kIsA = false;
template <typename... Args, template <typename...> class Template>
inline constexpr bool kIsA<Template<Args...>, Template> = true;

template <typename T>
concept HasTrait = requires(T& value) {
  TensorMembers<T>::Tie(value);
};
template <typename T>
concept HasFunction = requires(T& value) {
  tensor_members(value);
};

template <typename T>
concept IsRange = requires(T& value) {
  typename T::value_type;
  value.begin() != value.end();
  *value.begin();
};
template <typename T>
concept IsMap = IsRange<T> && requires {
  typename T::mapped_type;
};
// torch::OrderedDict, whose header costs much.
template <typename T>
concept IsOrderedDict = requires(T& value) {
  value.begin()->key();
  value.begin()->value();
  value.end();
};

template <typename T>
concept IsTuple = kIsA<T, std::tuple> || kIsA<T, std::pair>;

// Has an element type that may be a reference into memory of another.
template <typename T>
concept IsPointer = std::is_pointer_v<T> || requires(T& value) {
  typename T::element_type;
  value.get();
  value == nullptr;
};

template <typename T>
concept IsModule = std::is_base_of_v<torch::nn::Module, T> || requires {
  typename T::ContainedType;  // a holder
};

template <typename T>
constexpr bool HoldsNoTensors() {
  using std::is_same_v;
  if constexpr (std::is_base_of_v<at::TensorBase, T> || HasTrait<T> ||
                HasFunction<T>) {
    return false;
  } else if constexpr (kIsA<T, std::reference_wrapper>) {
    return false;
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                       std::is_null_pointer_v<T> || std::is_function_v<T> ||
                       std::is_member_pointer_v<T> || kIsA<T, std::function> ||
                       IsModule<T>) {
    return true;
  } else if constexpr (std::is_array_v<T>) {
    return HoldsNoTensors<std::remove_cv_t<std::remove_extent_t<T>>>();
  } else if constexpr (std::is_pointer_v<T>) {
    using Pointee = std::remove_cv_t<std::remove_pointer_t<T>>;
    if constexpr (std::is_void_v<Pointee>) {
      return true;
    } else if constexpr (std::is_class_v<Pointee>) {
      return false;
    } else {
      return HoldsNoTensors<Pointee>();
    }
  } else if constexpr (IsRange<T>) {
    return HoldsNoTensors<std::remove_cv_t<typename T::value_type>>();
  } else if constexpr (IsPointer<T> || kIsA<T, std::optional> || IsTuple<T> ||
                       kIsA<T, std::variant>) {
    return false;
  } else {
    return std::is_empty_v<T> || std::is_trivially_copyable_v<T>;
  }
}

// `item`, of a tuple's element type `Element`; const if that is a reference.
template <typename Element, typename Item>
auto& NoReference(Item& item) {
  if constexpr (std::is_reference_v<Element>) {
    return std::as_const(item);
  } else {
    return item;
  }
}

template <typename T>
[[noreturn]] void ThrowUnknownType() {
  const std::string name = c10::demangle(typeid(T).name());
  TORCH_CHECK_TYPE(
      false, "A module's inputs or outputs are to be cast, and ", name,
      " is not known to hold tensors or not. Say which of its members do: "
      "define `auto tensor_members(",
      name,
      "& v) { return std::tie(v.a, v.b); }` in its namespace, or specialise "
      "composable::TensorMembers<",
      name,
      ">; std::tie() is for none. See composable/tensor_members.h. Or switch "
      "the cast off: cast_forward_inputs(false), no output_dtype.");
}

}  // namespace internal

// Calls `visit` with each tensor in `value`, undefined ones included: as
// at::Tensor& where it can be replaced, as const at::Tensor& where it can't,
// because `value` or what holds it is const, or refers to it: a pointer, a span,
// a tuple of references.
template <typename T, typename Visit>
void VisitTensors(T& value, const Visit& visit) {
  using Value = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (internal::HoldsNoTensors<Value>()) {
  } else if constexpr (internal::HasTrait<Value> ||
                       internal::HasFunction<Value>) {
    const auto each = [&](auto&&... members) {
      (VisitTensors(members, visit), ...);
    };
    // A visit of something const does not change it.
    auto& members_of = const_cast<Value&>(value);
    if constexpr (internal::HasTrait<Value>) {
      std::apply(each, TensorMembers<Value>::Tie(members_of));
    } else {
      std::apply(each, tensor_members(members_of));
    }
  } else if constexpr (internal::kIsA<Value, std::optional>) {
    if (value) VisitTensors(*value, visit);
  } else if constexpr (internal::IsTuple<Value>) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (VisitTensors(internal::NoReference<std::tuple_element_t<I, Value>>(
                        std::get<I>(value)),
                    visit),
       ...);
    }
    (std::make_index_sequence<std::tuple_size_v<Value>>());
  } else if constexpr (internal::kIsA<Value, std::variant>) {
    std::visit([&](auto& item) { VisitTensors(item, visit); }, value);
  } else if constexpr (internal::IsMap<Value>) {
    for (auto& entry : value) VisitTensors(entry.second, visit);
  } else if constexpr (internal::IsOrderedDict<Value>) {
    for (auto& item : value) VisitTensors(item.value(), visit);
  } else if constexpr (internal::IsRange<Value> &&
                       std::is_trivially_copyable_v<Value>) {
    for (const auto& item : value) VisitTensors(item, visit);
  } else if constexpr (internal::IsRange<Value>) {
    for (auto& item : value) VisitTensors(item, visit);
  } else if constexpr (internal::kIsA<Value, std::reference_wrapper>) {
    VisitTensors(std::as_const(value.get()), visit);
  } else if constexpr (internal::IsPointer<Value>) {
    if (value == nullptr) return;
    using Pointee = std::remove_cvref_t<decltype(*value)>;
    if constexpr (!internal::IsModule<Pointee>) {
      VisitTensors(std::as_const(*value), visit);
    }
  } else {
    internal::ThrowUnknownType<Value>();
  }
}

}  // namespace composable
