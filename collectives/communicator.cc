#include "collectives/communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "collectives/agreement.h"
#include "collectives/collective.h"
#include "collectives/custom_collectives.h"

namespace composable {

struct Communicator::BackendRef {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::shared_ptr<OrderAgreement> agreement;  // null: the order isn't checked
};

namespace {

// A wait this long is unusual, so it is worth a look into the store.
constexpr std::chrono::milliseconds kFirstSlice(200);
constexpr std::chrono::milliseconds kLongestSlice(1000);

[[noreturn]] void ThrowFailure(const Collective& collective,
                               const c10d::Backend& backend,
                               const std::exception& cause) {
  C10_THROW_ERROR(
      DistError,
      absl::StrCat(collective.text(), " failed on rank ", backend.getRank(),
                   " of ", backend.getSize(), ": ", TextOf(cause),
                   ". If another rank has failed, its error is the cause."));
}

class PendingWork final : public PendingCollective {
 public:
  PendingWork(Collective collective, c10::intrusive_ptr<c10d::Backend> backend,
              std::shared_ptr<OrderAgreement> agreement,
              c10::intrusive_ptr<c10d::Work> work, at::Tensor output,
              at::Tensor input, bool custom)
      : collective_(std::move(collective)),
        backend_(std::move(backend)),
        agreement_(std::move(agreement)),
        work_(std::move(work)),
        output_(std::move(output)),
        input_(std::move(input)),
        custom_(custom) {}
  ~PendingWork() override {
    try {
      Wait();
    } catch (const std::exception&) {
      // Whoever drops the result has another error to report already.
    }
  }
  void Wait() override {
    if (error_ != nullptr) std::rethrow_exception(error_);
    if (backend_ == nullptr) return;
    try {
      if (work_ != nullptr) WaitForWork();
      if (agreement_ != nullptr) agreement_->ThrowIfBroken();
      if (!custom_) WriteOutput(*backend_, collective_, output_, input_);
    } catch (...) {
      error_ = std::current_exception();
    }
    work_.reset();
    output_.reset();
    input_.reset();
    agreement_.reset();
    backend_.reset();
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  // Returns or throws when the backend has finished with the tensors.
  void WaitForWork() {
    try {
      // On a GPU the wait is the stream's, and returns at once.
      if (agreement_ == nullptr || collective_.device.type() != c10::kCPU) {
        work_->wait();
      } else {
        WaitInSlices();
      }
    } catch (const std::exception& error) {
      // It may know the cause.
      if (agreement_ != nullptr) agreement_->Listen(*backend_);
      ThrowFailure(collective_, *backend_, error);
    }
  }

  void WaitInSlices() {
    auto slice = kFirstSlice;
    while (!WaitFor(slice)) {
      try {
        agreement_->Listen(*backend_);
      } catch (const c10::DistError&) {
        work_->wait();
        throw;
      }
      slice = std::min(2 * slice, kLongestSlice);
    }
  }

  // False if the time is over; throws what the work failed with.
  bool WaitFor(std::chrono::milliseconds slice) {
    try {
      work_->wait(slice);
      return true;
    } catch (const std::exception&) {
      // That may be the end of the slice, too.
      if (!work_->isCompleted()) return false;
    }
    work_->wait();
    return true;
  }

  Collective collective_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<OrderAgreement> agreement_;
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor output_;  // kept alive for the backend's threads
  at::Tensor input_;
  bool custom_;  // it writes the output itself
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
  owned_->agreement = OrderAgreement::Of(*group, *owned_->backend);
  backend_ = owned_->backend.get();
  rank_ = owned_->backend->getRank();
  size_ = owned_->backend->getSize();
}

Communicator::~Communicator() = default;

int64_t Communicator::NextSerial() {
  return owned_->agreement == nullptr ? 0 : owned_->agreement->NextSerial();
}

c10::intrusive_ptr<c10d::ProcessGroup> Communicator::group() const {
  return owned_->group;
}

std::vector<int64_t> Communicator::tally() const {
  return owned_->agreement == nullptr ? std::vector<int64_t>(size_, 0)
                                      : owned_->agreement->tally();
}

void Communicator::AddToTally(const std::vector<int64_t>& more) {
  if (owned_->agreement != nullptr) owned_->agreement->AddToTally(more);
}

PendingCollectivePtr Communicator::Start(const Collective& collective,
                                         at::Tensor output, at::Tensor input,
                                         const Poster& custom) {
  BackendRef& ref = *owned_;
  if (ref.agreement != nullptr) ref.agreement->Check(*ref.backend, collective);
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = custom ? custom() : Post(*ref.backend, collective, output, input);
  } catch (const std::exception& error) {
    ThrowFailure(collective, *ref.backend, error);
  }
  return std::make_unique<PendingWork>(collective, ref.backend, ref.agreement,
                                       std::move(work), std::move(output),
                                       std::move(input), custom != nullptr);
}

PendingCollectivePtr Communicator::AllGather(
    at::Tensor output, at::Tensor input, const CollectiveLabelPtr& label,
    const std::shared_ptr<composable::AllGather>& custom) {
  TORCH_INTERNAL_ASSERT(output.numel() == input.numel() * size_);
  if (size_ == 1) {
    if (output.const_data_ptr() != input.const_data_ptr()) output.copy_(input);
    return std::make_unique<Done>();
  }
  const Collective collective(CollectiveKind::kAllGather, input, label);
  Poster poster;
  if (custom != nullptr) {
    poster = [&] {
      return (*custom)(output, input, owned_->group, /*async_op=*/true);
    };
  }
  return Start(collective, output, input, poster);
}

PendingCollectivePtr Communicator::ReduceScatter(
    at::Tensor output, at::Tensor input, const CollectiveLabelPtr& label,
    const std::shared_ptr<composable::ReduceScatter>& custom) {
  TORCH_INTERNAL_ASSERT(input.numel() == output.numel() * size_);
  if (size_ == 1) {
    output.copy_(input);
    return std::make_unique<Done>();
  }
  const Collective collective(CollectiveKind::kReduceScatter, output, label);
  Poster poster;
  if (custom != nullptr) {
    poster = [&] {
      return (*custom)(output, input, owned_->group, /*async_op=*/true);
    };
  }
  return Start(collective, output, input, poster);
}

void Communicator::AllReduce(at::Tensor tensor, Reduction reduction,
                             const CollectiveLabelPtr& label) {
  StartAllReduce(std::move(tensor), reduction, label)->Wait();
}

PendingCollectivePtr Communicator::StartAllReduce(
    at::Tensor tensor, Reduction reduction, const CollectiveLabelPtr& label) {
  if (size_ == 1) return std::make_unique<Done>();
  const Collective collective(reduction == Reduction::kSum
                                  ? CollectiveKind::kAllReduceSum
                                  : CollectiveKind::kAllReduceMax,
                              tensor, label);
  return Start(collective, std::move(tensor), at::Tensor());
}

void Communicator::Broadcast(at::Tensor tensor,
                             const CollectiveLabelPtr& label) {
  if (size_ == 1) return;
  const Collective collective(CollectiveKind::kBroadcast, tensor, label);
  Start(collective, std::move(tensor), at::Tensor())->Wait();
}

void Communicator::Scatter(const at::Tensor& output, const at::Tensor& input,
                           const CollectiveLabelPtr& label) {
  TORCH_INTERNAL_ASSERT(rank_ != 0 || input.numel() == output.numel() * size_);
  if (size_ == 1) {
    output.copy_(input);
    return;
  }
  constexpr int64_t kPieces = 16;
  constexpr int64_t kSmallestPiece = 4096;
  const int64_t numel = output.numel();
  const int64_t most =
      std::max(kSmallestPiece, (numel + kPieces - 1) / kPieces);
  for (int64_t at = 0; at < numel; at += most) {
    const int64_t piece = std::min(most, numel - at);
    const at::Tensor mine = output.narrow(0, at, piece);
    const Collective collective(CollectiveKind::kScatter, mine, label);
    at::Tensor all;
    if (rank_ == 0) all = input.view({size_, numel}).narrow(1, at, piece);
    Start(collective, mine, std::move(all))->Wait();
  }
}

}  // namespace composable
