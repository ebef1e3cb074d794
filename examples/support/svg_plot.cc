#include "examples/support/svg_plot.h"

#include <absl/strings/str_format.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string_view>

#include "examples/support/plot_axis.h"
#include "examples/support/xml_text.h"

namespace examples {
namespace {

// In pixels. The legend stands above the plot, one line per series.
constexpr double kWidth = 720, kPlotHeight = 320;
constexpr double kLeft = 84, kRight = 24, kTop = 44, kBottom = 56;
constexpr double kLegendLine = 20, kTickSize = 5;
constexpr double kPlotWidth = kWidth - kLeft - kRight;

// Told apart with impaired colour vision too (Okabe and Ito's palette), and on
// either background.
constexpr std::array<std::string_view, 6> kColors = {
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"};

// Attributes are the light scheme; a viewer that knows no media queries keeps
// it whole.
constexpr std::string_view kDarkScheme =
    "<style>@media (prefers-color-scheme: dark) { .paper { fill: #181a1b; } "
    ".ink text { fill: #e8e6e3; } .frame { stroke: #e8e6e3; } "
    ".grid { stroke: #45494c; } }</style>\n";

struct Point {
  double x = 0;
  double y = 0;
};

class Plot {
 public:
  Plot(const PlotOptions& options, const std::vector<PlotSeries>& series)
      : scale_(options.log_y ? PlotAxis::Scale::kLog
                             : PlotAxis::Scale::kLinear),
        top_(kTop + kLegendLine * static_cast<double>(series.size())),
        x_({}, PlotAxis::Scale::kLinear),
        y_({}, scale_) {
    for (const PlotSeries& one : series) AddStretches(one);
    MakeAxes();
    Header(options);
    Axes(options);
    for (size_t i = 0; i < series.size(); ++i) Series(series[i], i);
    if (x_values_.empty()) {
      Text(kLeft + kPlotWidth / 2, top_ + kPlotHeight / 2, "middle", "no data");
    }
    svg_ += "</g>\n</svg>\n";
  }

  std::string Take() && { return std::move(svg_); }

 private:
  using Stretch = std::vector<Point>;

  void AddStretches(const PlotSeries& series) {
    TORCH_CHECK_VALUE(series.x.empty() || series.x.size() == series.y.size(),
                      "expected as many x as y in the series '", series.name,
                      "', but got ", series.x.size(), " x and ",
                      series.y.size(), " y.");
    std::vector<Stretch> stretches;
    bool open = false;
    for (size_t i = 0; i < series.y.size(); ++i) {
      const Point point = {
          series.x.empty() ? static_cast<double>(i + 1) : series.x[i],
          series.y[i]};
      const bool shown = PlotAxis::CanShow(point.x, PlotAxis::Scale::kLinear) &&
                         PlotAxis::CanShow(point.y, scale_);
      if (shown) {
        if (!open) stretches.emplace_back();
        stretches.back().push_back(point);
        x_values_.push_back(point.x);
        y_values_.push_back(point.y);
      }
      open = shown;
    }
    stretches_.push_back(std::move(stretches));
  }

  void MakeAxes() {
    const bool whole = std::all_of(x_values_.begin(), x_values_.end(),
                                   [](double x) { return std::floor(x) == x; });
    x_ = PlotAxis(x_values_, PlotAxis::Scale::kLinear, whole);
    y_ = PlotAxis(y_values_, scale_);
  }

  double X(double value) const {
    return kLeft + kPlotWidth * x_.Position(value);
  }
  double Y(double value) const {
    return top_ + kPlotHeight * (1 - y_.Position(value));
  }

  void Text(double x, double y, std::string_view anchor, std::string_view text,
            std::string_view more = "") {
    absl::StrAppendFormat(
        &svg_, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n",
        x, y, anchor, more, XmlText(text));
  }
  void Line(Point from, Point to, std::string_view attributes) {
    absl::StrAppendFormat(
        &svg_, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n",
        from.x, from.y, to.x, to.y, attributes);
  }

  void Header(const PlotOptions& options) {
    const double height = top_ + kPlotHeight + kBottom;
    svg_ = absl::StrFormat(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" "
        "width=\"%g\" height=\"%g\" role=\"img\">\n<title>%s</title>\n%s"
        "<rect class=\"paper\" width=\"100%%\" height=\"100%%\" "
        "fill=\"#ffffff\"/>\n"
        "<g class=\"ink\" font-family=\"sans-serif\" font-size=\"12\" "
        "fill=\"#1a1a1a\">\n",
        kWidth, height, kWidth, height, XmlText(options.title), kDarkScheme);
    Text(kLeft, kTop - 18, "start", options.title, " font-size=\"16\"");
  }

  void Axes(const PlotOptions& options) {
    const double bottom = top_ + kPlotHeight;
    const double right = kLeft + kPlotWidth;
    constexpr std::string_view kGrid = "class=\"grid\" stroke=\"#d9d9d9\"";
    for (const PlotAxis::Tick& tick : x_.ticks()) {
      const double x = X(tick.value);
      Line({x, top_}, {x, bottom + kTickSize}, kGrid);
      Text(x, bottom + kTickSize + 14, "middle", tick.label,
           " class=\"x-tick\"");
    }
    for (const PlotAxis::Tick& tick : y_.ticks()) {
      const double y = Y(tick.value);
      Line({kLeft - kTickSize, y}, {right, y}, kGrid);
      Text(kLeft - kTickSize - 4, y + 4, "end", tick.label,
           " class=\"y-tick\"");
    }
    absl::StrAppendFormat(
        &svg_,
        "<rect class=\"frame\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
        "height=\"%.1f\" fill=\"none\" stroke=\"#1a1a1a\"/>\n",
        kLeft, top_, kPlotWidth, kPlotHeight);
    Text(kLeft + kPlotWidth / 2, bottom + 42, "middle", options.x_label);
    const double middle = top_ + kPlotHeight / 2;
    Text(18, middle, "middle", options.y_label,
         absl::StrFormat(" transform=\"rotate(-90 18 %.1f)\"", middle));
  }

  void Series(const PlotSeries& series, size_t index) {
    const std::string style = absl::StrFormat(
        "fill=\"none\" stroke=\"%s\" stroke-width=\"%g\"%s",
        kColors[index % kColors.size()], index == 0 ? 4 : 1.8,
        index == 0 ? ""
                   : absl::StrFormat(" stroke-dasharray=\"%d 4\"",
                                     4 + 4 * static_cast<int>(index)));
    const double legend = kTop + kLegendLine * static_cast<double>(index);
    Line({kLeft, legend}, {kLeft + 36, legend}, style);
    size_t shown = 0;
    for (const Stretch& stretch : stretches_[index]) shown += stretch.size();
    std::string name = series.name;
    if (shown < series.y.size()) {
      name += absl::StrFormat(" (%d of %d points can't be shown)",
                              series.y.size() - shown, series.y.size());
    }
    Text(kLeft + 44, legend + 4, "start", name, " class=\"legend\"");

    absl::StrAppendFormat(&svg_, "<g class=\"series\" %s>\n", style);
    for (const Stretch& stretch : stretches_[index]) Draw(stretch, index);
    svg_ += "</g>\n";
  }

  void Draw(const Stretch& stretch, size_t index) {
    if (stretch.size() == 1) {
      absl::StrAppendFormat(
          &svg_,
          "<circle cx=\"%.2f\" cy=\"%.2f\" r=\"3\" stroke=\"none\" "
          "fill=\"%s\"/>\n",
          X(stretch[0].x), Y(stretch[0].y), kColors[index % kColors.size()]);
      return;
    }
    svg_ += "<polyline points=\"";
    for (size_t i = 0; i < stretch.size(); ++i) {
      absl::StrAppendFormat(&svg_, "%s%.2f,%.2f", i > 0 ? " " : "",
                            X(stretch[i].x), Y(stretch[i].y));
    }
    svg_ += "\"/>\n";
  }

  const PlotAxis::Scale scale_;
  const double top_;  // of the plot, below title and legend
  PlotAxis x_;
  PlotAxis y_;
  std::vector<std::vector<Stretch>> stretches_;  // by series
  std::vector<double> x_values_, y_values_;      // of all points shown
  std::string svg_;
};

}  // namespace

std::string SvgPlot(const PlotOptions& options,
                    const std::vector<PlotSeries>& series) {
  return Plot(options, series).Take();
}

void WriteSvgPlot(const std::string& path, const PlotOptions& options,
                  const std::vector<PlotSeries>& series) {
  const std::string svg = SvgPlot(options, series);
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  out << svg << std::flush;
  TORCH_CHECK_VALUE(out, "can't write the plot to ", path, ": ",
                    std::strerror(errno));
}

}  // namespace examples
