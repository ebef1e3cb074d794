#include "state/tensor_access.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/cpp_hook.h>
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
struct AutogradOf {
  friend constexpr auto Get(AutogradOf);
};
template struct PrivateMember<&c10::TensorImpl::autograd_meta_, AutogradOf>;
struct ChildrenOf {
  friend constexpr auto Get(ChildrenOf);
};
template struct PrivateMember<&torch::nn::Module::children_, ChildrenOf>;

class MemberAutograd final : public torch::autograd::AutogradMeta {
 public:
  explicit MemberAutograd(std::function<std::string()> message)
      : message_(std::move(message)) {}
  at::Tensor& mutable_grad() override {
    Check();
    return grad_;
  }
  const at::Tensor& grad() const override {
    Check();
    return grad_;
  }

 private:
  void Check() const {
    // retain_grad() on a member keeps this rank's whole gradient.
    TORCH_CHECK_VALUE(retains_grad_ || grad_.defined(), message_());
  }
  std::function<std::string()> message_;
};

class WatchedAutograd final : public torch::autograd::AutogradMeta {
 public:
  explicit WatchedAutograd(std::shared_ptr<GradientWatch> watch)
      : watch_(std::move(watch)) {}
  at::Tensor& mutable_grad() override {
    if (watch_->on && !watch_->touched) {
      watch_->touched = true;
      watch_->gradient = grad_;
      watch_->version = grad_.defined() ? grad_._version() : 0;
    }
    return grad_;
  }

 private:
  std::shared_ptr<GradientWatch> watch_;
};

// As CppFunctionTensorPreHook, which LibTorch does not export.
class MemberHooks final : public torch::autograd::FunctionPreHook {
 public:
  MemberHooks(std::shared_ptr<torch::autograd::hooks_list> hooks, size_t index)
      : hooks_(std::move(hooks)), index_(index) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    torch::autograd::variable_list results = gradients;
    // By index: a hook may register another one.
    for (size_t i = 0; i < hooks_->size(); ++i) {  // NOLINT
      const auto hook = (*hooks_)[i];
      if (!hook) continue;  // removed
      const at::TensorBase result = hook(results[index_]);
      if (!result.defined()) continue;
      TORCH_CHECK_VALUE(result.sizes() == results[index_].sizes(),
                        "A hook on a member changed the sizes of its gradient: "
                        "expected ",
                        results[index_].sizes(), ", got ", result.sizes(), ".");
      results[index_] = at::Tensor(result);
    }
    return results;
  }

 private:
  std::shared_ptr<torch::autograd::hooks_list> hooks_;
  size_t index_;
};

void MoveHooks(torch::autograd::AutogradMeta& from,
               torch::autograd::AutogradMeta& to) {
  to.hooks_ = std::move(from.hooks_);
  from.hooks_.clear();
  to.cpp_hooks_list_ = std::move(from.cpp_hooks_list_);
  to.post_acc_grad_hooks_ = std::move(from.post_acc_grad_hooks_);
}

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

namespace {
constexpr char kShardName[] = "composable::shard";
constexpr char kMadeOfShard[] = "composable::made of shard ";
}  // namespace

void MarkShard(const at::Tensor& leaf) {
  torch::autograd::impl::set_name(leaf, kShardName);
}

bool IsMarkedShard(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->name_ == kShardName;
}

void MarkMadeOfShard(const at::Tensor& leaf, const std::string& fqn) {
  torch::autograd::impl::set_name(leaf, kMadeOfShard + fqn);
}

std::string MadeOfShard(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->name_.rfind(kMadeOfShard, 0) != 0) return "";
  return meta->name_.substr(sizeof(kMadeOfShard) - 1);
}

torch::OrderedDict<std::string, at::Tensor>& Parameters(
    torch::nn::Module& module) {
  return module.*ModuleAccess::parameters_member();
}

torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& Children(
    torch::nn::Module& module) {
  return module.*Get(ChildrenOf{});
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

bool HasData(const c10::StorageImpl& storage) {
  return storage.nbytes() == 0 || !(storage.*Get(ThrowOnAccess{}));
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
      c10::Storage(storage),
      c10::DispatchKeySet(storage->device_type() == c10::kMeta
                              ? c10::DispatchKey::Meta
                              : c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

TensorBody BodyOf(const at::Tensor& tensor) {
  return {MakeTensor(StorageOf(tensor), tensor.scalar_type(), tensor.sizes(),
                     tensor.strides(), tensor.storage_offset()),
          nullptr};
}

void ExchangeBody(const at::Tensor& tensor, TensorBody& body) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->shallow_copy_from(body.data.getIntrusivePtr());
  std::swap(impl->*Get(AutogradOf{}), body.autograd);
}

std::unique_ptr<c10::AutogradMetaInterface> MakeMemberAutograd(
    std::function<std::string()> message) {
  return std::make_unique<MemberAutograd>(std::move(message));
}

void WatchGradient(const at::Tensor& leaf,
                   std::shared_ptr<GradientWatch> watch) {
  leaf.unsafeGetTensorImpl()->set_autograd_meta(
      std::make_unique<WatchedAutograd>(std::move(watch)));
}

at::Tensor& GradientOf(const at::Tensor& leaf) {
  return torch::autograd::impl::materialize_autograd_meta(leaf)->grad_;
}

void MoveHooks(c10::AutogradMetaInterface* from, const at::Tensor& to) {
  if (from == nullptr) return;
  MoveHooks(*static_cast<torch::autograd::AutogradMeta*>(from),
            *torch::autograd::impl::materialize_autograd_meta(to));
}

void MoveHooks(const at::Tensor& from, c10::AutogradMetaInterface* to) {
  if (to == nullptr) return;
  MoveHooks(*torch::autograd::impl::materialize_autograd_meta(from),
            *static_cast<torch::autograd::AutogradMeta*>(to));
}

void SetGradientEdge(const at::Tensor& parameter, const NodePtr& node,
                     uint32_t index) {
  torch::autograd::impl::set_gradient_edge(
      parameter,
      node ? torch::autograd::Edge(node, index) : torch::autograd::Edge());
}

void AttachMemberHooks(const at::Tensor& parameter, const NodePtr& node,
                       uint32_t index) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return;
  node->add_tensor_pre_hook(
      std::make_unique<MemberHooks>(meta->cpp_hooks_list_, index));
}

void KeepRetainedGradient(const at::Tensor& parameter) {
  auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->retains_grad_) return;
  const auto& kept = meta->grad_fn_->retains_grad_hooks();
  if (kept.find(meta->output_nr_) != kept.end()) return;
  meta->retains_grad_ = false;
  parameter.retain_grad();
}

void SetAccumulator(const at::Tensor& leaf, const NodePtr& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, WeakNodePtr(node));
}

void GiveMemory(const at::Tensor& tensor) {
  const at::Tensor flat =
      at::empty({static_cast<int64_t>(tensor.storage().nbytes())}, c10::kByte);
  const at::Tensor data =
      MakeTensor(StorageOf(flat), tensor.scalar_type(), tensor.sizes(),
                 tensor.strides(), tensor.storage_offset());
  SetBody(tensor, data);
}

void SetBody(const at::Tensor& tensor, const at::Tensor& data) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

void BumpVersion(const at::Tensor& parameter) {
  torch::autograd::impl::bump_version(parameter);
}

}  // namespace composable::internal
