// Differences between the LibTorch versions that the project builds with
// (2.11 to 2.15), in one place.
//
//   composable::NodePtr sink = composable::MakeNode<MySink>();
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace composable {

// std::shared_ptr<Node> up to 2.12, c10::intrusive_ptr<Node> from 2.13 on.
using NodePtr = decltype(torch::autograd::Edge::function);

using WeakNodePtr = std::conditional_t<
    std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>,
    std::weak_ptr<torch::autograd::Node>,
    c10::weak_intrusive_ptr<torch::autograd::Node>>;

template <typename T, typename... Args>
NodePtr MakeNode(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr,
                               std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

}  // namespace composable
