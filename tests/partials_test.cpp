// The one set of partial routines: merge against fp64, empties of both signs, NaN payloads,
// strides.
#include "sparse_mla/partials.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/random.h"

#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// An owned partial with chosen strides; what lies between its elements is a guard value.
struct OwnedPartial {
  std::vector<float> out_memory, lse_memory;
  Partial view;

  OwnedPartial(std::int64_t rows, std::int64_t heads, std::int64_t width, bool padded = false) {
    const std::int64_t value_stride = padded ? 2 : 1;
    const std::int64_t head_stride = width * value_stride + (padded ? 3 : 0);
    const std::int64_t row_stride = heads * head_stride + (padded ? 5 : 0);
    const std::int64_t lse_stride = rows + (padded ? 7 : 0);
    out_memory.assign(rows * row_stride + 1, 1234.5f);
    lse_memory.assign(heads * lse_stride + 1, 1234.5f);
    view.out = strided<float, 3>(out_memory.data(), {rows, heads, width},
                                 {row_stride, head_stride, value_stride});
    view.lse = strided<float, 2>(lse_memory.data(), {heads, rows}, {lse_stride, 1});
  }

  void fill(std::uint64_t seed) {
    for (std::int64_t row = 0; row < view.out.extent(0); ++row)
      for (std::int64_t head = 0; head < view.out.extent(1); ++head) {
        const std::int64_t index = row * view.out.extent(1) + head;
        view.lse(head, row) = 4 * random_normal(seed, 1, index);
        for (std::int64_t i = 0; i < view.out.extent(2); ++i)
          view.out(row, head, i) = random_normal(seed, 2, index * view.out.extent(2) + i);
      }
  }

  void set_row(std::int64_t row, float lse, float value) {
    for (std::int64_t head = 0; head < view.out.extent(1); ++head) {
      view.lse(head, row) = lse;
      for (std::int64_t i = 0; i < view.out.extent(2); ++i) view.out(row, head, i) = value;
    }
  }
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// merge_partials on the backend under test.
void join(const ConstPartial& a, const ConstPartial& b, const Partial& out) {
  if (support::backend_under_test() != Backend::cuda) return merge_partials(a, b, out);
  MergeCall call;
  call.a = a;
  call.b = b;
  call.out_f32 = out.out;
  call.lse = out.lse;
  support::run_fastest(
      merge_operation(),
      {static_cast<int>(b.out.extent(1)), static_cast<int>(b.out.extent(2)), b.out.extent(0)},
      call);
}

double log_sum_exp(double a, double b) {
  const double top = std::max(a, b);
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

struct MergeShape {
  std::int64_t rows, heads, width;
  bool a_padded, b_padded, out_padded;
};
std::ostream& operator<<(std::ostream& out, const MergeShape& s) {
  return out << s.rows << 'x' << s.heads << 'x' << s.width << (s.a_padded ? " a-strided" : "")
             << (s.b_padded ? " b-strided" : "") << (s.out_padded ? " out-strided" : "");
}

class Merge : public ::testing::TestWithParam<MergeShape> {};

TEST_P(Merge, MatchesFp64AndTouchesNothingElse) {
  const MergeShape s = GetParam();
  OwnedPartial a(s.rows, s.heads, s.width, s.a_padded), b(s.rows, s.heads, s.width, s.b_padded);
  OwnedPartial out(s.rows, s.heads, s.width, s.out_padded);
  const OwnedPartial untouched = out;
  a.fill(1);
  b.fill(2);
  join(a.view, b.view, out.view);
  for (std::int64_t row = 0; row < s.rows; ++row)
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const double lse_a = a.view.lse(head, row), lse_b = b.view.lse(head, row);
      const double lse = log_sum_exp(lse_a, lse_b);
      ASSERT_NEAR(out.view.lse(head, row), lse, 1e-5);
      for (std::int64_t i = 0; i < s.width; ++i) {
        const double expected = std::exp(lse_a - lse) * a.view.out(row, head, i) +
                                std::exp(lse_b - lse) * b.view.out(row, head, i);
        ASSERT_NEAR(out.view.out(row, head, i), expected, 4e-6) << row << ' ' << head << ' ' << i;
      }
    }
  if (s.out_padded) {
    std::size_t guards = 0;
    for (std::size_t i = 0; i < out.out_memory.size(); ++i)
      guards += out.out_memory[i] == 1234.5f && untouched.out_memory[i] == 1234.5f;
    EXPECT_EQ(guards, out.out_memory.size() - s.rows * s.heads * s.width);
  }
}

TEST_P(Merge, MayWriteOverAnInput) {
  const MergeShape s = GetParam();
  OwnedPartial a(s.rows, s.heads, s.width, s.a_padded), b(s.rows, s.heads, s.width, s.b_padded);
  OwnedPartial out(s.rows, s.heads, s.width);
  a.fill(3);
  b.fill(4);
  join(a.view, b.view, out.view);
  join(a.view, b.view, a.view);
  for (std::int64_t row = 0; row < s.rows; ++row)
    for (std::int64_t head = 0; head < s.heads; ++head) {
      ASSERT_TRUE(same_bits(a.view.lse(head, row), out.view.lse(head, row)));
      for (std::int64_t i = 0; i < s.width; ++i)
        ASSERT_TRUE(same_bits(a.view.out(row, head, i), out.view.out(row, head, i)));
    }
}

std::vector<MergeShape> merge_shapes() {
  std::vector<MergeShape> shapes;
  for (int strides = 0; strides < 8; ++strides)
    shapes.push_back({7, 3, 10, (strides & 1) != 0, (strides & 2) != 0, (strides & 4) != 0});
  shapes.push_back({613, 48, 48, false, true, false});
  shapes.push_back({1, 128, 128, true, false, true});
  shapes.push_back({0, 4, 8, false, false, false});
  return shapes;
}
INSTANTIATE_TEST_SUITE_P(Shapes, Merge, ::testing::ValuesIn(merge_shapes()));

TEST(MergeEmpty, OneSideEmptyReturnsTheOtherBitForBit) {
  for (const float empty : {-kInf, kInf})
    for (const float payload : {0.0f, 7.0f, kNaN, kInf, -kInf})
      for (const bool a_empty : {true, false}) {
        OwnedPartial a(1, 2, 5), b(1, 2, 5), out(1, 2, 5);
        a.fill(5);
        b.fill(6);
        a.view.out(0, 0, 0) = b.view.out(0, 0, 0) = -0.0f;
        (a_empty ? a : b).set_row(0, empty, payload);
        join(a.view, b.view, out.view);
        const Partial& kept = a_empty ? b.view : a.view;
        for (int head = 0; head < 2; ++head) {
          EXPECT_TRUE(same_bits(out.view.lse(head, 0), kept.lse(head, 0)));
          for (int i = 0; i < 5; ++i)
            EXPECT_TRUE(same_bits(out.view.out(0, head, i), kept.out(0, head, i)));
        }
      }
}

TEST(MergeEmpty, BothEmptyGivesZeroAndMinusInfinity) {
  for (const float lse_a : {-kInf, kInf})
    for (const float lse_b : {-kInf, kInf})
      for (const float payload : {3.0f, kNaN, kInf}) {
        OwnedPartial a(1, 1, 4), b(1, 1, 4), out(1, 1, 4);
        a.set_row(0, lse_a, payload);
        b.set_row(0, lse_b, payload);
        join(a.view, b.view, out.view);
        EXPECT_EQ(out.view.lse(0, 0), -kInf);
        for (int i = 0; i < 4; ++i) EXPECT_TRUE(same_bits(out.view.out(0, 0, i), 0.0f));
      }
}

TEST(MergeEmpty, AWeightThatUnderflowsToZeroContributesNothing) {
  OwnedPartial a(1, 1, 2), b(1, 1, 2), out(1, 1, 2);
  a.set_row(0, -500.0f, kNaN);  // exp(-500) is 0 in fp32
  b.set_row(0, 0.0f, 2.0f);
  join(a.view, b.view, out.view);
  EXPECT_EQ(out.view.out(0, 0, 0), 2.0f);
  EXPECT_EQ(out.view.lse(0, 0), 0.0f);
}

TEST(MergeEmpty, ANanLsePropagates) {
  for (const float other : {0.0f, -kInf, kInf, kNaN})
    for (const bool in_a : {true, false}) {
      OwnedPartial a(1, 1, 2), b(1, 1, 2), out(1, 1, 2);
      a.set_row(0, in_a ? kNaN : other, 1.0f);
      b.set_row(0, in_a ? other : kNaN, 1.0f);
      join(a.view, b.view, out.view);
      EXPECT_TRUE(std::isnan(out.view.lse(0, 0))) << other << in_a;
      EXPECT_TRUE(std::isnan(out.view.out(0, 0, 0))) << other << in_a;
    }
}

TEST(MergeEmpty, MixedRowsLeaveNoNan) {
  OwnedPartial a(200, 3, 8), b(200, 3, 8), out(200, 3, 8);
  a.fill(8);
  b.fill(9);
  for (int row = 0; row < 200; ++row) {
    if (row % 4 == 0) a.set_row(row, -kInf, kNaN);
    if (row % 4 == 1) b.set_row(row, kInf, kNaN);
    if (row % 8 == 0) b.set_row(row, -kInf, kInf);
  }
  join(a.view, b.view, out.view);
  for (int row = 0; row < 200; ++row)
    for (int head = 0; head < 3; ++head)
      for (int i = 0; i < 8; ++i) EXPECT_FALSE(std::isnan(out.view.out(row, head, i)));
}

TEST(MergePublished, NaturalLogarithmNotBaseTwo) {
  OwnedPartial a(1, 1, 1), b(1, 1, 1), out(1, 1, 1);
  a.set_row(0, std::log(2.0f), 0.0f);
  b.set_row(0, std::log(8.0f), 10.0f);
  join(a.view, b.view, out.view);
  EXPECT_NEAR(out.view.out(0, 0, 0), 8.0f, 1e-5);  // a base mix-up gives 7.233
}

TEST(MergePublished, PrefixForTheFirstRowsOnly) {
  OwnedPartial prefix(128, 48, 96), suffix(613, 48, 96), out(613, 48, 96);
  prefix.fill(10);
  suffix.fill(11);
  MergeProblem problem{48, 96, 613};
  MergeCall call;
  call.a = prefix.view;
  call.b = suffix.view;
  call.out_f32 = out.view.out;
  call.lse = out.view.lse;
  support::run_fastest(merge_operation(), problem, call);
  for (int row = 128; row < 613; ++row)
    for (int head = 0; head < 48; ++head) {
      ASSERT_TRUE(same_bits(out.view.lse(head, row), suffix.view.lse(head, row)));
      for (int i = 0; i < 96; ++i)
        ASSERT_TRUE(same_bits(out.view.out(row, head, i), suffix.view.out(row, head, i)));
    }
  EXPECT_NE(out.view.out(0, 0, 0), suffix.view.out(0, 0, 0));
}

TEST(MergeOut, Bf16OutIsTheRoundedFp32ResultAtTheMappedToken) {
  OwnedPartial a(5, 2, 6), b(5, 2, 6), out(5, 2, 6);
  a.fill(12);
  b.fill(13);
  join(a.view, b.view, out.view);
  std::vector<bfloat16> rounded(9 * 2 * 6, __float2bfloat16_rn(99.0f));
  std::vector<float> lse(2 * 9, 99.0f);
  const std::vector<std::int32_t> tokens{8, 0, 3, 1, 6};
  MergeCall call;
  call.a = a.view;
  call.b = b.view;
  call.out_bf16 = contiguous(rounded.data(), 9, 2, 6);
  call.lse = contiguous(lse.data(), 2, 9);
  call.out_tokens = tokens.data();
  support::run_fastest(merge_operation(), {2, 6, 5, OutputType::bf16}, call);
  for (int row = 0; row < 5; ++row)
    for (int head = 0; head < 2; ++head) {
      EXPECT_EQ(call.lse(head, tokens[row]), out.view.lse(head, row));
      for (int i = 0; i < 6; ++i)
        EXPECT_EQ(__bfloat162float(call.out_bf16(tokens[row], head, i)),
                  __bfloat162float(__float2bfloat16_rn(out.view.out(row, head, i))));
    }
  for (const int token : {2, 4, 5, 7}) {
    EXPECT_EQ(call.lse(0, token), 99.0f);
    EXPECT_EQ(__bfloat162float(call.out_bf16(token, 0, 0)), 99.0f);
  }
}

TEST(Merge, BadShapesAreNamed) {
  OwnedPartial a(3, 2, 4), b(2, 2, 4), wide(2, 2, 5);
  EXPECT_THROW(join(a.view, b.view, b.view), std::invalid_argument);
  EXPECT_THROW(join(wide.view, b.view, b.view), std::invalid_argument);
  EXPECT_THROW(join(b.view, a.view, b.view), std::invalid_argument);
  OwnedPartial one_head(2, 1, 4);
  EXPECT_THROW(join(b.view, b.view, wide.view), std::invalid_argument);
  EXPECT_THROW(join(b.view, b.view, one_head.view), std::invalid_argument);
  EXPECT_THROW(join(b.view, b.view, {b.view.out, one_head.view.lse}), std::invalid_argument);
}

// Contexts [64, 0, 64, 0], 4 query tokens each: 12 running rows, 8 of them with context.
TEST(ContextPartial, InitAndAccumulate) {
  const std::vector<std::int32_t> queries{4, 4, 4, 4}, contexts{64, 0, 64, 0};
  const ContextPlan plan = plan_context_chunks(queries, contexts, {1024, 16});
  OwnedPartial running(plan.running_rows, 2, 3, true);
  init_context_partial(plan, running.view);
  for (int row = 0; row < 12; ++row) {
    const bool gap = row >= 4 && row < 8;
    EXPECT_EQ(running.view.lse(0, row), gap ? -kInf : 1234.5f);
    EXPECT_EQ(running.view.out(row, 1, 2), gap ? 0.0f : 1234.5f);
  }
  for (std::size_t c = 0; c < 2; ++c) {
    OwnedPartial chunk(4, 2, 3);
    chunk.fill(20 + c);
    const Partial result = accumulate_context_chunk(plan, c, chunk.view, running.view);
    EXPECT_EQ(result.out.data_handle(), running.view.out.data_handle());
    for (int row = 0; row < 4; ++row)
      EXPECT_TRUE(same_bits(running.view.out(c * 8 + row, 1, 2), chunk.view.out(row, 1, 2)));
  }
  EXPECT_EQ(running.view.lse(0, 5), -kInf);
}

TEST(ContextPartial, ContinuationIsMergedTheRestWritten) {
  const std::vector<std::int32_t> queries{3, 5, 7}, contexts{1500, 32, 32};
  const ContextPlan plan = plan_context_chunks(queries, contexts, {1024, 16});
  ASSERT_EQ(plan.chunks.size(), 2u);
  OwnedPartial running(15, 1, 2), first(3, 1, 2), second(15, 1, 2);
  first.fill(30);
  second.fill(31);
  accumulate_context_chunk(plan, 0, first.view, running.view);
  accumulate_context_chunk(plan, 1, second.view, running.view);
  for (int row = 0; row < 15; ++row) {
    const double expected = row < 3 ? log_sum_exp(first.view.lse(0, row), second.view.lse(0, row))
                                    : second.view.lse(0, row);
    EXPECT_NEAR(running.view.lse(0, row), expected, 1e-5) << row;
  }
  EXPECT_TRUE(same_bits(running.view.out(9, 0, 1), second.view.out(9, 0, 1)));
}

TEST(ContextPartial, OneCoveringChunkIsReturnedAsItIs) {
  const std::vector<std::int32_t> queries{2, 2}, contexts{10, 20};
  const ContextPlan plan = plan_context_chunks(queries, contexts, {1024, 16});
  OwnedPartial running(4, 1, 2), chunk(4, 1, 2);
  chunk.fill(40);
  const Partial result = accumulate_context_chunk(plan, 0, chunk.view, running.view);
  EXPECT_EQ(result.out.data_handle(), chunk.view.out.data_handle());
  EXPECT_EQ(running.view.out(0, 0, 0), 1234.5f);
}

TEST(ContextPartial, BadShapesAreNamed) {
  const std::vector<std::int32_t> queries{2, 2}, contexts{10, 2000};
  const ContextPlan plan = plan_context_chunks(queries, contexts, {1024, 16});
  OwnedPartial running(4, 1, 2), small(2, 1, 2), chunk(4, 1, 2);
  EXPECT_THROW(accumulate_context_chunk(plan, 7, chunk.view, running.view), std::invalid_argument);
  EXPECT_THROW(accumulate_context_chunk(plan, 0, small.view, running.view), std::invalid_argument);
  EXPECT_THROW(accumulate_context_chunk(plan, 0, chunk.view, small.view), std::invalid_argument);
}

}  // namespace
}  // namespace sparse_mla
