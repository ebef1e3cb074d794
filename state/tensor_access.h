// Every intrusion into LibTorch's private parts, and nothing else.
//
// A sharded parameter needs three things that LibTorch offers no call for: to
// replace a registry entry of a module, to mark a tensor so that each operator
// that reads it passes through us first, and to empty and refill a storage that
// tensors point to. No other file of the project reaches behind an interface.
//
//   composable::internal::AddGuard(weight);   // operators on it now trap
//
// Note [Guard key]
// DispatchKey::DeferredInit is reserved for out-of-tree use and lies above
// Autograd. A tensor that carries it sends every operator through the one boxed
// fallback registered for that key (hooks/guard.cc). Views copy the key, so a
// view of a guarded tensor is guarded too, in forward and as a saved tensor in
// backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>

#include <memory>
#include <string>

#include "state/compatibility.h"

namespace torch::nn {
class Module;
}

namespace composable::internal {

inline constexpr c10::DispatchKey kGuardKey = c10::DispatchKey::DeferredInit;

inline bool HasGuard(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kGuardKey);
}
void AddGuard(const at::Tensor& tensor);

// The registry of a module's own parameters. Undefined entries are legal.
torch::OrderedDict<std::string, at::Tensor>& Parameters(
    torch::nn::Module& module);

// A CPU storage of `nbytes` that has no memory yet: views of it can be made,
// access to its data throws.
c10::intrusive_ptr<c10::StorageImpl> MakeEmptyStorage(size_t nbytes);
// `owner` lives until the last tensor that points to the storage is gone.
void SetOwner(c10::StorageImpl& storage, std::shared_ptr<void> owner);
// What access throws while there is no memory.
void SetFreedMessage(c10::StorageImpl& storage, std::string message);

// Points the storage to memory that the caller keeps alive until DropData.
void SetData(c10::StorageImpl& storage, void* data);
// Takes the memory away. The storage keeps its size, which view operators
// check, and every access to its data throws from now on.
void DropData(c10::StorageImpl& storage);

// A CPU storage over memory that the caller keeps alive.
c10::intrusive_ptr<c10::StorageImpl> BorrowMemory(void* data, size_t nbytes);

// The storage that `tensor` points to.
c10::intrusive_ptr<c10::StorageImpl> StorageOf(const at::Tensor& tensor);

// A tensor over `storage` without guard and without autograd history.
at::Tensor MakeTensor(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                      at::ScalarType dtype, at::IntArrayRef sizes,
                      at::IntArrayRef strides, int64_t offset);

// Turns the leaf `parameter` into a guarded non-leaf view of `storage`,
// keeping its identity. Its former memory is released.
void MoveIntoStorage(const at::Tensor& parameter, const at::Tensor& view);

// Makes gradients of `parameter` flow into input `index` of `node`; with a null
// node the parameter does not require a gradient.
void SetGradientEdge(const at::Tensor& parameter, const NodePtr& node,
                     uint32_t index);

// Tells autograd that the values of `parameter` changed, so that a backward
// through an earlier use of it fails as it does for an in-place change.
void BumpVersion(const at::Tensor& parameter);

}  // namespace composable::internal
