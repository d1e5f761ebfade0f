// Operation `hadamard`: every width against the definition, its own inverse, in place, bad input.
#include "sparse_mla/hadamard.h"

#include <bit>
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
using ::testing::HasSubstr;

bfloat16 bf16(double value) { return __double2bfloat16(value); }

class Hadamard : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(EveryEntry, Hadamard,
                         ::testing::ValuesIn(support::usable_entries(hadamard_operation())));

TEST_P(Hadamard, AgreesWithItsDefinition) {
  constexpr std::int64_t kRows = 19, kHeads = 3;
  for (const int dims : {1, 2, 4, 64, 128, 1024}) {
    const std::int64_t head_stride = dims + 5, row_stride = kHeads * head_stride + 2;
    auto memory = poisoned<bfloat16>(kRows * row_stride);
    const auto view =
        strided<bfloat16, 3>(memory.data(), {kRows, kHeads, dims}, {row_stride, head_stride, 1});
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t head = 0; head < kHeads; ++head)
        for (int i = 0; i < dims; ++i)
          view(row, head, i) = bf16(random_normal(5, 1, (row * kHeads + head) * dims + i));
    auto out = poisoned<bfloat16>(kRows * kHeads * dims);
    HadamardCall call;
    call.in = view;
    call.out = contiguous(out.data(), kRows, kHeads, dims);
    run_entry(hadamard_operation(), GetParam(), {dims, kRows}, call);
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t head = 0; head < kHeads; ++head) {
        double squares = 0;
        for (int j = 0; j < dims; ++j)
          squares += std::pow(double{__bfloat162float(view(row, head, j))}, 2);
        for (int i = 0; i < dims; ++i) {
          double sum = 0;
          for (int j = 0; j < dims; ++j)
            sum += (std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1 : -1) *
                   double{__bfloat162float(view(row, head, j))};
          const double expected = sum / std::sqrt(dims);
          // Half an ulp of bf16; log2(dims) rounds of fp32 additions on a row of this norm.
          ASSERT_NEAR(__bfloat162float(call.out(row, head, i)), expected,
                      0x1p-8 * std::fabs(expected) + 16 * 0x1p-24 * std::sqrt(squares))
              << dims << " wide, row " << row << " head " << head << " element " << i;
        }
      }

    // In place: the same bits, the gaps are left alone.
    call.out = view;
    run_entry(hadamard_operation(), GetParam(), {dims, kRows}, call);
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t head = 0; head < kHeads; ++head)
        for (int i = 0; i < dims; ++i)
          ASSERT_EQ(
              __bfloat162float(view(row, head, i)),
              __bfloat162float(out[static_cast<std::size_t>((row * kHeads + head) * dims + i)]));
    std::int64_t nans = 0;
    for (const bfloat16 value : memory) nans += __hisnan(value);
    EXPECT_EQ(nans, kRows * (2 + kHeads * 5));
  }
}

// Exact numbers: an impulse spreads evenly, twice is the identity, dot products stay.
TEST_P(Hadamard, IsOrthogonalAndItsOwnInverse) {
  constexpr int kDims = 64;  // 64^-1/2 = 1/8 is exact
  std::vector<bfloat16> rows(2 * kDims, bf16(0));
  rows[5] = bf16(8);
  for (int i = 0; i < kDims; ++i) rows[kDims + i] = bf16(i % 7 - 3);
  const auto before = rows;
  HadamardCall call;
  call.in = contiguous<const bfloat16>(rows.data(), 2, 1, kDims);
  call.out = contiguous(rows.data(), 2, 1, kDims);
  run_entry(hadamard_operation(), GetParam(), {kDims, 2}, call);
  double product = 0;
  for (int i = 0; i < kDims; ++i) {
    EXPECT_EQ(__bfloat162float(rows[i]), std::popcount(5u & static_cast<unsigned>(i)) % 2 ? -1 : 1);
    product += double{__bfloat162float(rows[i])} * double{__bfloat162float(rows[kDims + i])};
  }
  EXPECT_EQ(product, 8.0 * (5 % 7 - 3));
  run_entry(hadamard_operation(), GetParam(), {kDims, 2}, call);
  for (std::size_t i = 0; i < rows.size(); ++i)
    EXPECT_EQ(__bfloat162float(rows[i]), __bfloat162float(before[i])) << i;
}

TEST_P(Hadamard, NoRows) {
  HadamardCall call;
  call.in = contiguous<const bfloat16>(nullptr, 0, 4, 128);
  call.out = contiguous<bfloat16>(nullptr, 0, 4, 128);
  EXPECT_NO_THROW(run_entry(hadamard_operation(), GetParam(), {128, 0}, call));
}

TEST_P(Hadamard, RefusesBadArgumentsBeforeWriting) {
  for (const int dims : {0, -4, 3, 96, 100}) {
    std::vector<bfloat16> row(100, bf16(1));
    HadamardCall call;
    call.in = contiguous<const bfloat16>(row.data(), 1, 1, std::max(dims, 0));
    call.out = contiguous(row.data(), 1, 1, std::max(dims, 0));
    const std::string text = "dims: got " + std::to_string(dims) + ", expected a power of two";
    try {
      support::run_fastest(hadamard_operation(), {dims, 1}, call);
      ADD_FAILURE() << "accepted " << dims;
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
    for (const bfloat16 value : row) ASSERT_EQ(__bfloat162float(value), 1.0f);
  }
  std::vector<bfloat16> rows(2 * 64, bf16(1));
  HadamardCall call;
  call.in = contiguous<const bfloat16>(rows.data(), 2, 1, 64);
  call.out = contiguous(rows.data(), 1, 2, 64);
  EXPECT_THROW(run_entry(hadamard_operation(), GetParam(), {64, 2}, call), std::invalid_argument);
  call.out = contiguous(rows.data(), 2, 1, 64);
  EXPECT_THROW(run_entry(hadamard_operation(), GetParam(), {64, 1}, call), std::invalid_argument);
  EXPECT_THROW(run_entry(hadamard_operation(), GetParam(), {32, 2}, call), std::invalid_argument);
}

}  // namespace
}  // namespace sparse_mla
