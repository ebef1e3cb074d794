// One collective: what it is, what it is called in errors, how it is posted.
//
//   const auto label = composable::MakeCollectiveLabel("blocks.0", plan, 2);
//   const composable::Collective gather(
//       composable::CollectiveKind::kAllGather, shard, label);
//   gather.text();   // all-gather of 'blocks.0'
//   auto work = composable::Post(*backend, gather, whole, shard);
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>

#include "collectives/collective_label.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace composable {

enum class CollectiveKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduceSum,
  kAllReduceMax,
  kBroadcast,
  kScatter
};

struct Collective {
  // `part` is one rank's part: an all-gather's input, a reduce-scatter's or
  // scatter's output, all of an all-reduce or broadcast. `label` may be null.
  Collective(CollectiveKind kind, const at::Tensor& part,
             CollectiveLabelPtr label);

  CollectiveKind kind;
  c10::ScalarType dtype;
  c10::Device device;
  int64_t part_numel;
  CollectiveLabelPtr label;
  // Of all but the device: ranks may run a collective together if it is equal.
  uint64_t fingerprint;

  // As errors call it.
  std::string text() const;
  // What tells apart two that have the same text.
  std::string detail() const;
};

// Starts `collective`; `input` is ignored by an all-reduce and a broadcast, which
// are in place, may be overwritten by a reduce-scatter, and is read on rank 0
// alone, the root, by a scatter. When the work has ended, call
// WriteOutput with the same arguments.
//
// Gloo's reduce-scatter is an all-reduce of a copy whose wait ignores its
// timeout. Here it is one of `input` itself.
c10::intrusive_ptr<c10d::Work> Post(c10d::Backend& backend,
                                    const Collective& collective,
                                    at::Tensor output, at::Tensor input);

void WriteOutput(const c10d::Backend& backend, const Collective& collective,
                 const at::Tensor& output, const at::Tensor& input);

// Takes part in `collective` with memory of its own and zeros, so that ranks
// that have posted it already can end it. Blocks until it has ended, and
// ignores its error.
void TakePart(c10d::Backend& backend, const Collective& collective);

}  // namespace composable
