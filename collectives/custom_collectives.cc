#include "collectives/custom_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

namespace composable {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor Allocate(int64_t size, c10::ScalarType dtype, c10::Device device) {
  return at::empty({size}, at::TensorOptions(dtype).device(device));
}

WorkPtr Finish(WorkPtr work, bool async_op) {
  if (async_op) return work;
  work->wait();
  return {};
}

}  // namespace

at::Tensor DefaultAllGather::allocate(int64_t size, c10::ScalarType dtype,
                                      c10::Device device) {
  return Allocate(size, dtype, device);
}

WorkPtr DefaultAllGather::operator()(const at::Tensor& output,
                                     const at::Tensor& input,
                                     const ProcessGroupPtr& group,
                                     bool async_op) {
  at::Tensor whole = output;
  at::Tensor part = input;
  auto backend = group->getBackend(input.device().type());
  return Finish(backend->_allgather_base(whole, part), async_op);
}

at::Tensor DefaultReduceScatter::allocate(int64_t size, c10::ScalarType dtype,
                                          c10::Device device) {
  return Allocate(size, dtype, device);
}

WorkPtr DefaultReduceScatter::operator()(const at::Tensor& output,
                                         const at::Tensor& input,
                                         const ProcessGroupPtr& group,
                                         bool async_op) {
  at::Tensor part = output;
  at::Tensor whole = input;
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  auto backend = group->getBackend(input.device().type());
  return Finish(backend->_reduce_scatter_base(part, whole, options), async_op);
}

}  // namespace composable
