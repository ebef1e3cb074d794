#include "state/payload_pieces.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "state/chunks.h"
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
  if (const Chunks* chunks = param.chunks()) {
    const at::Tensor whole =
        at::empty_strided(param.sizes(), param.strides(), payload.options());
    if (chunks->is_copies()) {
      const at::Tensor first =
          payload.narrow(0, param.local_offset(), param.numel()).clone();
      return internal::MakeTensor(internal::StorageOf(first),
                                  first.scalar_type(), param.sizes(),
                                  param.strides(), 0);
    }
    Chunks::Views views;
    chunks->AppendViews(whole, payload, param.local_offset(), shape.chunk_numel,
                        views);
    at::_foreach_copy_(views.wholes, views.chunks);
    return whole;
  }
  const at::Tensor flat = at::empty({param.numel()}, payload.options());
  ForEachPiece(param, shape, [&](int64_t begin, int64_t at, int64_t count) {
    flat.narrow(0, begin, count).copy_(payload.narrow(0, at, count));
  });
  return internal::MakeTensor(internal::StorageOf(flat), flat.scalar_type(),
                              param.sizes(), param.strides(), 0);
}

void ZeroInPayload(const FSDPParam& param, PayloadShape shape,
                   const at::Tensor& payload) {
  if (const Chunks* chunks = param.chunks()) {
    const int64_t ranks = payload.numel() / shape.chunk_numel;
    for (int64_t r = 0; r < ranks; ++r) {
      payload
          .narrow(0, r * shape.chunk_numel + param.local_offset(),
                  chunks->numel_of(r))
          .zero_();
    }
    return;
  }
  ForEachPiece(param, shape, [&](int64_t /*begin*/, int64_t at, int64_t count) {
    payload.narrow(0, at, count).zero_();
  });
}

}  // namespace composable
