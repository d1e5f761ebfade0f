// Every CPU selector × every case, exactly. A case named after an id (R01 …) is that public failure
// re-told as an input of our own; docs/cases.md lists them.
#include "topk/threshold_tuning.h"

#include "tests/select_cases.h"

namespace sparse_mla {
namespace {

using support::bits;
using support::combination_name;
using support::combine;
using support::data;
using support::formula;
using support::kInf;
using support::kNan;
using support::ScoreData;
using support::SelectCase;
using support::SelectCases;
using support::shuffled;
using support::specials;
using support::winners;

float low_bits(std::uint32_t i) { return bits(0x3F900000u | (random_bits(17, 0, i) & 0x3FFu)); }
float zero(std::uint32_t) { return 0.0f; }

/// What the threshold selector's sample sees is `seen`, everything else `rest`.
template <class Seen, class Rest>
auto sampler_trap(int k, Seen seen, Rest rest) {
  return [=](std::span<float> row, std::int64_t) {
    const auto len = static_cast<std::int64_t>(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = rest(static_cast<std::uint32_t>(i));
    const std::int64_t sample = topk::sample_size(len, k);
    for (std::int64_t i = 0; i < sample; ++i)
      row[static_cast<std::size_t>(topk::sample_place(i, sample, len))] =
          seen(static_cast<std::uint32_t>(i));
  };
}

std::vector<SelectCase> public_failures() {
  std::vector<SelectCase> cases;
  for (const std::int64_t len : {16383, 16384, 16385, 16512})
    for (const int k : {512, 1024, 2048})
      cases.push_back({.name = "R01_even_spread",
                       .rows = 33,
                       .row_len = len,
                       .k = k,
                       .fill = shuffled([](std::uint32_t i, std::size_t size) {
                         return 1.0f + 0.245f * static_cast<float>(i) / static_cast<float>(size);
                       })});
  cases.push_back({.name = "R02_normal_64_rows",
                   .rows = 64,
                   .row_len = 262144,
                   .k = 2048,
                   .fill = data(ScoreData::normal)});
  cases.push_back({.name = "R03_ramp", .row_len = 65536, .k = 1024, .fill = data(ScoreData::ramp)});
  cases.push_back({.name = "R03_ramp_low_exponent",
                   .row_len = 65536,
                   .k = 1024,
                   .fill = formula([](std::uint32_t i) { return bits(0x3805ED27u + i); })});
  cases.push_back(
      {.name = "R05_one_half_precision_bin",
       .rows = 3,
       .row_len = 8000,
       .k = 2048,
       .fill = winners(
           500, [](std::uint32_t i) { return 8.0f + 0.001f * static_cast<float>(i); },
           [](std::uint32_t i) { return bits(0x3F800000u + (random_bits(5, 0, i) & 0x7FFu)); })});
  cases.push_back({.name = "R06_zeros_tie",
                   .rows = 3,
                   .row_len = 8320,
                   .k = 2048,
                   .fill = winners(
                       100, [](std::uint32_t) { return 1.5f; }, zero)});
  cases.push_back({.name = "R08_signed_zeros_tie",
                   .rows = 3,
                   .row_len = 5000,
                   .k = 2048,
                   .fill = winners(
                       700, [](std::uint32_t i) { return 0.1f + static_cast<float>(i % 97); },
                       [](std::uint32_t i) { return random_bits(3, 0, i) & 1 ? -0.0f : 0.0f; })});
  cases.push_back({.name = "R09_equal_maxima",
                   .row_len = 131072,
                   .k = 2048,
                   .fill = winners(
                       8192, [](std::uint32_t) { return 9.0f; },
                       [](std::uint32_t i) { return random_normal(3, 0, i); })});
  cases.push_back({.name = "R10_all_equal",
                   .rows = 2,
                   .row_len = 5000,
                   .k = 2048,
                   .fill = formula([](std::uint32_t) { return -3.25f; })});
  cases.push_back({.name = "R10_low_ten_bits",
                   .rows = 2,
                   .row_len = 20000,
                   .k = 2048,
                   .fill = formula(low_bits)});
  // Draft row j of a request ends at seq_len − next_n + j + 1: negative for padded slots.
  cases.push_back({.name = "R11_padded_draft_rows",
                   .rows = 8,
                   .row_len = 12,
                   .k = 4,
                   .fill = data(ScoreData::normal),
                   .ends = {9, 10, 6, 7, 11, 12, -1, 0}});
  constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();
  cases.push_back({.name = "R11_wild_row_ends",
                   .rows = 8,
                   .row_len = 3000,
                   .k = 64,
                   .fill = data(ScoreData::normal),
                   .ends = {-1, kLowest, kHighest, 3017, 0, 1, 63, 64}});
  cases.push_back({.name = "R11_wild_row_ranges",
                   .rows = 9,
                   .row_len = 3000,
                   .k = 64,
                   .fill = data(ScoreData::normal),
                   .starts = {-1, kLowest, kHighest, 20, 2999, 3000, 500, kLowest, 7},
                   .ends = {100, kHighest, kLowest, 10, 3000, 4000, -1, kLowest, 3001}});
  cases.push_back({.name = "R12_shorter_than_drafts",
                   .rows = 8,
                   .row_len = 8,
                   .k = 512,
                   .fill = data(ScoreData::normal),
                   .ends = {-1, 0, 1, 2, 3, 4, 5, 6}});
  cases.push_back({.name = "R15_mostly_nan",
                   .rows = 2,
                   .row_len = 5000,
                   .k = 2048,
                   .fill = winners(
                       100, [](std::uint32_t i) { return static_cast<float>(i); },
                       [](std::uint32_t i) { return bits(i & 1 ? 0x7FC00000u : 0xFFC00001u); })});
  cases.push_back(
      {.name = "R15_all_nan", .row_len = 5000, .k = 2048, .fill = formula([](std::uint32_t i) {
                                                            return i % 3 ? kNan : -kNan;
                                                          })});
  cases.push_back(
      {.name = "R16_one_finite", .row_len = 5, .k = 3, .fill = formula([](std::uint32_t i) {
                                                         return i ? -kInf : 0.5f;
                                                       })});
  cases.push_back({.name = "R16_all_negative_infinity",
                   .row_len = 100,
                   .k = 64,
                   .fill = formula([](std::uint32_t) { return -kInf; })});
  cases.push_back({.name = "R16_lowest_finite_against_infinity",
                   .row_len = 20000,
                   .k = 2048,
                   .fill = winners(
                       50, [](std::uint32_t) { return bits(0xFF7FFFFFu); },
                       [](std::uint32_t i) { return i % 5 ? -kInf : kNan; })});
  for (const float gap : {1e30f, kNan, kInf})
    cases.push_back(
        {.name = "R20_padded_stride",
         .rows = 4,
         .row_len = 12000,
         .k = 2048,
         .fill =
             [gap](std::span<float> row, std::int64_t r) {
               constexpr std::size_t kLens[] = {3000, 5000, 8000, 12000};
               support::fill_scores(ScoreData::normal, row, 3, static_cast<std::uint64_t>(r));
               std::fill(row.begin() + static_cast<std::ptrdiff_t>(kLens[r]), row.end(), gap);
             },
         .ends = {3000, 5000, 8000, 12000},
         .stride = 163840,
         .gap = gap});
  for (const int k : {1, 3, 4})
    cases.push_back({.name = "R21_row_starts",
                     .rows = 5,
                     .row_len = 9,
                     .k = k,
                     .fill = data(ScoreData::normal),
                     .starts = {0, 0, 0, 5, 5},
                     .ends = {3, 4, 5, 8, 9}});
  cases.push_back({.name = "R21_row_starts_unordered",
                   .rows = 3,
                   .row_len = 23,
                   .k = 4,
                   .fill = data(ScoreData::ties),
                   .starts = {1, 6, 20},
                   .ends = {3, 18, 23}});
  for (const int k : {1, 7, 64, 128, 256, 384, 512, 576, 1024, 1152, 2048, 2051, 3000, 4096})
    for (const std::int64_t len : {3000, 20000})
      cases.push_back({.name = "R25_any_k",
                       .rows = 2,
                       .row_len = len,
                       .k = k,
                       .fill = data(ScoreData::normal)});
  cases.push_back({.name = "R26_few_long_rows",
                   .rows = 2,
                   .row_len = 779425,
                   .k = 2048,
                   .fill = data(ScoreData::normal)});
  for (const std::int64_t len : {2047, 2048, 2049})
    cases.push_back({.name = "R28_around_k",
                     .rows = 2,
                     .row_len = len,
                     .k = 2048,
                     .fill = data(ScoreData::ties)});
  return cases;
}

std::vector<SelectCase> shapes() {
  std::vector<SelectCase> cases;
  for (const ScoreData kind : support::kAllScoreData)
    for (const ScoreType type : {ScoreType::f32, ScoreType::bf16})
      for (const auto& [len, k] :
           {std::pair{1, 1}, {33, 5}, {4096, 2048}, {10000, 512}, {65537, 2048}})
        cases.push_back({.name = std::string(to_string(kind)),
                         .rows = 3,
                         .row_len = len,
                         .k = k,
                         .fill = data(kind),
                         .type = type});
  // One row of every length up to 600, and around the lengths where implementations change path.
  {
    SelectCase c{.name = "causal_rows",
                 .rows = 600,
                 .row_len = 600,
                 .k = 256,
                 .fill = data(ScoreData::normal)};
    for (std::int32_t r = 0; r < 600; ++r) c.ends.push_back(r + 1);
    cases.push_back(c);
    c.name = "causal_rows_infinite_tail";
    c.fill = [](std::span<float> row, std::int64_t r) {
      support::fill_scores(ScoreData::relu, row, 5, static_cast<std::uint64_t>(r));
      std::fill(row.begin() + r / 2, row.end(), -kInf);
    };
    cases.push_back(c);
  }
  for (const std::int32_t centre : {1024, 2056, 4096, 8192, 16384, 32768, 65536}) {
    SelectCase c{.name = "around_" + std::to_string(centre),
                 .rows = 13,
                 .row_len = centre + 6,
                 .k = 2048,
                 .fill = data(ScoreData::narrow)};
    for (std::int32_t r = 0; r < 13; ++r) c.ends.push_back(centre - 6 + r);
    cases.push_back(c);
  }
  cases.push_back({.name = "longest_v32",
                   .rows = 2,
                   .row_len = 163840,
                   .k = 2048,
                   .fill = data(ScoreData::relu)});
  cases.push_back({.name = "mixed_lengths",
                   .rows = 8,
                   .row_len = 80000,
                   .k = 2048,
                   .fill = data(ScoreData::normal),
                   .ends = {2000, 6000, 30000, 80000, 100, 2048, 10000, 80000}});
  cases.push_back({.name = "k_is_row",
                   .rows = 2,
                   .row_len = 30000,
                   .k = 30000,
                   .fill = data(ScoreData::normal)});
  cases.push_back({.name = "k_is_row_less_one",
                   .rows = 2,
                   .row_len = 30000,
                   .k = 29999,
                   .fill = data(ScoreData::ties)});
  cases.push_back({.name = "k_above_half",
                   .rows = 2,
                   .row_len = 30000,
                   .k = 20000,
                   .fill = data(ScoreData::relu)});
  cases.push_back({.name = "k_beyond_row", .rows = 3, .row_len = 700, .k = 5000, .fill = specials});
  cases.push_back({.name = "empty_rows", .rows = 3, .row_len = 0, .k = 4, .fill = [](auto...) {}});
  cases.push_back({.name = "no_rows", .rows = 0, .row_len = 100, .k = 4, .fill = [](auto...) {}});
  cases.push_back({.name = "rows_beyond_a_grid",
                   .rows = 70000,
                   .row_len = 40,
                   .k = 8,
                   .fill = data(ScoreData::ties),
                   .out_stride = 8});
  cases.push_back({.name = "a_million_rows",
                   .rows = (1 << 20) + 5,
                   .row_len = 6,
                   .k = 2,
                   .fill = specials,
                   .out_stride = 2});
  cases.push_back({.name = "row_beyond_a_million",
                   .row_len = (1 << 20) + 3,
                   .k = 2048,
                   .fill = data(ScoreData::normal)});
  return cases;
}

std::vector<SelectCase> layouts() {
  std::vector<SelectCase> cases;
  for (const ScoreType type : {ScoreType::f32, ScoreType::bf16}) {
    const SelectCase base{.name = "layout",
                          .rows = 5,
                          .row_len = 3001,
                          .k = 300,
                          .fill = data(ScoreData::ties),
                          .type = type};
    for (const std::int64_t stride : {3001, 3002, 3007, 4096}) {
      SelectCase c = base;
      c.stride = stride;
      cases.push_back(c);
    }
    for (const std::int64_t shift : {1, 2, 4, 12, 31}) {
      SelectCase c = base;
      c.shift_bytes = shift;
      cases.push_back(c);
    }
    SelectCase c = base;
    c.ragged = true;
    cases.push_back(c);
    c.out_rows = {6, 0, 2, 9, 1};
    c.starts = {5, 0, 1000, 17, 3};
    cases.push_back(c);
  }
  return cases;
}

std::vector<SelectCase> distributions() {
  std::vector<SelectCase> cases;
  const auto add = [&cases](const char* name, std::int64_t len, int k, auto fill) {
    for (const ScoreType type : {ScoreType::f32, ScoreType::bf16})
      cases.push_back(
          {.name = name, .rows = 2, .row_len = len, .k = k, .fill = fill, .type = type});
  };
  add("descending", 50000, 1024, formula([](std::uint32_t i) { return -static_cast<float>(i); }));
  add("ten_values", 50000, 2048,
      formula([](std::uint32_t i) { return static_cast<float>(random_bits(2, 0, i) % 10); }));
  add("noise_on_base", 50000, 2048,
      formula([](std::uint32_t i) { return 1.0f + 1e-6f * random_uniform(2, 0, i); }));
  add("saw", 65536, 1024, formula([](std::uint32_t i) { return static_cast<float>(i % 64); }));
  add("negative", 20000, 512,
      formula([](std::uint32_t i) { return -1.0f - random_uniform(2, 0, i); }));
  add("signed_zeros", 20000, 2048,
      formula([](std::uint32_t i) { return random_bits(2, 0, i) & 1 ? -0.0f : 0.0f; }));
  add("zeros_at_the_cut", 20000, 2048, formula([](std::uint32_t i) {
        const std::uint32_t draw = random_bits(2, 0, i) % 100;
        return draw < 5 ? 1.0f : draw < 60 ? -0.0f : draw < 80 ? 0.0f : -1e-45f;
      }));
  add("denormals", 20000, 512,
      formula([](std::uint32_t i) { return bits((random_bits(2, 0, i) & 0x800000FFu)); }));
  add("infinities_fill_k", 20000, 512,
      formula([](std::uint32_t i) { return i % 7 ? 1.0f : kInf; }));
  add("specials", 20000, 2048, specials);
  add("specials_deep", 20000, 19000, specials);
  add("random_bits", 60000, 2048,
      formula([](std::uint32_t i) { return bits(random_bits(2, 1, i)); }));
  // The sample sees only peaks: its threshold keeps too few keys.
  add("sampler_sees_peaks", 131072, 2048,
      sampler_trap(
          2048, [](std::uint32_t i) { return 100.0f + static_cast<float>(i); },
          [](std::uint32_t i) { return random_normal(2, 2, i); }));
  // The sample sees only what is low, the rest ascends: the buffer of survivors fills again and
  // again.
  const auto ascending = [](std::uint32_t i) { return bits(0x3F800000u + i); };
  add("sampler_sees_lows", 131072, 2048,
      sampler_trap(
          2048, [](std::uint32_t) { return -kInf; }, ascending));
  add("sampler_sees_nan", 131072, 2048,
      sampler_trap(
          2048, [](std::uint32_t) { return kNan; }, ascending));
  add("sampler_sees_infinity", 131072, 2048,
      sampler_trap(
          2048, [](std::uint32_t) { return kInf; }, ascending));
  add("many_cuts_small_k", 300000, 10,
      sampler_trap(
          10, [](std::uint32_t) { return -kInf; }, ascending));
  return cases;
}

/// Rows whose k-th score lies one step above or below a threshold that the selector has set: the
/// sample sees lows, so the buffer of survivors fills, is cut, and the threshold rises by one step.
std::vector<SelectCase> threshold_steps() {
  struct Step {
    const char* name;
    std::uint32_t low, high;  ///< neighbouring fp32 scores, as bits
    std::uint32_t bf16_low, bf16_high;
  };
  constexpr Step kSteps[] = {
      {"above_one", 0x3F800000u, 0x3F800001u, 0x3F800000u, 0x3F810000u},
      {"below_minus_one", 0xBF800001u, 0xBF800000u, 0xBF810000u, 0xBF800000u},
      {"up_to_minus_zero", 0x80000001u, 0x80000000u, 0x80010000u, 0x80000000u},
      {"up_to_zero", 0x80000001u, 0x00000000u, 0x80010000u, 0x00000000u},
      {"up_from_minus_zero", 0x80000000u, 0x00000001u, 0x80000000u, 0x00010000u},
      {"up_from_zero", 0x00000000u, 0x00000001u, 0x00000000u, 0x00010000u},
      {"minus_zero_is_no_step", 0x80000000u, 0x00000000u, 0x80000000u, 0x00000000u},
      {"zero_is_no_step", 0x00000000u, 0x80000000u, 0x00000000u, 0x80000000u},
      {"up_to_infinity", 0x7F7FFFFFu, 0x7F800000u, 0x7F7F0000u, 0x7F800000u},
      {"up_from_infinity", 0xFF800000u, 0xFF7FFFFFu, 0xFF800000u, 0xFF7F0000u},
      {"up_from_nan", 0x7FC00000u, 0xFF800000u, 0x7FC00000u, 0xFF800000u},
      {"up_from_negative_nan", 0xFFC00000u, 0xFF800000u, 0xFFC00000u, 0xFF800000u}};
  constexpr int k = 2048;
  std::vector<SelectCase> cases;
  for (const Step& step : kSteps)
    for (const ScoreType type : {ScoreType::f32, ScoreType::bf16}) {
      const bool half = type == ScoreType::bf16;
      const float low = bits(half ? step.bf16_low : step.low);
      const float high = bits(half ? step.bf16_high : step.high);
      // Low for longer than the buffer, then one in 50 is high: fewer than k are.
      const auto rest = [low, high](std::uint32_t i) {
        return i > 40000 && i % 50 == 0 ? high : low;
      };
      for (const float seen : {-kInf, kNan, low, high})
        cases.push_back({.name = std::string("step_") + step.name,
                         .row_len = 90007,
                         .k = k,
                         .fill = sampler_trap(
                             k, [seen](std::uint32_t) { return seen; }, rest),
                         .type = type});
    }
  return cases;
}

/// The sample's threshold keeps k − 5 scores; NaNs must not be counted among the survivors and make
/// up for the missing ones, neither in the vector blocks nor behind the last of them.
std::vector<SelectCase> too_few_survivors() {
  constexpr int k = 2048;
  std::vector<SelectCase> cases;
  for (const ScoreType type : {ScoreType::f32, ScoreType::bf16})
    for (const std::uint32_t nan : {0x7FC00000u, 0xFFC00000u})
      for (const bool in_tail : {false, true}) {
        const auto fill = [nan, in_tail](std::span<float> row, std::int64_t r) {
          sampler_trap(
              k, [](std::uint32_t i) { return i < 200 ? 100.0f : 0.0f; },
              [](std::uint32_t i) { return random_normal(3, 9, i); })(row, r);
          std::ptrdiff_t winning = 200;
          for (std::size_t i = 0; winning < k - 5; i += 3) {
            winning += row[i] < 100.0f;
            row[i] = 100.0f;
          }
          const auto nans = in_tail ? row.last(7) : row.subspan(row.size() - 400, 60);
          for (float& score : nans)
            if (score < 100.0f) score = bits(nan);
        };
        cases.push_back({.name = in_tail ? "nan_in_tail" : "nan_in_blocks",
                         .row_len = 32 * 4096 + 7,
                         .k = k,
                         .fill = fill,
                         .type = type});
      }
  return cases;
}

TEST_P(SelectCases, ExactInEveryOrder) { run_and_check(GetParam()); }

INSTANTIATE_TEST_SUITE_P(PublicFailures, SelectCases, testing::ValuesIn(combine(public_failures())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Shapes, SelectCases, testing::ValuesIn(combine(shapes())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Layouts, SelectCases, testing::ValuesIn(combine(layouts())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(ThresholdSteps, SelectCases, testing::ValuesIn(combine(threshold_steps())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(TooFewSurvivors, SelectCases,
                         testing::ValuesIn(combine(too_few_survivors())), combination_name);
INSTANTIATE_TEST_SUITE_P(Distributions, SelectCases, testing::ValuesIn(combine(distributions())),
                         combination_name);

}  // namespace
}  // namespace sparse_mla
