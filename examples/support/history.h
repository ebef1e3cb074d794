// What a training run leaves behind to compare it by.
#pragma once

#include <string>
#include <vector>

namespace examples {

// One number per step each.
struct History {
  std::vector<double> losses;      // means over all ranks
  std::vector<double> grad_norms;  // of all gradients together, before clipping
};

// Writes `{"grad_norms":[2.1,...],"losses":[5.7,...],"world_size":2}` to the
// file `path`, or to standard output when it is `-`. Numbers read back as
// exactly the doubles given; one that is not finite becomes null. Throws
// c10::ValueError when the file can't be written.
void WriteHistory(const std::string& path, int world_size,
                  const History& history);

}  // namespace examples
