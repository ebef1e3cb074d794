// The documentation's first example, as it stands there, as a program of two
// processes.
//
// This file is one program of two kinds: a test, which starts it again as two
// ranks, and, where a launcher has set RANK, one of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "composable/composable.h"
#include "examples/gpt.h"
#include "examples/support/run_main.h"
#include "tests/support/processes.h"

namespace composable {
namespace {

using examples::GPT;
using examples::GPTConfig;

const GPTConfig kConfig = {.seq = 16, .layers = 2, .dim = 30, .heads = 3};
constexpr size_t kSteps = 150;
constexpr size_t kBatch = 4;

// Sequences that count bytes upwards; each rank's start at other ones.
struct Counting : torch::data::Dataset<Counting, at::Tensor> {
  explicit Counting(int64_t rank) : rank(rank) {}
  at::Tensor get(size_t index) override {
    const int64_t first = 37 * static_cast<int64_t>(index) + 101 * rank;
    return torch::arange(first, first + kConfig.seq + 1, at::kLong)
        .remainder(kConfig.vocab);
  }
  std::optional<size_t> size() const override { return kSteps * kBatch; }
  int64_t rank;
};

struct Stack
    : torch::data::transforms::Collation<at::Tensor, std::vector<at::Tensor>> {
  at::Tensor apply_batch(std::vector<at::Tensor> rows) override {
    return torch::stack(rows);
  }
};

auto MakeLoader(int64_t rank) {
  return torch::data::make_data_loader<
      torch::data::samplers::SequentialSampler>(Counting(rank).map(Stack()),
                                                kBatch);
}

// The loss of an unsharded model with `weights`, or as it is made if there are
// none.
double UnshardedLoss(const GPTConfig& config, const at::Tensor& batch,
                     const composable::StateDict* weights = nullptr) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  GPT plain(config);
  if (weights != nullptr) {
    TORCH_CHECK(weights->size() == plain->named_parameters().size());
    for (auto& item : plain->named_parameters()) {
      TORCH_CHECK(item.value().sizes() == (*weights)[item.key()].sizes(),
                  item.key(), " is not whole");
      item.value().copy_((*weights)[item.key()]);
    }
  }
  return plain->loss(batch).item<double>();
}

// What each rank runs. The assertions follow the example.
int QuickStart() {
  const GPTConfig config = kConfig;
  torch::manual_seed(0);
  const auto loader = MakeLoader(std::atoi(std::getenv("RANK")));

  // Its #include does nothing here: the header is included above.
  // clang-format off
  // example-begin quick_start
#include "composable/composable.h"

composable::init_process_group();            // torchrun, mpirun, srun
GPT model(config);
for (auto& block : *model->blocks) composable::fully_shard(block);
composable::fully_shard(model);
torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
for (auto& batch : *loader) {
  auto loss = model->loss(batch);
  loss.backward();
  composable::clip_grad_norm_(model->parameters(), 1.0);
  optimizer.step();
  optimizer.zero_grad();
}
auto weights = composable::full_state_dict(model);   // fqn -> full tensor
  // example-end
  // clang-format on

  const torch::NoGradGuard no_grad;
  const at::Tensor batch = *MakeLoader(composable::rank())->begin();
  const double before = UnshardedLoss(config, batch);
  const double after = model->loss(batch).item<double>();
  TORCH_CHECK(after < 0.95 * before, "the loss went from ", before, " to ",
              after);
  TORCH_CHECK(UnshardedLoss(config, batch, &weights) == after,
              "an unsharded model with these weights has another loss");
  std::cout << "rank " << composable::rank() << " of "
            << composable::world_size() << ": loss " << before << " to "
            << after << std::endl;
  return 0;
}

TEST(QuickStart, LossFallsAndWeightsAreWholeOnTwoProcesses) {
  const ProcessResult run = RunRankProcesses(2, {ThisProgram()});
  ASSERT_EQ(run.exit_code, 0) << run.output();
  EXPECT_THAT(run.out, testing::HasSubstr("rank 0 of 2: loss "));
  EXPECT_THAT(run.out, testing::HasSubstr("rank 1 of 2: loss "));
}

}  // namespace
}  // namespace composable

int main(int argc, char** argv) {
  if (std::getenv("RANK") != nullptr) {
    return examples::RunMain(composable::QuickStart);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
