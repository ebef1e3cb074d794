// NCCL serves CUDA tensors of a process group, beside Gloo for CPU tensors.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "collectives/process_group.h"

namespace composable {
namespace {

TEST(NcclGroupTest, ReducesCudaTensors) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  const auto group =
      init_process_group(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                         ProcessGroupOptions().backend("gloo,nccl"));
  const auto nccl = group->getBackend(c10::kCUDA);
  EXPECT_EQ(nccl->getBackendName(), "nccl");
  EXPECT_EQ(group->getBackend(c10::kCPU)->getBackendName(), "gloo");
  const auto cuda = at::TensorOptions().device(c10::kCUDA);
  std::vector<at::Tensor> tensors{at::full({4}, 2.5, cuda)};
  nccl->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0].sum().item<float>(), 10.0F);
  at::Tensor whole = at::full({4}, 0.0, cuda);
  nccl->_allgather_base(whole, tensors[0])->wait();
  EXPECT_EQ(whole.sum().item<float>(), 10.0F);
}

}  // namespace
}  // namespace composable
