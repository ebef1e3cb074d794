#include "hooks/gradient_sink.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "hooks/post_backward.h"

namespace composable {
namespace {

class GradientSink final : public torch::autograd::Node {
 public:
  explicit GradientSink(std::weak_ptr<FSDPState> state)
      : Node(/*sequence_nr=*/UINT64_MAX), state_(std::move(state)) {}

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    const auto state = state_.lock();
    TORCH_CHECK(state != nullptr,
                "backward: the module that these parameters belong to was "
                "destroyed before its gradients were complete. Keep the model "
                "until backward() has returned.");
    PostBackward(state, std::move(gradients));
    return {};
  }
  std::string name() const override { return "composable::GradientSink"; }

 private:
  std::weak_ptr<FSDPState> state_;
};

}  // namespace

NodePtr MakeGradientSink(const std::shared_ptr<FSDPState>& state) {
  return MakeNode<GradientSink>(state);
}

}  // namespace composable
