// A model of sharded blocks and one log of all that happens in it: what its
// communicator is asked to do, what its groups do, and which operators run
// between.
//
//   TracedModel model(3);
//   model.Backward();
//   model.log.Take();   // {"forward root.embed", "gather root", ...}
//
// Entries, X being a group ("root", "b0", ...) and B one of its linear layers:
//   gather X        the all-gather of X was issued
//   wait gather X   a thread began to wait for it
//   free X          the whole parameters of X are gone
//   reduce X        the reduce-scatter of X was issued
//   wait reduce X   a thread began to wait for it
//   forward X.B     the operator of X.B is about to run
//   backward X.B    its backward operators are about to run
//
// Issues and waits are logged by the communicator itself. The group's name
// comes from the trace observer; an event of one without the other fails the
// test.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "composable/fully_shard.h"
#include "composable/stats.h"
#include "state/trace.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"

namespace composable {

using Events = std::vector<std::string>;

// Golden logs are written with several events in a line:
// "a, b" and "c" -> "a\nb\nc".
inline std::string OnePerLine(const Events& lines) {
  std::string text;
  for (const auto& line : lines) {
    for (size_t begin = 0; begin < line.size();) {
      const size_t comma = std::min(line.find(", ", begin), line.size());
      text += line.substr(begin, comma - begin) + "\n";
      begin = comma + 2;
    }
  }
  return text;
}

// Thread-safe.
class EventLog {
 public:
  void Add(std::string event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(std::move(event));
  }

  // From the communicator: "issue gather 3", "wait reduce 4", ...
  void AddCollective(const std::string& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t space = event.rfind(' ');
    const int index = std::stoi(event.substr(space + 1));
    if (event.rfind("issue ", 0) == 0) {
      ExpectNothingUnnamed();
      unnamed_ = index;
      events_.push_back(event.substr(6, space - 6));
    } else {
      last_wait_ = event.substr(0, space) + " " + names_[index];
      events_.push_back(last_wait_);
    }
  }

  // From the groups.
  void AddTrace(TraceEvent event, const std::string& fqn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string name = fqn.empty() ? "root" : fqn;
    switch (event) {
      case TraceEvent::kUnshard:
      case TraceEvent::kReduce:
        ASSERT_GE(unnamed_, 0)
            << ToString(event) << " " << name << " without a collective";
        ASSERT_EQ(events_.back(),
                  event == TraceEvent::kUnshard ? "gather" : "reduce");
        events_.back() += " " + name;
        names_[std::exchange(unnamed_, -1)] = name;
        break;
      case TraceEvent::kUnshardWait:
        EXPECT_EQ(std::exchange(last_wait_, ""), "wait gather " + name);
        break;
      case TraceEvent::kReduceWait:
        EXPECT_EQ(std::exchange(last_wait_, ""), "wait reduce " + name);
        break;
      case TraceEvent::kAllReduce:
      case TraceEvent::kAllReduceWait:
        FAIL() << "these ranks hold no replicas";
      case TraceEvent::kReshard:
        events_.push_back("free " + name);
        break;
    }
  }

  // The name of the group that collective `index` is of.
  std::string NameOf(size_t index) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = names_.find(static_cast<int>(index));
    return it == names_.end() ? "?" : it->second;
  }

  Events Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ExpectNothingUnnamed();
    return std::exchange(events_, {});
  }

 private:
  void ExpectNothingUnnamed() {
    EXPECT_EQ(unnamed_, -1) << "a collective that no group traces";
  }

  mutable std::mutex mutex_;
  Events events_;
  std::map<int, std::string> names_;
  int unnamed_ = -1;
  std::string last_wait_;
};

// A linear layer that logs.
struct LoggedLinearImpl : torch::nn::Module {
  LoggedLinearImpl(EventLog& log, std::string name, int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))),
        log(log),
        name(std::move(name)) {}
  at::Tensor forward(const at::Tensor& x) {
    log.Add("forward " + name);
    at::Tensor y = linear(x);
    if (y.requires_grad()) {
      y.register_hook([this](const at::Tensor& /*gradient*/) {
        log.Add("backward " + name);
      });
    }
    return y;
  }
  torch::nn::Linear linear;
  EventLog& log;
  std::string name;
};
TORCH_MODULE(LoggedLinear);

struct BlockImpl : torch::nn::Module {
  BlockImpl(EventLog& log, const std::string& name, int64_t width)
      : up(register_module("up",
                           LoggedLinear(log, name + ".up", width, 2 * width))),
        down(register_module(
            "down", LoggedLinear(log, name + ".down", 2 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::tanh(up(x))); }
  LoggedLinear up;
  LoggedLinear down;
};
TORCH_MODULE(Block);

// Tokens in, as a language model: the root owns an embedding and a head.
struct BlocksImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 4;
  BlocksImpl(EventLog& log, int count)
      : embed(register_module("embed", torch::nn::Embedding(8, kWidth))),
        log(log) {
    for (int i = 0; i < count; ++i) {
      const std::string name = "b" + std::to_string(i);
      blocks.push_back(register_module(name, Block(log, name, kWidth)));
    }
    head = register_module("head", LoggedLinear(log, "root.head", kWidth, 8));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    log.Add("forward root.embed");
    at::Tensor x = embed(tokens);
    if (x.requires_grad()) {
      x.register_hook([this](const at::Tensor& /*gradient*/) {
        log.Add("backward root.embed");
      });
    }
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  torch::nn::Embedding embed;
  std::vector<Block> blocks;
  LoggedLinear head{nullptr};
  EventLog& log;
};
TORCH_MODULE(Blocks);

// Two ranks, of which this is one; see ManualBackend. Waits finish what they
// wait for unless the test says otherwise.
struct TracedRank {
  TracedRank()
      : backend(MakeManualBackend(
            /*world_size=*/2,
            [this](const std::string& event) { log.AddCollective(event); })) {
    backend->set_finish_on_wait(true);
  }
  FullyShardOptions options() const {
    return FullyShardOptions().mesh(GroupOf(backend));
  }
  void Observe(const ModuleRef& model) {
    set_trace_observer(model, [this](TraceEvent event, const std::string& fqn) {
      log.AddTrace(event, fqn);
    });
  }

  EventLog log;
  c10::intrusive_ptr<ManualBackend> backend;
};

// `count` blocks, each a group, and the root.
struct TracedModel : TracedRank {
  explicit TracedModel(int count, FullyShardOptions root = {},
                       FullyShardOptions blocks = {})
      : model(log, count) {
    const auto mesh = options().mesh();
    for (auto& block : model->blocks) {
      handles.push_back(fully_shard(block, blocks.mesh(mesh)));
    }
    handles.push_back(fully_shard(model, root.mesh(mesh)));
    Observe(model);
  }

  at::Tensor Forward() { return model(tokens); }
  void Backward() { Forward().sum().backward(); }
  // The log of one forward and backward.
  Events Iterate() {
    Backward();
    return log.Take();
  }
  FSDPStats stats() const { return fsdp_stats(model); }

  Blocks model;
  std::vector<FSDPModule> handles;  // of the blocks, then of the root
  at::Tensor tokens = at::arange(6).view({2, 3});
};

}  // namespace composable
