// A program linked with LibTorch runs without LD_LIBRARY_PATH.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

TEST(TorchLinkTest, Adds) {
  const at::Tensor two = at::add(at::ones({3}), at::ones({3}));
  EXPECT_EQ(two.sum().item<double>(), 6.0);
}
