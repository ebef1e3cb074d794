#include "collectives/communicator.h"

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace composable {

struct Communicator::BackendRef {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::Backend> backend;
};

namespace {

class PendingWork final : public PendingCollective {
 public:
  PendingWork(c10::intrusive_ptr<c10d::Work> work, at::Tensor output,
              at::Tensor input)
      : work_(std::move(work)),
        output_(std::move(output)),
        input_(std::move(input)) {}
  ~PendingWork() override {
    try {
      Wait();
    } catch (const std::exception&) {
      // Whoever drops the result has another error to report already.
    }
  }
  void Wait() override {
    if (error_ != nullptr) std::rethrow_exception(error_);
    if (work_ == nullptr) return;
    const auto work = std::exchange(work_, nullptr);
    try {
      work->wait();
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    output_.reset();
    input_.reset();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor output_;  // kept alive for the backend's threads
  at::Tensor input_;
  std::exception_ptr error_;
};

class Done final : public PendingCollective {
 public:
  void Wait() override {}
};

}  // namespace

Communicator::Communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           c10::DeviceType device)
    : owned_(std::make_shared<BackendRef>()) {
  TORCH_CHECK_VALUE(group != nullptr, "expected a process group, got none.");
  owned_->group = group;
  const auto devices = group->getDeviceTypes();
  TORCH_CHECK_VALUE(
      std::any_of(devices.begin(), devices.end(),
                  [&](const c10::Device& d) { return d.type() == device; }),
      "expected a process group with a backend for ",
      c10::DeviceTypeName(device, /*lower_case=*/true),
      " tensors, got one without. Name it in ProcessGroupOptions().backend.");
  owned_->backend = group->getBackend(device);
  backend_ = owned_->backend.get();
  rank_ = owned_->backend->getRank();
  size_ = owned_->backend->getSize();
}

Communicator::~Communicator() = default;

PendingCollectivePtr Communicator::AllGather(at::Tensor output,
                                             at::Tensor input) {
  TORCH_INTERNAL_ASSERT(output.numel() == input.numel() * size_);
  if (size_ == 1) {
    output.copy_(input);
    return std::make_unique<Done>();
  }
  auto work = owned_->backend->_allgather_base(output, input);
  return std::make_unique<PendingWork>(std::move(work), std::move(output),
                                       std::move(input));
}

PendingCollectivePtr Communicator::ReduceScatter(at::Tensor output,
                                                 at::Tensor input) {
  TORCH_INTERNAL_ASSERT(input.numel() == output.numel() * size_);
  if (size_ == 1) {
    output.copy_(input);
    return std::make_unique<Done>();
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  auto work = owned_->backend->_reduce_scatter_base(output, input, options);
  return std::make_unique<PendingWork>(std::move(work), std::move(output),
                                       std::move(input));
}

void Communicator::AllReduce(at::Tensor tensor, Reduction reduction) {
  if (size_ == 1) return;
  c10d::AllreduceOptions options;
  options.reduceOp =
      reduction == Reduction::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors{std::move(tensor)};
  owned_->backend->allreduce(tensors, options)->wait();
}

}  // namespace composable
