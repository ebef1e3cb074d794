// Burgers' equation on a ring that is cut into one piece per rank; nothing in
// here knows about neural networks.
//
//   const Burgers fine(group, /*cells_here=*/256);
//   at::Tensor u = fine.Centers().sin();      // this rank's cells
//   u = fine.Advance(u, /*t=*/0, /*dt=*/1e-3);
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace examples {

// u_t + (u^2 / 2)_x = nu u_xx + sin(x - t) / 2, x in [0, 2 pi), by a finite
// volume scheme of first order. Every rank holds as many cells, in the order of
// the ranks.
class Burgers {
 public:
  Burgers(c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t cells_here,
          double viscosity = 0.01)
      : group_(std::move(group)),
        cells_(cells_here),
        dx_(2 * M_PI / static_cast<double>(cells_here * group_->getSize())),
        viscosity_(viscosity) {}

  // x of this rank's cells.
  at::Tensor Centers() const {
    const double first = static_cast<double>(cells_ * group_->getRank()) + 0.5;
    return (torch::arange(cells_) + first) * dx_;
  }

  // (collective) `u` with `width` cells of each neighbour beside it.
  at::Tensor WithHalo(const at::Tensor& u, int64_t width) const {
    const int size = group_->getSize(), rank = group_->getRank();
    std::vector<at::Tensor> mine = {
        torch::cat({u.slice(0, 0, width), u.slice(0, cells_ - width)})};
    std::vector<std::vector<at::Tensor>> edges(1);
    for (int i = 0; i < size; ++i)
      edges[0].push_back(torch::empty_like(mine[0]));
    group_->allgather(edges, mine)->wait();
    return torch::cat({edges[0][(rank + size - 1) % size].slice(0, width), u,
                       edges[0][(rank + 1) % size].slice(0, 0, width)});
  }

  // (collective) `u` one step later.
  at::Tensor Advance(const at::Tensor& u, double t, double dt) const {
    const at::Tensor all = WithHalo(u, 1);
    const at::Tensor left = all.slice(0, 0, -1), right = all.slice(0, 1);
    const at::Tensor speed = torch::maximum(left.abs(), right.abs());
    const at::Tensor jump = right - left;
    const at::Tensor flux = (left.square() + right.square()) / 4 -
                            speed * jump / 2 - jump * (viscosity_ / dx_);
    const at::Tensor force = torch::sin(Centers() - t) / 2;
    return u + (force - torch::diff(flux) / dx_) * dt;
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t cells_;  // of this rank
  double dx_;
  double viscosity_;
};

}  // namespace examples
