// Every selector at the sizes where implementations change path or where a buffer is full, and on
// rows that are laid out against sampling: exactly.
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
using support::winners;

constexpr std::int64_t kLong = 131072;

float ascending(std::uint32_t i) { return bits(0x3F800000u + i); }
float normal(std::uint32_t i) { return random_normal(5, 0, i); }

/// Lengths of a row: powers of two that tiles, clusters and shared memory come in, and one more or
/// less.
std::vector<SelectCase> lengths() {
  std::vector<SelectCase> cases;
  for (std::int64_t centre = 1024; centre <= 262144; centre *= 2)
    for (const std::int64_t len : {centre - 1, centre, centre + 1})
      for (const ScoreType type : {ScoreType::f32, ScoreType::bf16}) {
        const bool half = type == ScoreType::bf16;
        cases.push_back({.name = "length",
                         .rows = centre < 65536 ? 3 : 1,
                         .row_len = len,
                         .k = half || centre < 4096 ? 512 : 2048,
                         .fill = data(half ? ScoreData::normal : ScoreData::narrow),
                         .type = type});
      }
  // The bound of all rows is one number, their own lengths lie on both sides of such sizes.
  for (const std::int32_t centre : {131072, 262144}) {
    SelectCase c{.name = "around",
                 .rows = 5,
                 .row_len = centre + 6,
                 .k = 2048,
                 .fill = data(ScoreData::relu)};
    c.ends = {centre - 6, centre - 1, centre, centre + 1, centre + 6};
    cases.push_back(c);
  }
  return cases;
}

/// k around 1,024 and its multiples.
std::vector<SelectCase> picks() {
  std::vector<SelectCase> cases;
  for (const int k : {1023, 1024, 1025, 2047, 2048, 2049, 3000, 4095, 4096, 4097, 8193}) {
    cases.push_back({.name = "k_short_row",
                     .rows = 2,
                     .row_len = k + 1,
                     .k = k,
                     .fill = data(ScoreData::ties)});
    cases.push_back({.name = "k_middle_row",
                     .rows = 2,
                     .row_len = 20000,
                     .k = k,
                     .fill = data(ScoreData::normal),
                     .type = ScoreType::bf16});
    cases.push_back(
        {.name = "k_long_row", .row_len = kLong, .k = k, .fill = data(ScoreData::narrow)});
  }
  return cases;
}

/// So many keys that agree in their leading bits: what a buffer for one digit's candidates holds,
/// and one more or less.
std::vector<SelectCase> candidates() {
  std::vector<SelectCase> cases;
  for (const int centre : {2048, 3072, 4096, 6144, 8192, 12288, 16384})
    for (const int count : {centre - 1, centre, centre + 1}) {
      const auto low = [](std::uint32_t i) { return -1.0f - random_uniform(6, 0, i); };
      cases.push_back(
          {.name = "one_digit",
           .row_len = 40000,
           .k = 2048,
           .fill = winners(
               static_cast<std::size_t>(count),
               [](std::uint32_t i) { return bits(0x3F800000u | (random_bits(6, 1, i) & 0x3FFu)); },
               low)});
      cases.push_back(
          {.name = "equal",
           .row_len = 40000,
           .k = 2048,
           .fill = winners(
               static_cast<std::size_t>(count), [](std::uint32_t) { return 1.0f; }, low)});
      // Behind 1,000 that win at once.
      cases.push_back({.name = "equal_behind_winners",
                       .row_len = 40000,
                       .k = 2048,
                       .fill = winners(
                           static_cast<std::size_t>(count),
                           [](std::uint32_t i) { return i < 3000 ? 2.0f : 1.0f; }, low)});
    }
  return cases;
}

/// Where selectors that stream a row of fp32 sample it (Sample in topk/stream_select.cuh): a chunk
/// of 16 scores at a scattered place in each of 256 strata.
std::vector<char> streamed_sample(std::int64_t len) {
  constexpr std::uint64_t kStrata = 256, kChunk = 16;
  const std::uint64_t chunks = static_cast<std::uint64_t>(len) / kChunk;
  std::vector<char> places(static_cast<std::size_t>(len), 0);
  for (std::uint32_t stratum = 0; stratum < kStrata; ++stratum) {
    const std::uint64_t begin = chunks * stratum / kStrata, end = chunks * (stratum + 1) / kStrata;
    const std::uint64_t scattered = stratum * 2654435769u;  // in 32 bits
    const std::uint64_t first = (begin + (scattered * (end - begin) >> 32)) * kChunk;
    for (std::uint64_t i = first; begin < end && i < first + kChunk; ++i) places[i] = 1;
  }
  return places;
}

/// Long rows whose winners lie where a method hopes that they do not.
std::vector<SelectCase> places() {
  std::vector<SelectCase> cases;
  const auto add = [&cases](const char* name, std::int64_t len, int k, auto fill) {
    cases.push_back({.name = name, .row_len = len, .k = k, .fill = fill});
  };
  for (const std::int64_t len : {std::int64_t{65536}, kLong}) {
    const auto last = static_cast<std::uint32_t>(len - 1);
    add("ascending", len, 2048, formula(ascending));
    add("descending", len, 2048, formula([=](std::uint32_t i) { return ascending(last - i); }));
    add("ascending_steps", len, 2048, formula([](std::uint32_t i) { return ascending(i / 100); }));
  }
  cases.push_back({.name = "ascending_half_precision",
                   .row_len = kLong,
                   .k = 2048,
                   .fill = formula([](std::uint32_t i) { return bits((i / 8) << 16); }),
                   .type = ScoreType::bf16});
  // All winners side by side: one thread's, one tile's, one block's share of the row.
  for (const std::uint32_t first : {0u, 1u, 4097u, 65533u, 128000u, 131072u - 2100u}) {
    add("stretch", kLong, 2048, formula([=](std::uint32_t i) {
          return i >= first && i < first + 2100 ? 50.0f + random_uniform(7, 0, i) : normal(i);
        }));
    add("stretch_of_equals", kLong, 2048, formula([=](std::uint32_t i) {
          return i >= first && i < first + 5000 ? 50.0f : normal(i);
        }));
  }
  // Samples of whole 32-byte sectors, every so many.
  for (const std::uint32_t stride : {8u, 16u, 32u, 64u, 128u}) {
    const auto seen = [=](std::uint32_t i) { return i / 8 % stride == 0; };
    add("sectors_are_peaks", kLong, 2048, formula([=](std::uint32_t i) {
          return seen(i) ? 100.0f + random_uniform(7, 1, i) : normal(i);
        }));
    add("sectors_are_lows", kLong, 2048,
        formula([=](std::uint32_t i) { return seen(i) ? -kInf : ascending(i); }));
  }
  add("sectors_are_nan", kLong, 2048,
      formula([](std::uint32_t i) { return i / 8 % 32 == 0 ? kNan : normal(i); }));
  for (const std::int64_t len : {std::int64_t{65536}, kLong, std::int64_t{300000}}) {
    const auto seen = std::make_shared<const std::vector<char>>(streamed_sample(len));
    const auto sampled = [=](float (*there)(std::uint32_t), float (*elsewhere)(std::uint32_t)) {
      return formula([=](std::uint32_t i) { return (*seen)[i] ? there(i) : elsewhere(i); });
    };
    add("sample_is_peaks", len, 2048,
        sampled([](std::uint32_t i) { return 100.0f + random_uniform(7, 4, i); }, normal));
    add("sample_is_peaks_small_k", len, 64, sampled([](std::uint32_t) { return 9.0f; }, normal));
    add("sample_is_lows", len, 2048, sampled([](std::uint32_t) { return -kInf; }, ascending));
    add("sample_is_nan", len, 2048, sampled([](std::uint32_t) { return kNan; }, ascending));
    add("sample_is_infinite", len, 2048, sampled([](std::uint32_t) { return kInf; }, normal));
  }
  // Peaks at single elements, one stride apart.
  for (const std::uint32_t stride : {31u, 32u, 64u, 100u})
    add("peaks_one_stride_apart", kLong, 2048, formula([=](std::uint32_t i) {
          return i % stride == 0 ? 100.0f + random_uniform(7, 2, i) : normal(i);
        }));
  // A relu indexer: fewer positive scores than picks, the rest exactly zero.
  add("few_positive", kLong, 2048,
      winners(
          1000, [](std::uint32_t i) { return 0.5f + random_uniform(7, 3, i); },
          [](std::uint32_t i) { return i % 3 ? 0.0f : -0.0f; }));
  add("relu_below_k", kLong, 70000, data(ScoreData::relu));
  add("one_value_long", 1000000, 2048, formula([](std::uint32_t) { return 0.25f; }));
  add("one_value_long_k_1024", 1 << 20, 1024, formula([](std::uint32_t) { return -kInf; }));
  return cases;
}

/// Batches: many rows of unlike lengths, every row's length its own path.
std::vector<SelectCase> batches() {
  std::vector<SelectCase> cases;
  for (const std::int64_t rows : {1, 2, 4, 16, 32, 65, 128, 132, 133, 256, 512})
    cases.push_back({.name = "batch_of_" + std::to_string(rows),
                     .rows = rows,
                     .row_len = 2500,
                     .k = 512,
                     .fill = data(ScoreData::relu)});
  SelectCase causal{.name = "causal_rows",
                    .rows = 2050,
                    .row_len = 2050,
                    .k = 2048,
                    .fill = data(ScoreData::normal)};
  for (std::int32_t r = 0; r < 2050; ++r) causal.ends.push_back(r + 1);
  cases.push_back(causal);
  causal.name = "causal_rows_few";
  causal.rows = 32;
  causal.k = 3000;
  causal.ends.resize(32);
  cases.push_back(causal);
  // A long row behind a short one, with the short one's leftovers in shared memory; more rows than
  // blocks that sort.
  SelectCase turns{.name = "short_and_long_in_turn",
                   .rows = 400,
                   .row_len = 9000,
                   .k = 512,
                   .fill = data(ScoreData::ties)};
  for (std::int32_t r = 0; r < 400; ++r) turns.ends.push_back(r % 3 == 0 ? 9000 - r : r % 700);
  cases.push_back(turns);
  // Draft rows of two long requests.
  cases.push_back({.name = "drafts_of_300000",
                   .rows = 4,
                   .row_len = 300000,
                   .k = 3000,
                   .fill = data(ScoreData::normal),
                   .ends = {299998, 299999, 299999, 300000}});
  // What a captured graph may be replayed with.
  cases.push_back({.name = "replayed_lengths",
                   .rows = 10,
                   .row_len = 70000,
                   .k = 2048,
                   .fill = data(ScoreData::normal),
                   .ends = {-1, 0, 1, 2047, 2048, 32769, 65535, 65536, 70000, 70017}});
  cases.push_back({.name = "one_value",
                   .rows = 74,
                   .row_len = 16384,
                   .k = 512,
                   .fill = formula([](std::uint32_t) { return 1.0f; })});
  // A piece of a wider buffer of scores, from row starts of their own on.
  SelectCase wide{.name = "row_starts_in_a_wide_buffer",
                  .rows = 40,
                  .row_len = 18432,
                  .k = 2048,
                  .fill = data(ScoreData::normal),
                  .stride = 20011};
  for (std::int32_t r = 0; r < 40; ++r) {
    wide.starts.push_back(
        static_cast<std::int32_t>(random_bits(9, 0, static_cast<unsigned>(r)) % 2048));
    wide.ends.push_back(wide.starts.back() + 16384);
  }
  wide.pages = {.block_size = 64, .identity = true};
  cases.push_back(wide);
  return cases;
}

class SelectLimits : public support::SelectCases {};

TEST_P(SelectLimits, Exact) { run_and_check(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Lengths, SelectLimits, testing::ValuesIn(combine(lengths())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Picks, SelectLimits, testing::ValuesIn(combine(picks())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Candidates, SelectLimits, testing::ValuesIn(combine(candidates())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Places, SelectLimits, testing::ValuesIn(combine(places())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Batches, SelectLimits, testing::ValuesIn(combine(batches())),
                         combination_name);

}  // namespace
}  // namespace sparse_mla
