// Collectives, and the memory that they work on, of the user's own.
//
//   class Logged : public composable::DefaultReduceScatter {
//    public:
//     c10::intrusive_ptr<c10d::Work> operator()(
//         const at::Tensor& output, const at::Tensor& input,
//         const composable::ProcessGroupPtr& group, bool async_op) override {
//       std::cout << input.numel() << " elements are reduced\n";
//       return DefaultReduceScatter::operator()(output, input, group, async_op);
//     }
//   };
//   handle.set_custom_reduce_scatter(std::make_shared<Logged>());
//
// Without one the library's own are used: they keep their buffers in a pool and
// bound how long a wait on the CPU lasts. Custom ones are called for groups of
// two ranks and more, after the order of collectives was checked. All ranks must
// use equal ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "collectives/process_group.h"

namespace composable {

class CollectiveMemory {
 public:
  virtual ~CollectiveMemory() = default;
  // A contiguous tensor of `size` elements; its values are not read.
  virtual at::Tensor allocate(int64_t size, c10::ScalarType dtype,
                              c10::Device device) = 0;
};

class AllGather : public CollectiveMemory {
 public:
  // output[r * n, (r + 1) * n) = the input of rank r, n = input.numel(). With
  // `async_op` may return before that is so, and then returns the work to wait
  // for; otherwise, or if it is done, null. What is gathered comes as bytes, in
  // memory of allocate() for the output.
  virtual c10::intrusive_ptr<c10d::Work> operator()(
      const at::Tensor& output, const at::Tensor& input,
      const ProcessGroupPtr& group, bool async_op) = 0;
};

class ReduceScatter : public CollectiveMemory {
 public:
  // output = the sum over ranks of their input[rank * n, (rank + 1) * n),
  // n = output.numel(). It may overwrite `input`. Both are in memory of
  // allocate(). Always a sum: dividing is the caller's.
  virtual c10::intrusive_ptr<c10d::Work> operator()(
      const at::Tensor& output, const at::Tensor& input,
      const ProcessGroupPtr& group, bool async_op) = 0;
};

// The process group's own, in LibTorch's memory: to derive from.
class DefaultAllGather : public AllGather {
 public:
  at::Tensor allocate(int64_t size, c10::ScalarType dtype,
                      c10::Device device) override;
  c10::intrusive_ptr<c10d::Work> operator()(const at::Tensor& output,
                                            const at::Tensor& input,
                                            const ProcessGroupPtr& group,
                                            bool async_op) override;
};

class DefaultReduceScatter : public ReduceScatter {
 public:
  at::Tensor allocate(int64_t size, c10::ScalarType dtype,
                      c10::Device device) override;
  c10::intrusive_ptr<c10d::Work> operator()(const at::Tensor& output,
                                            const at::Tensor& input,
                                            const ProcessGroupPtr& group,
                                            bool async_op) override;
};

}  // namespace composable
