// The model of a program, and both ways to train it.
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

#include "composable/composable.h"
#include "tests/random/program.h"

namespace composable {
namespace {

struct Run {
  int rank = 0;
  int step = 0;
  bool boundary = false;
  bool rounds = false;  // by hand, as a policy would
  std::vector<at::Tensor> escaped = {};
};

class NodeImpl;
using SharedNode = std::shared_ptr<NodeImpl>;

// Numbers in [-1, 1) that are the same in every process.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : engine_(seed) {}
  at::Tensor Draw(at::IntArrayRef sizes) {
    at::Tensor result = torch::empty(sizes, torch::kDouble);
    auto* values = result.mutable_data_ptr<double>();
    for (int64_t i = 0; i < result.numel(); ++i) {
      values[i] = static_cast<double>(engine_() >> 11) * 0x1p-52 - 1;
    }
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

class NodeImpl : public torch::nn::Module {
 public:
  NodeImpl(const NodePlan& plan, int64_t dim, Numbers& numbers,
           const at::Tensor& tied_to)
      : plan_(plan) {
    const auto parameter = [&](const char* name, at::IntArrayRef sizes) {
      at::Tensor value = numbers.Draw(sizes) * 0.5;
      if (plan.transposed && sizes.size() == 2) {
        value = torch::empty_strided(sizes, {1, sizes[0]}, torch::kDouble)
                    .copy_(value);
      }
      return register_parameter(name, value);
    };
    if (plan.has_own) {
      up = plan.tied ? register_parameter("up", tied_to)
                     : parameter("up", {plan.hidden, dim});
      down = parameter("down", {dim, plan.hidden});
      at::Tensor value = numbers.Draw({plan.hidden});
      bias = register_parameter(
          "bias", plan.bias_is_float ? value.to(torch::kFloat) : value);
      for (auto* tensor : {&up, &down, &bias}) {
        tensor->set_requires_grad(!plan.frozen);
      }
      if (plan.frozen_bias) bias.set_requires_grad(false);
    }
    if (plan.has_branches) {
      left = parameter("left", {dim, dim});
      right = parameter("right", {dim, dim});
    }
    for (size_t i = 0; i < plan.children.size(); ++i) {
      children.push_back(
          register_module("child" + std::to_string(i),
                          std::make_shared<NodeImpl>(
                              plan.children[i], dim, numbers,
                              i == 0 ? at::Tensor() : children[i - 1]->up)));
    }
  }

  // A parameter in the dtype of activations.
  static at::Tensor Value(const at::Tensor& parameter, const Run& run) {
    return (run.rounds ? parameter.to(torch::kFloat) : parameter)
        .to(torch::kDouble);
  }

  at::Tensor forward(at::Tensor x, Run& run) {
    using Op = NodePlan::Op;
    for (const auto& step : plan_.steps) {
      switch (step.op) {
        case Op::kOwn:
          x = x + torch::linear(torch::tanh(torch::linear(x, Value(up, run),
                                                          BiasValue(run))),
                                Value(down, run));
          break;
        case Op::kOwnInPlace: {
          at::Tensor hidden = torch::linear(x, Value(up, run)).unsqueeze(0);
          hidden.squeeze(0).add_(BiasValue(run));
          hidden = hidden.squeeze(0).tanh_();
          x = x.clone();
          x.view({-1}).add_(torch::linear(hidden, Value(down, run)).view({-1}));
          break;
        }
        case Op::kBranch:
          x = x + 0.5 * torch::linear(
                            x, Value(run.rank % 2 == 0 ? left : right, run));
          break;
        case Op::kEscape:
          run.escaped.push_back(x);
          break;
        case Op::kChildTwice:
          x = Call(step.index, x, run);
          x = Call(step.index, torch::tanh(x), run);
          break;
        case Op::kChildSometimes:
          if ((run.step + step.index) % 2 == 0) x = Call(step.index, x, run);
          break;
        case Op::kChildByRank:
          if ((run.rank + step.index) % 2 == 0) x = Call(step.index, x, run);
          break;
        case Op::kChild:
          x = Call(step.index, x, run);
          break;
        case Op::kReadChild:
          x = x * (1 + 0.1 * Value(children[step.index]->up, run).mean());
          break;
      }
    }
    return x;
  }

  // Applies `visit` to the node and all below, children first.
  template <typename Visit>
  void Walk(Visit visit) {
    for (const auto& child : children) child->Walk(visit);
    visit(*this);
  }

  const NodePlan& plan() const { return plan_; }

  at::Tensor BiasValue(const Run& run) const {
    return plan_.ignored_bias ? bias.to(torch::kDouble) : Value(bias, run);
  }

  at::Tensor up, down, bias, left, right;
  std::vector<SharedNode> children;

 private:
  at::Tensor Call(size_t index, const at::Tensor& x, Run& run) {
    return run.boundary ? composable::call(children[index], x, run)
                        : children[index]->forward(x, run);
  }

  const NodePlan& plan_;
};

SharedNode MakeModel(const Program& program) {
  Numbers numbers(program.seed);
  return std::make_shared<NodeImpl>(program.root, program.dim, numbers,
                                    at::Tensor());
}

at::Tensor BatchOf(const Program& program, int rank, int step, int micro,
                   int forward) {
  Numbers numbers(program.seed * 1000003 + rank * 1009 + step * 101 +
                  micro * 11 + forward);
  return numbers.Draw({2, program.dim});
}

at::Tensor Loss(NodeImpl& model, const at::Tensor& x, Run& run) {
  run.escaped.clear();
  const SharedNode shared =
      std::static_pointer_cast<NodeImpl>(model.shared_from_this());
  const at::Tensor y =
      run.boundary ? composable::call(shared, x, run) : model.forward(x, run);
  at::Tensor loss = (y - 0.3).pow(2).mean();
  for (const auto& tensor : run.escaped)
    loss = loss + 0.1 * tensor.pow(2).mean();
  return loss;
}

void ToggleFreezing(NodeImpl& model, int step) {
  model.Walk([&](NodeImpl& node) {
    if (!node.plan().toggled) return;
    for (auto& parameter : node.parameters(/*recurse=*/false)) {
      parameter.requires_grad_(step != 1 && !node.plan().frozen);
    }
  });
}

// Each once: LibTorch lists tied ones, and clips and steps them, twice.
std::vector<at::Tensor> UniqueParameters(const NodeImpl& model) {
  std::vector<at::Tensor> unique;
  for (const auto& parameter : model.parameters()) {
    const auto same = [&](const at::Tensor& t) { return t.is_same(parameter); };
    if (std::none_of(unique.begin(), unique.end(), same)) {
      unique.push_back(parameter);
    }
  }
  return unique;
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const Program& program,
                                                       NodeImpl& model) {
  if (program.has(Feature::kAdamW)) {
    return std::make_unique<torch::optim::AdamW>(
        UniqueParameters(model), torch::optim::AdamWOptions(0.02));
  }
  return std::make_unique<torch::optim::SGD>(
      UniqueParameters(model), torch::optim::SGDOptions(0.1).momentum(0.5));
}

// The losses of one microbatch, on the batches of `rank`.
at::Tensor MicrobatchLoss(const Program& program, NodeImpl& model, Run& run,
                          int micro) {
  at::Tensor loss =
      Loss(model, BatchOf(program, run.rank, run.step, micro, 0), run);
  if (program.has(Feature::kTwoForwards)) {
    loss =
        loss + Loss(model, BatchOf(program, run.rank, run.step, micro, 1), run);
  }
  return loss / program.microbatches;
}

void Evaluate(const Program& program, NodeImpl& model, Run& run) {
  const torch::NoGradGuard no_grad;
  Loss(model, BatchOf(program, run.rank, run.step, 0, 2), run);
}

constexpr double kMaxNorm = 0.1;

// Of the node and all below.
std::vector<at::Tensor> Ignored(NodeImpl& model) {
  std::vector<at::Tensor> ignored;
  model.Walk([&](NodeImpl& node) {
    if (node.plan().ignored_bias) ignored.push_back(node.bias);
  });
  return ignored;
}

// What sharding does for the other parameters: the mean over ranks, if any has
// a gradient.
void AverageGradients(const std::vector<at::Tensor>& parameters,
                      RankContext& rank) {
  for (at::Tensor parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    at::Tensor sum = torch::zeros({parameter.numel() + 1}, torch::kDouble);
    if (gradient.defined()) {
      sum[0] = 1;
      sum.narrow(0, 1, parameter.numel()).copy_(gradient.flatten());
    }
    std::vector<at::Tensor> tensors{sum};
    rank.group->allreduce(tensors)->wait();
    if (sum[0].item<double>() == 0) continue;
    gradient =
        (sum.narrow(0, 1, parameter.numel()) / rank.world_size)
            .view(parameter.sizes())
            .to(parameter.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
}

void ShardAll(const Program& program, const SharedNode& model,
              FullyShardOptions options) {
  for (size_t i = 0; i < model->children.size(); ++i) {
    ShardAll(program, model->children[i], options);
  }
  const auto shard = [&](const SharedNode& node) {
    FullyShardOptions own = options;
    own.ignored_params(Ignored(*node));
    if (node->plan().keep) own.reshard_after_forward(false);
    return own;
  };
  for (size_t i = 0; i < model->children.size(); ++i) {
    const SharedNode& child = model->children[i];
    if (!child->plan().sharded) continue;
    if (child->plan().joined) {
      FullyShardOptions both = shard(child);
      auto ignored = Ignored(*child);
      const auto more = Ignored(*model->children[i + 1]);
      ignored.insert(ignored.end(), more.begin(), more.end());
      fully_shard({child, model->children[i + 1]},
                  both.ignored_params(ignored));
    } else {
      fully_shard(child, shard(child));
    }
  }
}

std::optional<Placement> PlaceByName(const std::string& fqn,
                                     const at::Tensor& parameter) {
  const auto sum = std::accumulate(fqn.begin(), fqn.end(), size_t{0});
  switch (sum % 4) {
    case 0:
      return Shard(0);
    case 1:
      return Shard(static_cast<int>(parameter.dim()) - 1);
    case 2:
      return Owned();
    default:
      return std::nullopt;
  }
}

}  // namespace

Weights TrainUnsharded(const Program& program) {
  const SharedNode model = MakeModel(program);
  const auto optimizer = MakeOptimizer(program, *model);
  for (int step = 0; step < kProgramSteps; ++step) {
    ToggleFreezing(*model, step);
    for (int rank = 0; rank < program.world_size; ++rank) {
      Run run{
          .rank = rank, .step = step, .rounds = program.has(Feature::kMixed)};
      for (int micro = 0; micro < program.microbatches; ++micro) {
        const at::Tensor loss = MicrobatchLoss(program, *model, run, micro);
        if (loss.requires_grad()) (loss / program.world_size).backward();
      }
    }
    if (program.has(Feature::kClip)) {
      torch::nn::utils::clip_grad_norm_(UniqueParameters(*model), kMaxNorm);
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  Weights weights;
  for (const auto& item : model->named_parameters()) {
    weights[item.key()] = item.value().detach();
  }
  return weights;
}

Weights TrainSharded(const Program& program, RankContext& rank) {
  const SharedNode model = MakeModel(program);
  FullyShardOptions options = program.options;
  if (program.has(Feature::kReplicas)) {
    const int64_t shards = rank.world_size == 4 ? 2 : 1;
    options.mesh(init_device_mesh("cpu", {rank.world_size / shards, shards},
                                  {"replicate", "shard"}, rank.group));
  } else {
    options.mesh(rank.group);
  }
  if (program.has(Feature::kPlacements))
    options.shard_placement_fn(PlaceByName);
  ShardAll(program, model, options);
  if (program.root.keep) options.reshard_after_forward(false);
  const auto ignored = Ignored(*model);
  options.ignored_params(ignored);
  FSDPModule handle = fully_shard(model, options);
  handle.set_reshard_after_backward(!program.has(Feature::kHeld));
  handle.set_manual_backward_finalization(program.has(Feature::kManual));
  const auto optimizer = MakeOptimizer(program, *model);
  Run run{.rank = rank.rank, .boundary = program.has(Feature::kBoundary)};
  for (run.step = 0; run.step < kProgramSteps; ++run.step) {
    ToggleFreezing(*model, run.step);
    if (program.has(Feature::kUserUnshard)) handle.unshard();
    for (int micro = 0; micro < program.microbatches; ++micro) {
      handle.set_requires_gradient_sync(micro + 1 == program.microbatches);
      const at::Tensor loss = MicrobatchLoss(program, *model, run, micro);
      if (loss.requires_grad()) loss.backward();
      const bool last = micro + 1 == program.microbatches;
      if (last && program.has(Feature::kManual)) handle.finalize_backward();
      if (program.has(Feature::kEval)) Evaluate(program, *model, run);
    }
    AverageGradients(ignored, rank);
    if (program.has(Feature::kClip)) {
      clip_grad_norm_(UniqueParameters(*model), kMaxNorm);
    }
    optimizer->step();
    optimizer->zero_grad();
    if (program.has(Feature::kEval)) Evaluate(program, *model, run);
  }
  Weights weights;
  for (const auto& item : full_state_dict(model)) {
    weights[item.key()] = item.value();
  }
  return weights;
}

}  // namespace composable
