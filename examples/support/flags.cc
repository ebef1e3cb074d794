#include "examples/support/flags.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <absl/strings/match.h>

ABSL_FLAG(std::vector<std::string>, data, {},
          "files or folders of text to train on, separated by commas or "
          "blanks; default: the "
          "text of this repository");
ABSL_FLAG(int64_t, steps, 20, "optimizer steps");
ABSL_FLAG(int64_t, batch, 4, "sequences per rank and step");
ABSL_FLAG(int64_t, seq, 128, "tokens (bytes) per sequence");
ABSL_FLAG(int64_t, layers, 6, "transformer blocks");
ABSL_FLAG(int64_t, dim, 384,
          "width of the model; the defaults give 10.9 M parameters");
ABSL_FLAG(int64_t, heads, 6, "attention heads; must divide the width");
ABSL_FLAG(double, lr, 3e-4, "learning rate of AdamW");
ABSL_FLAG(double, clip, 1.0, "largest norm of all gradients together");
ABSL_FLAG(uint64_t, seed, 0,
          "of the initial weights and of the choice of sequences");
ABSL_FLAG(int64_t, log_every, 5,
          "steps between two lines, where there is no terminal");
ABSL_FLAG(std::string, losses, "-",
          "file for losses and gradient norms as JSON; - for standard output");
ABSL_FLAG(std::string, plot, "",
          "file for a plot of the losses as SVG; default: none");
ABSL_FLAG(
    bool, verify, false,
    "train the same model unsharded in one process as well, and fail when a "
    "loss or a gradient norm differs");

namespace examples {

namespace {

bool IsOurs(absl::string_view file) {
  return absl::EndsWith(file, "examples/support/flags.cc");
}

}  // namespace

Flags ParseFlags(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "trains a byte-level GPT on text, sharded over all ranks\n\n"
      "  tools/run --nproc=2 bazel-bin/examples/train_gpt --verify\n"
      "  torchrun --nproc-per-node=2 --no-python bazel-bin/examples/train_gpt "
      "--steps=100");
  absl::FlagsUsageConfig
      usage;  // by default, --help looks for flags in train_gpt.cc
  usage.contains_helpshort_flags = usage.contains_help_flags = &IsOurs;
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> positional = absl::ParseCommandLine(argc, argv);
  Flags flags;
  flags.data = absl::GetFlag(FLAGS_data);
  flags.data.insert(flags.data.end(), positional.begin() + 1, positional.end());
  flags.model.seq = absl::GetFlag(FLAGS_seq);
  flags.model.layers = absl::GetFlag(FLAGS_layers);
  flags.model.dim = absl::GetFlag(FLAGS_dim);
  flags.model.heads = absl::GetFlag(FLAGS_heads);
  flags.training.seed = absl::GetFlag(FLAGS_seed);
  flags.training.lr = absl::GetFlag(FLAGS_lr);
  flags.training.clip = absl::GetFlag(FLAGS_clip);
  flags.batches.seed = absl::GetFlag(FLAGS_seed);
  flags.batches.steps = absl::GetFlag(FLAGS_steps);
  flags.batches.batch = absl::GetFlag(FLAGS_batch);
  flags.batches.seq = absl::GetFlag(FLAGS_seq);
  flags.log_every = absl::GetFlag(FLAGS_log_every);
  flags.losses = absl::GetFlag(FLAGS_losses);
  flags.plot = absl::GetFlag(FLAGS_plot);
  flags.verify = absl::GetFlag(FLAGS_verify);
  return flags;
}

}  // namespace examples
