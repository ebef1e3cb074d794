// Plots as an XML parser and a reader of the numbers see them.
#include "examples/support/svg_plot.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "examples/support/xml_text.h"
#include "tests/examples/svg_plots.h"
#include "tests/support/processes.h"

namespace composable {
namespace {

using examples::PlotOptions;
using examples::PlotSeries;
using examples::SvgPlot;
using examples::WriteSvgPlot;
using examples::XmlText;
using testing::ElementsAre;
using testing::HasSubstr;
using Labels = std::vector<std::string>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

[[maybe_unused]] void Example() {
  // example-begin tests/examples/svg_plots.h
  nlohmann::json plot = composable::ReadSvgPlot("loss.svg");
  EXPECT_EQ(plot["legend"][0], "sharded");
  // example-end
}

class SvgPlotTest : public testing::Test {
 protected:
  // Writes, reads, and checks what holds for all plots.
  nlohmann::json Plot(const std::vector<PlotSeries>& series,
                      const PlotOptions& options = {}) const {
    const std::string path = folder_ / "plot.svg";
    WriteSvgPlot(path, options, series);
    const nlohmann::json plot = ReadSvgPlot(path);
    const std::vector<double> box = plot.at("view_box");
    const std::vector<double> frame = plot.at("frame");
    EXPECT_GE(frame[0], box[0]);
    EXPECT_GE(frame[1], box[1]);
    EXPECT_LE(frame[0] + frame[2], box[0] + box[2]);
    EXPECT_LE(frame[1] + frame[3], box[1] + box[3]);
    for (const auto& one : plot.at("series")) {
      for (const auto& stretch : one) {
        for (const auto& point : stretch) {
          EXPECT_GE(point[0], frame[0]) << plot;
          EXPECT_LE(point[0], frame[0] + frame[2]) << plot;
          EXPECT_GE(point[1], frame[1]) << plot;
          EXPECT_LE(point[1], frame[1] + frame[3]) << plot;
        }
      }
    }
    EXPECT_EQ(plot.at("series").size(), series.size());
    EXPECT_EQ(plot.at("legend").size(), series.size());
    for (const char* axis : {"x_ticks", "y_ticks"}) {
      const Labels ticks = plot.at(axis);
      EXPECT_GE(ticks.size(), 1) << plot;
      EXPECT_LE(ticks.size(), 10) << plot;
      EXPECT_EQ(std::set<std::string>(ticks.begin(), ticks.end()).size(),
                ticks.size())
          << plot;
    }
    return plot;
  }

  TemporaryFolder folder_;
};

TEST_F(SvgPlotTest, ShowsEveryPointOfEverySeriesWhereItBelongs) {
  const auto plot =
      Plot({{.name = "first", .y = {4, 2, 1, 0}},
            {.name = "second", .x = {1, 2.5}, .y = {3, 3}}},
           {.title = "Title", .x_label = "step", .y_label = "loss"});
  EXPECT_EQ(plot["title"], "Title");
  EXPECT_EQ(plot["texts"], (Labels{"Title", "step", "loss"}));
  EXPECT_EQ(plot["legend"], (Labels{"first", "second"}));
  EXPECT_EQ(plot["x_ticks"][0], "1");
  EXPECT_EQ(plot["y_ticks"], (Labels{"0", "1", "2", "3", "4"}));

  const std::vector<double> frame = plot["frame"];
  const double left = frame[0], right = frame[0] + frame[2];
  const double top = frame[1], bottom = frame[1] + frame[3];
  ASSERT_EQ(plot["series"][0].size(), 1) << plot;
  const std::vector<std::vector<double>> first = plot["series"][0][0];
  ASSERT_EQ(first.size(), 4);
  EXPECT_THAT(first[0], ElementsAre(left, top));
  EXPECT_NEAR(first[1][0], left + (right - left) / 3, 0.01);
  EXPECT_NEAR(first[1][1], (top + bottom) / 2, 0.01);
  EXPECT_THAT(first[3], ElementsAre(right, bottom));
  const std::vector<std::vector<double>> second = plot["series"][1][0];
  ASSERT_EQ(second.size(), 2);
  EXPECT_NEAR(second[1][0], (left + right) / 2, 0.01);
  EXPECT_NEAR(second[1][1], top + (bottom - top) / 4, 0.01);
}

TEST_F(SvgPlotTest, LogarithmicAxis) {
  const auto plot =
      Plot({{.name = "s", .y = {1000, 10, 0.1}}}, {.log_y = true});
  EXPECT_EQ(plot["y_ticks"], (Labels{"0.1", "1", "10", "100", "1e+03"}));
  const std::vector<std::vector<double>> points = plot["series"][0][0];
  EXPECT_NEAR(points[1][1], (points[0][1] + points[2][1]) / 2, 0.01);

  // Within two powers of ten there are finer ticks, and within one step of
  // those, linear ones.
  EXPECT_EQ(Plot({{.name = "s", .y = {0.9, 30}}}, {.log_y = true})["y_ticks"],
            (Labels{"1", "2", "5", "10", "20"}));
  EXPECT_EQ(Plot({{.name = "s", .y = {5.1, 5.6}}}, {.log_y = true})["y_ticks"],
            (Labels{"5.1", "5.2", "5.3", "5.4", "5.5", "5.6"}));
}

TEST_F(SvgPlotTest, PointsThatCannotBeShownAreGapsAndAreCounted) {
  const std::vector<double> y = {1, 2, kNaN, 3, kInfinity, -kInfinity, 4, 5, 6};
  const auto plot = Plot({{.name = "s", .y = y}});
  const auto& stretches = plot["series"][0];
  ASSERT_EQ(stretches.size(), 3) << plot;
  EXPECT_EQ(stretches[0].size(), 2);
  EXPECT_EQ(stretches[1].size(), 1);
  EXPECT_EQ(stretches[2].size(), 3);
  EXPECT_EQ(plot["legend"], (Labels{"s (3 of 9 points can't be shown)"}));

  // No logarithm.
  const auto log = Plot({{.name = "s", .y = {1, 0, -1, 10}}}, {.log_y = true});
  EXPECT_EQ(log["series"][0].size(), 2) << log;
  EXPECT_EQ(log["legend"], (Labels{"s (2 of 4 points can't be shown)"}));
  // No place on the other axis.
  const auto x = Plot({{.name = "s", .x = {1, kNaN, 3}, .y = {1, 2, 3}}});
  EXPECT_EQ(x["series"][0].size(), 2) << x;
}

TEST_F(SvgPlotTest, NothingToShow) {
  for (const bool log_y : {false, true}) {
    for (const std::vector<PlotSeries>& series :
         {std::vector<PlotSeries>{},
          {{.name = "empty", .y = {}}},
          {{.name = "bad", .y = {kNaN, -kInfinity}}}}) {
      const auto plot = Plot(series, {.log_y = log_y});
      EXPECT_EQ(plot["texts"].back(), "no data") << plot;
      EXPECT_GE(plot["y_ticks"].size(), 2);
    }
  }
}

TEST_F(SvgPlotTest, UnusualRanges) {
  const double kMost = std::numeric_limits<double>::max();
  const double kLeast = std::numeric_limits<double>::denorm_min();
  for (const bool log_y : {false, true}) {
    for (const std::vector<double>& y :
         std::vector<std::vector<double>>{{5},
                                          {0, 0},
                                          {-3, -3, -3},
                                          {2.5, 2.5 + 1e-15},
                                          {1, 1 + 2e-9},
                                          {-1e300, 1e300},
                                          {kMost, -kMost, kLeast, -kLeast},
                                          {1e-300, 1e300},
                                          {1e-300},
                                          {123456, 123456.5}}) {
      SCOPED_TRACE(testing::PrintToString(y) + (log_y ? " log" : " linear"));
      const auto plot = Plot({{.name = "s", .y = y}}, {.log_y = log_y});
      EXPECT_GE(plot["y_ticks"].size(), 2) << plot;
      const std::vector<double> positions = plot["y_tick_positions"];
      EXPECT_TRUE(std::is_sorted(positions.rbegin(), positions.rend()));
    }
  }
  std::vector<double> many(20000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = std::sin(0.01 * i);
  const auto plot = Plot({{.name = "s", .y = many}});
  EXPECT_EQ(plot["series"][0][0].size(), many.size());
  EXPECT_EQ(plot["x_ticks"], (Labels{"5000", "10000", "15000", "20000"}));
}

TEST_F(SvgPlotTest, TextIsEscapedAndAlwaysValid) {
  const std::string text = "a < b & \"c\" > 'd' \xc3\xa9 ]]>";
  const auto plot = Plot({{.name = text, .y = {1, 2}}},
                         {.title = text, .x_label = text, .y_label = text});
  EXPECT_EQ(plot["title"], text);
  EXPECT_EQ(plot["texts"], (Labels{text, text, text}));
  EXPECT_EQ(plot["legend"], Labels{text});

  // All bytes and all pairs of bytes are something an XML parser takes.
  std::string bytes;
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      bytes += static_cast<char>(a);
      bytes += static_cast<char>(b);
    }
  }
  Plot({{.name = bytes, .y = {1, 2}}}, {.title = bytes});
}

TEST(XmlTextTest, ReplacesWhatIsNoCharacterOfXml) {
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(XmlText("tab\tnew\nline"), "tab\tnew\nline");
  EXPECT_EQ(XmlText(std::string_view("\0\x01\x1f", 3)), bad + bad + bad);
  EXPECT_EQ(XmlText("\xf0\x9f\x98\x80"), "\xf0\x9f\x98\x80");  // 4 bytes
  EXPECT_EQ(XmlText("\xe2\x82"), bad + bad);                   // cut off
  EXPECT_EQ(XmlText("\xc0\xaf"), bad + bad);                   // overlong
  EXPECT_EQ(XmlText("\xed\xa0\x80"), bad);                     // surrogate
  EXPECT_EQ(XmlText("\xef\xbf\xbf"), bad);                     // U+FFFF
  EXPECT_EQ(XmlText("\xf4\x90\x80\x80"), bad + bad + bad + bad);
}

TEST(SvgPlotText, DependsOnArgumentsOnly) {
  const std::vector<PlotSeries> series = {{.name = "s", .y = {1, 0.3, 0.1}}};
  EXPECT_EQ(SvgPlot({.title = "t"}, series), SvgPlot({.title = "t"}, series));
  EXPECT_NE(SvgPlot({.title = "t"}, series), SvgPlot({.title = "u"}, series));
}

// A viewer with a dark background gets light text on dark paper, and one that
// knows no style sheets a page of its own.
TEST(SvgPlotText, HasPaperAndADarkScheme) {
  const std::string svg = SvgPlot({}, {});
  EXPECT_THAT(svg, HasSubstr("class=\"paper\" width=\"100%\" height=\"100%\" "
                             "fill=\"#ffffff\""));
  EXPECT_THAT(svg, HasSubstr("@media (prefers-color-scheme: dark) { .paper { "
                             "fill: #181a1b; }"));
}

template <typename Body>
std::string ValueErrorOf(const Body& body) {
  try {
    body();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no c10::ValueError";
}

TEST_F(SvgPlotTest, FailedWritesAndWrongSeriesAreErrors) {
  const std::string missing = folder_ / "missing/plot.svg";
  EXPECT_THAT(ValueErrorOf([&] { WriteSvgPlot(missing, {}, {}); }),
              HasSubstr("can't write the plot to " + missing +
                        ": No such file or directory"));
  EXPECT_THAT(ValueErrorOf([&] { WriteSvgPlot("/dev/full", {}, {}); }),
              HasSubstr("can't write the plot to /dev/full: No space left on "
                        "device"));
  EXPECT_THAT(ValueErrorOf([&] {
                SvgPlot({}, {{.name = "loss", .x = {1}, .y = {1, 2}}});
              }),
              HasSubstr("expected as many x as y in the series 'loss', but got "
                        "1 x and 2 y."));
}

}  // namespace
}  // namespace composable
