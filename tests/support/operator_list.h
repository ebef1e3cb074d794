// The names of the operators that a thread runs, nested ones included, as
// LibTorch's profiler sees them.
//
//   composable::OperatorList list;
//   model->forward(x).sum().backward();
//   list.names();  // {"aten::t", "aten::addmm", ...}
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <vector>

namespace composable {

class OperatorList {
 public:
  OperatorList()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&OperatorList::Begin)
                .scopes({at::RecordScope::FUNCTION}))) {
    Open() = this;
  }
  ~OperatorList() {
    at::removeCallback(handle_);
    Open() = nullptr;
  }
  OperatorList(const OperatorList&) = delete;
  OperatorList& operator=(const OperatorList&) = delete;

  const std::vector<std::string>& names() const { return names_; }

 private:
  static OperatorList*& Open() {
    static thread_local OperatorList* open = nullptr;
    return open;
  }
  static std::unique_ptr<at::ObserverContext> Begin(
      const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (Open() == nullptr || !name) return nullptr;
    Open()->names_.push_back(name->name);
    return nullptr;
  }

  std::vector<std::string> names_;
  at::CallbackHandle handle_;
};

}  // namespace composable
