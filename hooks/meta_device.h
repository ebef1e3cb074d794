// Modules made while this lives have their parameters and buffers on the meta
// device: shapes without memory.
//
//   torch::nn::Linear huge(nullptr);
//   {
//     const composable::MetaDevice meta;
//     huge = torch::nn::Linear(1 << 20, 1 << 20);   // 4 TiB, of which none
//   }
//   huge->weight.is_meta();
//
// In this thread, every operator that makes a tensor on the CPU makes it on the
// meta device instead, and operators on such tensors compute shapes only. Shard
// the module as usual, then give it values: see composable/materialize.h.
//
// (torch::tensor(data) is no operator: what it makes is on the CPU.)
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace composable {

class MetaDevice {
 public:
  MetaDevice();
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;

  static bool IsActive() { return depth_ > 0; }

 private:
  inline static thread_local int depth_ = 0;
  // Sends operators without tensors, too, to the guard.
  c10::impl::IncludeDispatchKeyGuard include_;
};

// For the guard: replaces a device argument of `op` on `stack`, if there is one
// and it names the CPU or nothing, by the meta device.
void MakeOnMeta(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace composable
