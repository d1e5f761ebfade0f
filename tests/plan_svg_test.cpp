#include "tools/plan_svg.h"

#include <regex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace sparse_mla::command {
namespace {

size_t count(const std::string& text, const std::string& what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

PlanPanel panel(std::vector<PlanBar> bars) {
  const auto num_bars = static_cast<int64_t>(bars.size());
  return {"Packed", "chunk", "chunks", num_bars, std::move(bars)};
}

// Every tag that opens closes again, in order, and no text breaks out of its element.
void expect_well_formed(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag(R"(<(/?)([a-z]+)[^<>]*?(/?)>)");
  for (std::sregex_iterator at(svg.begin(), svg.end(), tag), end; at != end; ++at) {
    const std::string name = (*at)[2];
    if ((*at)[1].length() > 0) {
      ASSERT_FALSE(open.empty()) << name;
      ASSERT_EQ(open.back(), name);
      open.pop_back();
    } else if ((*at)[3].length() == 0) {
      open.push_back(name);
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_EQ(count(svg, "<"), static_cast<size_t>(std::distance(
                                 std::sregex_iterator(svg.begin(), svg.end(), tag), {})));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

// Heights of the rectangles that carry a request's colour, legend excluded.
std::vector<double> segment_heights(const std::string& svg) {
  std::vector<double> heights;
  const std::regex rect(R"re(height="([0-9.]+)" fill="#[0-9a-f]+"/>)re");
  for (std::sregex_iterator at(svg.begin(), svg.end(), rect), end; at != end; ++at) {
    heights.push_back(std::stod((*at)[1]));
  }
  return heights;
}

TEST(PlanSvg, DrawsSegmentsToScale) {
  const std::string svg =
      render_plan_svg({"Title",
                       "spec",
                       1024,
                       {900, 512},
                       {panel({{{0, 0, 900}}, {{1, 0, 256}}, {{1, 256, 256}}})}});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("Packed: 3 chunks"), std::string::npos);
  EXPECT_NE(svg.find("workspace: 1,024 rows"), std::string::npos);
  EXPECT_NE(svg.find("request 0: 900 rows"), std::string::npos);
  EXPECT_NE(svg.find("request 1: 512 rows"), std::string::npos);
  EXPECT_NE(svg.find("hatched"), std::string::npos);
  const std::vector<double> heights = segment_heights(svg);
  ASSERT_EQ(heights.size(), 3u);
  EXPECT_NEAR(heights[0] / heights[1], 900.0 / 256, 0.01);
  EXPECT_NEAR(heights[1], heights[2], 0.01);
}

TEST(PlanSvg, SpeaksOfOneChunkInTheSingular) {
  const std::string svg = render_plan_svg({"", "", 64, {64}, {panel({{{0, 0, 64}}})}});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("Packed: 1 chunk<"), std::string::npos);
  EXPECT_EQ(svg.find("hatched"), std::string::npos);
}

TEST(PlanSvg, SaysWhatItLeavesOut) {
  std::vector<PlanBar> bars(200, PlanBar{{0, 0, 10}});
  const std::string svg = render_plan_svg({"t", "s", 100, {2000}, {panel(bars)}});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("Packed: 200 chunks"), std::string::npos);
  EXPECT_NE(svg.find("the first 60; 140 more are not drawn"), std::string::npos);
  EXPECT_EQ(segment_heights(svg).size(), kMaxPlanBars);
}

TEST(PlanSvg, ThousandsOfRequestsStaySmall) {
  PlanBar bar;
  std::vector<int64_t> context_lens;
  for (int64_t request = 0; request < 5000; ++request) {
    context_lens.push_back(1 + request % 17);
    bar.push_back({request, 0, context_lens.back()});
  }
  const std::string svg =
      render_plan_svg({"t", "s", 65536, context_lens, {panel(std::vector<PlanBar>(60, bar))}});
  expect_well_formed(svg);
  EXPECT_LT(svg.size(), 2u << 20);
  EXPECT_NE(svg.find("5,000 requests with context, 1 to 17 rows each"), std::string::npos);
}

TEST(PlanSvg, DrawsBatchesWithoutContext) {
  const std::string svg = render_plan_svg({"t", "s", 64, {0, 0}, {panel({})}});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("no request of this batch has context"), std::string::npos);
  expect_well_formed(render_plan_svg({"t", "s", 64, {}, {panel({})}}));
}

TEST(PlanSvg, EscapesAndShortensTexts) {
  const std::string svg =
      render_plan_svg({"a<b>&\"c\"", std::string(1000, 'q'), 3, {1}, {panel({{{0, 0, 1}}})}});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("a&lt;b&gt;&amp;&quot;c&quot;"), std::string::npos);
  EXPECT_EQ(svg.find(std::string(200, 'q')), std::string::npos);
}

TEST(PlanSvg, BarsMayOverrunTheBudget) {
  const std::string svg =
      render_plan_svg({"t", "s", 64, {64, 64}, {panel({{{0, 0, 64}, {1, 0, 64}}})}});
  expect_well_formed(svg);
  EXPECT_NE(svg.find("more than there is"), std::string::npos);
}

}  // namespace
}  // namespace sparse_mla::command
