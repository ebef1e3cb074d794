// A c10d backend that counts the collectives that pass through it to another.
//
//   auto counted = composable::CountCollectives(rank.group);
//   fully_shard(model, FullyShardOptions().mesh(counted.group));
//   model(x).sum().backward();
//   EXPECT_EQ(counted.counts->reduce_scatters, 1);
#pragma once

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "tests/support/in_process_backend.h"

namespace composable {

struct CollectiveCounts {
  int all_gathers = 0;
  int reduce_scatters = 0;
  int all_reduces = 0;
  // Of what all ranks give together, as this rank gets it (all-gathers) or gives
  // it (reduce-scatters, all-reduces).
  int64_t gathered_bytes = 0;
  int64_t scattered_bytes = 0;
  int64_t all_reduced_bytes = 0;
};

class CountingBackend final : public c10d::Backend {
 public:
  CountingBackend(c10::intrusive_ptr<c10d::Backend> inner,
                  std::shared_ptr<CollectiveCounts> counts)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        counts_(std::move(counts)) {}
  const std::string getBackendName() const override { return "counting"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    ++counts_->all_gathers;
    counts_->gathered_bytes += static_cast<int64_t>(output.nbytes());
    return inner_->_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    ++counts_->reduce_scatters;
    counts_->scattered_bytes += static_cast<int64_t>(input.nbytes());
    return inner_->_reduce_scatter_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override {
    ++counts_->all_reduces;
    counts_->all_reduced_bytes += static_cast<int64_t>(tensors.at(0).nbytes());
    return inner_->allreduce(tensors, options);
  }
  // Of start values: not counted.
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override {
    return inner_->scatter(outputs, inputs, options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<CollectiveCounts> counts_;
};

struct Counted {
  ProcessGroupPtr group;
  std::shared_ptr<CollectiveCounts> counts;
  ProcessGroupPtr inner;  // kept alive
};

inline Counted CountCollectives(const ProcessGroupPtr& group) {
  auto counts = std::make_shared<CollectiveCounts>();
  return {GroupOf(c10::make_intrusive<CountingBackend>(
              group->getBackend(c10::kCPU), counts)),
          counts, group};
}

}  // namespace composable
