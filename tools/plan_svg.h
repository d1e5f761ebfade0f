#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sparse_mla::command {

/// A part of one request's context in a fill of the workspace: rows [start, start + rows) of it.
struct PlanSegment {
  int64_t request = 0;
  int64_t start = 0;
  int64_t rows = 0;
};

/// One fill of the workspace: a chunk or a pass, first segment at row 0.
using PlanBar = std::vector<PlanSegment>;

/// One schedule of the batch.
struct PlanPanel {
  std::string name;      // "Packed"
  std::string bar_name;  // what a bar is, in the singular: "chunk"
  std::string bar_plural;
  int64_t num_bars = 0;       // all of them, for the headline
  std::vector<PlanBar> bars;  // the first ones; more than kMaxPlanBars are not drawn
};

/// The most bars that a panel can show and stay readable.
inline constexpr size_t kMaxPlanBars = 60;

struct PlanDrawing {
  std::string title;
  std::string subtitle;
  int64_t workspace_rows = 0;         // the budget of every bar
  std::vector<int64_t> context_lens;  // [requests], rows
  std::vector<PlanPanel> panels;      // from top to bottom, on one scale
};

/// Draws a batch's schedules one above the other as an SVG document: a bar for each fill of the
/// workspace, stacked from the rows of the requests, against the line of the budget. Neighbouring
/// requests of equal context share a colour; hatched rows continue a request. Follows the viewer's
/// light or dark preference.
std::string render_plan_svg(const PlanDrawing& drawing);

}  // namespace sparse_mla::command
