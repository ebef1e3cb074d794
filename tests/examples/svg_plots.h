// What an SVG plot shows, read by an XML parser.
//
//   nlohmann::json plot = composable::ReadSvgPlot("loss.svg");
//   EXPECT_EQ(plot["legend"][0], "sharded");
//
// Keys: view_box, frame (both x, y, width, height), title, texts, legend,
// x_ticks, y_ticks (labels), y_tick_positions, and series: for each its
// stretches of [x, y] points. List tests/examples/svg_summary.py in `data`.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "tests/support/processes.h"

namespace composable {

// Throws std::runtime_error where it is no well-formed plot.
inline nlohmann::json ReadSvgPlot(const std::string& path) {
  const ProcessResult run = RunProcess({"tests/examples/svg_summary.py", path});
  if (run.exit_code != 0) throw std::runtime_error(run.output());
  return nlohmann::json::parse(run.out);
}

}  // namespace composable
