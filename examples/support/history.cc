#include "examples/support/history.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

namespace examples {

void WriteHistory(const std::string& path, int world_size,
                  const History& history) {
  const nlohmann::json report = {{"world_size", world_size},
                                 {"losses", history.losses},
                                 {"grad_norms", history.grad_norms}};
  if (path == "-") {
    std::cout << report << std::endl;
    return;
  }
  std::ofstream out(path);
  out << report << std::endl;
  TORCH_CHECK_VALUE(out, "can't write the losses to ", path, ": ",
                    std::strerror(errno));
}

}  // namespace examples
