// The vectorised inner loops, baseline and AVX2: number formats exhaustively, softmax's
// exponential, packed panels.
#include "kernels/cpu/tile_kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/cpu_features.h"
#include "sparse_mla/types.h"

#include "tests/support/number_formats.h"

namespace sparse_mla::cpu {
namespace {

struct Table {
  std::string name;
  const TileKernels* kernels;
};
std::ostream& operator<<(std::ostream& out, const Table& table) { return out << table.name; }

std::vector<Table> tables() {
  std::vector<Table> list{{"baseline", &baseline_tile_kernels()}};
  if (has_avx2_fma()) list.push_back({"avx2", &avx2_tile_kernels()});
  return list;
}

class TileKernelsTest : public testing::TestWithParam<Table> {
 protected:
  const TileKernels& kernels() const { return *GetParam().kernels; }
};
INSTANTIATE_TEST_SUITE_P(EveryTable, TileKernelsTest, testing::ValuesIn(tables()));

TEST_P(TileKernelsTest, DecodesEveryBf16) {
  std::vector<std::uint16_t> in(65536 + 3);  // an incomplete vector at the end
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint16_t>(i);
  std::vector<float> out(in.size()), scaled(in.size());
  kernels().bf16_to_float(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  kernels().scale_bf16_to_float(in.data(), 0.25f, scaled.data(),
                                static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i) {
    const auto expected = static_cast<float>(support::decode_bf16(in[i]));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::uint32_t{in[i]} << 16);
    ASSERT_TRUE(scaled[i] == expected * 0.25f || std::isnan(expected)) << i;
  }
}

TEST_P(TileKernelsTest, EncodesBf16ToNearestEven) {
  // Around every bf16 number: itself, the ties on either side and their neighbours.
  std::vector<float> in;
  for (std::uint32_t high = 0; high < 65536; ++high)
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      in.push_back(std::bit_cast<float>(high << 16 | low));
  in.push_back(1.0f);
  std::vector<std::uint16_t> out(in.size());
  kernels().float_to_bf16(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i]))
      ASSERT_TRUE(std::isnan(support::decode_bf16(out[i]))) << i;
    else
      ASSERT_EQ(out[i], support::encode_bf16(in[i])) << i;
  }
}

TEST_P(TileKernelsTest, DecodesEveryE4m3) {
  std::vector<std::uint8_t> in(256 + 5);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint8_t>(i);
  std::vector<float> out(in.size());
  kernels().e4m3_to_float(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i) {
    const double expected = support::decode_e4m3(in[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_EQ(double{out[i]}, expected) << i;
      EXPECT_EQ(std::signbit(out[i]), std::signbit(expected)) << i;
    }
  }
}

TEST_P(TileKernelsTest, ScalesE4m3) {
  std::vector<std::uint8_t> in(256 + 5);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint8_t>(i);
  std::vector<float> out(in.size());
  for (const float factor : {0.75f, 1e-4f, 3.7e30f}) {
    kernels().scale_e4m3_to_float(in.data(), factor, out.data(),
                                  static_cast<std::int64_t>(in.size()));
    for (std::size_t i = 0; i < in.size(); ++i) {
      const auto expected = static_cast<float>(support::decode_e4m3(in[i])) * factor;
      ASSERT_TRUE(out[i] == expected || (std::isnan(out[i]) && std::isnan(expected))) << i;
    }
  }
}

// The toolkit's conversion is the yardstick for every number that the encoder may meet.
void expect_as_the_toolkit(const TileKernels& kernels, const std::vector<float>& in) {
  std::vector<std::uint8_t> out(in.size());
  kernels.float_to_e4m3(in.data(), 1, out.data(), static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i)
    ASSERT_EQ(int{out[i]}, int{fp8_e4m3(in[i]).__x})
        << in[i] << ' ' << std::hex << std::bit_cast<std::uint32_t>(in[i]);
}

TEST_P(TileKernelsTest, EncodesEveryBf16AsE4m3) {
  std::vector<std::uint16_t> in(65536 + 3);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint16_t>(i);
  std::vector<std::uint8_t> out(in.size());
  std::vector<float> values;
  for (const std::uint16_t bits : in)
    values.push_back(static_cast<float>(support::decode_bf16(bits)));
  expect_as_the_toolkit(kernels(), values);
  for (const float divisor : {1.0f, 0.3f, 1e-4f, 0x1p-13f, 7.6e35f}) {
    kernels().bf16_to_e4m3(in.data(), divisor, out.data(), static_cast<std::int64_t>(in.size()));
    for (std::size_t i = 0; i < in.size(); ++i)
      ASSERT_EQ(int{out[i]}, int{fp8_e4m3(values[i] / divisor).__x}) << values[i];
  }
}

TEST_P(TileKernelsTest, EncodesFloatsAsE4m3) {
  // Every tie and every number of e4m3, normal and subnormal, with the floats around it.
  std::vector<float> in;
  for (int code = 0; code < 0x7F; ++code) {
    const double low = support::decode_e4m3(static_cast<std::uint8_t>(code));
    const double high =
        code == 0x7E ? 480 : support::decode_e4m3(static_cast<std::uint8_t>(code + 1));
    for (const double value : {low, (low + high) / 2}) {
      const auto exact = static_cast<float>(value);
      for (const float near : {std::nextafter(exact, 0.0f), exact, std::nextafter(exact, 1e9f)})
        in.insert(in.end(), {near, -near});
    }
  }
  for (const float edge : {448.0f, 449.0f, 464.0f, 465.0f, 1000.0f, 3e38f, 1e-45f, 1e-38f,
                           std::numeric_limits<float>::infinity()})
    in.insert(in.end(), {edge, -edge});
  expect_as_the_toolkit(kernels(), in);
  // One bit pattern in 4,093 of all 2^32.
  in.clear();
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4093)
    in.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  expect_as_the_toolkit(kernels(), in);
}

TEST_P(TileKernelsTest, E4m3SaturatesAndOnlyNanIsNan) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> in{1000, -1000, 0.0f, -0.0f, inf, -inf, nan, -nan, 464, 3e38f};
  std::vector<std::uint8_t> out(in.size());
  kernels().float_to_e4m3(in.data(), 1, out.data(), static_cast<std::int64_t>(in.size()));
  EXPECT_EQ(
      out, (std::vector<std::uint8_t>{0x7E, 0xFE, 0x00, 0x80, 0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0x7E}));
  // A huge quotient saturates as well.
  const float big = 3e38f;
  std::uint8_t code = 0;
  kernels().float_to_e4m3(&big, 1e-4f, &code, 1);
  EXPECT_EQ(int{code}, 0x7E);
}

TEST_P(TileKernelsTest, MaxMagnitudePassesNanOver) {
  const auto of = [&](const std::vector<float>& values) {
    std::vector<std::uint16_t> in;
    for (const float value : values) in.push_back(support::encode_bf16(value));
    return kernels().max_magnitude_bf16(in.data(), static_cast<std::int64_t>(in.size()));
  };
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(of({}), 0);
  EXPECT_EQ(of({nan, -0.0f}), 0);
  EXPECT_EQ(of({1, nan, -inf}), 0x1.FEp127f);
  for (std::size_t at = 0; at < 21; ++at) {  // every lane and the incomplete vector
    std::vector<float> values(21, 0.5f);
    values[at] = -2;
    values[(at + 1) % 21] = nan;
    EXPECT_EQ(of(values), 2) << at;
  }
}

TEST_P(TileKernelsTest, SoftmaxWeightsAreWithinTwoUlps) {
  // A leading 0 is the maximum, so that weights are exp(score).
  std::mt19937 engine(3);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::vector<float> scores(64, 0.0f);
    for (std::size_t i = 1; i < scores.size(); ++i) {
      const auto u = static_cast<double>(engine()) * 0x1p-32;
      scores[i] = static_cast<float>(-std::pow(u, 4) * 87.0);
    }
    const auto before = scores;
    float maximum = -std::numeric_limits<float>::infinity(), sum = 0;
    kernels().softmax_row(scores.data(), 64, 64, nullptr, &maximum, &sum);
    ASSERT_EQ(maximum, 0.0f);
    double total = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double expected = std::exp(double{before[i]});
      ASSERT_NEAR(double{scores[i]}, expected, expected * 0x1p-22) << before[i];
      total += expected;
    }
    ASSERT_NEAR(double{sum}, total, total * 0x1p-20);
  }
}

TEST_P(TileKernelsTest, SoftmaxKeepsToWhatIsSeen) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto run = [&](std::vector<float> scores, std::int64_t width, std::int64_t visible,
                       const std::uint32_t* mask, float& maximum, float& sum) {
    kernels().softmax_row(scores.data(), width, visible, mask, &maximum, &sum);
    return scores;
  };
  // Unseen NaN and infinities, and what lies between width and the padding, become weight 0.
  for (std::int64_t width = 1; width <= 40; ++width)
    for (std::int64_t visible = 0; visible <= width; ++visible) {
      std::vector<float> scores(40, kNan);
      for (std::int64_t i = 0; i < visible; ++i)
        scores[static_cast<std::size_t>(i)] = static_cast<float>(i) * 0.5f;
      float maximum = -kInf, sum = 0;
      const auto weights = run(scores, width, visible, nullptr, maximum, sum);
      for (std::int64_t i = visible; i < (width + 7) / 8 * 8; ++i)
        ASSERT_EQ(weights[static_cast<std::size_t>(i)], 0.0f);
      ASSERT_EQ(maximum, visible == 0 ? -kInf : 0.5f * static_cast<float>(visible - 1));
      ASSERT_EQ(sum == 0, visible == 0);
      ASSERT_TRUE(visible == 0 || weights[static_cast<std::size_t>(visible - 1)] == 1.0f);
    }
  // Every single bit of a mask, against NaN everywhere else.
  for (std::uint32_t bit = 0; bit < 64; ++bit) {
    std::vector<float> scores(64, bit % 2 == 0 ? kNan : kInf);
    scores[bit] = -3;
    const std::uint32_t mask[] = {bit < 32 ? 1u << bit : 0u, bit < 32 ? 0u : 1u << (bit - 32)};
    float maximum = -kInf, sum = 0;
    const auto weights = run(scores, 64, 64, mask, maximum, sum);
    EXPECT_EQ(maximum, -3);
    EXPECT_EQ(sum, 1);
    for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(weights[i], i == bit ? 1.0f : 0.0f);
  }
  // A seen NaN is not lost, whatever comes with it.
  for (const float other : {1.0f, -kInf, -1000.0f})
    for (std::size_t at = 0; at < 16; ++at) {
      std::vector<float> scores(16, other);
      scores[at] = kNan;
      float maximum = -kInf, sum = 0;
      run(scores, 16, 16, nullptr, maximum, sum);
      EXPECT_TRUE(std::isnan(sum)) << other << ' ' << at;
    }
}

TEST_P(TileKernelsTest, SoftmaxRescalesEarlierSums) {
  float maximum = 1, sum = 2;
  std::vector<float> scores(8, 1.0f);
  scores[3] = 3;
  const float factor = kernels().softmax_row(scores.data(), 8, 8, nullptr, &maximum, &sum);
  EXPECT_NEAR(double{factor}, std::exp(-2.0), 1e-7);
  EXPECT_EQ(maximum, 3);
  EXPECT_NEAR(double{sum}, 9 * std::exp(-2.0) + 1, 1e-6);
  std::vector<float> lower(8, 2.0f);
  EXPECT_EQ(kernels().softmax_row(lower.data(), 8, 8, nullptr, &maximum, &sum), 1.0f);
  EXPECT_EQ(maximum, 3);
}

TEST_P(TileKernelsTest, PanelProducts) {
  std::mt19937 engine(9);
  for (const std::int64_t columns : {1, 7, 8, 16, 17, 40})
    for (const std::int64_t depth : {1, 5, 8, 33})
      for (const std::int64_t rows : {1, 5, 6, 13}) {
        const auto draw = [&] {
          return support::encode_bf16(
              static_cast<float>(static_cast<double>(engine()) * 0x1p-31 - 1));
        };
        std::vector<std::uint16_t> by_column(static_cast<std::size_t>(columns * (depth + 2)));
        std::vector<std::uint16_t> by_row(static_cast<std::size_t>(depth * (columns + 3)));
        std::vector<float> a(static_cast<std::size_t>(rows * (depth + 1)));
        for (auto& x : a) x = static_cast<float>(support::decode_bf16(draw()));
        for (std::int64_t c = 0; c < columns; ++c)
          for (std::int64_t d = 0; d < depth; ++d) {
            const std::uint16_t value = draw();
            by_column[static_cast<std::size_t>(c * (depth + 2) + d)] = value;
            by_row[static_cast<std::size_t>(d * (columns + 3) + c)] = value;
          }
        const auto size = static_cast<std::size_t>(panel_elements(columns, depth));
        std::vector<float> panels(size), panels_of_rows(size);
        kernels().pack_columns_bf16(by_column.data(), depth + 2, columns, depth, panels.data());
        kernels().pack_rows_bf16(by_row.data(), columns + 3, columns, depth, panels_of_rows.data());
        EXPECT_EQ(panels, panels_of_rows);
        const std::int64_t stride = panel_elements(columns, 1);
        std::vector<float> out(static_cast<std::size_t>(rows * stride));
        kernels().multiply_panels(a.data(), depth + 1, rows, panels.data(), columns, depth,
                                  out.data(), stride);
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c) {
            double expected = 0;
            for (std::int64_t d = 0; d < depth; ++d)
              expected +=
                  double{a[static_cast<std::size_t>(r * (depth + 1) + d)]} *
                  support::decode_bf16(by_column[static_cast<std::size_t>(c * (depth + 2) + d)]);
            ASSERT_NEAR(double{out[static_cast<std::size_t>(r * stride + c)]}, expected,
                        0x1p-24 * static_cast<double>(depth));
          }
        // A row's result does not depend on its place among others.
        for (std::int64_t r = 0; r < rows; ++r) {
          std::vector<float> alone(static_cast<std::size_t>(stride));
          kernels().multiply_panels(a.data() + r * (depth + 1), depth + 1, 1, panels.data(),
                                    columns, depth, alone.data(), stride);
          ASSERT_EQ(std::memcmp(alone.data(), &out[static_cast<std::size_t>(r * stride)],
                                static_cast<std::size_t>(columns) * sizeof(float)),
                    0);
        }
      }
}

}  // namespace
}  // namespace sparse_mla::cpu
