// What the selection contract promises beyond a single call's result: literal answers,
// repeatability, random calls, addresses beyond 2^31, bad arguments.
#include <array>
#include <numeric>
#include <set>
#include <thread>

#include <omp.h>
#include <sys/mman.h>

#include "sparse_mla/random.h"
#include "topk/select_rows.h"
#include "topk/threshold_tuning.h"

#include "tests/select_harness.h"
#include "tests/support/score_data.h"

namespace sparse_mla {
namespace {

using support::GuardedWorkspace;
using support::kGarbage;
using support::kInf;
using support::kNan;
using support::ScoreData;
using support::SelectCase;
using support::SelectEntry;
using support::SelectRun;

class SelectContract : public testing::TestWithParam<std::string> {
 protected:
  const SelectEntry& entry() const { return support::selector(GetParam()); }

  void run(const SelectCall& call, const SelectProblem& problem) const {
    support::run_selector(entry(), problem, call);
  }

  /// Whether the entry cannot take rows so long and so many picks; some are made for short rows.
  bool refuses(std::int64_t max_row_len, int k) const {
    return support::refuses(entry(), {.max_rows = 1, .max_row_len = max_row_len, .k = k});
  }
  bool on_device() const { return entry().backend == Backend::cuda; }

  /// The k picks of one row, in the order asked for.
  std::vector<std::int32_t> picks(const std::vector<float>& row, int k, SelectOrder order) const {
    std::vector<std::int32_t> out(static_cast<std::size_t>(k), kGarbage);
    SelectCall call;
    const auto len = static_cast<std::int64_t>(row.size());
    call.scores = {row.data(), ScoreType::f32, 1, len, len, nullptr};
    call.indices = contiguous(out.data(), 1, k);
    run(call, problem_of(call, TieBreak::lowest_index, order));
    return out;
  }
};

std::vector<std::int32_t> counting(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Literal answers, so that the oracle is not the only witness.

TEST_P(SelectContract, R03RampGivesItsLastIndices) {
  if (refuses(65536, 1024)) return;
  for (const std::uint32_t first : {0x3F800000u, 0x3805ED27u}) {
    std::vector<float> row(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) row[i] = std::bit_cast<float>(first + i);
    EXPECT_EQ(picks(row, 1024, SelectOrder::by_index), counting(64512, 1024));
  }
}

TEST_P(SelectContract, R08R10TiesGoToTheLowestIndices) {
  EXPECT_EQ(picks(std::vector<float>(5000, 1.0f), 2048, SelectOrder::by_index), counting(0, 2048));
  std::vector<float> row(5000);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = i >= 4300 ? 2.0f : i % 2 ? -0.0f : 0.0f;
  std::vector<std::int32_t> expected = counting(0, 1348);
  const std::vector<std::int32_t> positive = counting(4300, 700);
  expected.insert(expected.end(), positive.begin(), positive.end());
  EXPECT_EQ(picks(row, 2048, SelectOrder::by_index), expected);
}

TEST_P(SelectContract, R15R16NanLastThenNegativeInfinity) {
  EXPECT_EQ(picks({0.5f, -kInf, -kInf, -kInf, -kInf}, 3, SelectOrder::by_value),
            (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(picks(std::vector<float>(100, -kInf), 64, SelectOrder::by_index), counting(0, 64));
  EXPECT_EQ(picks({kNan, -kInf, -kNan, 1.0f, -kInf}, 4, SelectOrder::by_value),
            (std::vector<std::int32_t>{3, 1, 4, 0}));
  EXPECT_EQ(picks({kNan, -kNan}, 3, SelectOrder::by_value), (std::vector<std::int32_t>{0, 1, -1}));
}

TEST_P(SelectContract, R28OrdersHoldForShortRowsToo) {
  const std::vector<float> row{1.0f, 3.0f, -0.0f, 3.0f, 0.0f};
  for (const int k : {4, 5, 6}) {
    std::vector<std::int32_t> by_value{1, 3, 0, 2, 4, -1}, by_index{0, 1, 2, 3, 4, -1};
    by_value.resize(static_cast<std::size_t>(k));
    by_index.resize(static_cast<std::size_t>(k));
    EXPECT_EQ(picks(row, k, SelectOrder::by_value), by_value) << "k " << k;
    EXPECT_EQ(picks(row, k, SelectOrder::by_index), by_index) << "k " << k;
  }
}

// Repeatability.

TEST_P(SelectContract, R09HundredLaunchesAreBitEqual) {
  if (refuses(131072, 2048)) return;
  // 8,192 equal maxima: which of them, and in which order, may not depend on the launch. On a
  // device each launch has a stream of its own.
  SelectRun run({.name = "equal_maxima",
                 .rows = on_device() ? 3 : 1,
                 .row_len = 131072,
                 .k = 2048,
                 .fill = [](std::span<float> row, std::int64_t) {
                   for (std::size_t i = 0; i < row.size(); ++i) row[i] = i % 16 ? 0.5f : 9.0f;
                 }});
  run.run(entry());
  run.check();
  const std::vector<std::int32_t> first = run.indices();
  for (int launch = 1; launch < 100; ++launch) {
    run.run(entry(), SelectOrder::unspecified, launch % 2 ? TieBreak::any : TieBreak::lowest_index);
    ASSERT_EQ(run.indices(), first) << "launch " << launch;
  }
}

TEST_P(SelectContract, WhatAnotherCallLeftInTheWorkspaceDoesNotShow) {
  const auto rows_of = [](ScoreData kind) {
    return [kind](std::span<float> row, std::int64_t r) {
      support::fill_scores(kind, row, 71, static_cast<std::uint64_t>(r));
    };
  };
  SelectRun ties(
      {.name = "ties", .rows = 2, .row_len = 90000, .k = 5000, .fill = rows_of(ScoreData::ties)});
  SelectRun long_rows({.name = "normal",
                       .rows = 3,
                       .row_len = 131072,
                       .k = 2048,
                       .fill = rows_of(ScoreData::normal)});
  SelectRun short_rows(
      {.name = "relu", .rows = 30, .row_len = 3000, .k = 512, .fill = rows_of(ScoreData::relu)});
  struct Step {
    SelectRun* run;
    SelectOrder order;
    SelectProblem problem() const { return problem_of(run->call(), TieBreak::lowest_index, order); }
  };
  std::vector<Step> steps{
      {&ties, SelectOrder::by_value},       {&long_rows, SelectOrder::unspecified},
      {&ties, SelectOrder::by_value},       {&short_rows, SelectOrder::by_index},
      {&long_rows, SelectOrder::by_value},  {&short_rows, SelectOrder::by_value},
      {&short_rows, SelectOrder::by_index}, {&long_rows, SelectOrder::unspecified}};
  std::erase_if(steps, [&](const Step& step) { return support::refuses(entry(), step.problem()); });
  std::size_t bytes = 0;
  for (const Step& step : steps) bytes = std::max(bytes, entry().workspace_bytes(step.problem()));
  std::unique_ptr<GuardedWorkspace> on_host;
  std::unique_ptr<support::DeviceMemory> memory;
  if (on_device())
    memory = std::make_unique<support::DeviceMemory>(bytes);
  else
    on_host = std::make_unique<GuardedWorkspace>(bytes);
  for (const Step& step : steps) {
    const SelectProblem problem = step.problem();
    SCOPED_TRACE(testing::PrintToString(problem));
    step.run->spoil();
    if (on_device())
      support::run_on_device(select_operation(), entry(), problem, step.run->call(),
                             memory->span());
    else
      select_operation().run(entry(), problem, step.run->call(), on_host->span(), nullptr);
    step.run->check(step.order);
  }
  EXPECT_TRUE(on_device() || on_host->intact());
}

TEST_P(SelectContract, ThreadCountDoesNotShow) {
  SelectRun run({.name = "threads",
                 .rows = 40,
                 .row_len = 9000,
                 .k = 700,
                 .fill = [](std::span<float> row, std::int64_t r) {
                   support::fill_scores(ScoreData::ties, row, 3, static_cast<std::uint64_t>(r));
                 }});
  const int before = omp_get_max_threads();
  std::vector<std::int32_t> first;
  for (const int threads : {1, 2, 5}) {
    omp_set_num_threads(threads);
    run.run(entry());
    run.check();
    if (first.empty()) first = run.indices();
    EXPECT_EQ(run.indices(), first) << threads << " threads";
  }
  omp_set_num_threads(before);
}

TEST_P(SelectContract, CallersOnSeveralThreadsWithTheirOwnWorkspaces) {
  if (refuses(20000, 600)) return;
  std::vector<std::thread> callers;
  for (std::uint64_t t = 0; t < 4; ++t)
    callers.emplace_back([this, t] {
      SelectRun run({.name = "concurrent",
                     .rows = 4,
                     .row_len = 20000,
                     .k = 600,
                     .fill = [t](std::span<float> row, std::int64_t r) {
                       support::fill_scores(ScoreData::relu, row, t, static_cast<std::uint64_t>(r));
                     }});
      for (int i = 0; i < 5; ++i) {
        run.run(entry());
        run.check();
      }
    });
  for (std::thread& caller : callers) caller.join();
}

TEST_P(SelectContract, RowsDoNotDependOnTheirBatch) {
  const auto fill = [](std::span<float> row, std::int64_t r) {
    support::fill_scores(ScoreData::ties, row, 23, static_cast<std::uint64_t>(r));
  };
  SelectCase batch{.name = "batch", .rows = 12, .row_len = 6000, .k = 500, .fill = fill};
  batch.out_stride = batch.k;
  SelectRun whole(batch);
  whole.run(entry());
  for (std::int64_t r = 0; r < 12; ++r) {
    SelectCase one = batch;
    one.rows = 1;
    one.fill = [&fill, r](std::span<float> row, std::int64_t) { fill(row, r); };
    SelectRun alone(one);
    alone.run(entry());
    const auto guard = static_cast<std::ptrdiff_t>((alone.indices().size() - 500) / 2);
    EXPECT_TRUE(std::equal(alone.indices().begin() + guard, alone.indices().begin() + guard + 500,
                           whole.indices().begin() + guard + r * 500))
        << "row " << r;
  }
}

// Random calls.

TEST_P(SelectContract, RandomCalls) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    std::uint64_t draws = 0;
    const auto draw = [&](std::int64_t low, std::int64_t high) {  // [low, high]
      return low + static_cast<std::int64_t>(random_bits(seed, 77, draws++) %
                                             static_cast<std::uint64_t>(high - low + 1));
    };
    SelectCase c;
    c.name = "random_seed_" + std::to_string(seed);
    c.rows = draw(1, 9);
    c.row_len = draw(0, seed % 4 ? 900 : 12000);
    c.k = static_cast<int>(draw(1, seed % 3 ? 200 : c.row_len + 40));
    c.type = draw(0, 1) ? ScoreType::f32 : ScoreType::bf16;
    c.stride = draw(0, 1) ? 0 : c.row_len + draw(0, 17);
    c.ragged = draw(0, 3) == 0;
    c.shift_bytes = draw(0, 15);
    if (draw(0, 1))
      for (std::int64_t r = 0; r < c.rows; ++r)
        c.starts.push_back(static_cast<std::int32_t>(draw(-3, c.row_len / 2 + 1)));
    if (draw(0, 1))
      for (std::int64_t r = 0; r < c.rows; ++r)
        c.ends.push_back(static_cast<std::int32_t>(draw(-3, c.row_len + 20)));
    if (draw(0, 1)) {
      for (std::int64_t r = 0; r < c.rows; ++r) c.out_rows.push_back(static_cast<int>(2 * r + 1));
      std::swap(c.out_rows.front(), c.out_rows.back());
    }
    const std::int64_t kind = draw(0, 7);
    const auto alphabet = static_cast<std::uint32_t>(draw(1, 40));
    c.fill = [=](std::span<float> row, std::int64_t r) {
      const auto stream = static_cast<std::uint64_t>(r);
      if (kind < 5) return support::fill_scores(support::kAllScoreData[kind], row, seed, stream);
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::uint32_t word = random_bits(seed, stream, i);
        // Any bits at all; a small alphabet around zero; that with NaN and −inf strewn in.
        row[i] = kind == 5 ? std::bit_cast<float>(word)
                           : (static_cast<float>(word % alphabet) - 7.0f) * 0.25f;
        if (kind == 7 && word >> 29 == 0) row[i] = word & 1 << 20 ? kNan : -kInf;
      }
    };
    const auto order = static_cast<SelectOrder>(draw(0, 2));
    if (refuses(c.row_len, c.k)) continue;
    SCOPED_TRACE(testing::PrintToString(c) + " " + testing::PrintToString(order));
    SelectRun run(c);
    run.run(entry(), order);
    run.check(order);
    if (HasFailure()) return;
  }
}

// Shapes and addresses.

TEST_P(SelectContract, R23ManyLongRows) {
  if (refuses(32768, 2048)) return;
  // Rows one element apart over one buffer, so that 8,192 × 32,768 scores fit a test. The slow
  // selectors take a sixteenth.
  const bool fast = GetParam().starts_with("cpu_threshold") || on_device();
  const std::int64_t rows = fast ? 8192 : 64, len = 32768;
  const int k = 2048;
  std::vector<float> scores(static_cast<std::size_t>(rows + len));
  support::fill_scores(ScoreData::normal, scores, 41, 0);
  std::vector<std::int32_t> out(static_cast<std::size_t>(rows * k), kGarbage);
  SelectCall call;
  call.scores = {scores.data(), ScoreType::f32, rows, len, 1, nullptr};
  call.indices = contiguous(out.data(), rows, k);
  run(call, problem_of(call, TieBreak::lowest_index, SelectOrder::by_index));
  for (std::int64_t r = 0; r < rows; r = r + 1 == rows ? rows : std::min(r + 257, rows - 1)) {
    std::vector<std::int32_t> expected = support::select_oracle(
        std::span(scores).subspan(static_cast<std::size_t>(r), static_cast<std::size_t>(len)), 0,
        len, k);
    std::sort(expected.begin(), expected.end());
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), out.begin() + r * k)) << "row " << r;
  }
}

TEST_P(SelectContract, BroadcastAndBackwardStrides) {
  std::vector<float> scores(400);
  support::fill_scores(ScoreData::normal, scores, 43, 0);
  for (const std::int64_t stride : {0, -100}) {
    std::vector<std::int32_t> out(4 * 9, kGarbage);
    SelectCall call;
    call.scores = {scores.data() + 300, ScoreType::f32, 4, 100, stride, nullptr};
    call.indices = contiguous(out.data(), 4, 9);
    run(call, problem_of(call, TieBreak::lowest_index, SelectOrder::by_value));
    for (std::int64_t r = 0; r < 4; ++r)
      EXPECT_EQ(std::vector(out.begin() + r * 9, out.begin() + (r + 1) * 9),
                support::select_oracle(
                    std::span(scores).subspan(static_cast<std::size_t>(300 + r * stride), 100), 0,
                    100, 9))
          << "row " << r << ", stride " << stride;
  }
}

/// Address space without memory behind it until it is touched.
class Reservation {
 public:
  explicit Reservation(std::size_t bytes)
      : bytes_(bytes),
        base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (valid()) munmap(base_, bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  bool valid() const { return base_ != MAP_FAILED; }
  template <class T>
  T* as() const {
    return static_cast<T*>(base_);
  }

 private:
  std::size_t bytes_;
  void* base_;
};

TEST_P(SelectContract, R13RowsBeyondTwoToTheThirtyOneElements) {
  // A device gets a copy of it all: near rows. Far ones: CudaFarOffsets, in memory of its own.
  constexpr std::int64_t kRows = 5, kLen = 3000;
  const std::int64_t stride = on_device() ? kLen + 7 : (std::int64_t{1} << 30) + 7;
  constexpr int kPicks = 40;
  const Reservation scores(static_cast<std::size_t>(kRows * stride) * sizeof(float));
  const Reservation outputs(static_cast<std::size_t>(kRows * stride) * sizeof(std::int32_t));
  ASSERT_TRUE(scores.valid() && outputs.valid()) << "no 40 GB of address space";
  std::array<std::int64_t, kRows> offsets{};
  for (std::int64_t r = 0; r < kRows; ++r) {
    offsets[static_cast<std::size_t>(r)] = (kRows - 1 - r) * stride;
    support::fill_scores(ScoreData::normal, {scores.as<float>() + r * stride, kLen}, 47,
                         static_cast<std::uint64_t>(r));
  }
  for (const bool ragged : {false, true}) {
    SelectCall call;
    call.scores = {
        scores.as<float>(), ScoreType::f32, kRows, kLen, stride, ragged ? offsets.data() : nullptr};
    call.indices = strided(outputs.as<std::int32_t>(), std::array<std::int64_t, 2>{kRows, kPicks},
                           {stride, 1});
    run(call, problem_of(call, TieBreak::lowest_index, SelectOrder::by_value));
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::int64_t offset = ragged ? offsets[static_cast<std::size_t>(r)] : r * stride;
      const std::int32_t* const got = outputs.as<std::int32_t>() + r * stride;
      EXPECT_EQ(std::vector(got, got + kPicks),
                support::select_oracle({scores.as<float>() + offset, kLen}, 0, kLen, kPicks))
          << "row " << r << (ragged ? ", row_offsets" : ", row_stride");
    }
  }
}

TEST(SelectAddresses, R13OffsetsAre64Bit) {
  ScoreRows rows;
  rows.row_stride = 163840;
  EXPECT_EQ(topk::row_offset(rows, 13108), 2147614720);
  rows.row_stride = 262144;
  EXPECT_EQ(topk::row_offset(rows, 8192), 2147483648);
  EXPECT_EQ(topk::row_offset(rows, std::int64_t{1} << 33), std::int64_t{1} << 51);
  const std::array<std::int64_t, 2> offsets{5, std::int64_t{1} << 40};
  rows.row_offsets = offsets.data();
  EXPECT_EQ(topk::row_offset(rows, 1), std::int64_t{1} << 40);
}

TEST_P(SelectContract, ValuesAreOptionalAndProblemsMayBeLargerThanCalls) {
  if (refuses(70000, 100)) return;
  SelectRun run({.name = "larger_problem",
                 .rows = 3,
                 .row_len = 5000,
                 .k = 100,
                 .fill = [](std::span<float> row, std::int64_t r) {
                   support::fill_scores(ScoreData::normal, row, 53, static_cast<std::uint64_t>(r));
                 }});
  SelectProblem problem = problem_of(run.call(), TieBreak::any, SelectOrder::by_index);
  problem.max_rows = 1000;
  problem.max_row_len = 70000;
  SelectCall call = run.call();
  run.spoil();
  this->run(call, problem);
  run.check(SelectOrder::by_index);
  run.spoil();
  call.values = {};
  this->run(call, problem);
  for (std::int64_t r = 0; r < 3; ++r) EXPECT_GE(address(call.indices, r, 0)[0], 0) << "row " << r;
}

TEST_P(SelectContract, RowsMayBeWiderThanTheirBoundWhenRangesAreNot) {
  // A score row over all keys of a packed batch, of which each query sees its own request's.
  SelectCase c{.name = "ranges",
               .rows = 2,
               .row_len = 5000,
               .k = 50,
               .fill =
                   [](std::span<float> row, std::int64_t r) {
                     support::fill_scores(ScoreData::normal, row, 59,
                                          static_cast<std::uint64_t>(r));
                   },
               .starts = {100, 4000},
               .ends = {300, 9000}};
  SelectRun run(c);
  SelectProblem problem = problem_of(run.call());
  problem.max_row_len = 1000;
  run.spoil();
  this->run(run.call(), problem);
  run.check();
  if (on_device()) return;  // cannot look at the ranges
  problem.max_row_len = 999;
  EXPECT_THROW(this->run(run.call(), problem), std::invalid_argument);
}

/// Where any of several equal scores will do: picks are distinct, and as good as the oracle's.
TEST(SelectAnyTies, PicksAreDistinctAndNoScoreBeatsThem) {
  constexpr std::int64_t kLen = 4000;
  // Ties; ties before greater scores that are none of the row's; NaNs, of which some stay behind;
  // a row without a choice; none.
  const std::vector<std::int32_t> ends{4000, 3000, 150, 100, 0};
  const auto rows = static_cast<std::int64_t>(ends.size());
  std::vector<float> scores(static_cast<std::size_t>(rows * kLen), 1e30f);
  const auto row_of = [&](std::int64_t r) {
    return std::span(scores).subspan(static_cast<std::size_t>(r * kLen),
                                     static_cast<std::size_t>(ends[static_cast<std::size_t>(r)]));
  };
  for (std::int64_t r = 0; r < rows; ++r)
    support::fill_scores(ScoreData::ties, row_of(r), 61, static_cast<std::uint64_t>(r));
  std::ranges::fill(row_of(2), kNan);
  row_of(2)[149] = -kInf;
  const auto key = [](float score) {
    return topk::ordered_key(std::bit_cast<std::uint32_t>(score));
  };

  for (const std::string& name : support::tested_selectors())
    for (const int k : {1, 100, 2048, 5000})
      for (const SelectOrder order : {SelectOrder::unspecified, SelectOrder::by_index}) {
        SCOPED_TRACE(name + ", k " + std::to_string(k));
        std::vector<std::int32_t> indices(static_cast<std::size_t>(rows * k), kGarbage);
        std::vector<float> values(indices.size());
        SelectCall call;
        call.scores = {scores.data(), ScoreType::f32, rows, kLen, kLen, nullptr};
        call.ends = ends.data();
        call.indices = contiguous(indices.data(), rows, std::int64_t{k});
        call.values = contiguous(values.data(), rows, std::int64_t{k});
        const SelectProblem problem = problem_of(call, TieBreak::any, order);
        const SelectEntry& entry = support::selector(name);
        if (!entry.why_not(problem).empty()) continue;
        support::run_selector(entry, problem, call);
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::span<const float> row = row_of(r);
          const auto first = static_cast<std::size_t>(r * k);
          std::vector<std::uint32_t> wanted, got;
          for (const std::int32_t i :
               support::select_oracle(row, 0, static_cast<std::int64_t>(row.size()), k))
            wanted.push_back(key(row[static_cast<std::size_t>(i)]));
          std::set<std::int32_t> distinct;
          for (std::size_t j = 0; j < static_cast<std::size_t>(k); ++j) {
            const std::int32_t pick = indices[first + j];
            if (j >= wanted.size()) {
              ASSERT_EQ(pick, -1) << "row " << r << ", slot " << j;
              continue;
            }
            ASSERT_TRUE(pick >= 0 && pick < ends[static_cast<std::size_t>(r)])
                << "row " << r << ", slot " << j << ": got " << pick;
            const std::int32_t before = j > 0 ? indices[first + j - 1] : -1;
            ASSERT_TRUE(order != SelectOrder::by_index || pick > before) << "row " << r;
            distinct.insert(pick);
            const float score = row[static_cast<std::size_t>(pick)];
            got.push_back(key(score));
            ASSERT_EQ(std::bit_cast<std::uint32_t>(values[first + j]),
                      std::bit_cast<std::uint32_t>(score));
          }
          EXPECT_EQ(distinct.size(), wanted.size()) << "row " << r;
          std::ranges::sort(got, std::greater<>());
          EXPECT_EQ(got, wanted) << "row " << r;
        }
      }
}

// Bad arguments: refused with the argument's name, before anything is written.

TEST_P(SelectContract, BadArgumentsAreRefusedBeforeAnythingIsWritten) {
  constexpr std::int64_t kRows = 3, kLen = 50;
  constexpr int kPicks = 5;
  std::vector<float> scores(kRows * kLen, 1.0f);
  std::vector<std::int32_t> indices(kRows * kPicks * 2, kGarbage);
  std::vector<float> values(kRows * kPicks * 2, -777.0f);
  std::vector<std::int32_t> out_rows{0, 1, 2};
  SelectCall good;
  good.scores = {scores.data(), ScoreType::f32, kRows, kLen, kLen, nullptr};
  good.indices = contiguous(indices.data(), kRows, kPicks);
  good.values = contiguous(values.data(), kRows, kPicks);
  good.out_rows = out_rows.data();
  const SelectProblem bounds = problem_of(good);

  const auto refused = [&](const char* argument, auto spoil) {
    SelectCall call = good;
    SelectProblem problem = bounds;
    spoil(call, problem);
    const GuardedWorkspace workspace(std::size_t{1} << 20);
    try {
      entry().run(problem, call, workspace.span(), nullptr);
      ADD_FAILURE() << argument << ": accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(argument), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(": got "), std::string::npos) << error.what();
    }
    EXPECT_EQ(std::count(indices.begin(), indices.end(), kGarbage),
              static_cast<std::ptrdiff_t>(indices.size()))
        << argument << ": wrote first";
    EXPECT_EQ(std::count(values.begin(), values.end(), -777.0f),
              static_cast<std::ptrdiff_t>(values.size()))
        << argument << ": wrote first";
  };
  using Call = SelectCall;
  using Problem = SelectProblem;
  const auto shape = [](std::int64_t rows, std::int64_t columns) {
    return std::array<std::int64_t, 2>{rows, columns};
  };
  refused("k", [](Call&, Problem& p) { p.k = 0; });
  refused("k", [](Call&, Problem& p) { p.k = -4; });
  refused("max_rows", [](Call&, Problem& p) { p.max_rows = -1; });
  refused("max_row_len", [](Call&, Problem& p) { p.max_row_len = -1; });
  refused("max_row_len", [](Call&, Problem& p) { p.max_row_len = std::int64_t{1} << 31; });
  refused("scores.data", [](Call& c, Problem&) { c.scores.data = nullptr; });
  refused("scores.num_rows", [](Call& c, Problem&) { c.scores.num_rows = -1; });
  refused("scores.num_rows", [](Call&, Problem& p) { p.max_rows = kRows - 1; });
  refused("scores.row_len", [](Call& c, Problem&) { c.scores.row_len = -1; });
  if (!on_device()) refused("length of row 0", [](Call&, Problem& p) { p.max_row_len = kLen - 1; });
  refused("scores.type", [](Call&, Problem& p) { p.score_type = ScoreType::bf16; });
  refused("indices", [](Call& c, Problem&) { c.indices = {}; });
  refused("indices rows",
          [&](Call& c, Problem&) { c.indices = contiguous(indices.data(), kRows - 1, kPicks); });
  refused("indices columns",
          [&](Call& c, Problem&) { c.indices = contiguous(indices.data(), kRows, kPicks - 1); });
  refused("indices columns",
          [&](Call& c, Problem&) { c.indices = contiguous(indices.data(), kRows, kPicks + 1); });
  refused("indices stride", [&](Call& c, Problem&) {
    c.indices = strided(indices.data(), shape(kRows, kPicks), {2 * kPicks, 2});
  });
  refused("values rows",
          [&](Call& c, Problem&) { c.values = contiguous(values.data(), kRows - 1, kPicks); });
  refused("values columns",
          [&](Call& c, Problem&) { c.values = contiguous(values.data(), kRows, kPicks + 1); });
  refused("values stride", [&](Call& c, Problem&) {
    c.values = strided(values.data(), shape(kRows, kPicks), {1, kRows});
  });
  if (on_device()) return;  // neither out_rows nor host memory for it to run on
  for (const std::int32_t bad : {-1, 3, std::numeric_limits<std::int32_t>::min()}) {
    out_rows[1] = bad;
    refused("out_rows[1]", [](Call&, Problem&) {});
  }
  out_rows[1] = 1;

  // A workspace that is too small even for one thread, through the operation and past it.
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::size_t needed = entry().workspace_bytes(bounds);
  omp_set_num_threads(threads);
  if (needed > kWorkspaceAlignment) {
    const GuardedWorkspace workspace(needed - kWorkspaceAlignment);
    EXPECT_THROW(select_operation().run(entry(), bounds, good, workspace.span(), nullptr),
                 std::invalid_argument);
    EXPECT_THROW(entry().run(bounds, good, workspace.span(), nullptr), std::invalid_argument);
  }
  EXPECT_EQ(std::count(indices.begin(), indices.end(), kGarbage),
            static_cast<std::ptrdiff_t>(indices.size()));
  EXPECT_NO_THROW(run(good, bounds));
}

TEST(SelectProblemOf, BoundsExactlyTheCall) {
  std::vector<float> scores(200);
  std::vector<std::int32_t> indices(14);
  SelectCall call;
  call.scores = {scores.data(), ScoreType::bf16, 2, 100, 100, nullptr};
  call.indices = contiguous(indices.data(), 2, 7);
  const SelectProblem problem = problem_of(call, TieBreak::any, SelectOrder::by_value);
  EXPECT_EQ(problem.max_rows, 2);
  EXPECT_EQ(problem.max_row_len, 100);
  EXPECT_EQ(problem.k, 7);
  EXPECT_EQ(problem.score_type, ScoreType::bf16);
  EXPECT_EQ(problem.tie, TieBreak::any);
  EXPECT_EQ(problem.order, SelectOrder::by_value);
  EXPECT_FALSE(problem.hinted);
  call.hints = call.indices;
  EXPECT_TRUE(problem_of(call).hinted);

  call.indices = contiguous(indices.data(), 1, 7);
  EXPECT_THROW(problem_of(call), std::invalid_argument);
  call.indices = {};
  EXPECT_THROW(problem_of(call), std::invalid_argument);
  call.indices = contiguous(indices.data(), 2, 7);
  call.scores.row_len = -1;
  EXPECT_THROW(problem_of(call), std::invalid_argument);
}

TEST(SelectChoice, EveryEntryCanBeForcedAndTheReferenceComesLast) {
  Dispatch dispatch;
  dispatch.backend = Backend::cpu;
  const SelectProblem problem{.max_rows = 1, .max_row_len = 10, .k = 3};
  std::vector<std::string> names;
  for (const SelectEntry& entry : select_operation().entries())
    if (entry.backend == Backend::cpu) names.emplace_back(entry.name);
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "cpu_sort");
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
  EXPECT_TRUE(
      std::string(select_operation().choose(problem, dispatch).name).starts_with("cpu_threshold"));
  for (const std::string& name : names) {
    if (!support::selector(name).why_not(problem).empty()) continue;
    dispatch.forced["select"] = name;
    EXPECT_EQ(select_operation().choose(problem, dispatch).name, name);
  }
}

// Who cannot serve a problem is not listed for its tests; a force says why.
TEST(SelectChoice, WhoCannotServeIsRefused) {
  const SelectProblem problems[] = {
      {},
      {.max_rows = 4, .max_row_len = 20000, .k = 2048},
      {.max_rows = 4, .max_row_len = 20000, .k = 5000},
      {.max_rows = 4, .max_row_len = 500, .k = 5, .order = SelectOrder::by_value},
      {.max_rows = 4, .max_row_len = 500, .k = 5, .hinted = true}};
  for (const std::string& name : support::tested_selectors())
    for (const SelectProblem& problem : problems) {
      const auto serving = support::selectors_serving(problem);
      const bool listed = std::find(serving.begin(), serving.end(), name) != serving.end();
      EXPECT_NE(support::refuses(support::selector(name), problem), listed) << name;
    }
}

TEST(ThresholdTuning, SampleAndBuffersFitWhatTheyServe) {
  for (std::int64_t len = 1; len < 3000000; len = len * 5 / 4 + 1)
    for (std::int64_t k = 1; k < len; k = k * 3 / 2 + 1) {
      const std::int64_t sample = topk::sample_size(len, k);
      const std::int64_t capacity = topk::survivor_capacity(len, k);
      ASSERT_GT(capacity, k) << len;
      ASSERT_LE(capacity, std::max<std::int64_t>(4 * k, 16384));
      if (sample == 0) continue;
      ASSERT_LE(sample, capacity);
      const std::int64_t rank = topk::sample_rank(sample, len, k);
      ASSERT_GE(rank, 1);
      ASSERT_LE(rank, sample);
      std::int64_t previous = -1;
      for (std::int64_t i = 0; i < sample; ++i) {
        const std::int64_t place = topk::sample_place(i, sample, len);
        ASSERT_GT(place, previous);
        ASSERT_LT(place, len);
        previous = place;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Entries, SelectContract, testing::ValuesIn(support::selectors_serving({})),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace sparse_mla
