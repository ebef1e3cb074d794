#include "examples/support/run_main.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

namespace examples {
namespace {

void Report(const std::string& text) noexcept try {
  const char* rank = std::getenv("RANK");
  std::cerr << (rank != nullptr ? "[rank " + std::string(rank) + "] " : "")
            << "error: " << text << std::endl;
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == '\0') return;
  // torchrun prints `py_callstack`, not the inner `message`, so both say it.
  const nlohmann::json extra = {
      {"py_callstack", text},
      {"timestamp", std::to_string(std::time(nullptr))}};
  const nlohmann::json report = {
      {"message", {{"message", text}, {"extraInfo", extra}}}};
  std::ofstream(path) << report.dump(-1, ' ', true,
                                     nlohmann::json::error_handler_t::replace);
} catch (...) {
  // Out of memory or the like while reporting: the exit code still tells.
}

}  // namespace

int RunMain(const std::function<int()>& body) noexcept {
  try {
    return body();
  } catch (const c10::Error& error) {
    Report(error.what_without_backtrace());
  } catch (const std::exception& error) {
    Report(error.what());
  } catch (...) {
    Report("an exception of unknown type");
  }
  return 1;
}

}  // namespace examples
