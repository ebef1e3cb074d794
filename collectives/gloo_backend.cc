// The only file that includes Gloo. Its headers come from the system, its code
// from libtorch_cpu: no Gloo type may be derived from or called here, since
// the two may differ by version.
#include <cstdlib>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "collectives/backends.h"

namespace composable {

c10::intrusive_ptr<c10d::Backend> MakeGlooBackend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr && *interface != '\0'
                                 ? Gloo::createDeviceForInterface(interface)
                                 : Gloo::createDefaultDevice());
  return c10::make_intrusive<Gloo>(store, rank, world_size, options);
}

}  // namespace composable
