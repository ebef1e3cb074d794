#include "tests/support/in_process_backend.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

namespace composable {

InProcessHub::InProcessHub(int world_size, std::chrono::milliseconds timeout)
    : world_size_(world_size), timeout_(timeout) {}

void InProcessHub::Post(int rank, uint64_t sequence, Kind kind,
                        at::Tensor output, at::Tensor input) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& operation = operations_[sequence];
  const at::Tensor& part = kind == Kind::kScatter ? output : input;
  const int64_t numel = part.numel();
  const c10::ScalarType dtype = part.scalar_type();
  if (operation.posted == 0) {
    operation.kind = kind;
    operation.numel = numel;
    operation.dtype = dtype;
    operation.outputs.resize(world_size_);
    operation.inputs.resize(world_size_);
  }
  if (operation.kind != kind || operation.numel != numel ||
      operation.dtype != dtype) {
    operation.error = "ranks issued different collectives";
  }
  operation.outputs[rank] = std::move(output);
  operation.inputs[rank] = std::move(input);
  if (++operation.posted < world_size_) return;
  if (operation.error.empty()) Execute(operation);
  operation.outputs.clear();
  operation.inputs.clear();
  operation.done = true;
  changed_.notify_all();
}

void InProcessHub::Execute(Operation& operation) const {
  const at::NoGradGuard no_grad;
  auto& in = operation.inputs;
  auto& out = operation.outputs;
  switch (operation.kind) {
    case Kind::kAllGather:
      for (auto& whole : out) {
        for (int r = 0; r < world_size_; ++r) {
          whole.narrow(0, r * in[r].numel(), in[r].numel()).copy_(in[r]);
        }
      }
      return;
    case Kind::kReduceScatter:
      for (int r = 0; r < world_size_; ++r) {
        const int64_t n = out[r].numel();
        out[r].copy_(in[0].narrow(0, r * n, n));
        for (int s = 1; s < world_size_; ++s) {
          out[r].add_(in[s].narrow(0, r * n, n));
        }
      }
      return;
    case Kind::kAllReduceSum:
      for (int s = 1; s < world_size_; ++s) out[0].add_(in[s]);
      break;
    case Kind::kAllReduceMax:
      for (int s = 1; s < world_size_; ++s) out[0].copy_(out[0].max(in[s]));
      break;
    case Kind::kBroadcast:
      break;
    case Kind::kScatter:
      for (int r = 0; r < world_size_; ++r) {
        const int64_t n = out[r].numel();
        out[r].copy_(in[0].narrow(0, r * n, n));
      }
      return;
  }
  for (int r = 1; r < world_size_; ++r) out[r].copy_(out[0]);
}

void InProcessHub::Wait(uint64_t sequence) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool in_time = changed_.wait_for(lock, timeout_, [&] {
    return operations_[sequence].done || !aborted_.empty();
  });
  const Operation& operation = operations_[sequence];
  TORCH_CHECK(operation.error.empty(),
              "in-process collective: ", operation.error);
  TORCH_CHECK(operation.done || aborted_.empty(),
              "in-process collective: ", aborted_);
  TORCH_CHECK(in_time, "in-process collective ", sequence,
              " timed out: another rank did not issue it");
}

bool InProcessHub::Done(uint64_t sequence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return operations_[sequence].done;
}

void InProcessHub::Abort(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_.empty()) aborted_ = why;
  changed_.notify_all();
}

namespace {

class InProcessWork final : public c10d::Work {
 public:
  InProcessWork(std::shared_ptr<InProcessHub> hub, uint64_t sequence)
      : hub_(std::move(hub)), sequence_(sequence) {}
  bool isCompleted() override { return hub_->Done(sequence_); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    hub_->Wait(sequence_);
    return true;
  }

 private:
  std::shared_ptr<InProcessHub> hub_;
  uint64_t sequence_;
};

class InProcessBackend final : public c10d::Backend {
 public:
  InProcessBackend(std::shared_ptr<InProcessHub> hub, int rank)
      : Backend(rank, hub->world_size()), hub_(std::move(hub)) {}
  const std::string getBackendName() const override { return "in_process"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& /*options*/) override {
    return Post(InProcessHub::Kind::kAllGather, output, input);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& /*options*/) override {
    return Post(InProcessHub::Kind::kReduceScatter, output, input);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override {
    return Post(options.reduceOp == c10d::ReduceOp::MAX
                    ? InProcessHub::Kind::kAllReduceMax
                    : InProcessHub::Kind::kAllReduceSum,
                tensors[0], tensors[0]);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& /*options*/) override {
    return Post(InProcessHub::Kind::kBroadcast, tensors[0], tensors[0]);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& /*options*/) override {
    // The parts are slices of one tensor, one after the other.
    const int64_t numel = outputs[0].numel() * getSize();
    return Post(
        InProcessHub::Kind::kScatter, outputs[0],
        inputs.empty() ? at::Tensor() : inputs[0][0].as_strided({numel}, {1}));
  }

 private:
  c10::intrusive_ptr<c10d::Work> Post(InProcessHub::Kind kind,
                                      const at::Tensor& output,
                                      const at::Tensor& input) {
    const uint64_t sequence = next_++;
    hub_->Post(getRank(), sequence, kind, output, input);
    return c10::make_intrusive<InProcessWork>(hub_, sequence);
  }

  std::shared_ptr<InProcessHub> hub_;
  uint64_t next_ = 0;
};

}  // namespace

ProcessGroupPtr GroupOf(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(),
                                                       backend->getSize());
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

ProcessGroupPtr MakeInProcessGroup(const std::shared_ptr<InProcessHub>& hub,
                                   int rank) {
  return GroupOf(c10::make_intrusive<InProcessBackend>(hub, rank));
}

}  // namespace composable
