// Whether the modules of a tree still have the parameters that they had.
//
//   context.snapshot.Check(roots);   // at the start of each forward
//
// A parameter that is registered, or put into the registry in place of another,
// after fully_shard would be neither sharded nor reduced, and each rank would
// train its own. So would those of a module that is added. The check compares
// addresses; only where something changed does it look at what that is.
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace composable {

class TreeSnapshot {
 public:
  // Throws c10::ValueError, naming the parameter, if a module in `roots` has one
  // that belongs to no fully_shard.
  void Check(const std::vector<std::weak_ptr<torch::nn::Module>>& roots);

 private:
  struct Entry {
    std::weak_ptr<torch::nn::Module> module;
    std::vector<const void*> parameters;
    std::vector<const void*> children;
  };
  static bool IsSame(const Entry& entry);
  void Visit(const std::shared_ptr<torch::nn::Module>& module,
             const std::string& prefix);

  std::vector<Entry> entries_;
};

}  // namespace composable
