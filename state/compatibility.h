// Differences between the LibTorch versions that the project builds with
// (2.11 to 2.15), in one place.
//
//   // MySink derives from composable::OwningNode.
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

// The base of a node whose members own something that may lead back to it.
//
// Up to 2.12 the last NodePtr takes a node's members with it. From 2.13 on they
// live until the last WeakNodePtr is gone too, and LibTorch holds such pointers
// itself (AutogradMeta::grad_accumulator_); when the last NodePtr goes, it calls
// release_resources(). So whoever derives from this implements Release(), and
// what it drops there is dropped with the last NodePtr in all versions.
template <typename Base>
class BasicOwningNode : public Base {
 public:
  using Base::Base;

  // Overrides the function of Base where it has one.
  void release_resources() {
    Release();
    if constexpr (requires(Base & base) { base.Base::release_resources(); }) {
      Base::release_resources();
    }
  }

 private:
  // Drops the owning members. Nothing runs the node afterwards. Up to 2.12 it is
  // not called, since the destructor drops them at that moment.
  virtual void Release() = 0;
};
using OwningNode = BasicOwningNode<torch::autograd::Node>;

}  // namespace composable
