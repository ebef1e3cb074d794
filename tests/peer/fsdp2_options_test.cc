// Training with many options against PyTorch's own FSDP2 (fsdp2_options.py): the
// same seeds, data and options.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "composable/composable.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

using nlohmann::json;

constexpr int kSteps = 10;
constexpr int64_t kBatch = 4;

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t dim, int64_t hidden)
      : norm(register_module(
            "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})))),
        up(register_module("up", torch::nn::Linear(dim, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, dim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + down(torch::gelu(up(norm(x))));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
COMPOSABLE_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, int64_t hidden, int count)
      : enter(register_module("enter", torch::nn::Linear(dim, dim))),
        blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int i = 0; i < count; ++i) blocks->push_back(Block(dim, hidden));
    leave = register_module(
        "leave",
        torch::nn::Linear(torch::nn::LinearOptions(dim, dim).bias(false)));
  }
  at::Tensor forward(at::Tensor x) {
    x = enter(x);
    for (const auto& block : *blocks) {
      x = call(std::dynamic_pointer_cast<BlockImpl>(block), x);
    }
    return leave(x);
  }
  torch::nn::Linear enter, leave{nullptr};
  torch::nn::ModuleList blocks;
};
COMPOSABLE_MODULE(Net);

// How far numbers may be apart, relative to the largest that they belong to.
struct Tolerances {
  double losses = 1e-5;
  double gradients = 1e-6;
};

// Both sides run the same kernels on the same numbers. The sums of two ranks are
// equal bit by bit, those of four differ in their order: a few ulp of float.
constexpr Tolerances kFloat;
// The two sides may round a gradient to bfloat16 at another place: before or
// after the sum over ranks, one rounding of 2^-9.
constexpr Tolerances kBFloat16 = {.losses = 2e-3, .gradients = 0x1p-8};

struct Case {
  std::string name;
  int ranks = 2;
  json options = json::object();
  Tolerances tolerances = kFloat;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      {"plain"},
      {"uneven", 2, {{"dim", 7}, {"hidden", 5}}},
      {"kept_unsharded", 2, {{"reshard", false}}},
      {"freed", 2, {{"reshard", true}}},
      {"accumulation", 2, {{"microbatches", 3}}},
      {"momentum_free_sgd_with_large_rate", 2, {{"lr", 0.3}}},
      {"adamw", 2, {{"optimizer", "adamw"}, {"lr", 1e-3}}},
      {"clipping", 2, {{"clip", 0.1}}},
      {"clipping_by_1_norm", 2, {{"clip", 0.5}, {"clip_order", 1.0}}},
      {"clipping_by_maximum", 2, {{"clip", 0.01}, {"clip_order", nullptr}}},
      {"frozen_blocks", 2, {{"frozen", "blocks"}}},
      {"frozen_weights", 2, {{"frozen", "weights"}}},
      {"bf16_param_fp32_reduce",
       2,
       {{"param_dtype", "bfloat16"}, {"reduce_dtype", "float32"}},
       kBFloat16},
      {"bf16_param_default_reduce",
       2,
       {{"param_dtype", "bfloat16"}},
       kBFloat16},
      {"bf16_accumulation",
       2,
       {{"param_dtype", "bfloat16"},
        {"reduce_dtype", "float32"},
        {"microbatches", 3}},
       kBFloat16},
      {"fp32_param_bf16_reduce", 2, {{"reduce_dtype", "bfloat16"}}, kBFloat16},
      {"hsdp", 4, {{"replicas", 2}}},
      {"hsdp_uneven", 4, {{"replicas", 2}, {"dim", 7}, {"hidden", 5}}},
      {"hsdp_accumulation", 4, {{"replicas", 2}, {"microbatches", 2}}},
      {"hsdp_clipping", 4, {{"replicas", 2}, {"clip", 0.1}}},
      {"int_reshard", 4, {{"reshard", 2}}},
      {"hsdp_bf16",
       4,
       {{"replicas", 2},
        {"param_dtype", "bfloat16"},
        {"reduce_dtype", "float32"}},
       kBFloat16},
  };
  return *cases;
}

json Options(const Case& c) {
  json options = {{"seed", 1},
                  {"dim", 16},
                  {"hidden", 24},
                  {"blocks", 3},
                  {"microbatches", 1},
                  {"replicas", 1},
                  {"reshard", nullptr},
                  {"param_dtype", nullptr},
                  {"reduce_dtype", nullptr},
                  {"frozen", "none"},
                  {"optimizer", "sgd"},
                  {"lr", 0.05},
                  {"clip", nullptr},
                  {"clip_order", 2.0}};
  options.update(c.options);
  options["name"] = c.name;
  options["steps"] = kSteps;
  options["batch"] = kBatch;
  return options;
}

std::optional<c10::ScalarType> Dtype(const json& name) {
  if (name.is_null()) return std::nullopt;
  return name == "bfloat16" ? torch::kBFloat16 : torch::kFloat;
}

// What a run of either side reports.
struct Report {
  std::vector<double> losses;
  std::vector<double> norms;
  std::map<std::string, at::Tensor> gradients;  // whole, of the first step
  std::map<std::string, at::Tensor> weights;    // at the end
};

Report FromJson(const json& report) {
  Report result{report.at("losses"), report.at("norms"), {}, {}};
  for (const auto& [key, to] : {std::pair("gradients", &result.gradients),
                                std::pair("weights", &result.weights)}) {
    for (const auto& [name, values] : report.at(key).items()) {
      (*to)[name] = torch::tensor(values.get<std::vector<double>>());
    }
  }
  return result;
}

void Freeze(torch::nn::Module& model, const std::string& what) {
  for (const auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    const bool frozen =
        what == "blocks"
            ? name.rfind("blocks.0", 0) == 0 || name.rfind("blocks.2", 0) == 0
            : what == "weights" && name.find("bias") == std::string::npos;
    if (frozen) at::Tensor(item.value()).set_requires_grad(false);
  }
}

FullyShardOptions Sharding(const json& options, const RankContext& rank) {
  FullyShardOptions sharding;
  const auto replicas = options["replicas"].get<int64_t>();
  if (replicas > 1) {
    sharding.mesh(init_device_mesh("cpu",
                                   {replicas, rank.world_size / replicas},
                                   {"replicate", "shard"}, rank.group));
  } else {
    sharding.mesh(rank.group);
  }
  const json& reshard = options["reshard"];
  if (reshard.is_boolean()) {
    sharding.reshard_after_forward(reshard.get<bool>());
  } else if (reshard.is_number()) {
    sharding.reshard_after_forward(reshard.get<int64_t>());
  }
  sharding.mp_policy(
      MixedPrecisionPolicy()
          .param_dtype(Dtype(options["param_dtype"]))
          .reduce_dtype(Dtype(options["reduce_dtype"]))
          .default_reduce_dtype(TORCH_VERSION_MAJOR > 2 ||
                                        TORCH_VERSION_MINOR >= 15
                                    ? DefaultReduceDtype::kGradDtype
                                    : DefaultReduceDtype::kParamDtype));
  return sharding;
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const json& options,
                                                       const Net& model) {
  std::vector<at::Tensor> trained;
  for (const auto& parameter : model->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  const auto lr = options["lr"].get<double>();
  if (options["optimizer"] == "sgd") {
    return std::make_unique<torch::optim::SGD>(trained, lr);
  }
  return std::make_unique<torch::optim::AdamW>(trained,
                                               torch::optim::AdamWOptions(lr));
}

double MeanOverRanks(double value, const RankContext& rank) {
  const at::Tensor sum = torch::full({1}, value, torch::kDouble);
  Communicator(rank.group, c10::kCPU)
      .AllReduce(sum, Communicator::Reduction::kSum);
  return sum.item<double>() / rank.world_size;
}

// Whole gradients: those of the shards, gathered as if they were values.
std::map<std::string, at::Tensor> WholeGradients(const Net& model,
                                                 const Net& scratch) {
  std::map<std::string, at::Tensor> whole;
  const torch::NoGradGuard no_grad;
  const auto to = scratch->named_parameters();
  std::vector<std::string> names;
  for (const auto& item : model->named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    if (!gradient.defined()) continue;
    to[item.key()].copy_(gradient);
    names.push_back(item.key());
  }
  const auto values = full_state_dict(scratch);
  for (const auto& name : names) whole[name] = values[name].flatten();
  return whole;
}

Report Train(const json& options, RankContext& rank) {
  const auto dim = options["dim"].get<int64_t>();
  const auto microbatches = options["microbatches"].get<int64_t>();
  const auto make = [&] {
    return Net(dim, options["hidden"].get<int64_t>(),
               options["blocks"].get<int>());
  };
  at::Tensor data;
  Net model = RankContext::Seeded(options["seed"].get<uint64_t>(), [&] {
    Net net = make();
    data =
        torch::randn({kSteps, microbatches, 2, rank.world_size * kBatch, dim});
    return net;
  });
  Net scratch = RankContext::Seeded(1, make);
  Freeze(*model, options["frozen"]);
  Freeze(*scratch, options["frozen"]);
  const FullyShardOptions sharding = Sharding(options, rank);
  for (const Net& net : {model, scratch}) {
    for (const auto& block : *net->blocks) fully_shard(block, sharding);
  }
  FSDPModule handle = fully_shard(model, sharding);
  fully_shard(scratch, sharding);
  const auto optimizer = MakeOptimizer(options, model);
  const double order = options["clip_order"].is_null()
                           ? std::numeric_limits<double>::infinity()
                           : options["clip_order"].get<double>();
  const double clip = options["clip"].is_null()
                          ? std::numeric_limits<double>::infinity()
                          : options["clip"].get<double>();
  Report report;
  for (int step = 0; step < kSteps; ++step) {
    double mean = 0;
    for (int64_t i = 0; i < microbatches; ++i) {
      handle.set_requires_gradient_sync(i + 1 == microbatches);
      const at::Tensor mine =
          data[step][i].narrow(1, rank.rank * kBatch, kBatch);
      const at::Tensor loss =
          torch::mse_loss(model(mine[0]).to(torch::kFloat), mine[1]) /
          microbatches;
      loss.backward();
      mean += loss.item<double>();
    }
    report.losses.push_back(MeanOverRanks(mean, rank));
    if (step == 0) report.gradients = WholeGradients(model, scratch);
    report.norms.push_back(clip_grad_norm_(model->parameters(), clip, order));
    optimizer->step();
    optimizer->zero_grad();
  }
  for (const auto& item : full_state_dict(model)) {
    report.weights[item.key()] = item.value().flatten();
  }
  return report;
}

class FSDP2Options : public testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    for (const int ranks : {2, 4}) {
      json cases = json::array();
      for (const Case& c : Cases()) {
        if (c.ranks == ranks) cases.push_back(Options(c));
      }
      const std::string path =
          *folder_ / ("cases" + std::to_string(ranks) + ".json");
      WriteFile(path, cases.dump());
      const ProcessResult run =
          RunRankProcesses(ranks,
                           {PythonWithTorch(), "tests/peer/fsdp2_options.py",
                            path, folder_->path()},
                           {.timeout = std::chrono::seconds(180)});
      ASSERT_EQ(run.exit_code, 0) << run.output();
    }
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static void SetUpReports(const Case& c, Report* peer, Report* ours) {
    *peer = FromJson(json::parse(ReadFile(*folder_ / (c.name + ".json"))));
    std::mutex mutex;
    RunRanks(c.ranks, [&](RankContext& rank) {
      Report mine = Train(Options(c), rank);
      const std::lock_guard<std::mutex> lock(mutex);
      if (rank.rank == 0) *ours = std::move(mine);
    });
  }

  static std::unique_ptr<TemporaryFolder> folder_;
};

std::unique_ptr<TemporaryFolder> FSDP2Options::folder_;

void ExpectNear(const std::vector<double>& ours,
                const std::vector<double>& peer, double tolerance,
                const char* what) {
  ASSERT_EQ(ours.size(), peer.size());
  double worst = 0;
  for (size_t i = 0; i < peer.size(); ++i) {
    EXPECT_NEAR(ours[i], peer[i], tolerance * std::abs(peer[i]))
        << what << ", step " << i;
    worst = std::max(worst, std::abs(ours[i] / peer[i] - 1));
  }
  testing::Test::RecordProperty(what, std::to_string(worst));
}

void ExpectNear(const std::map<std::string, at::Tensor>& ours,
                const std::map<std::string, at::Tensor>& peer, double tolerance,
                const char* what) {
  double worst = 0;
  ASSERT_EQ(ours.size(), peer.size()) << what;
  for (const auto& [name, expected] : peer) {
    ASSERT_EQ(ours.count(name), 1U) << what << " of " << name;
    const at::Tensor got = ours.at(name).to(torch::kDouble);
    const at::Tensor wanted = expected.to(torch::kDouble);
    ASSERT_EQ(got.sizes(), wanted.sizes()) << what << " of " << name;
    const double scale = wanted.abs().max().item<double>();
    const double error = (got - wanted).abs().max().item<double>();
    EXPECT_LE(error, tolerance * scale) << what << " of " << name;
    worst = std::max(worst, error / scale);
  }
  testing::Test::RecordProperty(what, std::to_string(worst));
}

TEST_P(FSDP2Options, TrainsAlike) {
  const Case& c = GetParam();
  Report peer;
  Report ours;
  SetUpReports(c, &peer, &ours);
  ExpectNear(ours.losses, peer.losses, c.tolerances.losses, "losses");
  ExpectNear(ours.norms, peer.norms,
             std::max(c.tolerances.losses, c.tolerances.gradients), "norms");
  ExpectNear(ours.gradients, peer.gradients, c.tolerances.gradients,
             "gradients");
  // A weight has moved by at most ten gradients times the rate.
  ExpectNear(ours.weights, peer.weights, 10 * c.tolerances.losses, "weights");
}

INSTANTIATE_TEST_SUITE_P(, FSDP2Options, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace composable
