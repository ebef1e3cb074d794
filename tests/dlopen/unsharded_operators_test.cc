// A model that is not sharded runs the same operators whether or not the library
// is loaded, and whether or not it trains others meanwhile.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/support/operator_list.h"

namespace composable {
namespace {

struct Plain {
  Plain() { Step(); }
  void Step() {
    optimizer.zero_grad();
    model->forward(torch::ones({4, 6})).pow(2).sum().backward();
    optimizer.step();
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) (void)p.clone().norm();
  }
  std::vector<std::string> Names() {
    const OperatorList list;
    Step();
    return list.names();
  }
  torch::nn::Sequential model{torch::nn::Linear(6, 5),
                              torch::nn::BatchNorm1d(5),
                              torch::nn::Linear(5, 3)};
  torch::optim::AdamW optimizer{model->parameters()};
};

TEST(UnshardedOperatorsTest, AreTheSameWithTheLibraryLoadedAndInUse) {
  Plain plain;
  const auto before = plain.Names();
  EXPECT_GE(before.size(), 20U);
  void* library = dlopen("tests/dlopen/libtrain_step.so", RTLD_NOW);
  ASSERT_NE(library, nullptr) << dlerror();
  EXPECT_EQ(plain.Names(), before);
  struct {
    double losses[4];
    int64_t same_weights, sharded_elements, plain_elements;
  } report = {};
  char error[1000] = "";
  auto* train = reinterpret_cast<int (*)(int, void*, char*, size_t)>(
      dlsym(library, "TrainStep"));
  ASSERT_NE(train, nullptr);
  ASSERT_EQ(train(2, &report, error, sizeof(error)), 0) << error;
  EXPECT_EQ(report.same_weights, 1);
  EXPECT_EQ(plain.Names(), before);
}

}  // namespace
}  // namespace composable
