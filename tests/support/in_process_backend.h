// A c10d backend for ranks that are threads of one process: collectives are
// copies between their tensors, with no memory of their own. Sums are taken in
// the order of the ranks, so they are the same bits on every rank and in every
// run.
//
//   auto hub = std::make_shared<composable::InProcessHub>(2, timeout);
//   auto group = composable::MakeInProcessGroup(hub, /*rank=*/0);
//
// A collective is done by the last rank that issues it. Ranks that issue
// different ones at the same place all fail.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/process_group.h"

namespace composable {

class InProcessHub {
 public:
  enum class Kind {
    kAllGather,
    kReduceScatter,
    kAllReduceSum,
    kAllReduceMax,
    kBroadcast,
    kScatter  // the input of rank 0; others have none
  };

  InProcessHub(int world_size, std::chrono::milliseconds timeout);

  int world_size() const { return world_size_; }

  // Rank `rank` takes part in its `sequence`-th collective.
  void Post(int rank, uint64_t sequence, Kind kind, at::Tensor output,
            at::Tensor input);
  // Throws after the timeout, or if the hub was aborted.
  void Wait(uint64_t sequence);
  bool Done(uint64_t sequence);

  // Makes every wait fail, now and later.
  void Abort(const std::string& why);

 private:
  struct Operation {
    Kind kind = Kind::kAllGather;  // of the first that posted, as the next two
    int64_t numel = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    int posted = 0;
    bool done = false;
    std::string error;
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
  };
  void Execute(Operation& operation) const;

  const int world_size_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Operation> operations_;
  std::string aborted_;
};

ProcessGroupPtr MakeInProcessGroup(const std::shared_ptr<InProcessHub>& hub,
                                   int rank);

// A process group whose CPU tensors are served by `backend`.
ProcessGroupPtr GroupOf(const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace composable
