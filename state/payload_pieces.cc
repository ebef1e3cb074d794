#include "state/payload_pieces.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "state/tensor_access.h"

namespace composable {
namespace {

// Calls `visit` with where each rank's piece of `param` begins, in the
// parameter and in the payload, and how long it is.
template <typename Visit>
void ForEachPiece(const FSDPParam& param, PayloadShape shape, Visit visit) {
  for (int64_t begin = 0; begin < param.numel();) {
    const int64_t at = param.offset() + begin;
    const int64_t rank = at / shape.shard_numel;
    const int64_t local = at - rank * shape.shard_numel;
    const int64_t count =
        std::min(param.numel() - begin, shape.shard_numel - local);
    visit(begin, rank * shape.chunk_numel + local, count);
    begin += count;
  }
}

}  // namespace

at::Tensor WholeOfPayload(const FSDPParam& param, PayloadShape shape,
                          const at::Tensor& payload) {
  const at::Tensor flat = at::empty({param.numel()}, payload.options());
  ForEachPiece(param, shape, [&](int64_t begin, int64_t at, int64_t count) {
    flat.narrow(0, begin, count).copy_(payload.narrow(0, at, count));
  });
  return internal::MakeTensor(internal::StorageOf(flat), flat.scalar_type(),
                              param.sizes(), param.strides(), 0);
}

void ZeroInPayload(const FSDPParam& param, PayloadShape shape,
                   const at::Tensor& payload) {
  ForEachPiece(param, shape, [&](int64_t /*begin*/, int64_t at, int64_t count) {
    payload.narrow(0, at, count).zero_();
  });
}

}  // namespace composable
