#include "state/fsdp_param_group.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/hash.h"
#include "state/shard_gradient.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

constexpr size_t kSegmentAlignment = 128;  // bytes

size_t RoundUp(size_t bytes) {
  return (bytes + kSegmentAlignment - 1) / kSegmentAlignment *
         kSegmentAlignment;
}

std::string MemberGradientMessage(const std::string& fqn) {
  return "The gradient of '" + fqn +
         "' was asked for through the module's member, which is the whole "
         "parameter. Its reduced gradient, for this rank's rows, is in "
         "module->named_parameters()[\"" +
         fqn +
         "\"].grad(). If an optimizer asked, it was built from members or "
         "before fully_shard: build it afterwards from module->parameters(), "
         "or move it with composable::rebind(optimizer, module).";
}

}  // namespace

FSDPParamGroup::FSDPParamGroup(
    const std::vector<OwnedParam>& owned,
    // NOLINTNEXTLINE(performance-unnecessary-value-param): cheap to copy
    Communicator communicator)
    : communicator_(communicator) {
  // What is made here lives on after an inference or no-grad scope.
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : owned) params_.emplace_back(parameter);
  BuildSegments();
}

FSDPParamGroup::~FSDPParamGroup() {
  for (const auto& segment : segments_) {
    UnregisterGuardedStorage(segment.storage._unsafe_get_target());
    UnregisterGuardedStorage(
        segment.flat_shard.storage().unsafeGetStorageImpl());
  }
}

void FSDPParamGroup::BuildSegments() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor parameter = params_[i].unsharded();
    auto it = std::find_if(
        segments_.begin(), segments_.end(), [&](const Segment& segment) {
          return segment.dtype == parameter.scalar_type() &&
                 segment.trainable == parameter.requires_grad();
        });
    if (it == segments_.end()) {
      Segment segment;
      segment.dtype = parameter.scalar_type();
      segment.trainable = parameter.requires_grad();
      it = segments_.insert(segments_.end(), std::move(segment));
    }
    it->params.push_back(static_cast<int>(i));
  }
  for (size_t s = 0; s < segments_.size(); ++s) {
    Segment& segment = segments_[s];
    const auto itemsize = static_cast<int64_t>(c10::elementSize(segment.dtype));
    std::vector<ParamExtent> extents;
    for (const int i : segment.params) extents.push_back(params_[i].extent());
    segment.layout = ShardLayout::Plan(
        extents, {.world_size = communicator_.size(), .itemsize = itemsize});
    segment.buffer_offset = unsharded_bytes_;
    unsharded_bytes_ += RoundUp(segment.layout.unsharded_numel() * itemsize);
    bool has_empty = false;
    for (size_t k = 0; k < segment.params.size(); ++k) {
      FSDPParam& param = params_[segment.params[k]];
      param.Place(static_cast<int>(s), k, segment.layout, communicator_.rank());
      const ShardRange local = param.local_range();
      has_empty |= local.begin == local.end;
    }
    // Shards without rows have places of their own behind it.
    const int64_t numel = segment.layout.shard_numel();
    const auto places =
        has_empty ? static_cast<int64_t>(segment.params.size()) : 0;
    segment.flat_shard =
        MakeFlatShard(segment, numel + places).narrow(0, 0, numel);
    for (const int i : segment.params) MakeShard(params_[i], segment);
  }
}

at::Tensor FSDPParamGroup::MakeFlatShard(const Segment& segment,
                                         int64_t places) const {
  const bool any_values =
      std::any_of(segment.params.begin(), segment.params.end(),
                  [&](int i) { return !params_[i].unsharded().is_meta(); });
  if (any_values) return at::zeros({places}, segment.dtype);
  return internal::MakeTensor(
      internal::MakeEmptyStorage(places * c10::elementSize(segment.dtype)),
      segment.dtype, {places}, {1}, 0);
}

void FSDPParamGroup::MakeShard(FSDPParam& param, const Segment& segment) {
  const at::Tensor whole = param.unsharded();
  if (whole.is_meta()) {
    param.has_values = false;
    ++without_values_;
  } else {
    param.CopyRowsFrom(whole.detach(), segment.flat_shard);
  }
  param.sharded = param.RowsIn(segment.flat_shard);
  param.sharded.set_requires_grad(whole.requires_grad());
  if (whole.grad().defined() && !whole.is_meta()) {
    at::Tensor rows = param.RowsOf(whole.grad().to_dense());
    internal::AddGuard(rows);
    param.sharded.mutable_grad() = std::move(rows);
  }
  internal::AddGuard(param.sharded);
  internal::MarkShard(param.sharded);
  if (c10::isFloatingType(segment.dtype)) {
    param.accumulator = MakeShardAccumulator(param.sharded);
  }
}

void FSDPParamGroup::Attach(const std::shared_ptr<FSDPState>& state,
                            std::function<NodePtr()> make_sink) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  make_sink_ = std::move(make_sink);
  try {
    for (size_t s = 0; s < segments_.size(); ++s) {
      Segment& segment = segments_[s];
      auto storage = internal::MakeEmptyStorage(
          segment.layout.unsharded_numel() * c10::elementSize(segment.dtype));
      segment.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(storage);
      new_storages_.push_back(storage);
      internal::SetOwner(*storage, state);
      RegisterGuardedStorage(storage.get(),
                             {state, static_cast<int>(s), /*is_shard=*/false});
      RegisterGuardedStorage(
          segment.flat_shard.storage().unsafeGetStorageImpl(),
          {state, static_cast<int>(s), /*is_shard=*/true});
    }
    TakeOver();
    const NodePtr sink = Sink();  // one for all parameters
    for (size_t i = 0; i < params_.size(); ++i) {
      SyncGradientEdge(static_cast<int>(i));
    }
    SetNames("");
  } catch (...) {
    UndoAttach();
    throw;
  }
}

void FSDPParamGroup::TakeOver() {
  originals_.reserve(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    const at::Tensor whole = param.unsharded();
    if (whole.storage().use_count() > 1) {
      TORCH_WARN("fully_shard: parameter '", param.fqn,
                 "' shares its memory with another tensor, such as a view "
                 "taken before: that memory stays, and later changes of the "
                 "parameter do not reach it.");
    }
    internal::TensorBody body{
        param.WholeIn(new_storages_[param.segment()]),
        internal::MakeMemberAutograd([name = param.shared_name] {
          return MemberGradientMessage(*name);
        })};
    internal::TensorBody original = internal::BodyOf(whole);
    internal::ExchangeBody(whole, body);
    internal::AddGuard(whole);
    original.autograd = std::move(body.autograd);
    internal::MoveHooks(original.autograd.get(), param.sharded);
    originals_.push_back(std::move(original));
    for (const auto& slot : param.slots) {
      internal::Parameters(*slot.module.lock())[slot.key] = param.sharded;
    }
  }
}

void FSDPParamGroup::CommitAttach() noexcept {
  originals_.clear();
  new_storages_.clear();
}

void FSDPParamGroup::UndoAttach() noexcept {
  for (size_t i = 0; i < originals_.size(); ++i) {
    FSDPParam& param = params_[i];
    const at::Tensor whole = param.unsharded();
    for (const auto& slot : param.slots) {
      internal::Parameters(*slot.module.lock())[slot.key] = whole;
    }
    internal::MoveHooks(param.sharded, originals_[i].autograd.get());
    internal::ExchangeBody(whole, originals_[i]);
  }
  originals_.clear();
  new_storages_.clear();
}

NodePtr FSDPParamGroup::Sink() {
  NodePtr sink = sink_.lock();
  if (sink) return sink;
  sink = make_sink_();
  for (const auto& param : params_) {
    if (const at::Tensor whole = param.unsharded(); whole.defined()) {
      sink->add_input_metadata(whole);
    } else {
      sink->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
  torch::autograd::edge_list shards;
  for (const auto& param : params_) shards.emplace_back(param.accumulator, 0);
  sink->set_next_edges(std::move(shards));
  for (size_t i = 0; i < params_.size(); ++i) {
    if (const at::Tensor whole = params_[i].unsharded(); whole.defined()) {
      internal::AttachMemberHooks(whole, sink, static_cast<uint32_t>(i));
    }
  }
  sink_ = WeakNodePtr(sink);
  return sink;
}

void FSDPParamGroup::IssueUnshard(BufferPool& pool) {
  TORCH_INTERNAL_ASSERT(is_sharded());
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  buffer_ = pool.Acquire(unsharded_bytes_);
  sharded_state_ = ShardedState::kUnsharding;
  dirty_ = false;
  try {
    for (const auto& segment : segments_) {
      gathers_.push_back(communicator_.AllGather(
          WholeBytes(segment), ShardBytes(segment), segment.label));
    }
  } catch (...) {
    Reshard(pool);
    throw;
  }
}

at::Tensor FSDPParamGroup::WholeBytes(const Segment& segment) const {
  const auto bytes = static_cast<int64_t>(segment.layout.unsharded_numel() *
                                          c10::elementSize(segment.dtype));
  return internal::MakeTensor(
      internal::BorrowMemory(
          static_cast<char*>(buffer_->data) + segment.buffer_offset, bytes),
      c10::kByte, {bytes}, {1}, 0);
}

at::Tensor FSDPParamGroup::GatheredValue(const FSDPParam& param) const {
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kUnsharded);
  return param.WholeIn(
      internal::StorageOf(WholeBytes(segments_[param.segment()])));
}

at::Tensor FSDPParamGroup::ShardBytes(const Segment& segment) {
  return internal::MakeTensor(
      internal::StorageOf(segment.flat_shard), c10::kByte,
      {static_cast<int64_t>(segment.flat_shard.nbytes())}, {1}, 0);
}

void FSDPParamGroup::WaitUnshard(BufferPool& pool) {
  if (sharded_state_ != ShardedState::kUnsharding) return;
  try {
    for (const auto& gather : gathers_) gather->Wait();
  } catch (...) {
    Reshard(pool);
    throw;
  }
  gathers_.clear();
  for (const auto& segment : segments_) {
    if (const auto storage = segment.storage.lock()) {
      internal::SetData(
          *storage, static_cast<char*>(buffer_->data) + segment.buffer_offset);
    }
  }
  sharded_state_ = ShardedState::kUnsharded;
}

void FSDPParamGroup::Reshard(BufferPool& pool) {
  if (is_sharded()) return;
  gathers_.clear();  // waits
  for (const auto& segment : segments_) {
    if (const auto storage = segment.storage.lock()) {
      internal::DropData(*storage);
    }
  }
  pool.Release(std::exchange(buffer_, nullptr));
  sharded_state_ = ShardedState::kSharded;
}

void FSDPParamGroup::UnshardWithoutGather(BufferPool& pool) {
  TORCH_INTERNAL_ASSERT(is_sharded());
  buffer_ = pool.Acquire(unsharded_bytes_);
  dirty_ = false;
  sharded_state_ = ShardedState::kUnsharding;
  WaitUnshard(pool);
}

void FSDPParamGroup::AllocateShards() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  for (const auto& segment : segments_) {
    const auto storage = internal::StorageOf(segment.flat_shard);
    if (internal::HasData(*storage)) continue;
    const auto memory = std::make_shared<at::Tensor>(
        at::zeros({static_cast<int64_t>(storage->nbytes())}, c10::kByte));
    internal::SetData(*storage, memory->mutable_data_ptr());
    internal::SetOwner(*storage, memory);
  }
}

void FSDPParamGroup::SetHasValues(int index, bool has_values) {
  if (has_values) AllocateShards();
  bool& now = params_[index].has_values;
  if (now == has_values) return;
  now = has_values;
  without_values_ += has_values ? -1 : 1;
}

void FSDPParamGroup::WriteBack(int index) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const FSDPParam& param = params_[index];
  const at::Tensor shard = param.RowsIn(segments_[param.segment()].flat_shard);
  if (shard.numel() == 0) return;
  const at::Tensor rows = param.RowsOf(GatheredValue(param));
  const at::Tensor before = shard.to(rows.scalar_type());
  // Bit by bit: a NaN is equal to itself.
  if (std::memcmp(before.const_data_ptr(), rows.const_data_ptr(),
                  rows.nbytes()) == 0) {
    return;
  }
  ++writes_;
  if (const at::Tensor whole = param.unsharded(); whole.defined()) {
    internal::BumpVersion(whole);
  }
  shard.copy_(rows);
}

void FSDPParamGroup::ScatterWhole() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  AllocateShards();
  for (const auto& segment : segments_) {
    communicator_.Scatter(ShardBytes(segment), WholeBytes(segment),
                          segment.label);
  }
}

void FSDPParamGroup::MarkDirty(int param) {
  dirty_ = true;
  ++writes_;
  const at::Tensor whole = params_[param].unsharded();
  if (whole.defined()) internal::BumpVersion(whole);
  for (const auto& gather : gathers_) gather->Wait();  // it reads the shard
}

void FSDPParamGroup::MarkAllDirty() {
  for (size_t i = 0; i < params_.size(); ++i) MarkDirty(static_cast<int>(i));
}

void FSDPParamGroup::SetShardData(int index, const at::Tensor& data) {
  FSDPParam& param = params_[index];
  const Segment& segment = segments_[param.segment()];
  const bool is_rows = data.sizes() == param.local_sizes();
  TORCH_CHECK_VALUE(data.device().is_cpu() && data.layout() == c10::kStrided &&
                        data.scalar_type() == segment.dtype &&
                        (is_rows || data.sizes() == param.sizes()),
                    "The shard of parameter '", param.fqn,
                    "' was to be given other memory: "
                    "expected ",
                    segment.dtype, " of sizes ", param.local_sizes(),
                    " (this rank's rows) or ", param.sizes(),
                    " (the whole parameter) on "
                    "the CPU, got ",
                    data.scalar_type(), " of sizes ", data.sizes(), " on ",
                    data.device(),
                    ". Convert or move a module with to() before fully_shard.");
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  MarkDirty(index);
  SetHasValues(index, true);
  // Itself and its parameters.
  const size_t owners = 1 + segment.params.size();
  if (!warned_of_alias_ && segment.flat_shard.storage().use_count() > owners) {
    warned_of_alias_ = true;
    TORCH_WARN("set_data on the shard of parameter '", param.fqn,
               "' copies into the shard's memory, which other tensors share, "
               "such as p.data() or p.detach(): they change too. To keep "
               "values, take p.detach().clone().");
  }
  if (is_rows) {
    param.RowsIn(segment.flat_shard).copy_(data);
  } else {
    param.CopyRowsFrom(data, segment.flat_shard);
  }
}

void FSDPParamGroup::CheckParams() const {
  for (const auto& param : params_) {
    const Segment& segment = segments_[param.segment()];
    const at::Tensor& shard = param.sharded;
    TORCH_CHECK_VALUE(
        shard.storage().is_alias_of(segment.flat_shard.storage()) &&
            shard.scalar_type() == segment.dtype &&
            shard.storage_offset() == param.local_offset() &&
            shard.sizes() == param.local_sizes(),
        "The shard of parameter '", param.fqn,
        "' points to other memory: "
        "expected ",
        segment.dtype, " of sizes ", param.local_sizes(),
        " in its group's flat shard, got ", shard.scalar_type(), " of sizes ",
        shard.sizes(),
        "; the values would never reach the module. Write into "
        "the shard with copy_, or load whole values with "
        "composable::load_full_state_dict.");
    const at::Tensor whole = param.unsharded();
    if (!whole.defined()) {
      const bool used = std::any_of(
          param.slots.begin(), param.slots.end(),
          [](const ParameterSlot& slot) { return !slot.module.expired(); });
      TORCH_CHECK_VALUE(
          !used, "No member holds parameter '", param.fqn,
          "' any more: it was "
          "assigned another tensor after fully_shard, which is neither sharded "
          "nor trained. Change values with composable::load_full_state_dict, "
          "and replace parameters before fully_shard.");
      continue;
    }
    TORCH_CHECK_VALUE(
        internal::HasGuard(whole) &&
            whole.storage().unsafeGetStorageImpl() ==
                segment.storage._unsafe_get_target() &&
            whole.storage_offset() == param.offset() &&
            whole.sizes() == param.sizes(),
        "The member that holds parameter '", param.fqn,
        "' was given other "
        "memory, which is neither sharded nor trained. Change values with "
        "composable::load_full_state_dict.");
  }
}

bool FSDPParamGroup::SyncGradientEdge(int index) {
  FSDPParam& param = params_[index];
  const bool wanted = param.sharded.requires_grad();
  const at::Tensor whole = param.unsharded();
  if (wanted == param.has_edge || !whole.defined()) return false;
  internal::SetGradientEdge(whole, wanted ? Sink() : NodePtr(),
                            static_cast<uint32_t>(index));
  if (wanted) internal::KeepRetainedGradient(whole);
  param.has_edge = wanted;
  return true;
}

bool FSDPParamGroup::has_gradient_edges() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const FSDPParam& param) { return param.has_edge; });
}

void FSDPParamGroup::LabelCollectives(const std::string& group_fqn) {
  if (serial_ == 0) serial_ = communicator_.NextSerial();
  for (auto& segment : segments_) {
    uint64_t plan = HashMix(segment.layout.fingerprint(),
                            static_cast<uint64_t>(segment.dtype));
    plan = HashMix(plan, segment.trainable ? 1 : 0);
    for (const int i : segment.params) {
      plan = HashMix(plan, HashString(params_[i].fqn));
    }
    segment.label = MakeCollectiveLabel(group_fqn, plan, serial_);
  }
}

void FSDPParamGroup::SetNames(const std::string& group_fqn) {
  LabelCollectives(group_fqn);
  constexpr size_t kNamed = 8;
  for (const auto& param : params_) *param.shared_name = param.fqn;
  for (const auto& segment : segments_) {
    const auto storage = segment.storage.lock();
    if (!storage) continue;
    std::string names;
    for (size_t k = 0; k < segment.params.size() && k < kNamed; ++k) {
      names += (k == 0 ? "'" : ", '") + params_[segment.params[k]].fqn + "'";
    }
    if (segment.params.size() > kNamed) names += ", ...";
    internal::SetFreedMessage(
        *storage,
        "The parameters " + names +
            (group_fqn.empty() ? "" : " of the module '" + group_fqn + "'") +
            " are sharded: their whole values are not in memory. Operators "
            "gather them by themselves; to read them in another way, call "
            "unshard() on the handle that fully_shard returned, and reshard() "
            "afterwards.");
  }
}

int FSDPParamGroup::FindShard(int segment, int64_t storage_offset) const {
  const auto& indices = segments_[segment].params;
  const auto it =
      std::find_if(indices.begin(), indices.end(), [&](const int i) {
        const auto range = params_[i].local_range();
        const int64_t begin = params_[i].local_offset();
        const int64_t size = std::max<int64_t>(range.end - range.begin, 1);
        return begin <= storage_offset && storage_offset < begin + size;
      });
  return it == indices.end() ? indices.front() : *it;
}

int FSDPParamGroup::FindParam(int segment, int64_t storage_offset) const {
  const auto& indices = segments_[segment].params;
  auto it = std::upper_bound(indices.begin(), indices.end(), storage_offset,
                             [&](int64_t offset, int index) {
                               return offset < params_[index].offset();
                             });
  return it == indices.begin() ? indices.front() : *(it - 1);
}

size_t FSDPParamGroup::sharded_bytes() const {
  size_t bytes = 0;
  for (const auto& segment : segments_) bytes += segment.flat_shard.nbytes();
  return bytes;
}

}  // namespace composable
