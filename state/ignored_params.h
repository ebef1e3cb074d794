// Parameters that fully_shard leaves alone because it was told to, also in later
// calls on modules above.
//
//   const composable::IgnoredParams ignored({model->scale});
//   composable::IgnoredParams::Contains(model->scale);   // true, while it lives
//
// Held by the state of the call that named them. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace composable {

class IgnoredParams {
 public:
  // Does not keep the tensors alive.
  explicit IgnoredParams(const std::vector<at::Tensor>& params);
  ~IgnoredParams();
  IgnoredParams(const IgnoredParams&) = delete;
  IgnoredParams& operator=(const IgnoredParams&) = delete;

  static bool Contains(const at::TensorBase& tensor);

 private:
  // So that no other tensor gets the address of one that is gone.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> params_;
};

}  // namespace composable
