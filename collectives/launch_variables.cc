#include "collectives/launch_variables.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace composable {

LaunchVariables::LaunchVariables(EnvironmentLookup lookup, std::string advice)
    : lookup_(std::move(lookup)), advice_(std::move(advice)) {}

bool LaunchVariables::Has(const char* name) const {
  const char* value = lookup_(name);
  return value != nullptr && *value != '\0';
}

std::string LaunchVariables::Text(const char* name) const {
  return Has(name) ? lookup_(name) : "";
}

const char* LaunchVariables::FirstSet(const char* first,
                                      const char* second) const {
  return !Has(first) && Has(second) ? second : first;
}

std::string LaunchVariables::Require(const char* name) const {
  if (!Has(name)) {
    Fail(absl::StrCat("the environment variable ", name, " is not set."));
  }
  return Text(name);
}

int LaunchVariables::Number(const char* name, int least, int most,
                            const std::string& why) const {
  const std::string text = Require(name);
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
    Fail(absl::StrCat("expected ", name, " to be a number from ", least, " to ",
                      most, why, ", got '", text, "'."));
  }
  return value;
}

void LaunchVariables::Fail(const std::string& text) const {
  TORCH_CHECK_VALUE(false, "init_process_group: ", text, " ", advice_);
  std::abort();  // not reached: the line above throws
}

}  // namespace composable
