#include "hooks/gradient_sink.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "hooks/post_backward.h"

namespace composable {
namespace {

class GradientSink final : public OwningNode {
 public:
  explicit GradientSink(std::shared_ptr<FSDPState> state)
      : OwningNode(/*sequence_nr=*/UINT64_MAX), state_(std::move(state)) {}

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    return PostBackward(state_, std::move(gradients));
  }
  std::string name() const override { return "composable::GradientSink"; }

 private:
  void Release() override { state_.reset(); }

  std::shared_ptr<FSDPState> state_;
};

}  // namespace

std::function<NodePtr()> GradientSinkFactory(
    const std::shared_ptr<FSDPState>& state) {
  return [weak = std::weak_ptr<FSDPState>(state)] {
    auto alive = weak.lock();
    TORCH_INTERNAL_ASSERT(alive != nullptr);
    return MakeNode<GradientSink>(std::move(alive));
  };
}

}  // namespace composable
