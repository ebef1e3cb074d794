// CUDA and NCCL code compiles, links and starts, on a machine without a GPU
// too.
#include <ATen/cuda/CUDAContextLight.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace {

TEST(CudaLinkTest, RuntimeIsOfTheToolkitsMajorVersion) {
  int version = 0;
  ASSERT_EQ(cudaRuntimeGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version / 1000, CUDART_VERSION / 1000);
}

TEST(CudaLinkTest, NcclIsTheOneOfTheHeaders) {
  int version = 0;
  ASSERT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE)
      << "nccl.h is not of the libnccl that LibTorch was built with";
}

TEST(CudaLinkTest, C10dSpeaksNccl) {
  EXPECT_FALSE(c10d::getNcclVersion().empty());
  const auto options = c10d::ProcessGroupNCCL::Options::create();
  EXPECT_EQ(options->backend, "nccl");
}

TEST(CudaLinkTest, DeviceCountAnswers) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  EXPECT_EQ(at::cuda::is_available(), error == cudaSuccess && count > 0);
}

}  // namespace
