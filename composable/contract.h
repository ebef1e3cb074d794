// Composable APIs as objects: applied to a module once, with a state that can
// be asked for, and without changing what the module is called.
//
//   struct MyState : composable::ComposableState { int calls = 0; };
//   inline constexpr auto my_api = composable::contract<MyState>(
//       "my_api", [](const composable::Modules& /*modules*/) {
//         return std::make_shared<MyState>();
//       });
//
// and then
//
//   my_api(model);
//   my_api.state(model)->calls;
//
// Modelled on torch.distributed._composable.contract, with one difference: it is
// a transaction. A body that throws must leave the modules as they were; where
// something throws later, ComposableState::Rollback does. Nothing is recorded,
// and the call can be repeated.
//
// Thread-safe for different modules.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "composable/module_ref.h"
#include "state/contract_registry.h"

namespace composable {

namespace internal {

// Checks of one application: before the body, and after it.
class ContractGuard {
 public:
  // Throws c10::ValueError, naming `api` and the module, if it was applied to
  // one of `modules` already, or if `modules` is empty.
  ContractGuard(const char* api, const Modules& modules);
  // Throws c10::ValueError, naming what came and went, if the FQNs of the
  // parameters, buffers or submodules have changed; else records `state`. Ends
  // with state->Commit(), or with state->Rollback() if it throws.
  void Commit(const std::shared_ptr<ComposableState>& state) const;

 private:
  struct Names {
    std::vector<std::string> parameters;
    std::vector<std::string> buffers;
    std::vector<std::string> modules;
  };
  static Names NamesOf(const torch::nn::Module& module);
  void CheckSame(const torch::nn::Module& module, const char* kind,
                 const std::vector<std::string>& before,
                 const std::vector<std::string>& after) const;

  const char* api_;
  const Modules& modules_;
  std::vector<Names> names_;
};

}  // namespace internal

template <typename State, typename Body>
class Contract {
 public:
  constexpr Contract(const char* name, Body body)
      : name_(name), body_(std::move(body)) {}

  // Applies the API to `modules`, which share one state.
  template <typename... Args>
  std::shared_ptr<State> operator()(const Modules& modules,
                                    Args&&... args) const {
    const internal::ContractGuard guard(name_, modules);
    std::shared_ptr<State> state = body_(modules, std::forward<Args>(args)...);
    guard.Commit(state);
    return state;
  }
  template <typename... Args>
  std::shared_ptr<State> operator()(const ModuleRef& module,
                                    Args&&... args) const {
    return (*this)(Modules{module.ptr()}, std::forward<Args>(args)...);
  }

  // The state on `module`, or null.
  std::shared_ptr<State> state(const ModuleRef& module) const {
    return std::dynamic_pointer_cast<State>(
        ContractRegistry::Get().Find(*module, name_));
  }
  constexpr const char* name() const { return name_; }

 private:
  const char* name_;
  Body body_;
};

// `body` takes the modules and any further arguments, and returns the
// std::shared_ptr<State>.
template <typename State, typename Body>
constexpr Contract<State, Body> contract(const char* name, Body body) {
  return Contract<State, Body>(name, std::move(body));
}

}  // namespace composable
