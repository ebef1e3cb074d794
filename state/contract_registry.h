// Which composable APIs were applied to which modules, and with what state.
//
//   auto& registry = composable::ContractRegistry::Get();
//   registry.Add({module}, "fully_shard", state);
//   registry.Find(*module, "fully_shard");   // the state, or null
//
// A module has no room for foreign attributes, so the registry is kept beside
// it, keyed by its address and checked against its life: an entry of a module
// that is gone never answers for another one at the same address. Entries hold
// states weakly; what must live as long as a module's parameters is owned by
// their storage (see FSDPState), and a state without parameters by its entry.
//
// Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace composable {

// Base of the states of composable APIs.
class ComposableState {
 public:
  ComposableState() = default;
  virtual ~ComposableState() = default;
  ComposableState(const ComposableState&) = delete;
  ComposableState& operator=(const ComposableState&) = delete;
  // Whether something that lives as long as the modules owns this state. If
  // not, the registry does.
  virtual bool owned_by_modules() const { return false; }
  // End of the application: it stays, or something threw after the state was
  // made, and the modules are to be what they were.
  virtual void Commit() noexcept {}
  virtual void Rollback() noexcept {}
};

class ContractRegistry {
 public:
  static ContractRegistry& Get();

  // Records that `api` was applied to `modules`, which share `state`. Throws
  // c10::ValueError if one of them has it already. Nothing is recorded if it
  // throws.
  void Add(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
           const std::string& api,
           const std::shared_ptr<ComposableState>& state);

  // The state of `api` on `module`, or null.
  std::shared_ptr<ComposableState> Find(const torch::nn::Module& module,
                                        const std::string& api) const;

  // Whether `api` was applied to the module, even if its state is gone.
  bool Applied(const torch::nn::Module& module, const std::string& api) const;

  // The APIs applied to `module`, in order.
  std::vector<std::string> Apis(const torch::nn::Module& module) const;

 private:
  ContractRegistry();
  ~ContractRegistry() = default;
  struct Tables;
  std::unique_ptr<Tables> tables_;
};

}  // namespace composable
