#include "state/staged_gather.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <string>
#include <utility>

#include "collectives/hash.h"
#include "state/chunks.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

constexpr int64_t kWireAlignment = 16;  // bytes

int64_t AlignUp(int64_t bytes) {
  return (bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

std::string Describe(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    if (!text.empty()) text += ", ";
    text += tensor.defined() ? c10::str(tensor.scalar_type(), tensor.sizes())
                             : "undefined";
  }
  return "[" + text + "]";
}

// What an extension throws says of which parameter.
template <typename Call>
void NamingTheParameter(const char* method, const std::string& fqn, Call call) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  try {
    call();
  } catch (c10::Error& error) {
    error.add_context(c10::str("In ", method,
                               " of the all-gather extension of parameter '",
                               fqn, "'."));
    throw;
  }
}

}  // namespace

StagedGather::StagedGather(std::vector<const FSDPParam*> params,
                           ShardLayout layout, const at::Tensor& flat_shard,
                           int rank, c10::ScalarType gathered)
    : params_(std::move(params)),
      layout_(std::move(layout)),
      dtype_(flat_shard.scalar_type()),
      gathered_(gathered),
      rank_(rank) {
  if (params_.front()->extension == nullptr) {
    chunk_bytes_ = layout_.shard_numel() *
                   static_cast<int64_t>(c10::elementSize(gathered_));
    return;
  }
  for (const FSDPParam* param : params_) {
    Extended& extended = extended_.emplace_back();
    const AllGatherInputs inputs = CallPre(*param, flat_shard);
    TORCH_CHECK_VALUE(!inputs.tensors.empty(),
                      "PreAllGather of the extension of parameter '",
                      param->fqn, "' gave no tensor: expected at least one.");
    for (const at::Tensor& tensor : inputs.tensors) {
      TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == c10::kStrided &&
                            tensor.device().is_cpu(),
                        "PreAllGather of the extension of parameter '",
                        param->fqn, "' gave ", Describe(inputs.tensors),
                        ": expected strided tensors on the CPU.");
      extended.wires.push_back(
          {chunk_bytes_, tensor.scalar_type(), tensor.sizes().vec()});
      chunk_bytes_ =
          AlignUp(chunk_bytes_ + static_cast<int64_t>(tensor.nbytes()));
    }
  }
}

uint64_t StagedGather::fingerprint() const {
  uint64_t hash = static_cast<uint64_t>(chunk_bytes_);
  for (const Extended& extended : extended_) {
    for (const Wire& wire : extended.wires) {
      hash = HashMix(hash, static_cast<uint64_t>(wire.offset));
      hash = HashMix(hash, static_cast<uint64_t>(wire.dtype));
      for (const int64_t size : wire.sizes) {
        hash = HashMix(hash, static_cast<uint64_t>(size));
      }
    }
  }
  return hash;
}

AllGatherContext StagedGather::ContextOf(const FSDPParam& param) const {
  const Chunks& chunks = *param.chunks();
  AllGatherContext context;
  context.fqn = param.fqn;
  context.rank = rank_;
  context.world_size = static_cast<int>(layout_.world_size());
  context.sizes = param.sizes();
  context.strides = param.strides();
  context.dim = chunks.dim();
  context.length = param.local_sizes()[chunks.dim()];
  context.param_dtype = gathered_;
  return context;
}

AllGatherInputs StagedGather::CallPre(const FSDPParam& param,
                                      const at::Tensor& flat_shard) const {
  const Chunks::Dims sizes = param.chunks()->padded_sizes();
  const at::Tensor padded =
      internal::MakeTensor(internal::StorageOf(flat_shard), dtype_,
                           {param.chunks()->numel()}, {1}, param.local_offset())
          .view(sizes);
  AllGatherInputs inputs;
  NamingTheParameter("PreAllGather", param.fqn, [&] {
    inputs = param.extension->PreAllGather(padded, ContextOf(param));
  });
  return inputs;
}

at::Tensor StagedGather::Staged(int64_t offset, int64_t bytes) const {
  return internal::MakeTensor(
      internal::BorrowMemory(static_cast<char*>(buffer_->data) + offset, bytes),
      c10::kByte, {bytes}, {1}, 0);
}

StagedGather::Transfer StagedGather::Begin(const at::Tensor& flat_shard,
                                           BufferPool& pool) {
  // An extension's part of this rank is made behind those of all ranks.
  buffer_ = pool.Acquire(gathered_bytes() + (is_extended() ? chunk_bytes_ : 0));
  Transfer transfer;
  transfer.output = Staged(0, gathered_bytes());
  if (!is_extended() && gathered_ != dtype_) {
    transfer.input = Staged(rank_ * chunk_bytes_, chunk_bytes_);
    transfer.input.view(gathered_).copy_(flat_shard);
    return transfer;
  }
  if (!is_extended()) {
    transfer.input = internal::MakeTensor(internal::StorageOf(flat_shard),
                                          c10::kByte, {chunk_bytes_}, {1}, 0);
    return transfer;
  }
  transfer.input = Staged(gathered_bytes(), chunk_bytes_);
  for (size_t i = 0; i < params_.size(); ++i) {
    AllGatherInputs inputs = CallPre(*params_[i], flat_shard);
    const auto& wires = extended_[i].wires;
    bool same = inputs.tensors.size() == wires.size();
    for (size_t k = 0; same && k < wires.size(); ++k) {
      const at::Tensor& tensor = inputs.tensors[k];
      same = tensor.defined() && tensor.scalar_type() == wires[k].dtype &&
             tensor.sizes() == wires[k].sizes;
    }
    if (!same) {
      std::string expected;
      for (const Wire& wire : wires) {
        expected += (expected.empty() ? "" : ", ") +
                    c10::str(wire.dtype, at::IntArrayRef(wire.sizes));
      }
      TORCH_CHECK_VALUE(false, "PreAllGather of the extension of parameter '",
                        params_[i]->fqn, "' gave ", Describe(inputs.tensors),
                        ": expected [", expected,
                        "] as in the first call, since every rank must send "
                        "the same sizes and dtypes in every gather.");
    }
    for (size_t k = 0; k < wires.size(); ++k) {
      const auto bytes = static_cast<int64_t>(inputs.tensors[k].nbytes());
      Staged(gathered_bytes() + wires[k].offset, bytes)
          .view(wires[k].dtype)
          .view(wires[k].sizes)
          .copy_(inputs.tensors[k]);
    }
    extended_[i].metadata = std::move(inputs.metadata);
  }
  return transfer;
}

void StagedGather::CopyTo(const c10::intrusive_ptr<c10::StorageImpl>& whole) {
  const auto storage = internal::StorageOf(Staged(0, gathered_bytes()));
  if (!is_extended()) {
    const int64_t shard = layout_.shard_numel();
    const at::Tensor flat = internal::MakeTensor(
        storage, gathered_, {shard * layout_.world_size()}, {1}, 0);
    Chunks::Views views;
    for (const FSDPParam* param : params_) {
      param->chunks()->AppendViews(param->WholeIn(whole), flat,
                                   param->local_offset(), shard, views);
    }
    at::_foreach_copy_(views.wholes, views.chunks);
    return;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    std::vector<at::Tensor> outputs;
    for (const Wire& wire : extended_[i].wires) {
      const auto itemsize = static_cast<int64_t>(c10::elementSize(wire.dtype));
      std::vector<int64_t> sizes = {layout_.world_size()};
      std::vector<int64_t> strides(wire.sizes.size() + 1, 1);
      sizes.insert(sizes.end(), wire.sizes.begin(), wire.sizes.end());
      for (size_t d = wire.sizes.size(); d-- > 1;) {
        strides[d] = strides[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
      }
      strides[0] = chunk_bytes_ / itemsize;
      outputs.push_back(internal::MakeTensor(storage, wire.dtype, sizes,
                                             strides, wire.offset / itemsize));
    }
    const FSDPParam& param = *params_[i];
    NamingTheParameter("PostAllGather", param.fqn, [&] {
      param.extension->PostAllGather(outputs, extended_[i].metadata,
                                     ContextOf(param), param.WholeIn(whole));
    });
    extended_[i].metadata.reset();
  }
}

void StagedGather::Release(BufferPool& pool) {
  if (buffer_ != nullptr) pool.Release(std::exchange(buffer_, nullptr));
}

}  // namespace composable
