// Operation `rotary`: both layouts against fp64, scores by hand, strides, in place, bad input.
#include "sparse_mla/rotary.h"

#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/random.h"

#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::poisoned;
using support::run_entry;
using support::same_bits;
using ::testing::HasSubstr;

constexpr int kDims = 64;
constexpr double kBf16Step = 0x1p-8;  // half an ulp, relative

bfloat16 bf16(double value) { return __double2bfloat16(value); }

struct Table {
  std::vector<float> values;
  View2<const float> view;

  Table(std::int64_t positions, int dims, double base, double magnitude = 1)
      : values(static_cast<std::size_t>(positions * dims)) {
    const auto all = contiguous(values.data(), positions, dims);
    fill_rotary_table(rotary_inverse_frequencies(base, dims), magnitude, all);
    view = all;
  }
};

RotaryProblem problem_of(RotaryLayout layout, int dims, std::int64_t rows) {
  RotaryProblem problem(layout);
  problem.dims = dims;
  problem.max_rows = rows;
  return problem;
}

// The dot product of a query at position 7 and a key at position 6 after rotary.
double score(const std::string& entry, RotaryLayout layout, std::vector<bfloat16> query,
             std::vector<bfloat16> key) {
  const Table table(8, kDims, 10000);
  const std::int64_t positions[] = {7, 6};
  std::vector<bfloat16> both = query;
  both.insert(both.end(), key.begin(), key.end());
  RotaryCall call;
  call.in = contiguous<const bfloat16>(both.data(), 2, 1, kDims);
  call.out = contiguous(both.data(), 2, 1, kDims);
  call.positions = contiguous(positions, 2);
  call.table = table.view;
  run_entry(rotary_operation(), entry, problem_of(layout, kDims, 2), call);
  double sum = 0;
  for (int i = 0; i < kDims; ++i)
    sum +=
        double{__bfloat162float(call.out(0, 0, i))} * double{__bfloat162float(call.out(1, 0, i))};
  return sum;
}

class Rotary : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(EveryEntry, Rotary,
                         ::testing::ValuesIn(support::usable_entries(
                             rotary_operation(), RotaryProblem(RotaryLayout::half_split))));

// q = e0 + 2·e32, k = e0 + e1, one position apart; pair 0 turns by 1 rad.
//   half-split:  pair 0 is (0, 32): q (1, 2), k (1, 0): the turned product is cos 1 − 2·sin 1.
//   interleaved: pair 0 is (0, 1):  q (1, 0), k (1, 1): cos 1 + sin 1; e32 meets nothing.
// One is positive and the other negative: relu keeps this key or drops it.
TEST_P(Rotary, TheLayoutsGiveDifferentScores) {
  std::vector<bfloat16> query(kDims, bf16(0)), key(kDims, bf16(0));
  query[0] = bf16(1);
  query[32] = bf16(2);
  key[0] = key[1] = bf16(1);
  const double tolerance = 8 * kBf16Step;  // four products of numbers up to 2, each rounded twice
  EXPECT_NEAR(score(GetParam(), RotaryLayout::half_split, query, key), -1.1426396637476532,
              tolerance);
  EXPECT_NEAR(score(GetParam(), RotaryLayout::interleaved, query, key), 1.3817732906760363,
              tolerance);
}

// A lower pair turns slower: pair 16 of 32 at base 10,000 by 10000^-1/2 = 0.01 rad.
TEST(RotaryTable, HoldsCosinesThenSines) {
  const Table table(1001, kDims, 10000, 1.25);
  for (const std::int64_t position : {0, 1, 500, 1000}) {
    EXPECT_NEAR(table.view(position, 0), 1.25 * std::cos(1.0 * position), 1e-7);
    EXPECT_NEAR(table.view(position, 32), 1.25 * std::sin(1.0 * position), 1e-7);
    EXPECT_NEAR(table.view(position, 16), 1.25 * std::cos(0.01 * position), 1e-7);
    EXPECT_NEAR(table.view(position, 48), 1.25 * std::sin(0.01 * position), 1e-7);
  }
  EXPECT_EQ(rotary_inverse_frequencies(10000, 4), (std::vector<double>{1, 0.01}));
}

// Angles at far positions are not taken in fp32, where 163,839 rad is only known to 0.008 rad.
TEST(RotaryTable, IsExactAtFarPositions) {
  const Table table(163840, 2, 10000);
  EXPECT_NEAR(table.view(163839, 0), std::cos(163839.0), 1e-7);
  EXPECT_NEAR(table.view(163839, 1), std::sin(163839.0), 1e-7);
}

TEST_P(Rotary, AgreesWithFp64) {
  constexpr std::int64_t kRows = 37, kHeads = 3;
  for (const int dims : {2, 6, 64, 128})
    for (const RotaryLayout layout : {RotaryLayout::half_split, RotaryLayout::interleaved}) {
      const Table table(5000, dims, 10000);
      // A head's rotary part behind another part, with a gap behind both.
      const std::int64_t head_stride = dims + 9, row_stride = kHeads * head_stride + 1;
      auto memory = poisoned<bfloat16>(kRows * row_stride);
      const auto view = strided<bfloat16, 3>(memory.data() + 5, {kRows, kHeads, dims},
                                             {row_stride, head_stride, 1});
      std::vector<std::int64_t> positions;
      for (std::int64_t row = 0; row < kRows; ++row) {
        positions.push_back(row == 0 ? 0 : random_bits(3, 1, row) % 5000);
        for (std::int64_t head = 0; head < kHeads; ++head)
          for (int i = 0; i < dims; ++i)
            view(row, head, i) = bf16(random_normal(3, 2, (row * kHeads + head) * dims + i));
      }
      auto turned = poisoned<bfloat16>(kRows * kHeads * dims);
      RotaryCall call;
      call.in = view;
      call.out = contiguous(turned.data(), kRows, kHeads, dims);
      call.positions = contiguous<const std::int64_t>(positions.data(), kRows);
      call.table = table.view;
      const auto before = memory;
      run_entry(rotary_operation(), GetParam(), problem_of(layout, dims, kRows), call);
      EXPECT_TRUE(same_bits(memory, before));  // out of place
      for (std::int64_t row = 0; row < kRows; ++row)
        for (std::int64_t head = 0; head < kHeads; ++head)
          for (int i = 0; i < dims / 2; ++i) {
            const int first = layout == RotaryLayout::half_split ? i : 2 * i;
            const int second = layout == RotaryLayout::half_split ? i + dims / 2 : 2 * i + 1;
            const double x = __bfloat162float(view(row, head, first));
            const double y = __bfloat162float(view(row, head, second));
            const double angle = static_cast<double>(positions[static_cast<std::size_t>(row)]) *
                                 std::pow(10000.0, -2.0 * i / dims);
            const double bound = kBf16Step * std::hypot(x, y) + 1e-6;
            ASSERT_NEAR(__bfloat162float(call.out(row, head, first)),
                        x * std::cos(angle) - y * std::sin(angle), bound);
            ASSERT_NEAR(__bfloat162float(call.out(row, head, second)),
                        y * std::cos(angle) + x * std::sin(angle), bound);
          }
      for (std::int64_t head = 0; head < kHeads; ++head)  // position 0 turns nothing
        for (int i = 0; i < dims; ++i)
          ASSERT_EQ(__bfloat162float(call.out(0, head, i)), __bfloat162float(view(0, head, i)));

      // In place: the same bits, and what lies between the parts is left alone.
      call.out = view;
      run_entry(rotary_operation(), GetParam(), problem_of(layout, dims, kRows), call);
      std::int64_t nans = 0, expected_nans = kRows * (1 + kHeads * 9);
      for (const bfloat16 value : memory) nans += __hisnan(value);
      EXPECT_EQ(nans, expected_nans);
      for (std::int64_t row = 0; row < kRows; ++row)
        for (std::int64_t head = 0; head < kHeads; ++head)
          for (int i = 0; i < dims; ++i)
            ASSERT_EQ(__bfloat162float(view(row, head, i)),
                      __bfloat162float(
                          turned[static_cast<std::size_t>((row * kHeads + head) * dims + i)]));
    }
}

TEST_P(Rotary, NoRows) {
  const Table table(1, kDims, 10000);
  RotaryCall call;
  call.in = contiguous<const bfloat16>(nullptr, 0, 4, kDims);
  call.out = contiguous<bfloat16>(nullptr, 0, 4, kDims);
  call.table = table.view;
  EXPECT_NO_THROW(run_entry(rotary_operation(), GetParam(),
                            problem_of(RotaryLayout::interleaved, kDims, 0), call));
}

TEST_P(Rotary, RefusesBadArgumentsBeforeWriting) {
  const Table table(10, kDims, 10000);
  const std::vector<std::int64_t> positions{0, 9};
  std::vector<bfloat16> data(2 * 3 * kDims, bf16(1));
  const auto error = [&](auto&& spoil) {
    RotaryCall call;
    call.in = contiguous<const bfloat16>(data.data(), 2, 3, kDims);
    call.out = contiguous(data.data(), 2, 3, kDims);
    call.positions = contiguous(positions.data(), 2);
    call.table = table.view;
    RotaryProblem problem = problem_of(RotaryLayout::half_split, kDims, 2);
    spoil(problem, call);
    try {
      run_entry(rotary_operation(), GetParam(), problem, call);
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  using P = RotaryProblem&;
  using C = RotaryCall&;
  const std::vector<std::int64_t> far{0, 10}, negative{-1, 0};
  // A device leaves such a row alone; position 0 turns the other one by nothing.
  const bool looks = support::checks_contents(rotary_operation(), GetParam());
  EXPECT_THAT(error([&](P, C c) { c.positions = contiguous(far.data(), 2); }),
              HasSubstr(looks ? "positions[1]: got 10, expected 0 … 9" : "no error"));
  EXPECT_THAT(error([&](P, C c) { c.positions = contiguous(negative.data(), 2); }),
              HasSubstr(looks ? "positions[0]: got -1" : "no error"));
  EXPECT_THAT(error([&](P, C c) { c.positions = contiguous(far.data(), 1); }),
              HasSubstr("positions: got [1]"));
  EXPECT_THAT(error([](P p, C) { p.dims = 63; }), HasSubstr("dims: got 63"));
  EXPECT_THAT(error([](P p, C) { p.dims = 32; }), HasSubstr("in: got [2, 3, 64]"));
  EXPECT_THAT(error([](P p, C) { p.max_rows = 1; }), HasSubstr("in: got [2, 3, 64]"));
  EXPECT_THAT(error([&](P, C c) { c.out = contiguous(data.data(), 3, 2, kDims); }),
              HasSubstr("out: got [3, 2, 64]"));
  EXPECT_THAT(error([](P, C c) { c.table = {}; }), HasSubstr("table: got"));
  for (const bfloat16 value : data) ASSERT_EQ(__bfloat162float(value), 1.0f);
}

TEST(RotaryTable, RefusesBadArguments) {
  EXPECT_THROW(rotary_inverse_frequencies(10000, 0), std::invalid_argument);
  EXPECT_THROW(rotary_inverse_frequencies(10000, 7), std::invalid_argument);
  EXPECT_THROW(rotary_inverse_frequencies(0, 64), std::invalid_argument);
  EXPECT_THROW(rotary_inverse_frequencies(-2, 64), std::invalid_argument);
  std::vector<float> table(64);
  const auto frequencies = rotary_inverse_frequencies(10000, 64);
  EXPECT_THROW(fill_rotary_table(frequencies, 1, contiguous(table.data(), 2, 32)),
               std::invalid_argument);
  EXPECT_THROW(fill_rotary_table({}, 1, contiguous(table.data(), 2, 0)), std::invalid_argument);
}

}  // namespace
}  // namespace sparse_mla
