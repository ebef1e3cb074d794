// The collectives of one group of parameters, over a c10d process group.
//
//   composable::Communicator comm(group, c10::kCPU);
//   auto pending = comm.AllGather(whole, shard);   // returns at once
//   // ... other work ...
//   pending->Wait();                               // `whole` may be read now
//
// Every rank must issue the same collectives of one process group in the same
// order. Where they don't, every rank throws c10::DistError before anything is
// sent, or from the wait for what was sent; see Note [Agreed order]. Tensors
// must be contiguous and stay alive and unchanged until Wait() has returned. A
// rank that does not answer makes Wait() throw after the group's timeout.
//
// Thread-compatible: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/collective_label.h"

namespace c10d {
class Backend;
class ProcessGroup;
class Work;
}  // namespace c10d

namespace composable {

struct Collective;
class AllGather;
class ReduceScatter;

// A collective that was issued. Dropping it without Wait() waits for it and
// swallows its error: the buffers it uses may be reused afterwards.
class PendingCollective {
 public:
  virtual ~PendingCollective() = default;
  // Blocks until the outputs may be read. Throws what the collective failed
  // with, each time. Later calls do nothing else.
  virtual void Wait() = 0;
};

using PendingCollectivePtr = std::unique_ptr<PendingCollective>;

class Communicator {
 public:
  // Throws c10::ValueError if `group` is null or has no backend for `device`.
  Communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
               c10::DeviceType device);
  ~Communicator();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // A number for a label, so that equal modules are told apart: how many times
  // this was called on the process group. 0 where the order is not checked.
  int64_t NextSerial();

  // A number per rank that callers keep over the process group, alike on all
  // ranks: such as bytes given to each. Zeros where the order is not checked.
  std::vector<int64_t> tally() const;
  void AddToTally(const std::vector<int64_t>& more);

  // `label` names a collective in errors, and holds what must be equal on all
  // ranks. They throw c10::DistError if the ranks are not about to run the same
  // collective.

  // output[rank * n, (rank + 1) * n) = that rank's input, n = input.numel().
  // `input` may be this rank's part of `output`. `custom`, if not null, does the
  // work where there are several ranks.
  PendingCollectivePtr AllGather(
      at::Tensor output, at::Tensor input,
      const CollectiveLabelPtr& label = nullptr,
      const std::shared_ptr<composable::AllGather>& custom = nullptr);

  // output = sum over ranks of their input[rank * n, (rank + 1) * n),
  // n = output.numel(). May overwrite `input`.
  PendingCollectivePtr ReduceScatter(
      at::Tensor output, at::Tensor input,
      const CollectiveLabelPtr& label = nullptr,
      const std::shared_ptr<composable::ReduceScatter>& custom = nullptr);

  enum class Reduction : uint8_t { kSum, kMax };
  // In place; returns when done.
  void AllReduce(at::Tensor tensor, Reduction reduction,
                 const CollectiveLabelPtr& label = nullptr);
  // In place; returns at once.
  PendingCollectivePtr StartAllReduce(
      at::Tensor tensor, Reduction reduction,
      const CollectiveLabelPtr& label = nullptr);

  c10::intrusive_ptr<c10d::ProcessGroup> group() const;

  // tensor = that of rank 0; returns when done.
  void Broadcast(at::Tensor tensor, const CollectiveLabelPtr& label = nullptr);

  // output = rank 0's input[rank * n, (rank + 1) * n), n = output.numel();
  // `input` may be undefined on other ranks. Both are flat. Returns when done.
  // In pieces, because Gloo has memory of the size of its input beside it.
  void Scatter(const at::Tensor& output, const at::Tensor& input,
               const CollectiveLabelPtr& label = nullptr);

  // Two communicators of one process group compare equal.
  friend bool operator==(const Communicator& a, const Communicator& b) {
    return a.backend_ == b.backend_;
  }

 private:
  // Declared without its type's definition, which costs seconds to include.
  struct BackendRef;
  // Posts it; may be replaced.
  using Poster = std::function<c10::intrusive_ptr<c10d::Work>()>;
  PendingCollectivePtr Start(const Collective& collective, at::Tensor output,
                             at::Tensor input, const Poster& custom = nullptr);
  std::shared_ptr<BackendRef> owned_;
  const void* backend_ = nullptr;  // identity
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace composable
