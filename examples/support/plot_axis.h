// One axis of a plot: its range, where values lie on it, and its ticks.
//
//   const PlotAxis axis({1.2, 5.5, 3.0}, PlotAxis::Scale::kLinear);
//   axis.Position(3.0);          // 0 at the start of the axis, 1 at its end
//   for (const auto& tick : axis.ticks()) {
//     std::cout << tick.value << " is labelled " << tick.label << "\n";
//   }
#pragma once

#include <string>
#include <vector>

namespace examples {

class PlotAxis {
 public:
  enum class Scale { kLinear, kLog };
  struct Tick {
    double value = 0;
    std::string label;
  };

  // Whether an axis of this scale can show `value`.
  static bool CanShow(double value, Scale scale);

  // Covers `values`, each of which can be shown, and is wider where they are
  // all but equal; without values it goes from 0 to 1, or from 0.1 to 1. With
  // `whole`, ticks are whole numbers.
  PlotAxis(const std::vector<double>& values, Scale scale, bool whole = false);

  double Position(double value) const;

  // At least two (but one for a `whole` axis of one number), inside the range,
  // ascending; their labels differ.
  const std::vector<Tick>& ticks() const { return ticks_; }

 private:
  void AddLinearTicks(double least_step);
  void AddLogTicks();

  Scale scale_;
  double low_ = 0;
  double high_ = 1;
  std::vector<Tick> ticks_;
};

}  // namespace examples
