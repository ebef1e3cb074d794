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

#include <functional>
#include <memory>
#include <string>

#include "state/compatibility.h"

namespace torch::nn {
class Module;
}

namespace c10 {
struct AutogradMetaInterface;
}

namespace composable::internal {

inline constexpr c10::DispatchKey kGuardKey = c10::DispatchKey::DeferredInit;

inline bool HasGuard(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kGuardKey);
}
void AddGuard(const at::Tensor& tensor);

// Tells a shard, also one whose group is gone, from a copy of one.
void MarkShard(const at::Tensor& leaf);
bool IsMarkedShard(const at::Tensor& tensor);
// Tells a leaf that an operator made of the shard of parameter `fqn`.
void MarkMadeOfShard(const at::Tensor& leaf, const std::string& fqn);
// That parameter; empty: of none.
std::string MadeOfShard(const at::Tensor& tensor);

// The registry of a module's own parameters. Undefined entries are legal.
torch::OrderedDict<std::string, at::Tensor>& Parameters(
    torch::nn::Module& module);

torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& Children(
    torch::nn::Module& module);

// A CPU storage of `nbytes` that has no memory yet: views of it can be made,
// access to its data throws.
c10::intrusive_ptr<c10::StorageImpl> MakeEmptyStorage(size_t nbytes);
// `owner` lives until the last tensor that points to the storage is gone.
void SetOwner(c10::StorageImpl& storage, std::shared_ptr<void> owner);
// What access throws while there is no memory.
void SetFreedMessage(c10::StorageImpl& storage, std::string message);

// Whether it has memory, or needs none.
bool HasData(const c10::StorageImpl& storage);

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

// What makes a tensor a parameter, taken away from it, so that it can become
// another one and back.
struct TensorBody {
  at::Tensor data;  // over the same memory
  std::unique_ptr<c10::AutogradMetaInterface> autograd;
};
// A copy of the data only: what ExchangeBody needs to come back.
TensorBody BodyOf(const at::Tensor& tensor);
// Makes `tensor` the tensor that `body` describes, keeping its identity, and
// hands back its own autograd state in `body`. Does not throw for tensors of at
// most 5 dimensions.
void ExchangeBody(const at::Tensor& tensor, TensorBody& body);

// The autograd state of a whole parameter: a non-leaf whose grad() throws,
// since the gradient is the shard's. `message` makes the text.
std::unique_ptr<c10::AutogradMetaInterface> MakeMemberAutograd(
    std::function<std::string()> message);

// Whether somebody cleared or changed the gradient of a leaf.
struct GradientWatch {
  bool on = false;
  bool touched = false;  // mutable_grad() was called while on
  // What the gradient was then.
  at::Tensor gradient = {};
  int64_t version = 0;
};
// Replaces the autograd state of `leaf`, which has none yet. zero_grad() of
// modules and optimizers calls mutable_grad(), step() does not.
void WatchGradient(const at::Tensor& leaf,
                   std::shared_ptr<GradientWatch> watch);
// Its gradient, unwatched.
at::Tensor& GradientOf(const at::Tensor& leaf);

// Moves tensor hooks and post-accumulate hooks, and makes `to` their tensor.
void MoveHooks(c10::AutogradMetaInterface* from, const at::Tensor& to);
void MoveHooks(const at::Tensor& from, c10::AutogradMetaInterface* to);

// Makes gradients of `parameter` flow into input `index` of `node`; with a null
// node the parameter does not require a gradient.
void SetGradientEdge(const at::Tensor& parameter, const NodePtr& node,
                     uint32_t index);

// Makes `node`, which the caller keeps, the gradient accumulator of `leaf`.
void SetAccumulator(const at::Tensor& leaf, const NodePtr& node);

// Hooks that the user registered on the non-leaf `parameter` are kept by its
// node: hands them to a new one, whose input `index` it becomes.
void AttachMemberHooks(const at::Tensor& parameter, const NodePtr& node,
                       uint32_t index);
// The same for retain_grad(), once the gradient edge is set.
void KeepRetainedGradient(const at::Tensor& parameter);

// Gives `tensor`, which is on the meta device, memory on the CPU of unspecified
// contents, keeping its identity, sizes, strides and autograd state.
void GiveMemory(const at::Tensor& tensor);
// Makes `tensor` a tensor over what `data` is over, of its device and sizes.
void SetBody(const at::Tensor& tensor, const at::Tensor& data);

// Tells autograd that the values of `parameter` changed, so that a backward
// through an earlier use of it fails as it does for an in-place change.
void BumpVersion(const at::Tensor& parameter);

}  // namespace composable::internal
