// Cache writes, context gathers and slot mapping: byte for byte, at every start, and what happens
// at the edges of block tables and caches. Quantised rows: cache_formats_test.
#include "sparse_mla/cache.h"

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kLora = 8, kRope = 4, kWidth = kLora + kRope;  // of these tests
constexpr int kIndexDim = 8;

ModelDims small_dims() {
  ModelDims dims;
  dims.kv_lora_rank = kLora;
  dims.qk_rope_head_dim = kRope;
  return dims;
}

struct Pages {
  std::vector<std::byte> latent_bytes, index_bytes;
  LatentCache latent;
  IndexKeyCache index;

  Pages(std::int64_t num_blocks, std::int32_t block_size)
      : latent_bytes(num_blocks * block_size * kWidth * 2, std::byte{0xEE}),
        index_bytes(num_blocks * index_page_bytes(block_size, kIndexDim), std::byte{0xEE}),
        latent(make_latent_cache(CacheFormat::bf16, latent_bytes, num_blocks, block_size,
                                 small_dims())),
        index(make_index_key_cache(index_bytes.data(), num_blocks, block_size, kIndexDim)) {}
};

struct NewTokens {
  std::vector<bfloat16> latent;
  std::vector<fp8_e4m3> keys;
  std::vector<float> scales;
  std::vector<std::int64_t> slots;

  explicit NewTokens(std::vector<std::int64_t> slot_mapping) : slots(std::move(slot_mapping)) {
    const std::size_t n = slots.size();
    for (std::size_t i = 0; i < n * kWidth; ++i)
      latent.push_back(__float2bfloat16_rn(static_cast<float>(i) + 1));
    keys.resize(n * kIndexDim);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i].__x = static_cast<std::uint8_t>(i % 120);
    for (std::size_t i = 0; i < n; ++i) scales.push_back(0.25f * static_cast<float>(i + 1));
  }

  WriteCacheCall call(Pages& pages) const {
    const auto n = static_cast<std::int64_t>(slots.size());
    WriteCacheCall call;
    call.latent = contiguous(latent.data(), n, kWidth);
    call.index_k = contiguous(keys.data(), n, kIndexDim);
    call.index_k_scale = contiguous(scales.data(), n);
    call.slot_mapping = contiguous(slots.data(), n);
    call.latent_cache = pages.latent;
    call.index_cache = pages.index;
    return call;
  }
};

constexpr WriteCacheProblem kWrite{64, CacheFormat::bf16, kLora, kRope, kIndexDim};

TEST(WriteCache, RowsLandInTheirSlotsAndNowhereElse) {
  for (const std::int32_t block_size : {1, 3, 64}) {
    Pages pages(130 / block_size + 1, block_size);
    const NewTokens tokens({5, -1, 0, 129, 64});
    support::run_fastest(write_cache_operation(), kWrite, tokens.call(pages));
    std::vector<std::byte> latent(pages.latent_bytes.size(), std::byte{0xEE});
    std::vector<std::byte> index(pages.index_bytes.size(), std::byte{0xEE});
    for (std::size_t i = 0; i < tokens.slots.size(); ++i) {
      const std::int64_t slot = tokens.slots[i];
      if (slot < 0) continue;
      const std::int64_t page = slot / block_size, offset = slot % block_size;
      std::memcpy(&latent[slot * kWidth * 2], &tokens.latent[i * kWidth], kWidth * 2);
      // Layout of a page: all keys first, then all scales.
      std::byte* base = &index[page * block_size * (kIndexDim + 4)];
      std::memcpy(base + offset * kIndexDim, &tokens.keys[i * kIndexDim], kIndexDim);
      std::memcpy(base + block_size * kIndexDim + offset * 4, &tokens.scales[i], 4);
    }
    EXPECT_EQ(pages.latent_bytes, latent);
    EXPECT_EQ(pages.index_bytes, index);
  }
}

TEST(WriteCache, ScaleOfTokenTStandsBehindAllKeysOfThePage) {
  const IndexKeyCache cache = make_index_key_cache(nullptr, 4, 64, 128);
  EXPECT_EQ(cache.scale(5) - cache.data, 64 * 128 + 5 * 4);
  EXPECT_EQ(cache.key(64 + 5) - cache.data, 64 * 132 + 5 * 128);
}

TEST(WriteCache, ABadSlotOrScaleWritesNothing) {
  Pages pages(2, 64);
  for (const std::int64_t slot : {std::int64_t{128}, std::int64_t{-2}, std::int64_t{1} << 40}) {
    const NewTokens tokens({1, slot});
    try {
      support::run_fastest(write_cache_operation(), kWrite, tokens.call(pages));
      ASSERT_EQ(support::backend_under_test(), Backend::cuda) << "slot " << slot << " was taken";
      // A device skips it; the other token is written.
      for (std::size_t i = 0; i < pages.latent_bytes.size(); ++i)
        ASSERT_EQ(pages.latent_bytes[i] == std::byte{0xEE},
                  &pages.latent_bytes[i] < pages.latent.row(1) ||
                      &pages.latent_bytes[i] >= pages.latent.row(1) + 2 * kWidth)
            << i;
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), HasSubstr("slot_mapping[1]: got " + std::to_string(slot)));
    }
  }
  if (support::backend_under_test() == Backend::cuda) return;
  NewTokens negative({1, 2});
  negative.scales[1] = -1;
  EXPECT_THROW(support::run_fastest(write_cache_operation(), kWrite, negative.call(pages)),
               std::invalid_argument);
  for (const std::byte byte : pages.latent_bytes) ASSERT_EQ(byte, std::byte{0xEE});
}

class Gather : public ::testing::TestWithParam<std::int32_t> {};

TEST_P(Gather, AnyStartIsExact) {
  const std::int32_t block_size = GetParam();
  const std::int32_t blocks = 40, requests = 3, table_width = 12;
  Pages pages(blocks, block_size);
  std::mt19937 random(block_size);
  for (auto& byte : pages.latent_bytes) byte = static_cast<std::byte>(random());
  std::vector<std::int32_t> table(requests * table_width);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  for (std::int32_t start = 0; start < 2 * block_size + 1; ++start) {
    std::vector<ChunkMember> members(3);
    std::int32_t row = 0;
    for (std::int32_t m = 0; m < 3; ++m) {
      members[m].request = (m + 1) % requests;
      members[m].first_key = start;
      members[m].num_keys = m == 1 ? 0 : 3 * block_size + m;
      members[m].key_row = row;
      row += members[m].num_keys;
    }
    std::vector<bfloat16> rows(row * kWidth);
    GatherCall call;
    call.cache = pages.latent;
    call.block_tables =
        contiguous(static_cast<const std::int32_t*>(table.data()), requests, table_width);
    call.members = members;
    call.rows = contiguous(rows.data(), row, kWidth);
    support::run_fastest(gather_operation(), {row, CacheFormat::bf16, kLora, kRope}, call);
    for (const ChunkMember& member : members)
      for (std::int32_t i = 0; i < member.num_keys; ++i) {
        const std::int32_t position = start + i;
        const std::int32_t page = table[member.request * table_width + position / block_size];
        ASSERT_EQ(std::memcmp(
                      &rows[(member.key_row + i) * kWidth],
                      &pages.latent_bytes[(page * block_size + position % block_size) * kWidth * 2],
                      kWidth * 2),
                  0);
      }
  }
}
INSTANTIATE_TEST_SUITE_P(BlockSizes, Gather, ::testing::Values(1, 2, 5, 16, 61, 64));

// Table [[1, 2]], block 64, start 128, 65 rows: nothing past the table is read, the rows are 0.
TEST(GatherEdges, RowsOutsideTheTableOrTheCacheAreZero) {
  Pages pages(5, 64);
  const std::vector<std::int32_t> memory{1, 2, 3, 3};  // a reader past the table would find page 3
  std::vector<bfloat16> rows(65 * kWidth, __float2bfloat16_rn(9.0f));
  std::vector<ChunkMember> members(1);
  members[0].first_key = 128;
  members[0].num_keys = 65;
  GatherCall call;
  call.cache = pages.latent;
  call.block_tables = contiguous(memory.data(), 1, 2);
  call.members = members;
  call.rows = contiguous(rows.data(), 65, kWidth);
  support::run_fastest(gather_operation(), {65, CacheFormat::bf16, kLora, kRope}, call);
  for (const bfloat16 value : rows) ASSERT_EQ(__bfloat162float(value), 0.0f);

  const std::vector<std::int32_t> outside{5, -1};
  call.block_tables = contiguous(outside.data(), 1, 2);
  members[0].first_key = 32;
  std::fill(rows.begin(), rows.end(), __float2bfloat16_rn(9.0f));
  support::run_fastest(gather_operation(), {65, CacheFormat::bf16, kLora, kRope}, call);
  for (const bfloat16 value : rows) ASSERT_EQ(__bfloat162float(value), 0.0f);
}

// Table [998, 1024], block 16, request 997, start 15,967, length 834: the last pages lie past it.
TEST(GatherEdges, LongTableLastRows) {
  Pages pages(4, 16);
  std::vector<std::int32_t> table(998 * 1024, 1);
  std::vector<bfloat16> rows(834 * kWidth, __float2bfloat16_rn(9.0f));
  std::vector<ChunkMember> members(1);
  members[0].request = 997;
  members[0].first_key = 15967;
  members[0].num_keys = 834;
  GatherCall call;
  call.cache = pages.latent;
  call.block_tables = contiguous(static_cast<const std::int32_t*>(table.data()), 998, 1024);
  call.members = members;
  call.rows = contiguous(rows.data(), 834, kWidth);
  support::run_fastest(gather_operation(), {834, CacheFormat::bf16, kLora, kRope}, call);
  const std::int32_t inside = 1024 * 16 - 15967;
  EXPECT_EQ(rows[(inside - 1) * kWidth].operator float(),
            reinterpret_cast<const bfloat16*>(pages.latent.row(16 + 15))->operator float());
  for (std::size_t i = inside * kWidth; i < rows.size(); ++i)
    ASSERT_EQ(__bfloat162float(rows[i]), 0.0f);
}

TEST(GatherEdges, BadMembersAreNamed) {
  Pages pages(4, 16);
  const std::vector<std::int32_t> table{0, 1};
  std::vector<bfloat16> rows(16 * kWidth);
  std::vector<ChunkMember> members(1);
  GatherCall call;
  call.cache = pages.latent;
  call.block_tables = contiguous(table.data(), 1, 2);
  call.members = members;
  call.rows = contiguous(rows.data(), 16, kWidth);
  const GatherProblem problem{16, CacheFormat::bf16, kLora, kRope};
  // A device reads nothing for them: rows without a page are 0, rows past the workspace are none.
  const auto refused = [&] {
    try {
      support::run_fastest(gather_operation(), problem, call);
      return support::backend_under_test() == Backend::cuda;
    } catch (const std::invalid_argument&) {
      return true;
    }
  };
  members[0].num_keys = 17;  // more than the workspace
  EXPECT_TRUE(refused());
  members[0].num_keys = 4;
  members[0].request = 1;
  EXPECT_TRUE(refused());
  members[0].request = 0;
  members[0].first_key = -1;
  EXPECT_TRUE(refused());
}

std::vector<std::int32_t> map(const std::vector<std::int32_t>& picks, std::int32_t request,
                              std::int32_t num_keys, const std::vector<std::int32_t>& table,
                              std::int32_t table_width, std::int64_t num_blocks,
                              std::int32_t block_size) {
  const auto k = static_cast<int>(picks.size());
  std::vector<std::int32_t> slots(k, 123456789);
  MapSlotsCall call;
  call.picks = contiguous(picks.data(), 1, k);
  call.request_of_token = &request;
  call.keys_of_token = &num_keys;
  call.block_tables =
      contiguous(table.data(), static_cast<std::int64_t>(table.size()) / table_width, table_width);
  call.num_blocks = num_blocks;
  call.block_size = block_size;
  call.slots = contiguous(slots.data(), 1, k);
  support::run_fastest(map_slots_operation(), {1, k}, call);
  return slots;
}

TEST(MapSlots, PicksNeverLeaveTheirRequest) {
  const std::vector<std::int32_t> table{7, 3, 9, 1, 0, 2};  // two requests, three pages each
  const std::vector<std::int32_t> picks{
      0, 63, 64, 130, 149, 150, 191, 192, -1, -2147483647 - 1, 2147483647, 114514};
  EXPECT_THAT(map(picks, 0, 150, table, 3, 10, 64),
              ElementsAre(7 * 64, 7 * 64 + 63, 3 * 64, 9 * 64 + 2, 9 * 64 + 21, -1, -1, -1, -1, -1,
                          -1, -1));
  EXPECT_THAT(map({0, 64}, 1, 100, table, 3, 10, 64), ElementsAre(64, 0));
}

TEST(MapSlots, PagesOutsideTheCacheAndUnknownRequestsGiveMinusOne) {
  EXPECT_THAT(map({0, 64}, 0, 200, {10, -5}, 2, 10, 64), ElementsAre(-1, -1));
  EXPECT_THAT(map({0}, 2, 200, {1, 2}, 2, 10, 64), ElementsAre(-1));
  EXPECT_THAT(map({0}, -1, 200, {1, 2}, 2, 10, 64), ElementsAre(-1));
  EXPECT_THAT(map({130}, 0, 200, {1, 2}, 2, 10, 64), ElementsAre(-1));  // past the table
}

TEST(MapSlots, MoreRowsThanTokensIsRefused) {
  const std::vector<std::int32_t> picks(2 * 4, 0), tokens{0, 5};
  const std::vector<std::int32_t> request{0, 0}, keys{9, 9}, table{0};
  std::vector<std::int32_t> slots(12 * 4, 7);
  MapSlotsCall call;
  call.picks = contiguous(picks.data(), 2, 4);
  call.request_of_token = request.data();
  call.keys_of_token = keys.data();
  call.block_tables = contiguous(table.data(), 1, 1);
  call.num_blocks = 1;
  call.slots = contiguous(slots.data(), 12, 4);  // 12 rows for 2 rows of picks
  EXPECT_THROW(support::run_fastest(map_slots_operation(), {12, 4}, call), std::invalid_argument);
  call.tokens = tokens.data();  // token 5 has no picks
  call.slots = contiguous(slots.data(), 2, 4);
  if (support::backend_under_test() == Backend::cuda) {  // which cannot look: no pick, no slot
    support::run_fastest(map_slots_operation(), {12, 4}, call);
    EXPECT_THAT(std::vector(slots.begin() + 4, slots.begin() + 8), ::testing::Each(-1));
    return;
  }
  EXPECT_THROW(support::run_fastest(map_slots_operation(), {12, 4}, call), std::invalid_argument);
  EXPECT_EQ(slots[0], 7);
  call.num_blocks = std::int64_t{1} << 31;
  EXPECT_THROW(support::run_fastest(map_slots_operation(), {12, 4}, call), std::invalid_argument);
}

}  // namespace
}  // namespace sparse_mla
