// Trains a byte-level GPT on text, sharded over all ranks.
//
//   tools/run --nproc=2 bazel-bin/examples/train_gpt --verify --plot=loss.svg
//   torchrun --nproc-per-node=2 --no-python bazel-bin/examples/train_gpt
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "composable/composable.h"
#include "examples/gpt.h"
#include "examples/support/across_ranks.h"
#include "examples/support/byte_text.h"
#include "examples/support/flags.h"
#include "examples/support/history.h"
#include "examples/support/progress.h"
#include "examples/support/run_main.h"
#include "examples/support/svg_plot.h"
#include "examples/support/table.h"
#include "examples/support/verify.h"

namespace examples {

int Train(const Flags& flags) {
  auto group = composable::init_process_group();
  const int rank = composable::rank(), world_size = composable::world_size();
  ByteBatches batches(ReadText(flags.data), flags.batches, rank, world_size);
  Progress progress(std::cerr, {.steps = flags.batches.steps,
                                .tokens_per_step = batches.GlobalTokens(),
                                .log_every = flags.log_every,
                                .terminal = isatty(STDERR_FILENO) == 1,
                                .quiet = rank != 0});

  torch::manual_seed(flags.training.seed);
  GPT model(flags.model);
  for (auto& block : *model->blocks) composable::fully_shard(block);
  composable::fully_shard(model);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(flags.training.lr));

  History history;
  for (at::Tensor batch : batches) {
    auto loss = model->loss(batch);
    loss.backward();
    auto norm =
        composable::clip_grad_norm_(model->parameters(), flags.training.clip);
    optimizer.step();
    optimizer.zero_grad();
    history.grad_norms.push_back(norm);
    history.losses.push_back(MeanOverRanks(*group, loss));
    progress.Step(history.losses.back());
  }

  int64_t held = 0;
  for (auto& parameter : model->parameters()) held += parameter.numel();
  const auto stats = composable::fsdp_stats(model);
  const auto ranks =
      GatherFromRanks(*group, {held, stats.peak_unsharded_bytes,
                               stats.gathered_bytes, stats.reduced_bytes});
  composable::destroy_process_group();  // from here on nobody waits for rank 0
  if (rank != 0) return 0;
  std::cout << FormatRankTable(ranks) << std::flush;
  WriteHistory(flags.losses, world_size, history);
  std::vector<PlotSeries> losses = {
      {.name = "sharded over " + std::to_string(world_size) + " ranks",
       .y = history.losses}};
  bool passed = true;
  if (flags.verify) {
    const History expected =
        TrainUnsharded(flags.model, flags.training, batches.Global());
    passed = Agrees(history, expected);
    losses.push_back({.name = "one process, unsharded", .y = expected.losses});
  }
  if (!flags.plot.empty()) {
    WriteSvgPlot(flags.plot,
                 {.title = "Training loss of a byte-level GPT",
                  .x_label = "step",
                  .y_label = "cross entropy (nats per byte)"},
                 losses);
    std::cerr << "plot of the losses: " << flags.plot << std::endl;
  }
  return passed ? 0 : 1;
}

}  // namespace examples

int main(int argc, char** argv) {
  const examples::Flags flags = examples::ParseFlags(argc, argv);
  return examples::RunMain([&] { return examples::Train(flags); });
}
