// The command line of train_gpt.
#pragma once

#include <string>
#include <vector>

#include "examples/support/byte_text.h"
#include "examples/support/verify.h"

namespace examples {

struct Flags {
  std::vector<std::string> data;  // for ReadText()
  GPTConfig model;
  TrainingOptions training;
  ByteBatchesOptions batches;  // complete but for the rank and the world size
  int64_t log_every = 5;       // steps between two lines of a log
  std::string losses = "-";    // for WriteHistory()
  std::string plot;            // for WriteSvgPlot(); empty: no plot
  bool verify = false;
};

// Reads the flags and names of further data files: `--data=A,B C` means three
// files. Ends the program with a message when a flag is wrong, or for --help.
Flags ParseFlags(int argc, char** argv);

}  // namespace examples
