// Random selections without end: every selector of the backend under test against the oracle, for
// as many seconds as SPARSE_MLA_SOAK_SECONDS says (one unless it does). SPARSE_MLA_SOAK_SEED runs
// that one case alone.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>

#include "tests/select_cases.h"

namespace sparse_mla {
namespace {

using support::bits;
using support::HintCase;
using support::kInf;
using support::kNan;
using support::ScoreData;
using support::SelectCase;
using support::SelectEntry;
using support::SelectRun;

/// The draws of one case.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : seed_(seed) {}

  /// [low, high], all alike.
  std::int64_t between(std::int64_t low, std::int64_t high) {
    const auto range = static_cast<std::uint64_t>(high - low + 1);
    return low + static_cast<std::int64_t>(random_bits(seed_, 1, draws_++) % range);
  }
  /// [1, high], every power of two as likely as the next.
  std::int64_t magnitude(std::int64_t high) {
    const double u = random_bits(seed_, 1, draws_++) / 4294967296.0;
    return std::clamp<std::int64_t>(
        static_cast<std::int64_t>(std::exp2(u * std::log2(static_cast<double>(high) + 1))), 1,
        high);
  }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }
  template <class T, std::size_t N>
  T of(const T (&list)[N]) {
    return list[between(0, static_cast<std::int64_t>(N) - 1)];
  }

 private:
  std::uint64_t seed_, draws_ = 0;
};

/// Long enough for every path, short enough for the oracle.
constexpr std::int64_t kMaxScores = 4'000'000, kMaxRowLen = 1'200'000, kMaxRows = 20'000;

std::int64_t draw_len(Dice& dice) {
  if (dice.one_in(3)) {  // where paths change
    const std::int64_t centre = std::int64_t{1024} << dice.between(0, 8);
    return centre + dice.between(-9, 9);
  }
  return dice.one_in(60) ? 0 : dice.magnitude(kMaxRowLen);
}

int draw_k(Dice& dice, std::int64_t len) {
  constexpr int kUsual[] = {1, 16, 64, 512, 1024, 2048, 2048, 2049, 3000, 4096, 4097};
  if (dice.one_in(2)) return dice.of(kUsual);
  if (dice.one_in(4)) return static_cast<int>(std::max<std::int64_t>(1, len + dice.between(-3, 3)));
  return static_cast<int>(dice.magnitude(std::min<std::int64_t>(len + 40, 60000)));
}

auto draw_fill(Dice& dice, std::uint64_t seed) {
  const std::int64_t kind = dice.between(0, 13);
  const auto alphabet = static_cast<std::uint32_t>(dice.magnitude(3000));
  const std::int64_t first = dice.between(0, 1 << 20), length = dice.magnitude(30000);
  const auto stride = static_cast<std::uint32_t>(dice.magnitude(256));
  return [=](std::span<float> row, std::int64_t r) {
    const auto stream = static_cast<std::uint64_t>(r);
    if (kind < 5) return support::fill_scores(support::kAllScoreData[kind], row, seed, stream);
    if (kind == 5) return support::specials(row, r);
    const auto size = static_cast<std::int64_t>(row.size());
    for (std::int64_t i = 0; i < size; ++i) {
      const std::uint32_t word = random_bits(seed, stream, static_cast<std::uint64_t>(i));
      const float noise = static_cast<float>(word) * 0x1p-32f;
      const auto place = static_cast<std::uint32_t>(i);
      float& score = row[static_cast<std::size_t>(i)];
      switch (kind) {
        case 6:  // any bits at all
          score = bits(word);
          break;
        case 7:  // few values around zero
          score = (static_cast<float>(word % alphabet) - 7) * 0.25f;
          break;
        case 8:  // the same, NaN and −inf strewn in
          score = word >> 29 == 0 ? (word & 1 ? kNan : -kInf) : static_cast<float>(word % alphabet);
          break;
        case 9:  // one stretch above all
          score = (i - first % (size + 1) + size) % size < length ? 50 + noise : noise;
          break;
        case 10:  // every so many sectors above or below all
          score = place / 8 % stride == 0 ? (alphabet % 2 ? 50 + noise : -50 + noise) : noise;
          break;
        case 11:  // descending
          score = bits(0x40000000u - place);
          break;
        case 12:  // leading bits agree
          score = bits(0x3F900000u | (word & 0x3FFu));
          break;
        default:  // relu, mostly zeros of both signs
          score = word % 16 == 0 ? noise : word & 32 ? -0.0f : 0.0f;
      }
    }
  };
}

SelectCase draw_case(std::uint64_t seed) {
  Dice dice(seed);
  SelectCase c;
  c.name = "seed_" + std::to_string(seed);
  c.row_len = draw_len(dice);
  c.rows =
      dice.magnitude(std::min(kMaxRows, std::max<std::int64_t>(kMaxScores / (c.row_len + 1), 1)));
  c.k = draw_k(dice, c.row_len);
  // The outputs count too.
  c.rows = std::min<std::int64_t>(c.rows, std::max<std::int64_t>(kMaxScores / c.k, 1));
  c.fill = draw_fill(dice, seed);
  c.type = dice.one_in(2) ? ScoreType::f32 : ScoreType::bf16;
  if (dice.one_in(2)) c.stride = c.row_len + dice.between(0, 40);
  c.ragged = dice.one_in(5);
  if (dice.one_in(2)) c.shift_bytes = dice.between(0, 31);
  if (dice.one_in(3)) c.out_stride = c.k + dice.between(0, 9);
  const auto bound = static_cast<std::int32_t>(c.row_len);
  if (dice.one_in(3))
    for (std::int64_t r = 0; r < c.rows; ++r)
      c.starts.push_back(static_cast<std::int32_t>(dice.between(-3, bound / 2 + 1)));
  if (dice.one_in(2)) {
    const bool mixed = dice.one_in(2);
    for (std::int64_t r = 0; r < c.rows; ++r)
      c.ends.push_back(static_cast<std::int32_t>(mixed ? dice.magnitude(bound + 20) - 2
                                                       : dice.between(bound - 20, bound + 20)));
  }
  if (dice.one_in(4)) {
    const std::int64_t step = c.rows % 7 != 0 ? 7 : 1;  // a permutation, from row 2 on
    for (std::int64_t r = 0; r < c.rows; ++r)
      c.out_rows.push_back(static_cast<std::int32_t>(2 + r * step % c.rows));
  }
  if (dice.one_in(2)) {
    constexpr std::int32_t kSizes[] = {1, 2, 16, 61, 64, 64, 128, 576};
    c.pages = {.block_size = dice.of(kSizes),
               .identity = dice.one_in(4),
               .requests = dice.one_in(2) ? 0 : dice.between(1, c.rows),
               .missing_columns = dice.one_in(4) ? dice.between(1, 5) : 0};
    // A table for every row would outgrow the scores.
    if (c.pages.requests == 0 && c.rows * c.row_len / c.pages.block_size > kMaxScores / 4)
      c.pages.requests = 3;
  }
  if (dice.one_in(2))
    c.hints = support::kAllHintCases[static_cast<std::size_t>(dice.between(0, 4))];
  return c;
}

/// Runs every selector that can on the case of this seed; counts them by name.
void soak(std::uint64_t seed, std::map<std::string, std::int64_t>& runs) {
  const SelectCase c = draw_case(seed);
  Dice dice(seed + (std::uint64_t{1} << 63));
  const auto order = static_cast<SelectOrder>(dice.between(0, 2));
  const bool twice = dice.one_in(8);
  SelectRun run(c);
  for (const std::string& name : support::tested_selectors()) {
    const SelectEntry& entry = support::selector(name);
    if (!entry.why_not(problem_of(run.call(), TieBreak::lowest_index, order)).empty()) continue;
    const testing::ScopedTrace trace(__FILE__, __LINE__,
                                     name + ", SPARSE_MLA_SOAK_SEED=" + std::to_string(seed) +
                                         ": " + testing::PrintToString(c) +
                                         " order=" + testing::PrintToString(order));
    try {
      run.run(entry, order);
      run.check(order);
      if (twice) {
        const std::vector<std::int32_t> first = run.indices();
        run.run(entry, order);
        EXPECT_EQ(run.indices(), first) << "not the same twice";
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    ++runs[name];
  }
}

TEST(SelectSoak, RandomCalls) {
  using Clock = std::chrono::steady_clock;
  std::map<std::string, std::int64_t> runs;
  if (const char* seed = std::getenv("SPARSE_MLA_SOAK_SEED"))
    return soak(std::strtoull(seed, nullptr, 10), runs);
  const char* asked = std::getenv("SPARSE_MLA_SOAK_SECONDS");
  const std::chrono::duration<double> seconds(asked ? std::strtod(asked, nullptr) : 1);
  const auto end = Clock::now() + seconds;
  // Another run, other cases.
  const auto base = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch() /
                                               std::chrono::milliseconds(1))
                    << 20;
  std::uint64_t cases = 0;
  std::vector<std::uint64_t> failed;
  for (; Clock::now() < end && failed.size() < 10; ++cases) {
    const int before =
        testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
    soak(base + cases, runs);
    const int after =
        testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
    if (after != before) failed.push_back(base + cases);
  }
  std::cout << cases << " cases from seed " << base << " on\n";
  for (const auto& [name, count] : runs) std::cout << name << ": " << count << " runs\n";
  for (const std::uint64_t seed : failed)
    std::cout << "failed: SPARSE_MLA_SOAK_SEED=" << seed << '\n';
}

}  // namespace
}  // namespace sparse_mla
