// Data-parallel training written by hand with plain LibTorch: what sharded
// training is compared with. Nothing of this project is used in here.
//
// Gradients are averaged group by group, over one flat buffer that is laid out
// like the group's own, padding included. Gloo's order of addition depends on
// an element's position in the buffer, so only an equal layout can give
// gradients that are equal bit by bit.
//
//   std::vector<FlatGroup> groups = {
//       {{{"fc.weight", 0, 12}, {"fc.bias", 12, 4}}, /*total_numel=*/16}};
//   at::Tensor loss =
//       DataParallelStep(*model, optimizer, backend, groups,
//                        [&] { return model->loss(batch); });
//
// All functions are collectives: every rank calls them, with equal groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d
namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace data_parallel {

// Where a parameter lies in its group's flat buffer, in elements.
struct FlatParameter {
  std::string name;  // as in Module::named_parameters()
  int64_t offset;
  int64_t numel;
};

// The parameters of one group, of one dtype.
struct FlatGroup {
  std::vector<FlatParameter> parameters;
  int64_t total_numel;  // of the buffer, padding between and after included
};

// Replaces the gradient of every parameter named in `groups` by its mean over
// all ranks: copies a group's gradients into a flat buffer that is zero
// elsewhere, sums the buffer over all ranks by one all-reduce, divides it by
// their number, and copies back. Elements lie in the buffer in the order in
// which the parameter has them in memory.
//
// A parameter without a gradient on this rank counts as zeros and gets one. One
// that no group names keeps its gradient, or the lack of it.
void AverageGradients(torch::nn::Module& module, c10d::Backend& backend,
                      const std::vector<FlatGroup>& groups);
void AverageGradients(torch::nn::Module& module, c10d::ProcessGroup& group,
                      const std::vector<FlatGroup>& groups);

// One training step: zero_grad, loss, backward, AverageGradients, step. Returns
// this rank's loss, detached.
at::Tensor DataParallelStep(torch::nn::Module& module,
                            torch::optim::Optimizer& optimizer,
                            c10d::Backend& backend,
                            const std::vector<FlatGroup>& groups,
                            const std::function<at::Tensor()>& loss);

}  // namespace data_parallel
