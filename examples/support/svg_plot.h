// A line plot as an SVG file, without a plotting program.
//
//   examples::WriteSvgPlot("loss.svg",
//                          {.title = "Training", .x_label = "step",
//                           .y_label = "loss", .log_y = true},
//                          {{.name = "sharded", .y = losses}});
//
// The file is XML 1.0, looks the same in every viewer that knows SVG 1.1, turns
// dark where the viewer asks for it, and depends on nothing but the arguments.
#pragma once

#include <string>
#include <vector>

namespace examples {

struct PlotSeries {
  std::string name;
  std::vector<double> x = {};  // empty: 1, 2, 3, ...
  std::vector<double> y;
};

struct PlotOptions {
  std::string title = {};
  std::string x_label = {};
  std::string y_label = {};
  bool log_y = false;
};

// The text of the plot. A point that can't be drawn (a coordinate that is not a
// number, or beyond 1e300; y <= 0 on a logarithmic axis) makes a gap, and the
// legend says how many there are. Later series are drawn thinner and dashed, so
// that they do not hide the ones below. Throws c10::ValueError where a series
// has another number of x than of y. Text may be any bytes: what is no UTF-8 or
// not allowed in XML is replaced.
//
// Each series is a <g class="series"> of one <polyline> per stretch of points,
// or one <circle> where a stretch is a single point.
std::string SvgPlot(const PlotOptions& options,
                    const std::vector<PlotSeries>& series);

// Writes it to the file `path`. Throws c10::ValueError with the path and the
// reason where that fails.
void WriteSvgPlot(const std::string& path, const PlotOptions& options,
                  const std::vector<PlotSeries>& series);

}  // namespace examples
