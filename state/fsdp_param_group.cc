#include "state/fsdp_param_group.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
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

// Whether a tensor beside `whole` would see its memory. A parameter that is a
// view, such as one transposed, has a base of its own beside it.
bool SharesMemory(const at::Tensor& whole) {
  const bool own_base = whole.is_view() && whole._base().use_count() == 1;
  return whole.storage().use_count() > (own_base ? 2U : 1U);
}

}  // namespace

size_t FSDPParamGroup::PaddedBytes(size_t bytes) {
  return (bytes + kSegmentAlignment - 1) / kSegmentAlignment *
         kSegmentAlignment;
}

FSDPParamGroup::FSDPParamGroup(
    const std::vector<OwnedParam>& owned,
    // NOLINTNEXTLINE(performance-unnecessary-value-param): cheap to copy
    GroupCommunicators communicators, const MixedPrecisionPolicy& policy)
    : policy_(policy),
      communicator_(communicators.shard),
      replicate_(communicators.replicate) {
  CheckPolicy(policy);
  if (communicators.post_forward) {
    post_forward_.emplace(*communicators.post_forward);
  }
  // What is made here lives on after an inference or no-grad scope.
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : owned) {
    params_.emplace_back(parameter).set_dtypes(
        ResolveDtypes(policy, parameter.name, parameter.parameter));
  }
  BuildSegments();
}

FSDPParamGroup::~FSDPParamGroup() { UnregisterStorages(); }

void FSDPParamGroup::RegisterStorages(int index,
                                      const c10::StorageImpl* whole) {
  RegisterGuardedStorage(whole, {state_, index, /*is_shard=*/false});
  RegisterGuardedStorage(
      segments_[index].flat_shard.storage().unsafeGetStorageImpl(),
      {state_, index, /*is_shard=*/true});
}

void FSDPParamGroup::UnregisterStorages() {
  for (const auto& segment : segments_) {
    UnregisterGuardedStorage(segment.storage._unsafe_get_target());
    UnregisterGuardedStorage(
        segment.flat_shard.storage().unsafeGetStorageImpl());
  }
  for (const auto& param : params_) {
    if (!param.stands_alone) continue;
    UnregisterGuardedStorage(param.sharded.storage().unsafeGetStorageImpl());
    if (const at::Tensor whole = param.unsharded(); whole.defined()) {
      UnregisterGuardedStorage(whole.storage().unsafeGetStorageImpl());
    }
  }
}

void FSDPParamGroup::BuildSegments() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor parameter = params_[i].unsharded();
    const ParamDtypes& dtypes = params_[i].dtypes();
    auto it = std::find_if(
        segments_.begin(), segments_.end(), [&](const Segment& segment) {
          return segment.dtype == dtypes.original &&
                 segment.gathered == dtypes.gathered &&
                 segment.reduce == dtypes.reduce &&
                 segment.trainable == parameter.requires_grad() &&
                 segment.kind == SegmentKindOf(params_[i]);
        });
    if (it == segments_.end()) {
      Segment segment;
      segment.dtype = dtypes.original;
      segment.gathered = dtypes.gathered;
      segment.reduce = dtypes.reduce;
      segment.trainable = parameter.requires_grad();
      segment.kind = SegmentKindOf(params_[i]);
      it = segments_.insert(segments_.end(), std::move(segment));
    }
    it->params.push_back(static_cast<int>(i));
  }
  const std::vector<int64_t> owned_before = communicator_.tally();
  std::vector<int64_t> owned_bytes = owned_before;
  for (size_t s = 0; s < segments_.size(); ++s) {
    Segment& segment = segments_[s];
    // Of the smaller elements, so that a shard is aligned in either dtype.
    const auto smaller =
        c10::elementSize(segment.dtype) < c10::elementSize(segment.gathered)
            ? segment.dtype
            : segment.gathered;
    const SegmentPlan plan = PlanSegment(
        {.index = static_cast<int>(s), .kind = segment.kind, .dtype = smaller},
        communicator_.rank(), communicator_.size(), params_, segment.params,
        owned_bytes);
    segment.layout = plan.layout;
    // A multiple of the ranks, for reshard_after_forward(k).
    const int64_t ranks = communicator_.size();
    const int64_t numel_of_whole =
        (plan.whole_numel + ranks - 1) / ranks * ranks;
    segment.whole_bytes = numel_of_whole * c10::elementSize(segment.gathered);
    segment.buffer_offset = unsharded_bytes_;
    unsharded_bytes_ += PaddedBytes(segment.whole_bytes);
    bool has_empty = false;
    for (const int i : segment.params) {
      const ShardRange local = params_[i].local_range();
      has_empty |= local.begin == local.end;
    }
    // Shards without rows have places of their own behind it.
    const int64_t numel = segment.layout.shard_numel();
    const auto places =
        has_empty ? static_cast<int64_t>(segment.params.size()) : 0;
    const bool any_values =
        std::any_of(segment.params.begin(), segment.params.end(),
                    [&](int i) { return !params_[i].unsharded().is_meta(); });
    segment.flat_shard =
        MakeFlatShard(segment.dtype, numel, numel + places, any_values);
    std::vector<const FSDPParam*> in_order;
    for (const int i : segment.params) {
      MakeShard(params_[i], segment);
      in_order.push_back(&params_[i]);
    }
    if (plan.staged) {
      segment.staged = std::make_unique<StagedGather>(
          std::move(in_order), segment.layout, segment.flat_shard,
          communicator_.rank(), segment.gathered);
    }
  }
  for (size_t r = 0; r < owned_bytes.size(); ++r) {
    owned_bytes[r] -= owned_before[r];
  }
  owned_bytes_ = std::move(owned_bytes);
}

at::Tensor FSDPParamGroup::MakeFlatShard(c10::ScalarType dtype, int64_t numel,
                                         int64_t places, bool has_values) {
  return internal::MakeTensor(
      has_values ? internal::StorageOf(at::zeros({places}, dtype))
                 : internal::MakeEmptyStorage(places * c10::elementSize(dtype)),
      dtype, {numel}, {1}, 0);
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
  internal::WatchGradient(param.sharded, param.gradient_watch);
  param.sharded.set_requires_grad(whole.requires_grad());
  const auto grad_dtype = whole.grad_dtype();
  if (grad_dtype != whole.scalar_type()) {
    param.sharded.set_grad_dtype(grad_dtype);
  }
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
  state_ = state;
  make_sink_ = std::move(make_sink);
  try {
    for (size_t s = 0; s < segments_.size(); ++s) {
      Segment& segment = segments_[s];
      auto storage = internal::MakeEmptyStorage(segment.whole_bytes);
      segment.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(storage);
      new_storages_.push_back(storage);
      internal::SetOwner(*storage, state);
      RegisterStorages(static_cast<int>(s), storage.get());
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
    if (SharesMemory(whole)) {
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
  communicator_.AddToTally(owned_bytes_);
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
      const uint32_t input = sink->add_input_metadata(whole);
      const ParamDtypes& dtypes = param.dtypes();
      if (dtypes.reduce != dtypes.gathered) {
        // The engine would cast each gradient to the gathered dtype.
        sink->mutable_input_metadata(input).set_grad_dtype(std::nullopt);
      }
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
  from_part_ = sharded_state_ == ShardedState::kShardedPostForward && !dirty_;
  const auto custom = communicator_.size() > 1 ? custom_all_gather_ : nullptr;
  if (buffer_.data() == nullptr) {
    buffer_.Acquire(unsharded_bytes_, pool, custom.get());
  }
  sharded_state_ = ShardedState::kUnsharding;
  dirty_ = false;
  try {
    IssueGathers(pool, custom);
  } catch (...) {
    Reshard(pool);
    throw;
  }
}

void FSDPParamGroup::IssueGathers(BufferPool& pool,
                                  const std::shared_ptr<AllGather>& custom) {
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (from_part_) {
      gathers_.push_back(
          post_forward_->Gather(s, WholeBytes(segment), segment.label, custom));
      continue;
    }
    StagedGather::Transfer transfer;
    if (segment.staged != nullptr) {
      transfer = segment.staged->Begin(segment.flat_shard, pool);
    } else {
      transfer.output = WholeBytes(segment);
      transfer.input = segment.is_cast()
                           ? CastShardInto(segment, transfer.output)
                           : ShardBytes(segment);
    }
    gathers_.push_back(communicator_.AllGather(transfer.output, transfer.input,
                                               segment.label, custom));
  }
}

void FSDPParamGroup::GatherForOthers(BufferPool& pool) {
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kUnsharded ||
                        sharded_state_ == ShardedState::kSharded);
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const auto custom = communicator_.size() > 1 ? custom_all_gather_ : nullptr;
  GatherBuffer unused;
  unused.Acquire(unsharded_bytes_, pool, custom.get());
  std::swap(buffer_, unused);
  from_part_ = false;
  const auto finish = [&] {
    gathers_.clear();  // waits
    for (const auto& segment : segments_) {
      if (segment.staged != nullptr) segment.staged->Release(pool);
    }
    std::swap(buffer_, unused);
    unused.Release(pool);
  };
  try {
    IssueGathers(pool, custom);
    for (const auto& gather : gathers_) gather->Wait();
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

at::Tensor FSDPParamGroup::WholeBytes(const Segment& segment) const {
  size_t offset = segment.buffer_offset;
  if (original_) {
    offset = 0;
    for (const Segment* s = segments_.data(); s != &segment; ++s) {
      offset += PaddedBytes(WholeSize(*s));
    }
  }
  const auto bytes = static_cast<int64_t>(WholeSize(segment));
  return internal::MakeTensor(
      internal::BorrowMemory(static_cast<char*>(buffer_.data()) + offset,
                             bytes),
      c10::kByte, {bytes}, {1}, 0);
}

at::Tensor FSDPParamGroup::GatheredValue(const FSDPParam& param) const {
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kUnsharded);
  const Segment& segment = segments_[param.segment()];
  return param.WholeIn(internal::StorageOf(WholeBytes(segment)),
                       original_ ? segment.dtype : segment.gathered);
}

bool FSDPParamGroup::is_cast() const {
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const Segment& segment) { return segment.is_cast(); });
}

std::vector<at::Tensor> FSDPParamGroup::GatherShards() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> wholes;
  for (const auto& segment : segments_) {
    wholes.push_back(
        at::empty({segment.layout.unsharded_numel()}, segment.dtype));
    const at::Tensor bytes = internal::MakeTensor(
        internal::StorageOf(wholes.back()), c10::kByte,
        {static_cast<int64_t>(wholes.back().nbytes())}, {1}, 0);
    communicator_.AllGather(bytes, ShardBytes(segment), segment.label)->Wait();
  }
  return wholes;
}

at::Tensor FSDPParamGroup::CastShardInto(const Segment& segment,
                                         const at::Tensor& whole) const {
  const int64_t numel = segment.layout.shard_numel();
  const int64_t bytes = whole.numel() / communicator_.size();
  const auto storage = internal::StorageOf(whole);
  internal::MakeTensor(storage, segment.gathered, {numel}, {1},
                       communicator_.rank() * numel)
      .copy_(segment.flat_shard);
  return internal::MakeTensor(storage, c10::kByte, {bytes}, {1},
                              communicator_.rank() * bytes);
}

at::Tensor FSDPParamGroup::ShardBytes(const Segment& segment) {
  return internal::MakeTensor(
      internal::StorageOf(segment.flat_shard), c10::kByte,
      {static_cast<int64_t>(segment.flat_shard.nbytes())}, {1}, 0);
}

void FSDPParamGroup::WaitUnshard(BufferPool& pool) {
  if (sharded_state_ != ShardedState::kUnsharding) return;
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  try {
    for (const auto& gather : gathers_) gather->Wait();
    for (const auto& segment : segments_) {
      if (segment.staged == nullptr || from_part_) continue;
      segment.staged->CopyTo(internal::StorageOf(WholeBytes(segment)));
      segment.staged->Release(pool);
    }
  } catch (...) {
    Reshard(pool);
    throw;
  }
  gathers_.clear();
  if (post_forward_) post_forward_->Drop();
  for (const auto& segment : segments_) {
    if (const auto storage = segment.storage.lock()) {
      internal::SetData(
          *storage, static_cast<char*>(buffer_.data()) + segment.buffer_offset);
    }
  }
  sharded_state_ = ShardedState::kUnsharded;
}

void FSDPParamGroup::Reshard(BufferPool& pool) {
  if (!is_sharded()) FreeWhole(pool);
  if (post_forward_) post_forward_->Drop();
  sharded_state_ = ShardedState::kSharded;
}

void FSDPParamGroup::ReshardPostForward(BufferPool& pool) {
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kUnsharded &&
                        keeps_part());
  std::vector<at::Tensor> wholes;
  wholes.reserve(segments_.size());
  for (const auto& segment : segments_) wholes.push_back(WholeBytes(segment));
  post_forward_->Keep(wholes);
  FreeWhole(pool);
  sharded_state_ = ShardedState::kShardedPostForward;
}

void FSDPParamGroup::FreeWhole(BufferPool& pool) {
  gathers_.clear();  // waits
  for (const auto& segment : segments_) {
    if (segment.staged != nullptr) segment.staged->Release(pool);
    if (const auto storage = segment.storage.lock()) {
      internal::DropData(*storage);
    }
  }
  if (!keep_buffer_ || original_) buffer_.Release(pool);
  if (original_) SetOriginal(false);
}

void FSDPParamGroup::ReleaseKeptBuffer(BufferPool& pool) {
  if (is_sharded()) buffer_.Release(pool);
}

void FSDPParamGroup::UnshardWithoutGather(BufferPool& pool) {
  TORCH_INTERNAL_ASSERT(is_sharded());
  if (buffer_.data() == nullptr) {
    buffer_.Acquire(unsharded_bytes_, pool, /*custom=*/nullptr);
  }
  from_part_ = true;  // nothing is staged
  dirty_ = false;
  sharded_state_ = ShardedState::kUnsharding;
  WaitUnshard(pool);
}

void FSDPParamGroup::CopyIntoGathered(const FSDPParam& param,
                                      const at::Tensor& whole,
                                      const at::Tensor& gathered) const {
  const Segment& segment = segments_[param.segment()];
  if (const Chunks* chunks = param.chunks()) {
    Chunks::Views views;
    chunks->AppendViews(whole, gathered, param.local_offset(),
                        segment.layout.shard_numel(), views);
    at::_foreach_copy_(views.chunks, views.wholes);
    return;
  }
  param.WholeIn(internal::StorageOf(gathered), segment.dtype).copy_(whole);
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

void FSDPParamGroup::CheckShardData(const FSDPParam& param,
                                    const at::Tensor& data,
                                    c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      data.device().is_cpu() && data.layout() == c10::kStrided &&
          data.scalar_type() == dtype &&
          (data.sizes() == param.local_sizes() ||
           data.sizes() == param.sizes()),
      "The shard of parameter '", param.fqn,
      "' was to be given other memory: expected ", dtype, " of sizes ",
      param.local_sizes(), " (this rank's rows) or ", param.sizes(),
      " (the whole parameter) on the CPU, got ", data.scalar_type(),
      " of sizes ", data.sizes(), " on ", data.device(),
      ". Move a module with to() before fully_shard.");
}

void FSDPParamGroup::SetShardData(int index, const at::Tensor& data) {
  FSDPParam& param = params_[index];
  const Segment& segment = segments_[param.segment()];
  CheckShardData(param, data, segment.dtype);
  const bool is_rows = data.sizes() == param.local_sizes();
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
  if (serial_ == 0) {
    serial_ = communicator_.NextSerial();
    if (replicate_) replicate_serial_ = replicate_->NextSerial();
  }
  for (auto& segment : segments_) {
    uint64_t plan = HashMix(segment.layout.fingerprint(),
                            static_cast<uint64_t>(segment.dtype));
    plan = HashMix(plan, static_cast<uint64_t>(segment.gathered));
    plan = HashMix(plan, static_cast<uint64_t>(segment.reduce));
    plan = HashMix(plan, segment.trainable ? 1 : 0);
    plan = HashMix(plan, static_cast<uint64_t>(segment.kind));
    if (segment.staged != nullptr) {
      plan = HashMix(plan, segment.staged->fingerprint());
    }
    for (const int i : segment.params) {
      plan = HashMix(plan, static_cast<uint64_t>(params_[i].placement.dim));
      plan = HashMix(plan, HashString(params_[i].fqn));
    }
    segment.label = MakeCollectiveLabel(group_fqn, plan, serial_);
    segment.replicate_label =
        MakeCollectiveLabel(group_fqn, plan, replicate_serial_);
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
  if (segment < 0) return ~segment;
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
  if (segment < 0) return ~segment;
  const auto& indices = segments_[segment].params;
  auto it = std::upper_bound(indices.begin(), indices.end(), storage_offset,
                             [&](int64_t offset, int index) {
                               return offset < params_[index].offset();
                             });
  return it == indices.begin() ? indices.front() : *(it - 1);
}

size_t FSDPParamGroup::gathered_bytes() const {
  size_t bytes = 0;
  for (const auto& segment : segments_) {
    bytes += segment.staged != nullptr ? segment.staged->gathered_bytes()
                                       : PaddedBytes(segment.whole_bytes);
  }
  return bytes;
}

size_t FSDPParamGroup::sharded_bytes() const {
  size_t bytes = 0;
  for (const auto& segment : segments_) bytes += segment.flat_shard.nbytes();
  return bytes;
}

}  // namespace composable
