#include "tests/support/data_parallel_reference.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace data_parallel {
namespace {

// The part of `buffer` that holds `parameter`, in the parameter's shape.
at::Tensor SliceFor(const at::Tensor& buffer, const FlatParameter& place,
                    const at::Tensor& parameter) {
  TORCH_CHECK_VALUE(parameter.numel() == place.numel, place.name, ": expected ",
                    place.numel, " elements, but got ", parameter.numel());
  TORCH_CHECK_VALUE(
      place.offset >= 0 && place.offset + place.numel <= buffer.numel(),
      place.name, ": elements ", place.offset, " to ",
      place.offset + place.numel, " are outside the buffer of ",
      buffer.numel());
  TORCH_CHECK_VALUE(parameter.is_non_overlapping_and_dense(), place.name,
                    ": expected memory without gaps");
  return buffer.as_strided(parameter.sizes(), parameter.strides(),
                           place.offset);
}

// `Group` is a Backend or a ProcessGroup: both know allreduce() and getSize().
template <typename Group>
void Average(torch::nn::Module& module, Group& group,
             const std::vector<FlatGroup>& groups) {
  at::NoGradGuard no_grad;
  auto parameters = module.named_parameters();
  for (const FlatGroup& flat : groups) {
    if (flat.parameters.empty()) continue;
    const at::Tensor& first = parameters[flat.parameters.front().name];
    std::vector<at::Tensor> buffer = {
        at::zeros({flat.total_numel}, first.options())};
    for (const FlatParameter& place : flat.parameters) {
      const at::Tensor& parameter = parameters[place.name];
      at::Tensor slice = SliceFor(buffer[0], place, parameter);
      if (parameter.grad().defined()) slice.copy_(parameter.grad());
    }
    group.allreduce(buffer)->wait();
    buffer[0].div_(group.getSize());
    for (const FlatParameter& place : flat.parameters) {
      at::Tensor& parameter = parameters[place.name];
      if (!parameter.grad().defined())
        parameter.mutable_grad() = at::zeros_like(parameter);
      parameter.mutable_grad().copy_(SliceFor(buffer[0], place, parameter));
    }
  }
}

}  // namespace

void AverageGradients(torch::nn::Module& module, c10d::Backend& backend,
                      const std::vector<FlatGroup>& groups) {
  Average(module, backend, groups);
}

void AverageGradients(torch::nn::Module& module, c10d::ProcessGroup& group,
                      const std::vector<FlatGroup>& groups) {
  Average(module, group, groups);
}

at::Tensor DataParallelStep(torch::nn::Module& module,
                            torch::optim::Optimizer& optimizer,
                            c10d::Backend& backend,
                            const std::vector<FlatGroup>& groups,
                            const std::function<at::Tensor()>& loss) {
  optimizer.zero_grad();
  at::Tensor value = loss();
  value.backward();
  AverageGradients(module, backend, groups);
  optimizer.step();
  return value.detach();
}

}  // namespace data_parallel
