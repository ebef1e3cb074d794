#include "state/initial_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_join.h"
#include "collectives/hash.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

// What is the same on all ranks that shard the same module.
CollectiveLabelPtr LabelOf(const char* what, const FSDPParamGroup* group,
                           const std::vector<NamedBuffer>& buffers,
                           const std::string& module) {
  uint64_t plan = HashString(module);
  std::string first = buffers.empty() ? "" : buffers.front().name;
  if (group != nullptr) {
    first = group->params().front().fqn;
    for (const auto& segment : group->segments()) {
      plan = HashMix(plan, segment.layout.fingerprint());
    }
    for (const auto& param : group->params()) {
      plan = HashMix(plan, HashString(param.fqn));
    }
  }
  for (const auto& buffer : buffers) {
    plan = HashMix(plan, HashString(buffer.name));
    plan = HashMix(plan, static_cast<uint64_t>(buffer.tensor.numel()));
  }
  return MakeCollectiveLabel(
      std::string(what) + " of " + module + " with '" + first + "'", plan);
}

// The tensor's memory.
at::Tensor BytesOf(const at::Tensor& dense) {
  const auto bytes = static_cast<int64_t>(dense.nbytes());
  return internal::MakeTensor(internal::StorageOf(dense), c10::kByte, {bytes},
                              {1},
                              dense.storage_offset() * dense.element_size());
}

// Rank 0's whole parameters as one buffer, laid out as the flat shards are.
at::Tensor PackWhole(const FSDPParamGroup& group,
                     const FSDPParamGroup::Segment& segment) {
  const at::Tensor flat =
      at::zeros({segment.layout.unsharded_numel()}, segment.dtype);
  for (const int i : segment.params) {
    const FSDPParam& param = group.params()[i];
    if (!param.has_values) continue;
    group.CopyIntoGathered(param, param.unsharded().detach(), flat);
  }
  return BytesOf(flat);
}

void ScatterParameters(Communicator& communicator, FSDPParamGroup& group,
                       const unsigned char* flags,
                       const CollectiveLabelPtr& label) {
  const auto count = static_cast<int>(group.params().size());
  const bool any = std::any_of(flags, flags + count,
                               [](unsigned char flag) { return flag != 0; });
  if (!any) {
    for (int i = 0; i < count; ++i) group.SetHasValues(i, false);
    return;
  }
  group.AllocateShards();
  for (const auto& segment : group.segments()) {
    const at::Tensor whole =
        communicator.rank() == 0 ? PackWhole(group, segment) : at::Tensor();
    communicator.Scatter(BytesOf(segment.flat_shard), whole, label);
  }
  for (int i = 0; i < count; ++i) group.SetHasValues(i, flags[i] != 0);
}

std::vector<at::Tensor> BroadcastBuffers(
    Communicator& communicator, const std::vector<NamedBuffer>& buffers,
    const unsigned char* flags, const CollectiveLabelPtr& label) {
  int64_t bytes = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (flags[i] == 0) continue;
    const at::Tensor& tensor = buffers[i].tensor;
    bytes += tensor.numel() * static_cast<int64_t>(tensor.element_size());
  }
  std::vector<at::Tensor> values(buffers.size());
  if (bytes == 0) return values;
  const at::Tensor flat = at::empty({bytes}, c10::kByte);
  auto* at = static_cast<char*>(flat.mutable_data_ptr());
  for (size_t i = 0; i < buffers.size() && communicator.rank() == 0; ++i) {
    if (flags[i] == 0) continue;
    const at::Tensor dense = buffers[i].tensor.detach().contiguous();
    std::memcpy(at, dense.const_data_ptr(), dense.nbytes());
    at += dense.nbytes();
  }
  communicator.Broadcast(flat, label);
  at = static_cast<char*>(flat.mutable_data_ptr());
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (flags[i] == 0) continue;
    const at::Tensor& tensor = buffers[i].tensor;
    values[i] = at::empty(tensor.sizes(), tensor.scalar_type());
    std::memcpy(values[i].mutable_data_ptr(), at, values[i].nbytes());
    at += values[i].nbytes();
  }
  return values;
}

int64_t HashOf(const at::Tensor& tensor) {
  if (tensor.is_meta()) return 0;
  at::Tensor dense = tensor.detach();
  if (!dense.is_non_overlapping_and_dense()) dense = dense.contiguous();
  const auto* bytes = static_cast<const char*>(dense.const_data_ptr());
  uint64_t hash = 1;
  for (size_t at = 0; at < dense.nbytes(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof(word), dense.nbytes() - at));
    hash = HashMix(hash, word);
  }
  return static_cast<int64_t>(hash);
}

}  // namespace

std::vector<at::Tensor> SyncInitialValues(
    Communicator& communicator, FSDPParamGroup* group,
    const std::vector<NamedBuffer>& buffers, const std::string& module) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const size_t count = group == nullptr ? 0 : group->params().size();
  if (communicator.size() == 1 || count + buffers.size() == 0) return {};
  const auto label = LabelOf("sync_module_states", group, buffers, module);
  const at::Tensor flags =
      at::zeros({static_cast<int64_t>(count + buffers.size())}, c10::kByte);
  auto* values = flags.mutable_data_ptr<unsigned char>();
  for (size_t i = 0; i < count; ++i) {
    values[i] = group->params()[i].has_values ? 1 : 0;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    values[count + i] = buffers[i].tensor.is_meta() ? 0 : 1;
  }
  communicator.Broadcast(flags, label);
  if (group != nullptr) {
    ScatterParameters(communicator, *group, values, label);
  }
  return BroadcastBuffers(communicator, buffers, values + count, label);
}

void BroadcastShards(Communicator& communicator, FSDPParamGroup& group,
                     const std::string& module) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  if (communicator.size() == 1) return;
  const auto label = LabelOf("sync_module_states", &group, {}, module);
  const auto count = static_cast<int>(group.params().size());
  const at::Tensor flags = at::zeros({count}, c10::kByte);
  auto* values = flags.mutable_data_ptr<unsigned char>();
  for (int i = 0; i < count; ++i) {
    values[i] = group.params()[i].has_values ? 1 : 0;
  }
  communicator.Broadcast(flags, label);
  if (std::any_of(values, values + count,
                  [](unsigned char flag) { return flag != 0; })) {
    group.AllocateShards();
    for (const auto& segment : group.segments()) {
      communicator.Broadcast(BytesOf(segment.flat_shard), label);
    }
  }
  for (int i = 0; i < count; ++i) group.SetHasValues(i, values[i] != 0);
}

void CheckInitialValues(Communicator& shards, Communicator* replicas,
                        const FSDPParamGroup* group,
                        const std::vector<NamedBuffer>& buffers,
                        const std::string& module) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<int64_t> hashes;
  if (group != nullptr) {
    for (const auto& param : group->params()) {
      names.push_back(param.fqn);
      hashes.push_back(HashOf(param.unsharded()));
    }
  }
  for (const auto& buffer : buffers) {
    names.push_back(buffer.name);
    hashes.push_back(HashOf(buffer.tensor));
  }
  const int world_size =
      shards.size() * (replicas == nullptr ? 1 : replicas->size());
  if (world_size == 1 || names.empty()) return;
  const auto count = static_cast<int64_t>(names.size());
  // Those of all ranks, in the order of the mesh, so that all decide alike.
  at::Tensor all = at::empty({count}, c10::kLong);
  std::copy(hashes.begin(), hashes.end(), all.mutable_data_ptr<int64_t>());
  for (Communicator* communicator : {&shards, replicas}) {
    if (communicator == nullptr || communicator->size() == 1) continue;
    const at::Tensor mine = all;
    all = at::empty({mine.numel() * communicator->size()}, c10::kLong);
    communicator
        ->AllGather(all, mine,
                    LabelOf("check_module_states", group, buffers, module))
        ->Wait();
  }
  const auto* values = all.const_data_ptr<int64_t>();
  std::vector<std::string> different;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int> ranks;
    for (int r = 1; r < world_size; ++r) {
      if (values[r * count + i] != values[i]) ranks.push_back(r);
    }
    if (ranks.empty()) continue;
    different.push_back("'" + names[i] + "' (ranks " +
                        absl::StrJoin(ranks, ", ") + ")");
  }
  TORCH_CHECK_VALUE(
      different.empty(), "fully_shard: ranks start with other values of ",
      module, " than rank 0: ", absl::StrJoin(different, ", "),
      ". Construct modules with one seed on all ranks, or let rank 0's values "
      "be everybody's with FullyShardOptions::sync_module_states(true). If "
      "they are to differ: check_module_states(false).");
}

void SetBuffers(const std::vector<NamedBuffer>& buffers,
                const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].defined()) continue;
    at::Tensor buffer = buffers[i].tensor;
    if (buffer.is_meta()) internal::GiveMemory(buffer);
    const c10::InferenceMode mode(buffer.is_inference());
    buffer.copy_(values[i]);
  }
}

std::function<void()> BuffersBack(const std::vector<NamedBuffer>& buffers,
                                  const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  struct Saved {
    at::Tensor buffer;
    at::Tensor before;  // its values; on the meta device, its body
  };
  std::vector<Saved> saved;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].defined()) continue;
    const at::Tensor& buffer = buffers[i].tensor;
    const c10::InferenceMode mode(buffer.is_inference());
    saved.push_back({buffer, buffer.is_meta() ? internal::BodyOf(buffer).data
                                              : buffer.clone()});
  }
  return [saved = std::move(saved)] {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, before] : saved) {
      if (before.is_meta()) {
        internal::SetBody(buffer, before);
        continue;
      }
      const c10::InferenceMode mode(buffer.is_inference());
      buffer.copy_(before);
    }
  };
}

}  // namespace composable
