// Cache formats bit for bit: every entry that writes against the tests' own quantiser, every entry
// that reads against their own decoder, for every pair of the two.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/indexer.h"

#include "tests/support/latent_rows.h"
#include "tests/support/number_formats.h"
#include "tests/support/random_streams.h"
#include "tests/support/run_entry.h"
#include "tests/support/sparse_mqa_errors.h"

namespace sparse_mla {
namespace {

using support::LatentRowFormat;
using support::run_entry;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::byte kUntouched{0xEE};

const auto kWriters = support::usable_entries(write_cache_operation());
const auto kGatherers = support::usable_entries(gather_operation());
const auto kAttenders = support::usable_entries(sparse_mqa_operation());
const auto kScorers = support::usable_entries(indexer_scores_operation());

bfloat16 bf16_of(float value) { return std::bit_cast<bfloat16>(support::encode_bf16(value)); }
float float_of(bfloat16 value) {
  return static_cast<float>(support::decode_bf16(std::bit_cast<std::uint16_t>(value)));
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

struct FormatCase {
  LatentRowFormat format;
  std::int32_t block_size = 64;
  std::int64_t row_gap = 0;  // bytes; odd: rows start at odd addresses
  std::int64_t rows = 5;
};

std::ostream& operator<<(std::ostream& out, const FormatCase& c) {
  return out << support::name_of(c.format.format)
             << (c.format.power_of_two_scales ? " (power-of-two scales) " : " ")
             << c.format.kv_lora_rank << '+' << c.format.qk_rope_head_dim << ", scale "
             << c.format.scale << ", block " << c.block_size << ", gap " << c.row_gap;
}

std::vector<FormatCase> format_cases() {
  std::vector<FormatCase> cases;
  for (const std::int32_t block : {1, 3, 64})
    for (const std::int64_t gap : {0, 3}) {
      // Widths that fill no vector, too.
      cases.push_back({{CacheFormat::bf16, 24, 9}, block, gap});
      cases.push_back({{CacheFormat::fp8_ds_mla, 512, 64}, block, gap});
      cases.push_back({{CacheFormat::fp8_ds_mla, 128, 7, 1, true}, block, gap});
      cases.push_back({{CacheFormat::fp8, 512, 64, 0.0075f}, block, gap});
      cases.push_back({{CacheFormat::fp8, 77, 5, 2e-3f}, block, gap});
    }
  return cases;
}

// Latent rows in a cache with gaps, and where they are: slots 1, 3, 5, …
struct FormatData {
  FormatCase c;
  std::vector<bfloat16> values;  // [rows, L+R]
  std::vector<std::int64_t> slots;
  std::vector<std::byte> memory;
  LatentCache cache;

  explicit FormatData(const FormatCase& format_case) : c(format_case) {
    const std::int64_t width = c.format.latent_dim();
    for (std::int64_t i = 0; i < c.rows; ++i) slots.push_back(2 * i + 1);
    // Rows of very different magnitude, the last with a group of zeros.
    std::vector<float> row(static_cast<std::size_t>(width));
    for (std::int64_t i = 0; i < c.rows; ++i) {
      support::normal_row(7, 1, i, static_cast<int>(width),
                          std::exp2(static_cast<float>(4 * i - 8)), row.data());
      for (std::int64_t d = 0; d < width; ++d)
        values.push_back(
            bf16_of(i == c.rows - 1 && d < 128 ? 0 : row[static_cast<std::size_t>(d)]));
    }
    cache.format = c.format.format;
    cache.scale = c.format.scale;
    cache.block_size = c.block_size;
    cache.num_blocks = (2 * c.rows + c.block_size) / c.block_size;
    cache.row_stride = c.format.row_bytes() + c.row_gap;
    cache.block_stride = cache.row_stride * c.block_size + c.row_gap;
    memory.assign(static_cast<std::size_t>(cache.num_blocks * cache.block_stride), kUntouched);
    cache.data = memory.data();
  }
  const bfloat16* row(std::int64_t i) const { return values.data() + i * c.format.latent_dim(); }
  std::int64_t offset(std::int64_t i) const {  // of row i, in bytes
    const std::int64_t slot = slots[static_cast<std::size_t>(i)];
    return slot / c.block_size * cache.block_stride + slot % c.block_size * cache.row_stride;
  }
  void write_with(const std::string& entry) {
    WriteCacheCall call;
    call.latent = contiguous<const bfloat16>(values.data(), c.rows, c.format.latent_dim());
    call.slot_mapping = contiguous<const std::int64_t>(slots.data(), c.rows);
    call.latent_cache = cache;
    call.power_of_two_scales = c.format.power_of_two_scales;
    const WriteCacheProblem problem{c.rows, c.format.format, c.format.kv_lora_rank,
                                    c.format.qk_rope_head_dim, 0};
    run_entry(write_cache_operation(), entry, problem, call);
  }
  // What the cache should hold afterwards.
  std::vector<std::byte> expected_memory() const {
    std::vector<std::byte> bytes(memory.size(), kUntouched);
    for (std::int64_t i = 0; i < c.rows; ++i)
      support::encode_latent_row(c.format, row(i), bytes.data() + offset(i));
    return bytes;
  }
  // What a reader should find in row i, before it rounds.
  std::vector<double> expected_values(std::int64_t i) const {
    std::vector<double> decoded(static_cast<std::size_t>(c.format.latent_dim()));
    support::decode_latent_row(c.format, memory.data() + offset(i), decoded.data());
    return decoded;
  }
};

class CacheFormats : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CacheFormats, testing::ValuesIn(format_cases()));

TEST_P(CacheFormats, EveryWriterIsBitEqualToTheTestsOwn) {
  for (const std::string& writer : kWriters) {
    FormatData data(GetParam());
    data.write_with(writer);
    EXPECT_EQ(data.memory, data.expected_memory()) << writer;
  }
}

TEST_P(CacheFormats, EveryGatherReadsEveryWriter) {
  for (const std::string& writer : kWriters)
    for (const std::string& reader : kGatherers) {
      SCOPED_TRACE(writer + " → " + reader);
      FormatData data(GetParam());
      data.write_with(writer);
      const std::int64_t width = data.c.format.latent_dim(), keys = 2 * data.c.rows;
      std::vector<std::int32_t> table(static_cast<std::size_t>(data.cache.num_blocks));
      for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
      // Slots between the rows hold 0xEE…: read, and not looked at.
      std::vector<bfloat16> rows(static_cast<std::size_t>(keys * width));
      ChunkMember member;
      member.num_keys = static_cast<std::int32_t>(keys);
      GatherCall call;
      call.cache = data.cache;
      call.block_tables =
          contiguous<const std::int32_t>(table.data(), 1, static_cast<std::int64_t>(table.size()));
      call.members = {&member, 1};
      call.rows = contiguous(rows.data(), keys, width);
      const GatherProblem problem{keys, data.c.format.format, data.c.format.kv_lora_rank,
                                  data.c.format.qk_rope_head_dim};
      run_entry(gather_operation(), reader, problem, call);
      for (std::int64_t i = 0; i < data.c.rows; ++i) {
        auto expected = data.expected_values(i);
        // Of fp8 the latent part comes without its scale, exactly.
        if (data.c.format.format == CacheFormat::fp8) {
          for (std::int64_t d = 0; d < data.c.format.kv_lora_rank; ++d)
            expected[static_cast<std::size_t>(d)] =
                support::decode_e4m3(std::to_integer<std::uint8_t>(
                    data.memory[static_cast<std::size_t>(data.offset(i) + d)]));
          ASSERT_EQ(gathered_latent_scale(data.cache), data.c.format.scale);
        } else {
          ASSERT_EQ(gathered_latent_scale(data.cache), 1);
        }
        for (std::int64_t d = 0; d < width; ++d)
          ASSERT_EQ(std::bit_cast<std::uint16_t>(call.rows(2 * i + 1, d)),
                    support::encode_bf16(static_cast<float>(expected[static_cast<std::size_t>(d)])))
              << "row " << i << " element " << d;
      }
    }
}

// A token with one key gets that key's value whatever its weight, and its logit as the lse.
TEST_P(CacheFormats, EverySparseMqaReadsEveryWriter) {
  for (const std::string& writer : kWriters)
    for (const std::string& reader : kAttenders) {
      SCOPED_TRACE(writer + " → " + reader);
      FormatData data(GetParam());
      data.write_with(writer);
      const LatentRowFormat& format = data.c.format;
      const std::int64_t width = format.latent_dim(), rows = data.c.rows;
      const int heads = 3;
      std::vector<bfloat16> q(static_cast<std::size_t>(rows * heads * width));
      for (std::size_t i = 0; i < q.size(); ++i)
        q[i] = bf16_of(static_cast<float>(static_cast<int>(i * 37 % 64) - 32) / 64);
      std::vector<bfloat16> out(static_cast<std::size_t>(rows * heads * format.kv_lora_rank));
      std::vector<float> lse(static_cast<std::size_t>(heads * rows));
      const std::vector<std::int32_t> slots(data.slots.begin(), data.slots.end());
      SparseMqaCall call;
      call.q = contiguous<const bfloat16>(q.data(), rows, heads, width);
      call.cache = data.cache;
      call.slots = contiguous<const std::int32_t>(slots.data(), rows, 1);
      call.softmax_scale = 0.125f;
      call.out = contiguous(out.data(), rows, heads, format.kv_lora_rank);
      call.lse = contiguous(lse.data(), heads, rows);
      const SparseMqaProblem problem{heads, format.kv_lora_rank, format.qk_rope_head_dim,
                                     1,     format.format,       rows};
      if (!support::serves(sparse_mqa_operation(), reader, problem)) continue;
      run_entry(sparse_mqa_operation(), reader, problem, call);
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto expected = data.expected_values(i);
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < format.kv_lora_rank; ++d)
            ASSERT_EQ(float_of(call.out(i, h, d)),
                      float_of(bf16_of(static_cast<float>(expected[static_cast<std::size_t>(d)]))))
                << "row " << i << " element " << d;
          double logit = 0, magnitude = 0, squares = 0;
          for (std::int64_t d = 0; d < width; ++d) {
            const double product =
                0.125 * double{float_of(call.q(i, h, d))} * expected[static_cast<std::size_t>(d)];
            logit += product;
            magnitude += std::fabs(product);
            squares += product * product;
          }
          // Each product and each sum is rounded once, and so is each dequantised number: to fp32,
          // or as the entry says (independent roundings: three standard deviations and more).
          const double number = support::sparse_mqa_errors(reader, format.format).number;
          ASSERT_NEAR(double{call.lse(h, i)}, logit,
                      0x1p-23 * std::sqrt(static_cast<double>(width)) * magnitude +
                          2 * number * std::sqrt(squares) + 1e-30);
        }
      }
    }
}

// Indexer keys, for every writer and reader: the score of key t under a query that is 1 in one
// place is its scale times its number there, exactly.
TEST(IndexKeyPages, EveryScorerReadsEveryWriter) {
  constexpr int kDim = 128;
  constexpr std::int64_t kKeys = 130;
  for (const std::int32_t block_size : {1, 7, 64})
    for (const std::string& writer : kWriters)
      for (const std::string& reader : kScorers) {
        SCOPED_TRACE(writer + " → " + reader + ", block " + std::to_string(block_size));
        const std::int64_t blocks = kKeys / block_size + 1;
        std::vector<bfloat16> latent(kKeys * 3, bf16_of(1));
        std::vector<fp8_e4m3> keys(kKeys * kDim);
        std::vector<float> scales(kKeys);
        std::vector<std::int64_t> slots(kKeys);
        std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
        for (std::size_t i = 0; i < keys.size(); ++i)
          keys[i].__x = static_cast<std::uint8_t>(1 + i * 13 % 120);  // distinct neighbours, > 0
        for (std::size_t b = 0; b < table.size(); ++b)
          table[b] = static_cast<std::int32_t>(table.size() - 1 - b);
        for (std::int64_t t = 0; t < kKeys; ++t) {
          scales[static_cast<std::size_t>(t)] = 0.001f * static_cast<float>(t + 1);
          slots[static_cast<std::size_t>(t)] =
              (blocks - 1 - t / block_size) * block_size + t % block_size;
        }
        const std::int64_t page = index_page_bytes(block_size, kDim) + 5;  // unaligned pages
        std::vector<std::byte> index_memory(static_cast<std::size_t>(blocks * page));
        std::vector<std::byte> latent_memory(static_cast<std::size_t>(blocks * block_size * 6));
        ModelDims dims;
        dims.kv_lora_rank = 2;
        dims.qk_rope_head_dim = 1;
        WriteCacheCall write;
        write.latent = contiguous<const bfloat16>(latent.data(), kKeys, 3);
        write.index_k = contiguous<const fp8_e4m3>(keys.data(), kKeys, kDim);
        write.index_k_scale = contiguous<const float>(scales.data(), kKeys);
        write.slot_mapping = contiguous<const std::int64_t>(slots.data(), kKeys);
        write.latent_cache =
            make_latent_cache(CacheFormat::bf16, latent_memory, blocks, block_size, dims);
        write.index_cache = make_index_key_cache(index_memory.data(), blocks, block_size, kDim);
        write.index_cache.block_stride = page;
        run_entry(write_cache_operation(), writer, {kKeys, CacheFormat::bf16, 2, 1, kDim}, write);

        for (const int place : {0, 17, kDim - 1}) {
          std::vector<fp8_e4m3> q(kDim);
          for (fp8_e4m3& number : q) number.__x = 0;
          q[static_cast<std::size_t>(place)] = fp8_e4m3(1.0f);
          const float weight = 1;
          std::vector<float> scores(kKeys, kNan);
          ScoreMember member;
          member.num_rows = 1;
          member.first_position = kKeys - 1;
          member.row_keys = kKeys;
          IndexerCall call;
          call.index_q = contiguous<const fp8_e4m3>(q.data(), 1, 1, kDim);
          call.index_weights = contiguous<const float>(&weight, 1, 1);
          call.cache = write.index_cache;
          call.block_tables = contiguous<const std::int32_t>(table.data(), 1, blocks);
          call.members = {&member, 1};
          call.scores = scores.data();
          run_entry(indexer_scores_operation(), reader, {1, kDim, 1, kKeys}, call);
          for (std::int64_t t = 0; t < kKeys; ++t) {
            const auto code = keys[static_cast<std::size_t>(t * kDim + place)].__x;
            ASSERT_EQ(scores[static_cast<std::size_t>(t)],
                      scales[static_cast<std::size_t>(t)] *
                          static_cast<float>(support::decode_e4m3(code)))
                << "key " << t << " place " << place;
          }
        }
      }
}

// ---- published corner cases, on one row of DeepSeek's width

struct OneRow {
  std::vector<std::byte> memory;
  LatentCache cache;
  OneRow(CacheFormat format, float scale = 1)
      : memory(static_cast<std::size_t>(latent_row_bytes(format, 512, 64)), kUntouched),
        cache(make_latent_cache(format, memory, 1, 1, ModelDims{})) {
    cache.scale = scale;
  }
  void write(const std::string& entry, const std::vector<float>& values, bool power_of_two) {
    std::vector<bfloat16> row;
    for (const float value : values) row.push_back(bf16_of(value));
    row.resize(576, bf16_of(0));
    const std::int64_t slot = 0;
    WriteCacheCall call;
    call.latent = contiguous<const bfloat16>(row.data(), 1, 576);
    call.slot_mapping = contiguous(&slot, 1);
    call.latent_cache = cache;
    call.power_of_two_scales = power_of_two;
    run_entry(write_cache_operation(), entry, {1, cache.format, 512, 64, 0}, call);
  }
  std::vector<float> read(const std::string& entry) const {
    const std::int32_t block = 0;
    std::vector<bfloat16> row(576);
    ChunkMember member;
    member.num_keys = 1;
    GatherCall call;
    call.cache = cache;
    call.block_tables = contiguous(&block, 1, 1);
    call.members = {&member, 1};
    call.rows = contiguous(row.data(), 1, 576);
    run_entry(gather_operation(), entry, {1, cache.format, 512, 64}, call);
    std::vector<float> values;
    for (const bfloat16 value : row) values.push_back(float_of(value));
    return values;
  }
  std::vector<float> scales() const {
    std::vector<float> values(4);
    std::memcpy(values.data(), memory.data() + 512, 16);
    return values;
  }
  int code(std::size_t i) const { return std::to_integer<int>(memory[i]); }
};

TEST(Fp8DsMla, ScalesOfTheThreeKinds) {
  // Groups of 336, 336, 336 and nothing.
  std::vector<float> values(512, 336);
  std::fill(values.begin() + 384, values.end(), 0.0f);
  for (const std::string& writer : kWriters) {
    OneRow row(CacheFormat::fp8_ds_mla);
    row.write(writer, values, false);
    EXPECT_THAT(row.scales(), ElementsAre(0.75f, 0.75f, 0.75f, 1e-4f)) << writer;
    EXPECT_EQ(row.code(0), 0x7E);  // 448
    EXPECT_EQ(row.code(511), 0);
    for (const std::string& reader : kGatherers) {
      const auto read = row.read(reader);
      EXPECT_EQ(read[0], 336) << reader;  // 448 · 0.75: no power of two is made of it
      EXPECT_EQ(read[511], 0) << reader;
    }
    row.write(writer, values, true);
    EXPECT_THAT(row.scales(), ElementsAre(1.0f, 1.0f, 1.0f, 0x1p-13f)) << writer;
    for (const std::string& reader : kGatherers) EXPECT_EQ(row.read(reader)[511], 0) << reader;
  }
}

TEST(Fp8DsMla, ReadersHonourAnyScale) {
  for (const std::string& reader : kGatherers) {
    OneRow row(CacheFormat::fp8_ds_mla);
    std::memset(row.memory.data(), 0, row.memory.size());
    const std::vector<float> scales{0.75f, 0x1.23456p-7f, -2.0f, 1e30f};
    std::memcpy(row.memory.data() + 512, scales.data(), 16);
    for (std::size_t group = 0; group < 4; ++group) row.memory[128 * group + 5] = std::byte{0x39};
    const auto read = row.read(reader);
    for (std::size_t group = 0; group < 4; ++group)
      EXPECT_EQ(read[128 * group + 5], float_of(bf16_of(1.125f * scales[group]))) << reader;
  }
}

TEST(Fp8DsMla, AFaultStaysInItsNumber) {
  std::vector<float> values(512, 1);
  values[3] = kNan;
  values[200] = kInfinity;
  values[201] = -kInfinity;
  for (const std::string& writer : kWriters) {
    OneRow row(CacheFormat::fp8_ds_mla);
    row.write(writer, values, false);
    EXPECT_EQ(row.code(3), 0x7F) << writer;
    for (const std::string& reader : kGatherers) {
      const auto read = row.read(reader);
      EXPECT_TRUE(std::isnan(read[3]));
      EXPECT_EQ(read[4], 1);    // NaN does not touch its group's scale
      EXPECT_EQ(read[199], 0);  // an infinity swamps its group, and makes no NaN
      EXPECT_GT(read[200], 3e38f);
      EXPECT_LT(read[201], -3e38f);
      EXPECT_EQ(read[300], 1);
    }
  }
}

TEST(Fp8, SaturatesKeepsTheSignOfZeroAndReadsNan) {
  for (const std::string& writer : kWriters)
    for (const std::string& reader : kGatherers) {
      OneRow row(CacheFormat::fp8);
      row.write(writer, {1000, -1000, -0.0f, 0, kNan, 448, kInfinity, 3e38f}, false);
      EXPECT_EQ(row.code(2), 0x80);
      const auto read = row.read(reader);
      EXPECT_THAT(std::vector<float>(read.begin(), read.begin() + 4), ElementsAre(448, -448, 0, 0));
      EXPECT_TRUE(std::signbit(read[2]));
      EXPECT_TRUE(std::isnan(read[4]));
      EXPECT_THAT(std::vector<float>(read.begin() + 5, read.begin() + 8),
                  ElementsAre(448, 448, 448));
      row.memory[9] = std::byte{0x7F};
      row.memory[10] = std::byte{0xFF};
      EXPECT_TRUE(std::isnan(row.read(reader)[9]));
      EXPECT_TRUE(std::isnan(row.read(reader)[10]));
    }
}

// ---- sizes and errors

TEST(CacheLayout, RowAndPageBytes) {
  const ModelDims dims;
  EXPECT_EQ(latent_row_bytes(CacheFormat::bf16, dims), 1152);
  EXPECT_EQ(latent_row_bytes(CacheFormat::fp8_ds_mla, dims), 656);
  EXPECT_EQ(latent_row_bytes(CacheFormat::fp8, dims), 576);
  EXPECT_EQ(latent_row_bytes(CacheFormat::fp8_ds_mla, 256, 32), 256 + 8 + 64);
  std::vector<std::byte> memory(21'495'808);
  const LatentCache cache = make_latent_cache(CacheFormat::fp8_ds_mla, memory, 512, 64, dims);
  EXPECT_EQ(cache.block_stride, 41'984);
  EXPECT_EQ(cache.row(511 * 64 + 63), memory.data() + memory.size() - 656);
}

TEST(CacheLayout, MemoryOfAnotherFormatIsRefused) {
  std::vector<std::byte> memory(21'495'808);
  EXPECT_THAT(error_of([&] { make_latent_cache(CacheFormat::fp8, memory, 512, 64, ModelDims{}); }),
              "memory: got 21495808 bytes, expected 18874368 bytes: 512 pages of 64 rows of 576 "
              "bytes (fp8)");
  // The same mistake as strides, in every operation that takes a cache.
  LatentCache cache = make_latent_cache(CacheFormat::fp8_ds_mla, memory, 512, 64, ModelDims{});
  cache.row_stride = 576;
  const std::string text = "row_stride: got 576, expected at least a row's 656 bytes (fp8_ds_mla)";
  const std::int64_t slot = 0;
  std::vector<bfloat16> row(576);
  WriteCacheCall write;
  write.latent = contiguous<const bfloat16>(row.data(), 1, 576);
  write.slot_mapping = contiguous(&slot, 1);
  write.latent_cache = cache;
  GatherCall gather;
  gather.cache = cache;
  gather.rows = contiguous(row.data(), 1, 576);
  SparseMqaCall mqa;
  mqa.q = contiguous<const bfloat16>(nullptr, 0, 128, 576);
  mqa.out = contiguous<bfloat16>(nullptr, 0, 128, 512);
  mqa.lse = contiguous<float>(nullptr, 128, 0);
  mqa.slots = contiguous<const std::int32_t>(nullptr, 0, 1);
  mqa.cache = cache;
  SparseMqaProblem mqa_problem;
  mqa_problem.format = CacheFormat::fp8_ds_mla;
  for (const std::string& entry : kWriters)
    EXPECT_THAT(error_of([&] {
                  run_entry(write_cache_operation(), entry,
                            {1, CacheFormat::fp8_ds_mla, 512, 64, 0}, write);
                }),
                "latent_cache." + text);
  for (const std::string& entry : kGatherers)
    EXPECT_THAT(
        error_of([&] {
          run_entry(gather_operation(), entry, {1, CacheFormat::fp8_ds_mla, 512, 64}, gather);
        }),
        "cache." + text);
  for (const std::string& entry : kAttenders) {
    if (!support::serves(sparse_mqa_operation(), entry, mqa_problem)) continue;
    EXPECT_THAT(error_of([&] { run_entry(sparse_mqa_operation(), entry, mqa_problem, mqa); }),
                "cache." + text);
  }
}

TEST(CacheLayout, BadCachesAreNamed) {
  std::vector<std::byte> memory(4 * 16 * 656);
  const LatentCache good = make_latent_cache(CacheFormat::fp8_ds_mla, memory, 4, 16, ModelDims{});
  const auto error = [&](auto spoil) {
    LatentCache cache = good;
    spoil(cache);
    return error_of([&] { validate(cache, CacheFormat::fp8_ds_mla, 512, 64, "cache"); });
  };
  EXPECT_EQ(error([](LatentCache&) {}), "");
  EXPECT_EQ(error([](LatentCache& c) { c.row_stride = 700, c.block_stride = 16 * 700; }), "");
  EXPECT_EQ(error([](LatentCache& c) { c.num_blocks = 1, c.block_stride = 0; }), "");
  EXPECT_EQ(error([](LatentCache& c) { c.num_blocks = 0, c.data = nullptr; }), "");
  EXPECT_THAT(error([](LatentCache& c) { c.format = CacheFormat::fp8; }),
              "cache.format: got fp8, expected fp8_ds_mla");
  EXPECT_THAT(error([](LatentCache& c) { c.block_stride = 16 * 656 - 1; }),
              HasSubstr("cache.block_stride: got 10495, expected at least a page's 10496 bytes"));
  EXPECT_THAT(error([](LatentCache& c) { c.data = nullptr; }), HasSubstr("cache.data: got null"));
  EXPECT_THAT(error([](LatentCache& c) { c.block_size = 0; }),
              HasSubstr("cache.block_size: got 0"));
  EXPECT_THAT(error([](LatentCache& c) { c.num_blocks = -1; }),
              HasSubstr("cache.num_blocks: got -1"));
  EXPECT_THAT(error_of([] { latent_row_bytes(CacheFormat::fp8_ds_mla, 500, 64); }),
              HasSubstr("kv_lora_rank: got 500, expected a multiple of 128"));
}

TEST(CacheLayout, AScaleToDivideByIsNeeded) {
  for (const float scale : {0.0f, -1.0f, kNan, kInfinity})
    for (const std::string& writer : kWriters) {
      OneRow row(CacheFormat::fp8, scale);
      EXPECT_THAT(error_of([&] { row.write(writer, {1}, false); }),
                  HasSubstr("latent_cache.scale: got"));
      EXPECT_EQ(row.memory[0], kUntouched);
    }
}

TEST(CacheFormatNames, GoThereAndBack) {
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8})
    EXPECT_EQ(parse_cache_format(to_string(format)), format);
  EXPECT_EQ(to_string(CacheFormat::fp8_ds_mla), "fp8_ds_mla");
  EXPECT_EQ(error_of([] { parse_cache_format("fp4"); }),
            "cache format: got fp4, expected one of bf16, fp8_ds_mla, fp8");
}

}  // namespace
}  // namespace sparse_mla
