// Reads the variables of one launcher, with errors that name the launcher.
//
// Use it where a rank's place in the job comes from environment variables:
//
//   composable::LaunchVariables variables(std::getenv, "srun sets it.");
//   const int size = variables.Number("SLURM_STEP_NUM_TASKS", 1, 1024);
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace composable {

// Looks a variable up; nullptr if it is not set.
using EnvironmentLookup = std::function<const char*(const char*)>;

class LaunchVariables {
 public:
  // `advice` ends every error: who sets the variables, and how to start.
  LaunchVariables(EnvironmentLookup lookup, std::string advice);

  // One that is set to nothing counts as not set.
  bool Has(const char* name) const;
  // The value, or "".
  std::string Text(const char* name) const;
  // The first of the two that is set, else `first`.
  const char* FirstSet(const char* first, const char* second) const;

  // Throws c10::ValueError if it is not set.
  std::string Require(const char* name) const;
  // Throws c10::ValueError if it is not set or not a number in the range; `why`
  // explains the range, as in " (WORLD_SIZE is 4)".
  int Number(const char* name, int least, int most,
             const std::string& why = "") const;

  // Throws c10::ValueError: "init_process_group: ", the text, the advice.
  [[noreturn]] void Fail(const std::string& text) const;

 private:
  EnvironmentLookup lookup_;
  std::string advice_;
};

}  // namespace composable
