#include "collectives/collective.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <exception>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/hash.h"

namespace composable {
namespace {

uint64_t Fingerprint(const Collective& collective) {
  uint64_t hash = HashMix(0, static_cast<uint64_t>(collective.kind));
  hash = HashMix(hash, static_cast<uint64_t>(collective.dtype));
  hash = HashMix(hash, static_cast<uint64_t>(collective.part_numel));
  if (collective.label == nullptr) return hash;
  hash = HashMix(hash, HashString(collective.label->name));
  hash = HashMix(hash, collective.label->plan);
  return HashMix(hash, static_cast<uint64_t>(collective.label->serial));
}

bool ReducesWhole(const c10d::Backend& backend, const Collective& collective) {
  return collective.kind == CollectiveKind::kReduceScatter &&
         backend.getBackendName() == "gloo";
}

}  // namespace

Collective::Collective(CollectiveKind kind, const at::Tensor& part,
                       CollectiveLabelPtr label)
    : kind(kind),
      dtype(part.scalar_type()),
      device(part.device()),
      part_numel(part.numel()),
      label(std::move(label)),
      fingerprint(Fingerprint(*this)) {}

std::string Collective::text() const {
  const char* name = "all-reduce";
  if (kind == CollectiveKind::kAllGather) name = "all-gather";
  if (kind == CollectiveKind::kReduceScatter) name = "reduce-scatter";
  if (kind == CollectiveKind::kBroadcast) name = "broadcast";
  if (kind == CollectiveKind::kScatter) name = "scatter";
  return label == nullptr ? name
                          : absl::StrCat(name, " of '", label->name, "'");
}

std::string Collective::detail() const {
  std::string text =
      absl::StrCat(part_numel * static_cast<int64_t>(c10::elementSize(dtype)),
                   " bytes per rank as ", c10::toString(dtype));
  if (kind == CollectiveKind::kAllReduceMax) absl::StrAppend(&text, ", max");
  if (label == nullptr) return text;
  if (label->serial != 0) {
    absl::StrAppend(&text, ", sharded module ", label->serial);
  }
  if (label->plan != 0) {
    absl::StrAppend(&text, ", plan ", absl::Hex(label->plan, absl::kZeroPad16));
  }
  return text;
}

c10::intrusive_ptr<c10d::Work> Post(c10d::Backend& backend,
                                    const Collective& collective,
                                    at::Tensor output, at::Tensor input) {
  switch (collective.kind) {
    case CollectiveKind::kAllGather:
      return backend._allgather_base(output, input);
    case CollectiveKind::kReduceScatter: {
      if (ReducesWhole(backend, collective)) {
        output = std::move(input);
        break;
      }
      c10d::ReduceScatterOptions options;
      options.reduceOp = c10d::ReduceOp::SUM;
      return backend._reduce_scatter_base(output, input, options);
    }
    case CollectiveKind::kBroadcast: {
      std::vector<at::Tensor> tensors{std::move(output)};
      return backend.broadcast(tensors);
    }
    case CollectiveKind::kScatter: {
      std::vector<at::Tensor> outputs{std::move(output)};
      std::vector<std::vector<at::Tensor>> inputs;
      if (backend.getRank() == 0) {
        inputs.push_back(
            input.reshape({backend.getSize(), collective.part_numel}).unbind());
      }
      return backend.scatter(outputs, inputs);
    }
    case CollectiveKind::kAllReduceSum:
    case CollectiveKind::kAllReduceMax:
      break;
  }
  c10d::AllreduceOptions options;
  options.reduceOp = collective.kind == CollectiveKind::kAllReduceMax
                         ? c10d::ReduceOp::MAX
                         : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors{std::move(output)};
  return backend.allreduce(tensors, options);
}

void WriteOutput(const c10d::Backend& backend, const Collective& collective,
                 const at::Tensor& output, const at::Tensor& input) {
  if (!ReducesWhole(backend, collective)) return;
  const at::NoGradGuard no_grad;
  const int64_t part = collective.part_numel;
  output.copy_(input.narrow(0, backend.getRank() * part, part));
}

void TakePart(c10d::Backend& backend, const Collective& collective) {
  const int64_t part = collective.part_numel;
  const int64_t whole = part * backend.getSize();
  const bool gather = collective.kind == CollectiveKind::kAllGather;
  const bool scatter = collective.kind == CollectiveKind::kReduceScatter ||
                       collective.kind == CollectiveKind::kScatter;
  const auto options =
      at::TensorOptions(collective.dtype).device(collective.device);
  const at::Tensor output = at::zeros({gather ? whole : part}, options);
  const at::Tensor input = at::zeros({scatter ? whole : part}, options);
  try {
    Post(backend, collective, output, input)->wait();
  } catch (const std::exception&) {
    // The caller has an error to throw already.
  }
}

}  // namespace composable
