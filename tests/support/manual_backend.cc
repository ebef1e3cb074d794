#include "tests/support/manual_backend.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>
#include <utility>

namespace composable {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

std::string Name(bool gather, size_t index) {
  return (gather ? "gather " : "reduce ") + std::to_string(index);
}

// NaN in every floating type.
void Poison(const at::Tensor& tensor) {
  std::memset(tensor.mutable_data_ptr(), 0xff, tensor.nbytes());
}

}  // namespace

class ManualWork final : public c10d::Work {
 public:
  ManualWork(ManualBackend* backend, size_t index)
      : backend_(c10::intrusive_ptr<ManualBackend>::reclaim_copy(backend)),
        index_(index) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    backend_->Wait(index_);
    return true;
  }

 private:
  c10::intrusive_ptr<ManualBackend> backend_;
  size_t index_;
};

// Of what was done at once.
class DoneWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

ManualBackend::ManualBackend(int world_size, Log log)
    : Backend(/*rank=*/0, world_size), log_(std::move(log)) {}

void ManualBackend::set_finish_on_wait(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  finish_on_wait_ = on;
  no_more_waits_ = false;
}

c10::intrusive_ptr<c10d::Work> ManualBackend::Issue(bool gather,
                                                    const at::Tensor& output,
                                                    const at::Tensor& input) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t index = operations_.size();
  Poison(output);
  operations_.push_back({gather, false, false, output, input});
  log_("issue " + Name(gather, index));
  return c10::make_intrusive<ManualWork>(this, index);
}

void ManualBackend::Wait(size_t index) {
  std::unique_lock<std::mutex> lock(mutex_);
  operations_[index].waited = true;
  log_("wait " + Name(operations_[index].gather, index));
  changed_.notify_all();
  if (finish_on_wait_ && failures_.count(index) == 0) FinishLocked(index);
  const bool in_time = changed_.wait_for(lock, kPatience, [&] {
    return operations_[index].finished || failures_.count(index) != 0;
  });
  TORCH_CHECK(in_time, "the test did not finish collective ", index);
  if (operations_[index].finished) return;
  operations_[index].output.reset();
  operations_[index].input.reset();
  C10_THROW_ERROR(DistError, failures_[index]);
}

void ManualBackend::AwaitWait(size_t index) {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(changed_.wait_for(lock, kPatience,
                                [&] {
                                  return index < operations_.size() &&
                                         operations_[index].waited;
                                }),
              "no thread waited for collective ", index);
}

std::optional<size_t> ManualBackend::AwaitAnyWait() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::optional<size_t> found;
  const bool in_time = changed_.wait_for(lock, kPatience, [&] {
    for (size_t i = 0; i < operations_.size() && !found; ++i) {
      if (operations_[i].waited && !operations_[i].finished) found = i;
    }
    return found || no_more_waits_;
  });
  TORCH_CHECK(in_time, "no thread waited for a collective");
  return found;
}

void ManualBackend::NoMoreWaits() {
  const std::lock_guard<std::mutex> lock(mutex_);
  no_more_waits_ = true;
  changed_.notify_all();
}

void ManualBackend::Finish(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(index < operations_.size(), "collective ", index,
              " was not issued");
  FinishLocked(index);
  changed_.notify_all();
}

void ManualBackend::Fail(size_t index, const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failures_[index] = message;
  changed_.notify_all();
}

void ManualBackend::FinishLocked(size_t index) {
  Operation& operation = operations_[index];
  if (operation.finished) return;
  const at::NoGradGuard no_grad;
  if (operation.gather) {
    operation.output.view({getSize(), -1}).copy_(operation.input.view({1, -1}));
  } else {
    operation.output.copy_(
        operation.input.narrow(0, 0, operation.output.numel()));
    operation.output.mul_(getSize());
    Poison(operation.input);
  }
  operation.output.reset();
  operation.input.reset();
  operation.finished = true;
}

size_t ManualBackend::issued() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return operations_.size();
}

bool ManualBackend::waited(size_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return index < operations_.size() && operations_[index].waited;
}

at::Tensor ManualBackend::input(size_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return operations_.at(index).input;
}

c10::intrusive_ptr<c10d::Work> ManualBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& /*options*/) {
  return Issue(/*gather=*/true, output, input);
}

c10::intrusive_ptr<c10d::Work> ManualBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& /*options*/) {
  return Issue(/*gather=*/false, output, input);
}

c10::intrusive_ptr<c10d::Work> ManualBackend::broadcast(
    std::vector<at::Tensor>& /*tensors*/,
    const c10d::BroadcastOptions& /*options*/) {
  return c10::make_intrusive<DoneWork>();
}

c10::intrusive_ptr<c10d::Work> ManualBackend::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& /*options*/) {
  const at::NoGradGuard no_grad;
  outputs[0].copy_(inputs[0][getRank()]);
  return c10::make_intrusive<DoneWork>();
}

c10::intrusive_ptr<ManualBackend> MakeManualBackend(int world_size,
                                                    ManualBackend::Log log) {
  return c10::make_intrusive<ManualBackend>(world_size, std::move(log));
}

}  // namespace composable
