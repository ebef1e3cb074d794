// Collects the warnings that the code of a test causes in its thread.
//
//   composable::WarningsOfThisThread warnings;
//   TORCH_WARN("The gradient was cleared.");
//   EXPECT_EQ(warnings.Count("was cleared"), 1) << warnings.text();
#pragma once

#include <c10/util/Exception.h>

#include <mutex>
#include <string>
#include <vector>

namespace composable {

// LibTorch keeps the handler per thread; a backward runs in the thread that
// called it.
class WarningsOfThisThread {
 public:
  WarningsOfThisThread() : guard_(&handler_) {}

  int Count(const std::string& text) const {
    int count = 0;
    for (const auto& warning : handler_.warnings) {
      count += warning.find(text) != std::string::npos ? 1 : 0;
    }
    return count;
  }
  std::string text() const {
    std::string all;
    for (const auto& warning : handler_.warnings) all += warning + "\n";
    return all;
  }

 private:
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      warnings.push_back(warning.msg());
    }
    std::vector<std::string> warnings;
  };
  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace composable
