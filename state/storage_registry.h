// From a tensor to the group of sharded parameters that it belongs to.
//
//   composable::GuardedStorage found;
//   if (composable::FindGuardedStorage(tensor, &found)) {
//     // found.state: the group; found.is_shard: a shard, or whole parameters
//   }
//
// Thread-safe. A look-up costs a reader lock and a hash of the storage address.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace composable {

class FSDPState;

struct GuardedStorage {
  std::weak_ptr<FSDPState> state;
  int segment = 0;        // index in the group
  bool is_shard = false;  // flat shard of a segment, else its whole parameters
};

void RegisterGuardedStorage(const c10::StorageImpl* storage,
                            GuardedStorage entry);
void UnregisterGuardedStorage(const c10::StorageImpl* storage);

// False if the tensor is undefined, has no storage, or is none of ours.
bool FindGuardedStorage(const at::TensorBase& tensor, GuardedStorage* entry);

}  // namespace composable
