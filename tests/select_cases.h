/// Lists of selection problems: what rows are filled with, and the fixture that runs every selector
/// on every problem of a list.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "sparse_mla/random.h"

#include "tests/select_harness.h"
#include "tests/support/score_data.h"

namespace sparse_mla::support {

inline float bits(std::uint32_t word) { return std::bit_cast<float>(word); }

inline auto data(ScoreData kind, std::uint64_t seed = 7) {
  return [kind, seed](std::span<float> row, std::int64_t r) {
    fill_scores(kind, row, seed, static_cast<std::uint64_t>(r));
  };
}

/// score = f(index) for every row.
template <class F>
auto formula(F f) {
  return [f](std::span<float> row, std::int64_t) {
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = f(static_cast<std::uint32_t>(i));
  };
}

/// A seeded permutation of row.size() values f(0), f(1), …
template <class F>
auto shuffled(F f) {
  return [f](std::span<float> row, std::int64_t r) {
    const std::size_t size = row.size();
    for (std::size_t i = 0; i < size; ++i) row[i] = f(static_cast<std::uint32_t>(i), size);
    for (std::size_t i = size; i > 1; --i)
      std::swap(row[i - 1], row[random_bits(11, static_cast<std::uint64_t>(r), i) % i]);
  };
}

/// `few` at `count` seeded distinct places, `rest` elsewhere; both are functions of the index.
template <class Few, class Rest>
auto winners(std::size_t count, Few few, Rest rest) {
  return [=](std::span<float> row, std::int64_t r) {
    std::vector<char> wins(row.size(), 0);
    for (std::size_t placed = 0, draw = 0; placed < count; ++draw) {
      char& place = wins[random_bits(13, static_cast<std::uint64_t>(r), draw) % row.size()];
      placed += place == 0;
      place = 1;
    }
    for (std::size_t i = 0; i < row.size(); ++i) {
      const auto index = static_cast<std::uint32_t>(i);
      row[i] = wins[i] ? few(index) : rest(index);
    }
  };
}

/// A mixture of what breaks comparisons: NaNs of both signs, ±inf, ±0, denormals, extremes.
inline void specials(std::span<float> row, std::int64_t r) {
  constexpr std::uint32_t kWords[] = {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u,
                                      0x7F800000u, 0xFF800000u, 0x00000000u, 0x80000000u,
                                      0x00000001u, 0x80000001u, 0x7F7FFFFFu, 0xFF7FFFFFu,
                                      0x3F800000u, 0xBF800000u, 0x007FFFFFu, 0x807FFFFFu};
  for (std::size_t i = 0; i < row.size(); ++i)
    row[i] = bits(kWords[random_bits(19, static_cast<std::uint64_t>(r), i) % 16]);
}

/// The problem that a case brings, in the order that no selector minds.
inline SelectProblem problem_of_case(const SelectCase& c) {
  return {.max_rows = c.rows,
          .max_row_len = c.row_len,
          .k = c.k,
          .score_type = c.type,
          .hinted = c.hints != HintCase::none};
}

struct Combination {
  std::string entry;
  SelectCase problem;
  std::string id;  ///< of the problem, the same for every entry
};
inline std::ostream& operator<<(std::ostream& out, const Combination& c) {
  return out << c.entry << ", " << c.problem;
}

class SelectCases : public testing::TestWithParam<Combination> {
 protected:
  /// The problem's memory and oracle, kept from one entry to the next.
  static SelectRun& run_of(const Combination& c) {
    if (!run_ || id_ != c.id) {
      run_.reset();
      run_ = std::make_unique<SelectRun>(c.problem);
      id_ = c.id;
    }
    return *run_;
  }
  /// Runs the entry in each order that the case is small enough for, and compares.
  static void run_and_check(const Combination& c) {
    const SelectEntry& entry = selector(c.entry);
    SelectProblem problem = problem_of_case(c.problem);
    SelectRun& run = run_of(c);
    std::vector<SelectOrder> orders{SelectOrder::unspecified};
    // The orders share the selection: big cases need not repeat it.
    if (c.problem.rows * c.problem.row_len <= 100000)
      orders.insert(orders.end(), {SelectOrder::by_index, SelectOrder::by_value});
    for (const SelectOrder order : orders) {
      problem.order = order;
      if (refuses(entry, problem)) continue;
      SCOPED_TRACE(testing::PrintToString(order));
      run.run(entry, order);
      run.check(order);
    }
  }
  static void TearDownTestSuite() { run_.reset(); }

 private:
  static inline std::unique_ptr<SelectRun> run_;
  static inline std::string id_;
};

inline std::vector<Combination> combine(const std::vector<SelectCase>& cases) {
  std::vector<Combination> all;
  for (const SelectCase& c : cases) {
    const std::string id = c.name + "_" + std::to_string(c.row_len) + "_k" + std::to_string(c.k) +
                           (c.type == ScoreType::bf16 ? "_bf16_" : "_f32_") +
                           std::to_string(&c - cases.data());
    for (const std::string& entry : selectors_serving(problem_of_case(c)))
      all.push_back({entry, c, id});
  }
  return all;
}

inline std::string combination_name(const testing::TestParamInfo<Combination>& info) {
  return info.param.id + "_" + info.param.entry;
}

}  // namespace sparse_mla::support
