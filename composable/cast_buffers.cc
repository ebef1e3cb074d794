#include "composable/cast_buffers.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace composable {
namespace {

// Batch norm writes statistics without telling autograd, so no version counter
// shows it.
bool IsSameBits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.nbytes() == 0 ||
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace

void CastBuffers::restore() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  for (const Change& change : std::exchange(changes_, {})) {
    const at::Tensor& buffer = change.buffer;
    if (buffer.scalar_type() != change.cast.scalar_type() ||
        buffer.sizes() != change.cast.sizes()) {
      continue;
    }
    buffer.set_data(IsSameBits(buffer, change.cast)
                        ? change.original
                        : buffer.to(change.original.scalar_type()));
  }
}

CastBuffers cast_buffers(const ModuleRef& module,
                         const BufferDtypeFn& dtype_of) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  CastBuffers result;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  try {
    for (const auto& item : module->named_buffers()) {
      const at::Tensor& buffer = item.value();
      if (!buffer.defined() ||
          !seen.insert(buffer.unsafeGetTensorImpl()).second) {
        continue;
      }
      const auto dtype = dtype_of(item.key(), buffer);
      if (!dtype || *dtype == buffer.scalar_type()) continue;
      const at::Tensor cast = buffer.detach().to(*dtype);
      result.changes_.push_back({buffer, buffer.detach(), cast.clone()});
      buffer.set_data(cast);
    }
  } catch (...) {
    result.restore();
    throw;
  }
  return result;
}

}  // namespace composable
