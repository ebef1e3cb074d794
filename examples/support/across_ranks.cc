#include "examples/support/across_ranks.h"

#include <c10/util/Exception.h>

#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace examples {
namespace {

// Waits, and says what for if it fails.
void Wait(const c10d::ProcessGroup& group, const char* what,
          const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    work->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistError, false, what, " failed on rank ",
                     group.getRank(), " of ", group.getSize(), ": ",
                     error.what(),
                     ". If another rank has failed, its error is the cause.");
  }
}

}  // namespace

double MeanOverRanks(c10d::ProcessGroup& group, const at::Tensor& value) {
  std::vector<at::Tensor> sum = {value.detach().to(at::kDouble,
                                                   /*non_blocking=*/false,
                                                   /*copy=*/true)};
  Wait(group, "all-reduce of a mean over ranks", group.allreduce(sum));
  return sum[0].item<double>() / group.getSize();
}

std::vector<std::vector<int64_t>> GatherFromRanks(
    c10d::ProcessGroup& group, const std::vector<int64_t>& values) {
  std::vector<at::Tensor> mine = {at::tensor(values, at::kLong)};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < group.getSize(); ++rank)
    all[0].push_back(at::empty_like(mine[0]));
  Wait(group, "all-gather of numbers of all ranks", group.allgather(all, mine));
  std::vector<std::vector<int64_t>> rows;
  for (const at::Tensor& row : all[0]) {
    const auto* data = row.const_data_ptr<int64_t>();
    rows.emplace_back(data, data + row.numel());
  }
  return rows;
}

}  // namespace examples
