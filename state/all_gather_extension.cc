#include "state/all_gather_extension.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/util/Exception.h>

#include "state/chunks.h"

namespace composable {

void UnstackChunks(const at::Tensor& stacked, int64_t dim,
                   const at::Tensor& out) {
  const at::NoGradGuard no_grad;
  const Chunks chunks = Chunks::Along(dim, out.sizes(), stacked.size(0));
  TORCH_CHECK_VALUE(
      stacked.sizes().slice(1) == at::IntArrayRef(chunks.padded_sizes()),
      "UnstackChunks: expected one chunk of sizes ",
      at::IntArrayRef(chunks.padded_sizes()), " from each of ", stacked.size(0),
      " ranks, got ", stacked.sizes(), ".");
  const at::Tensor dense =
      stacked.select(0, 0).is_contiguous() ? stacked : stacked.contiguous();
  Chunks::Views views;
  chunks.AppendViews(out, dense, 0, dense.stride(0), views);
  at::_foreach_copy_(views.wholes, views.chunks);
}

}  // namespace composable
