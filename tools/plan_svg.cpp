#include "tools/plan_svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string_view>

#include "tools/table.h"

namespace sparse_mla::command {
namespace {

// Lengths in SVG user units (CSS pixels).
constexpr double kWidth = 960;
constexpr double kLeft = 100;  // room for "1,048,576" and the axis title
constexpr double kRight = 28;
constexpr double kPlotWidth = kWidth - kLeft - kRight;
constexpr double kHeader = 84;
constexpr double kPlotHeight = 190;
constexpr double kPanelHeading = 44;  // headline and room for the budget's label
constexpr double kPanelFooter = 46;   // bar numbers and the axis title
constexpr double kMaxPitch = 96;      // few bars do not need the whole width
constexpr double kBarShare = 0.8;     // of the pitch
constexpr double kLegendLine = 22;
constexpr double kTextSize = 12;
// Widest common sans-serif (DejaVu Sans): errs on the side of more room.
constexpr double kCharWidth = 0.62;

// Okabe–Ito, in an order that keeps neighbours apart; readable for colour-blind people, on light
// and on dark ground.
constexpr std::array<std::string_view, 7> kColours = {"#0072b2", "#e69f00", "#009e73", "#d55e00",
                                                      "#cc79a7", "#56b4e9", "#a08b00"};

constexpr std::string_view kStyle = R"(
  .card { fill: #ffffff; stroke: #d0d7de; }
  .text { fill: #1f2328; }
  .muted { fill: #59636e; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .track { fill: #eef1f4; }
  .seam { stroke: #ffffff; stroke-width: 1; }
  .hatch { stroke: #ffffff; stroke-opacity: 0.55; stroke-width: 2; }
  .budget { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 6 4; }
  .budget-text { fill: #cf222e; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; }
    .text { fill: #f0f6fc; }
    .muted { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .track { fill: #1c232b; }
    .seam { stroke: #0d1117; }
    .hatch { stroke: #0d1117; }
    .budget { stroke: #ff7b72; }
    .budget-text { fill: #ff7b72; }
  }
)";

// A run of neighbouring requests with the same context length: one colour, one line of the legend.
struct Group {
  int64_t begin = 0, end = 0;  // requests
  int64_t context_len = 0;
  std::string_view colour = {};
};

std::string number(double value) {
  std::string text = format_number(value, 2);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

std::string escape(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

// `text` cut to what fits `width`.
std::string fit(const std::string& text, double width, double size) {
  const auto room = static_cast<size_t>(width / (size * kCharWidth));
  return text.size() <= room ? text : text.substr(0, room - 1) + "…";
}

class Painter {
 public:
  explicit Painter(const PlanDrawing& drawing) : drawing_(drawing) {
    find_groups();
    double max_rows = static_cast<double>(std::max<int64_t>(drawing.workspace_rows, 1));
    size_t most_bars = 1;
    for (const PlanPanel& panel : drawing.panels) {
      const size_t shown = std::min(panel.bars.size(), kMaxPlanBars);
      most_bars = std::max(most_bars, shown);
      for (size_t i = 0; i < shown; ++i) {
        max_rows = std::max(max_rows, static_cast<double>(rows_of(panel.bars[i])));
      }
    }
    pixels_per_row_ = kPlotHeight / max_rows;
    pitch_ = std::min(kMaxPitch, kPlotWidth / static_cast<double>(most_bars));
  }

  std::string paint() {
    text(28, 36, 18, "text", "start", fit(drawing_.title, kWidth - 56, 18), "font-weight=\"600\"");
    text(28, 60, 13, "muted", "start", fit(drawing_.subtitle, kWidth - 56, 13));
    double top = kHeader;
    for (const PlanPanel& panel : drawing_.panels) {
      paint_panel(panel, top);
      top += kPanelHeading + kPlotHeight + kPanelFooter;
    }
    const double height = paint_legend(top + 8) + 16;

    const std::string size = number(kWidth) + "\" height=\"" + number(height);
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + size + "\" viewBox=\"0 0 " +
           number(kWidth) + " " + number(height) +
           "\" font-family=\"system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\">\n<title>" +
           escape(drawing_.title) + "</title>\n<style>" + std::string(kStyle) +
           "</style>\n<defs><pattern id=\"hatch\" width=\"6\" height=\"6\" "
           "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><line class=\"hatch\" "
           "x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\"/></pattern></defs>\n<rect class=\"card\" x=\"0.5\" "
           "y=\"0.5\" width=\"" +
           number(kWidth - 1) + "\" height=\"" + number(height - 1) + "\" rx=\"8\"/>\n" + body_ +
           "</svg>\n";
  }

 private:
  static int64_t rows_of(const PlanBar& bar) {
    return std::accumulate(bar.begin(), bar.end(), int64_t{0},
                           [](int64_t sum, const PlanSegment& s) { return sum + s.rows; });
  }

  void find_groups() {
    const std::vector<int64_t>& lens = drawing_.context_lens;
    group_of_.resize(lens.size());
    for (size_t i = 0; i < lens.size(); ++i) {
      if (groups_.empty() || groups_.back().context_len != lens[i]) {
        groups_.push_back({.begin = static_cast<int64_t>(i), .context_len = lens[i]});
      }
      groups_.back().end = static_cast<int64_t>(i) + 1;
      group_of_[i] = groups_.size() - 1;
    }
    size_t colour = 0;
    for (Group& group : groups_) {
      if (group.context_len == 0) continue;
      group.colour = kColours[colour++ % kColours.size()];
      num_requests_ += group.end - group.begin;
      longest_ = std::max(longest_, group.context_len);
      shortest_ = shortest_ == 0 ? group.context_len : std::min(shortest_, group.context_len);
    }
    colours_repeat_ = colour > kColours.size();
  }

  const Group& group_of(const PlanSegment& segment) const {
    return groups_[group_of_[static_cast<size_t>(segment.request)]];
  }

  void text(double x, double y, double size, std::string_view css_class, std::string_view anchor,
            const std::string& content, std::string_view more = "") {
    body_ += "<text class=\"" + std::string(css_class) + "\" x=\"" + number(x) + "\" y=\"" +
             number(y) + "\" font-size=\"" + number(size) + "\" text-anchor=\"" +
             std::string(anchor) + "\" " + std::string(more) + ">" + escape(content) + "</text>\n";
  }

  void line(double x1, double y1, double x2, double y2, std::string_view css_class) {
    body_ += "<line class=\"" + std::string(css_class) + "\" x1=\"" + number(x1) + "\" y1=\"" +
             number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) + "\"/>\n";
  }

  void rect(double x, double y, double width, double height, const std::string& paint) {
    body_ += "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) +
             "\" height=\"" + number(height) + "\" " + paint + "/>\n";
  }

  void paint_panel(const PlanPanel& panel, double top) {
    const double plot_top = top + kPanelHeading;
    const double base = plot_top + kPlotHeight;
    const double budget_y = base - static_cast<double>(drawing_.workspace_rows) * pixels_per_row_;
    const size_t shown = std::min(panel.bars.size(), kMaxPlanBars);

    paint_headline(panel, top + 16);
    if (shown > 0) paint_rows_axis(base);
    for (size_t i = 0; i < shown; ++i) {
      const double x = kLeft + pitch_ * (static_cast<double>(i) + (1 - kBarShare) / 2);
      rect(x, budget_y, pitch_ * kBarShare, base - budget_y, "class=\"track\"");
      paint_bar(panel.bars[i], x, base);
    }
    line(kLeft, base, kLeft + kPlotWidth, base, "grid");
    line(kLeft, budget_y, kLeft + kPlotWidth, budget_y, "budget");
    text(kLeft + kPlotWidth, budget_y - 6, kTextSize, "budget-text", "end",
         "workspace: " + format_count(drawing_.workspace_rows) + " rows");
    if (shown == 0) {
      text(kLeft + kPlotWidth / 2, base - kPlotHeight / 2, 13, "muted", "middle",
           "no request of this batch has context");
      return;
    }

    // Bar numbers, as many as stay apart.
    const double label_width =
        static_cast<double>(format_count(panel.num_bars).size() + 2) * kTextSize * kCharWidth;
    const auto every = static_cast<size_t>(std::max(1.0, std::ceil(label_width / pitch_)));
    for (size_t i = 0; i < shown; i += every) {
      text(kLeft + pitch_ * (static_cast<double>(i) + 0.5), base + 16, kTextSize, "muted", "middle",
           format_count(static_cast<int64_t>(i)));
    }
    std::string axis = panel.bar_name;
    const int64_t left_out = panel.num_bars - static_cast<int64_t>(shown);
    if (left_out > 0) {
      axis += " (the first " + format_count(static_cast<int64_t>(shown)) + "; " +
              format_count(left_out) + " more are not drawn)";
    }
    text(kLeft, base + 34, kTextSize, "muted", "start", axis);
  }

  void paint_headline(const PlanPanel& panel, double y) {
    const std::string count = format_count(panel.num_bars) + " " +
                              (panel.num_bars == 1 ? panel.bar_name : panel.bar_plural);
    std::string use;
    if (panel.num_bars > 0 && drawing_.workspace_rows > 0) {
      const double rows =
          std::accumulate(drawing_.context_lens.begin(), drawing_.context_lens.end(), 0.0);
      const double share = rows / (static_cast<double>(panel.num_bars) *
                                   static_cast<double>(drawing_.workspace_rows));
      use = "   " + format_number(100 * share, share < 0.1 ? 1 : 0) +
            (share > 1 ? " % of the workspace needed on average: more than there is"
                       : " % of the workspace in use on average");
    }
    body_ += "<text x=\"28\" y=\"" + number(y) +
             "\" font-size=\"15\" xml:space=\"preserve\"><tspan class=\"text\" "
             "font-weight=\"600\">" +
             escape(panel.name + ": " + count) +
             "</tspan><tspan class=\"muted\" font-size=\"13\">" + escape(use) + "</tspan></text>\n";
  }

  void paint_rows_axis(double base) {
    // Quarters of the budget, or round numbers: where it has none, and where bars overrun it.
    const double max_rows = kPlotHeight / pixels_per_row_;
    double step = max_rows / 4;
    if (drawing_.workspace_rows % 4 != 0 ||
        max_rows > static_cast<double>(drawing_.workspace_rows)) {
      const double power = std::pow(10, std::floor(std::log10(step)));
      step = power * (step / power >= 5 ? 5 : step / power >= 2 ? 2 : 1);
      step = std::max(step, 1.0);
    }
    for (double rows = 0; rows <= max_rows * 1.0001; rows += step) {
      const double y = base - rows * pixels_per_row_;
      if (rows > 0) line(kLeft, y, kLeft + kPlotWidth, y, "grid");
      text(kLeft - 8, y + 4, kTextSize, "muted", "end", format_count(std::llround(rows)));
    }
    const std::string middle = number(base - kPlotHeight / 2);
    text(24, base - kPlotHeight / 2, kTextSize, "muted", "middle", "rows",
         "transform=\"rotate(-90 24 " + middle + ")\"");
  }

  // Rows from the first segment (at the base) up. Slivers become one rectangle where they share
  // their colour or where colours repeat and so tell nothing: a batch may hold thousands of
  // requests of a few rows.
  void paint_bar(const PlanBar& bar, double x, double base) {
    constexpr double kSliver = 2.5;
    const double width = pitch_ * kBarShare;
    int64_t below = 0;
    for (size_t i = 0; i < bar.size();) {
      const Group& group = group_of(bar[i]);
      int64_t rows = bar[i].rows;
      const auto is_sliver = [&](int64_t n) {
        return static_cast<double>(n) * pixels_per_row_ < kSliver;
      };
      const bool sliver = is_sliver(rows);
      size_t end = i + 1;
      while (sliver && end < bar.size() && is_sliver(bar[end].rows) &&
             (group_of(bar[end]).colour == group.colour || (colours_repeat_ && is_sliver(rows)))) {
        rows += bar[end++].rows;
      }
      const double height = static_cast<double>(rows) * pixels_per_row_;
      const double y = base - static_cast<double>(below) * pixels_per_row_ - height;
      if (rows > 0) {
        rect(x, y, width, height, "fill=\"" + std::string(group.colour) + "\"");
        if (bar[i].start > 0 && height >= kSliver) {
          rect(x, y, width, height, "fill=\"url(#hatch)\"");
          has_hatched_ = true;
        }
        if (below > 0 && height >= kSliver) line(x, y + height, x + width, y + height, "seam");
        const std::string name = "#" + std::to_string(bar[i].request);
        const bool room = width >= static_cast<double>(name.size() + 1) * 11 * kCharWidth;
        if (!sliver && room && height >= 15) {
          text(x + width / 2, y + height / 2 + 4, 11, "label", "middle", name,
               "fill=\"#ffffff\" font-weight=\"600\" stroke=\"#000000\" stroke-opacity=\"0.35\" "
               "stroke-width=\"2\" paint-order=\"stroke\"");
        }
      }
      below += rows;
      i = end;
    }
  }

  // Returns the lower edge.
  double paint_legend(double top) {
    double x = 28;
    double y = top;
    const auto entry = [&](const std::string& label, const auto& paint_swatch) {
      const double width = 20 + static_cast<double>(label.size()) * kTextSize * kCharWidth + 20;
      if (x + width > kWidth - 28 + 20 && x > 28) {
        x = 28;
        y += kLegendLine;
      }
      paint_swatch();
      text(x + 20, y + 11, kTextSize, "text", "start", label);
      x += width;
    };
    const auto swatch = [&](std::string_view colour) {
      rect(x, y, 13, 13, "rx=\"2\" fill=\"" + std::string(colour) + "\"");
    };
    if (colours_repeat_) {
      entry(format_count(num_requests_) + " requests with context, " + format_count(shortest_) +
                " to " + format_count(longest_) + " rows each; colours repeat",
            [&] {
              for (int i = 0; i < 3; ++i) {
                rect(x + 5.0 * i, y, 4, 13, "fill=\"" + std::string(kColours[i]) + "\"");
              }
            });
    } else {
      for (const Group& group : groups_) {
        if (group.context_len == 0) continue;
        std::string label =
            group.end - group.begin == 1
                ? "request " + std::to_string(group.begin)
                : "requests " + std::to_string(group.begin) + "–" + std::to_string(group.end - 1);
        label += ": " + format_count(group.context_len) + " rows";
        if (group.end - group.begin > 1) label += " each";
        entry(label, [&] { swatch(group.colour); });
      }
    }
    if (has_hatched_) {
      entry("hatched: continues the request of an earlier bar", [&] {
        swatch(kColours[0]);
        rect(x, y, 13, 13, "rx=\"2\" fill=\"url(#hatch)\"");
      });
    }
    return y + (num_requests_ == 0 ? 0 : kLegendLine);
  }

  const PlanDrawing& drawing_;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;  // [requests]
  int64_t num_requests_ = 0;      // with context
  int64_t shortest_ = 0, longest_ = 0;
  bool colours_repeat_ = false;  // more groups than colours
  bool has_hatched_ = false;
  double pixels_per_row_ = 0;
  double pitch_ = 0;
  std::string body_;
};

}  // namespace

std::string render_plan_svg(const PlanDrawing& drawing) { return Painter(drawing).paint(); }

}  // namespace sparse_mla::command
