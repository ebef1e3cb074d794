// Other dtypes for the buffers of a module, for as long as they are wanted.
//
//   composable::CastBuffers cast = composable::cast_buffers(
//       model, [](const std::string& fqn, const at::Tensor& buffer)
//                  -> std::optional<c10::ScalarType> {
//         if (fqn == "running_mean") return buffer.scalar_type();
//         if (buffer.is_floating_point()) return torch::kBFloat16;
//         return std::nullopt;
//       });
//   // ... forwards ...
//   cast.restore();
//
// fully_shard and MixedPrecisionPolicy leave buffers alone: rotary frequencies
// or running statistics in a short dtype are wrong in ways that are hard to
// see. This is for operators that want statistics in the dtype of their weights.
// The module may be sharded or not. Members that hold a buffer see the change:
// the tensor stays the same one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "composable/module_ref.h"

namespace composable {

// The dtype that a buffer is to have; std::nullopt, or its own: as it is.
using BufferDtypeFn = std::function<std::optional<c10::ScalarType>(
    const std::string& fqn, const at::Tensor& buffer)>;

// What cast_buffers has changed. Dropped without restore(), it changes nothing.
class CastBuffers {
 public:
  // Gives each buffer its dtype back: with its former values, to the last bit,
  // where nothing has written other ones since; else with the present values,
  // cast. One that has got another dtype or size since is left alone. Later
  // calls do nothing.
  void restore();

  // How many buffers restore() would look at.
  size_t size() const { return changes_.size(); }

 private:
  friend CastBuffers cast_buffers(const ModuleRef& module,
                                  const BufferDtypeFn& dtype_of);
  struct Change {
    at::Tensor buffer;
    at::Tensor original;  // the memory that it had
    at::Tensor cast;      // a copy of what it got
  };
  std::vector<Change> changes_;
};

// Calls `dtype_of` once for each buffer in `module`, and casts it. If that
// throws, all buffers are as they were. Not while a graph that has saved one of
// them is to be run backward.
[[nodiscard]] CastBuffers cast_buffers(const ModuleRef& module,
                                       const BufferDtypeFn& dtype_of);

}  // namespace composable
