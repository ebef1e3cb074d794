#include "state/tensor_access.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <utility>

namespace composable::internal {
namespace {

// A derived class may name a protected member of its base, and the pointer to
// member that it hands out has the base's type.
struct TensorImplAccess : c10::TensorImpl {
  static auto key_set_member() { return &TensorImplAccess::key_set_; }
};
struct ModuleAccess : torch::nn::Module {
  static auto parameters_member() { return &ModuleAccess::parameters_; }
};

// An explicit instantiation may name a private member.
template <auto Member, typename Tag>
struct PrivateMember {
  friend constexpr auto Get(Tag /*tag*/) { return Member; }
};
struct ThrowOnAccess {
  friend constexpr auto Get(ThrowOnAccess);
};
template struct PrivateMember<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                              ThrowOnAccess>;

void DeleteOwner(void* owner) {
  delete static_cast<std::shared_ptr<void>*>(owner);
}

// Replaces the memory and keeps the owner. The old owner pointer is moved, so
// nothing is allocated.
void ReplaceMemory(c10::StorageImpl& storage, void* data) {
  c10::DataPtr& old = storage._mutable_data_ptr_no_checks();
  c10::DeleterFnPtr deleter = old.get_deleter();
  void* owner = old.move_context().release();
  storage.set_data_ptr_noswap(
      c10::DataPtr(data, owner, deleter, c10::Device(c10::kCPU)));
}

}  // namespace

void AddGuard(const at::Tensor& tensor) {
  auto& keys =
      tensor.unsafeGetTensorImpl()->*TensorImplAccess::key_set_member();
  keys = keys.add(kGuardKey);
}

torch::OrderedDict<std::string, at::Tensor>& Parameters(
    torch::nn::Module& module) {
  return module.*ModuleAccess::parameters_member();
}

c10::intrusive_ptr<c10::StorageImpl> MakeEmptyStorage(size_t nbytes) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes,
      c10::DataPtr(nullptr, c10::Device(c10::kCPU)), /*allocator=*/nullptr,
      /*resizable=*/false);
  DropData(*storage);
  return storage;
}

void SetOwner(c10::StorageImpl& storage, std::shared_ptr<void> owner) {
  c10::DataPtr& old = storage._mutable_data_ptr_no_checks();
  storage.set_data_ptr_noswap(
      c10::DataPtr(old.get(), new std::shared_ptr<void>(std::move(owner)),
                   &DeleteOwner, c10::Device(c10::kCPU)));
}

void SetFreedMessage(c10::StorageImpl& storage, std::string message) {
  const bool throws = storage.*Get(ThrowOnAccess{});
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(message));
  storage.*Get(ThrowOnAccess{}) = throws;
}

void SetData(c10::StorageImpl& storage, void* data) {
  storage.*Get(ThrowOnAccess{}) = false;
  ReplaceMemory(storage, data);
}

void DropData(c10::StorageImpl& storage) {
  storage.*Get(ThrowOnAccess{}) = true;
  ReplaceMemory(storage, nullptr);
}

c10::intrusive_ptr<c10::StorageImpl> BorrowMemory(void* data, size_t nbytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes,
      c10::DataPtr(data, c10::Device(c10::kCPU)), /*allocator=*/nullptr,
      /*resizable=*/false);
}

c10::intrusive_ptr<c10::StorageImpl> StorageOf(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl().lock();
}

at::Tensor MakeTensor(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                      at::ScalarType dtype, at::IntArrayRef sizes,
                      at::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

void MoveIntoStorage(const at::Tensor& parameter, const at::Tensor& view) {
  at::Tensor alias = parameter;
  alias.set_data(view);
  // A leaf may be a view, such as randn({5, 7}).t(); autograd would derive its
  // gradient function from its base again.
  if (alias.is_view()) alias.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
  if (alias.is_leaf()) alias.set_requires_grad(false);
  AddGuard(alias);
}

void SetGradientEdge(const at::Tensor& parameter, const NodePtr& node,
                     uint32_t index) {
  torch::autograd::impl::set_gradient_edge(
      parameter,
      node ? torch::autograd::Edge(node, index) : torch::autograd::Edge());
}

void BumpVersion(const at::Tensor& parameter) {
  torch::autograd::impl::bump_version(parameter);
}

}  // namespace composable::internal
