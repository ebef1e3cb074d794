#include "composable/sync_buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "collectives/communicator.h"
#include "state/fsdp_state.h"
#include "state/initial_values.h"

namespace composable {
namespace {

// One for each dimension of the mesh that `root` was sharded over.
std::vector<ProcessGroupPtr> GroupsOf(const torch::nn::Module& root) {
  for (const auto& module : root.modules()) {
    const auto state = FindFSDPState(*module);
    if (state != nullptr && state->options().mesh().defined()) {
      return state->options().mesh().get_all_groups();
    }
  }
  return {default_process_group()};
}

// Replaces each by its mean; one all-reduce for each dtype.
void Average(Communicator& communicator,
             const std::vector<NamedBuffer>& buffers) {
  std::map<c10::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const auto& buffer : buffers) {
    by_dtype[buffer.tensor.scalar_type()].push_back(buffer.tensor);
  }
  for (auto& [dtype, tensors] : by_dtype) {
    std::vector<at::Tensor> parts;
    parts.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      // Of low precision ones the sum would lose bits.
      const auto wide = tensor.is_complex() ? dtype : c10::ScalarType::Double;
      parts.push_back(tensor.detach().reshape({-1}).to(wide));
    }
    const at::Tensor flat = at::cat(parts);
    communicator.AllReduce(flat, Communicator::Reduction::kSum,
                           MakeCollectiveLabel("sync_buffers"));
    flat.div_(communicator.size());
    int64_t begin = 0;
    for (auto& tensor : tensors) {
      const at::Tensor part = flat.narrow(0, begin, tensor.numel());
      begin += tensor.numel();
      const c10::InferenceMode mode(tensor.is_inference());
      tensor.copy_(part.view(tensor.sizes()));
    }
  }
}

}  // namespace

void sync_buffers(const ModuleRef& module, BufferSync how,
                  const ProcessGroupPtr& process_group) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  std::vector<NamedBuffer> averaged;
  std::vector<NamedBuffer> copied;
  for (const auto& item : module->named_buffers()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.is_cpu() ||
        tensor.layout() != c10::kStrided) {
      continue;
    }
    const bool is_mean = how == BufferSync::kMean &&
                         (tensor.is_floating_point() || tensor.is_complex());
    (is_mean ? averaged : copied).push_back({item.key(), tensor});
  }
  if (averaged.empty() && copied.empty()) return;
  const auto groups = process_group != nullptr
                          ? std::vector<ProcessGroupPtr>{process_group}
                          : GroupsOf(*module);
  for (const auto& group : groups) {
    Communicator communicator(group, c10::kCPU);
    if (communicator.size() == 1) continue;
    Average(communicator, averaged);
    SetBuffers(copied, SyncInitialValues(communicator, /*group=*/nullptr,
                                         copied, module->name()));
  }
}

}  // namespace composable
