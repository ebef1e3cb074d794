// Training with this library against training with PyTorch's own FSDP2
// (fsdp2_gpt.py): the same seed, the same data, two real processes each.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "composable/composable.h"
#include "examples/gpt.h"
#include "examples/support/byte_text.h"
#include "examples/support/verify.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

constexpr int kWorldSize = 2;
const examples::GPTConfig kConfig = {
    .seq = 33, .layers = 3, .dim = 63, .heads = 3};
const examples::TrainingOptions kTraining = {
    .seed = 5, .lr = 1e-3, .clip = 1.0};
const examples::ByteBatchesOptions kBatches = {
    .seed = kTraining.seed, .steps = 20, .batch = 2, .seq = kConfig.seq};

// Words in random order: there is something to learn, and no two batches are
// alike.
std::string Text() {
  const std::vector<std::string> words = {"shard",  "gather", "reduce", "rank",
                                          "module", "tensor", "loss",   "step"};
  std::mt19937 generator(1);
  std::string text;
  for (int i = 0; i < 5000; ++i) {
    text += words[generator() % words.size()];
    text += generator() % 8 == 0 ? ".\n" : " ";
  }
  return text;
}

std::string Bytes(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()};
}

at::Tensor Floats(const std::string& bytes) {
  at::Tensor floats =
      torch::empty({static_cast<int64_t>(bytes.size() / sizeof(float))});
  std::memcpy(floats.mutable_data_ptr(), bytes.data(), floats.nbytes());
  return floats;
}

// Both trainings, once for all tests.
class FSDP2Parity : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    WriteFile(*folder_ / "text.txt", Text());
    RunPeer();
    RunOurs();
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static examples::ByteBatches Batches(int rank) {
    return {examples::ReadText({*folder_ / "text.txt"}), kBatches, rank,
            kWorldSize};
  }

  static void RunPeer() {
    std::string batches;
    for (const at::Tensor batch : Batches(0).Global()) batches += Bytes(batch);
    WriteFile(*folder_ / "batches.bin", batches);
    const nlohmann::json config = {
        {"batch", kBatches.batch}, {"vocab", kConfig.vocab},
        {"seq", kConfig.seq},      {"layers", kConfig.layers},
        {"dim", kConfig.dim},      {"heads", kConfig.heads},
        {"lr", kTraining.lr},      {"clip", kTraining.clip},
        {"seed", kTraining.seed}};
    WriteFile(*folder_ / "config.json", config.dump());
    const ProcessResult run =
        RunRankProcesses(kWorldSize,
                         {PythonWithTorch(), "tests/peer/fsdp2_gpt.py",
                          "--config=" + *folder_ / "config.json",
                          "--batches=" + *folder_ / "batches.bin",
                          "--output=" + *folder_ / "peer.json",
                          "--initial_weights=" + *folder_ / "initial.bin",
                          "--final_weights=" + *folder_ / "final.bin"},
                         {.timeout = std::chrono::seconds(120)});
    ASSERT_EQ(run.exit_code, 0) << run.output();
    peer_ = nlohmann::json::parse(ReadFile(*folder_ / "peer.json"));
  }

  static void RunOurs() {
    const auto flag = [](const std::string& name, auto value) {
      return "--" + name + "=" + nlohmann::json(value).dump();
    };
    const ProcessResult run = RunRankProcesses(
        kWorldSize,
        {"examples/train_gpt", "--data=" + *folder_ / "text.txt",
         "--losses=" + *folder_ / "ours.json", flag("batch", kBatches.batch),
         flag("steps", kBatches.steps), flag("seq", kConfig.seq),
         flag("layers", kConfig.layers), flag("dim", kConfig.dim),
         flag("heads", kConfig.heads), flag("lr", kTraining.lr),
         flag("clip", kTraining.clip), flag("seed", kTraining.seed)});
    ASSERT_EQ(run.exit_code, 0) << run.output();
    ours_ = nlohmann::json::parse(ReadFile(*folder_ / "ours.json"));
  }

  // Expects a list of both reports to agree within `tolerance`, relative.
  static void ExpectNear(const std::string& key, double tolerance) {
    const auto ours = ours_.at(key).get<std::vector<double>>();
    const auto peer = peer_.at(key).get<std::vector<double>>();
    ASSERT_EQ(ours.size(), kBatches.steps);
    ASSERT_EQ(peer.size(), kBatches.steps);
    for (size_t step = 0; step < peer.size(); ++step) {
      EXPECT_NEAR(ours[step], peer[step], tolerance * peer[step])
          << key << ", step " << step;
    }
  }

  static std::unique_ptr<TemporaryFolder> folder_;
  static nlohmann::json peer_;
  static nlohmann::json ours_;
};

std::unique_ptr<TemporaryFolder> FSDP2Parity::folder_;
nlohmann::json FSDP2Parity::peer_;
nlohmann::json FSDP2Parity::ours_;

TEST_F(FSDP2Parity, Losses) {
  ExpectNear("losses", 1e-5);
  // The run is one in which something can go wrong.
  EXPECT_LT(peer_["losses"].back().get<double>(),
            0.8 * peer_["losses"].front().get<double>());
}

// AdamW hides a wrong scale of the gradients from the losses; norms show it.
TEST_F(FSDP2Parity, GradientNorms) { ExpectNear("grad_norms", 1e-5); }

TEST_F(FSDP2Parity, InitialWeightsAreEqual) {
  torch::manual_seed(kTraining.seed);
  std::string bytes;
  for (const auto& parameter : examples::GPT(kConfig)->parameters()) {
    bytes += Bytes(parameter.detach());
  }
  EXPECT_TRUE(bytes == ReadFile(*folder_ / "initial.bin"));
}

TEST_F(FSDP2Parity, FinalWeights) {
  StateDict weights;
  RunRanks(kWorldSize, [&](RankContext& rank) {
    auto model = RankContext::Seeded(kTraining.seed,
                                     [] { return examples::GPT(kConfig); });
    for (auto& block : *model->blocks) fully_shard(block, rank.options());
    fully_shard(model, rank.options());
    torch::optim::AdamW optimizer(model->parameters(),
                                  torch::optim::AdamWOptions(kTraining.lr));
    for (const at::Tensor batch : Batches(rank.rank)) {
      model->loss(batch).backward();
      clip_grad_norm_(model->parameters(), kTraining.clip);
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto mine = full_state_dict(model);
    if (rank.rank == 0) weights = mine;
  });
  // AdamW moves a weight by about its rate at each step. A thousandth of that
  // path is left to rounding; all of it for attention's key biases, whose
  // gradients are nothing but rounding.
  const double path = kTraining.lr * kBatches.steps;
  const at::Tensor peer = Floats(ReadFile(*folder_ / "final.bin"));
  int64_t begin = 0;
  for (const auto& item : weights) {
    const at::Tensor ours = item.value().flatten();
    ASSERT_LE(begin + ours.numel(), peer.numel()) << item.key();
    at::Tensor distance = (ours - peer.narrow(0, begin, ours.numel())).abs();
    begin += ours.numel();
    if (item.key().find("qkv.bias") != std::string::npos) {
      const auto parts = distance.chunk(3);
      EXPECT_LE(parts[1].max().item<double>(), path) << item.key();
      distance = torch::cat({parts[0], parts[2]});
    }
    EXPECT_LE(distance.max().item<double>(), path / 1000) << item.key();
  }
  EXPECT_EQ(begin, peer.numel());
}

}  // namespace
}  // namespace composable
