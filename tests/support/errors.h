// The text of the error that a piece of code throws, to compare or to search.
//
//   const std::string text = composable::ErrorOf<c10::ValueError>(
//       [] { composable::default_process_group(); });
//   EXPECT_NE(text.find("init_process_group"), std::string::npos) << text;
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <string>

namespace composable {

// "no error" if `body` throws nothing. Other errors than `Error` pass through.
template <typename Error = c10::Error>
std::string ErrorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace composable
