#include "examples/support/across_ranks.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace examples {

double MeanOverRanks(c10d::ProcessGroup& group, const at::Tensor& value) {
  std::vector<at::Tensor> sum = {value.detach().to(at::kDouble,
                                                   /*non_blocking=*/false,
                                                   /*copy=*/true)};
  group.allreduce(sum)->wait();
  return sum[0].item<double>() / group.getSize();
}

std::vector<std::vector<int64_t>> GatherFromRanks(
    c10d::ProcessGroup& group, const std::vector<int64_t>& values) {
  std::vector<at::Tensor> mine = {at::tensor(values, at::kLong)};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < group.getSize(); ++rank)
    all[0].push_back(at::empty_like(mine[0]));
  group.allgather(all, mine)->wait();
  std::vector<std::vector<int64_t>> rows;
  for (const at::Tensor& row : all[0]) {
    const auto* data = row.const_data_ptr<int64_t>();
    rows.emplace_back(data, data + row.numel());
  }
  return rows;
}

}  // namespace examples
