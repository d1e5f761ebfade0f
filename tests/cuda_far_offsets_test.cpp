// Offsets past 2^31 elements, in device memory that no host copy mirrors. Most tests run an entry
// twice over the same numbers, once where they lie side by side and once where they lie far apart,
// and expect the same bits.
#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/attention.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/planner.h"
#include "sparse_mla/random.h"
#include "sparse_mla/rotary.h"
#include "sparse_mla/select.h"

#include "tests/support/far_memory.h"
#include "tests/support/latent_rows.h"
#include "tests/support/run_entry.h"
#include "tests/support/select_oracle.h"

namespace sparse_mla {
namespace {

using support::Axis;
using support::Blocks;
using support::Bytes;
using support::bytes_of;
using support::const_data;
using support::DeviceMemory;
using support::expect_same_near_and_far;
using support::for_each_cuda_entry;
using support::kFar;
using support::kShapes;
using support::launch;
using support::normals;
using support::on_device;
using support::Place;
using support::put;
using support::same_bits;
using support::Shape;
using support::take;
using support::Tensor;

/// `count` numbers in [low, low + range).
std::vector<std::int32_t> integers(std::int64_t count, std::uint64_t stream, int low, int range) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = low + static_cast<std::int32_t>(random_bits(7, stream, i) % range);
  return values;
}

TEST(CudaFarOffsets, SelectReadsAndWritesPast2To31) {
  constexpr int kLen = 5000, kPicks = 300, kPage = 20;
  // Rows of indices, values, slots, hints and pages, one beside the other; two of each, far apart.
  const DeviceMemory scores((kFar + kLen) * 4), rows((kFar + 5 * kPicks) * 4);
  const auto first = normals<float>(kLen, 20), second = normals<float>(kLen, 21);
  put(scores, 0, first);
  put(scores, kFar, second);
  const std::vector<std::int32_t> pages = integers(kLen / kPage, 22, 0, 1000);
  for (const std::int64_t row : {std::int64_t{0}, kFar}) {
    put(rows, row + 3 * kPicks, integers(kPicks, 23, -1, kLen + 1));
    put(rows, row + 4 * kPicks, pages);
  }
  const auto part = [&]<class T>(T*, int number, int columns) {
    return strided(reinterpret_cast<T*>(rows.data()) + number * kPicks,
                   std::array<std::int64_t, 2>{2, columns}, {kFar, 1});
  };
  constexpr std::int32_t* kNumbers = nullptr;
  constexpr const std::int32_t* kConstNumbers = nullptr;
  constexpr float* kScores = nullptr;
  SelectProblem problem{2, kLen, kPicks};
  problem.order = SelectOrder::by_value;
  SelectCall call;
  call.scores = {scores.data(), ScoreType::f32, 2, kLen, kFar, nullptr};
  call.indices = part(kNumbers, 0, kPicks);
  call.values = part(kScores, 1, kPicks);
  call.slot_map.slots = part(kNumbers, 2, kPicks);
  call.slot_map.block_tables = part(kConstNumbers, 4, kLen / kPage);
  call.slot_map.block_size = kPage;
  call.slot_map.num_blocks = 1000;
  call.hints = part(kConstNumbers, 3, kPicks);
  for (const bool hinted : {false, true}) {
    problem.hinted = hinted;
    for_each_cuda_entry(select_operation(), problem, [&](const auto& entry) {
      launch(select_operation(), entry, problem, call);
      for (const std::int64_t row : {std::int64_t{0}, kFar}) {
        const std::vector<float>& data = row == 0 ? first : second;
        const std::vector<std::int32_t> picks = support::select_oracle(data, 0, kLen, kPicks);
        std::vector<float> values;
        std::vector<std::int32_t> slots;
        for (const std::int32_t pick : picks) {
          values.push_back(data[static_cast<std::size_t>(pick)]);
          slots.push_back(pages[static_cast<std::size_t>(pick / kPage)] * kPage + pick % kPage);
        }
        EXPECT_EQ(take<std::int32_t>(rows, row, kPicks), picks);
        EXPECT_EQ(take<float>(rows, row + kPicks, kPicks), values);
        EXPECT_EQ(take<std::int32_t>(rows, row + 2 * kPicks, kPicks), slots);
      }
    });
  }
}

TEST(CudaFarOffsets, GatherReadsAndWritesPast2To31) {
  constexpr int kWidth = 576;
  const std::int64_t blocks =
      (kFar / kWidth + 64) / 64 + 1;  // the last pages lie past 2^31 numbers
  const DeviceMemory cache_memory(blocks * 64 * kWidth * 2), rows((kFar + kWidth) * 2);
  LatentCache cache;
  cache.data = cache_memory.data();
  cache.num_blocks = blocks;
  cache.row_stride = kWidth * 2;
  cache.block_stride = 64 * kWidth * 2;
  const auto values = normals<bfloat16>(64 * kWidth, 22);
  put(cache_memory, (blocks - 1) * 64 * kWidth, values);
  const DeviceMemory table =
      on_device(std::vector<std::int32_t>{0, static_cast<std::int32_t>(blocks - 1)});
  std::vector<ChunkMember> member(1);
  member[0].first_key = 70;
  member[0].num_keys = 2;
  const DeviceMemory members = on_device(member);
  GatherCall call;
  call.cache = cache;
  call.block_tables = contiguous(reinterpret_cast<const std::int32_t*>(table.data()), 1, 2);
  call.members = {reinterpret_cast<const ChunkMember*>(members.data()), 1};
  call.rows = strided(reinterpret_cast<bfloat16*>(rows.data()),
                      std::array<std::int64_t, 2>{2, kWidth}, {kFar, 1});
  const GatherProblem problem{2, CacheFormat::bf16, 512, 64};
  for_each_cuda_entry(gather_operation(), problem, [&](const auto& entry) {
    launch(gather_operation(), entry, problem, call);
    for (int r = 0; r < 2; ++r)
      EXPECT_TRUE(same_bits(take<bfloat16>(rows, r * kFar, kWidth),
                            std::vector<bfloat16>(values.begin() + (6 + r) * kWidth,
                                                  values.begin() + (7 + r) * kWidth)))
          << "row " << r;
  });
}

TEST(CudaFarOffsets, MergeOfMoreThan2To31Elements) {
  constexpr std::int64_t kRows = 140000, kHeads = 128, kWidth = 128;
  constexpr std::int64_t kRowElements = kHeads * kWidth;
  static_assert(kRows * kRowElements > kFar);
  const DeviceMemory a(kRows * kRowElements * 4), b(kRows * kRowElements * 4);
  const DeviceMemory lse(kRows * kHeads * 4), out(kRows * kRowElements * 2);
  support::fill_device(a.data(), 0, a.size());
  support::fill_device(b.data(), 0, b.size());
  support::fill_device(lse.data(), 0, lse.size());
  const std::int64_t probes[] = {0, 131071, 131072, kRows - 1};
  for (const std::int64_t row : probes) {
    put(a, row * kRowElements, normals<float>(kRowElements, 30 + row));
    put(b, row * kRowElements, normals<float>(kRowElements, 31 + row));
  }
  MergeCall call;
  const auto view = [&](const DeviceMemory& memory) {
    return contiguous(reinterpret_cast<const float*>(memory.data()), kRows, kHeads, kWidth);
  };
  const auto lse_view = contiguous(reinterpret_cast<const float*>(lse.data()), kHeads, kRows);
  const DeviceMemory lse_out(kRows * kHeads * 4);
  call.a = {view(a), lse_view};
  call.b = {view(b), lse_view};
  call.out_bf16 = contiguous(reinterpret_cast<bfloat16*>(out.data()), kRows, kHeads, kWidth);
  call.lse = contiguous(reinterpret_cast<float*>(lse_out.data()), kHeads, kRows);
  const MergeProblem problem{static_cast<int>(kHeads), static_cast<int>(kWidth), kRows,
                             OutputType::bf16};
  for_each_cuda_entry(merge_operation(), problem, [&](const auto& entry) {
    launch(merge_operation(), entry, problem, call);
    for (const std::int64_t row : probes) {
      const auto got = take<bfloat16>(out, row * kRowElements, kRowElements);
      const auto left = normals<float>(kRowElements, 30 + row),
                 right = normals<float>(kRowElements, 31 + row);
      for (std::int64_t i = 0; i < kRowElements; ++i)
        ASSERT_NEAR(__bfloat162float(got[i]), (left[i] + right[i]) / 2,
                    4e-3 * std::abs(left[i] + right[i]) + 1e-6)
            << "row " << row << ' ' << i;
    }
  });
}

// ---- near and far

constexpr std::int64_t kLora = 512, kRope = 64, kNope = 128, kValue = 128;  // L, R, P, V
constexpr std::int64_t kLatent = kLora + kRope;

/// Three pages of rows in `format`; written by the test's own encoder, or poison.
class Cache {
 public:
  Cache(Place place, CacheFormat format, std::int32_t block_size, bool filled)
      : format_(format),
        block_size_(block_size),
        row_bytes_(latent_row_bytes(format, kLora, kRope)),
        pages_(filled ? Blocks<std::byte>(place, kPages, encoded())
                      : Blocks<std::byte>(place, kPages, block_size * row_bytes_)) {}

  LatentCache cache() const {
    LatentCache cache;
    cache.format = format_;
    cache.data = pages_.data();
    cache.num_blocks = kPages;
    cache.block_size = block_size_;
    cache.block_stride = pages_.stride();
    cache.row_stride = row_bytes_;
    cache.scale = kScale;
    return cache;
  }
  std::vector<std::byte> results() const { return pages_.results(); }

  static constexpr std::int64_t kPages = 3;

 private:
  static constexpr float kScale = 0.25f;

  std::vector<std::byte> encoded() const {
    support::LatentRowFormat format;
    format.format = format_;
    format.scale = kScale;
    const std::int64_t rows = kPages * block_size_;
    const auto values = normals<bfloat16>(rows * kLatent, 40);
    std::vector<std::byte> bytes(static_cast<std::size_t>(rows * row_bytes_));
    for (std::int64_t r = 0; r < rows; ++r)
      encode_latent_row(format, &values[r * kLatent], &bytes[r * row_bytes_]);
    return bytes;
  }

  CacheFormat format_;
  std::int32_t block_size_;
  std::int64_t row_bytes_;
  Blocks<std::byte> pages_;
};

constexpr CacheFormat kFormats[] = {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8};

TEST(CudaFarOffsets, WriteCache) {
  constexpr std::int32_t kBlock = 4, kIndexDim = 128, kTokens = 3;
  const DeviceMemory slots = on_device(std::vector<std::int64_t>{9, 0, 6});  // pages 2, 0 and 1
  const DeviceMemory scales = on_device(std::vector<float>{0.5f, 2, 3});
  for (const CacheFormat format : kFormats) {
    SCOPED_TRACE(to_string(format));
    const WriteCacheProblem problem{kTokens, format, kLora, kRope, kIndexDim};
    expect_same_near_and_far(write_cache_operation(), problem, [&](Place place, auto&& start) {
      const Blocks<bfloat16> latent(place, kTokens, normals<bfloat16>(kTokens * kLatent, 41));
      const Blocks<fp8_e4m3> keys(place, kTokens, normals<fp8_e4m3>(kTokens * kIndexDim, 42));
      const Cache cache(place, format, kBlock, false);
      const Blocks<std::byte> index(place, Cache::kPages, index_page_bytes(kBlock, kIndexDim));
      WriteCacheCall call;
      call.latent = latent.rows();
      call.index_k = keys.rows();
      call.index_k_scale = contiguous(const_data<float>(scales), kTokens);
      call.slot_mapping = contiguous(const_data<std::int64_t>(slots), kTokens);
      call.latent_cache = cache.cache();
      call.index_cache = make_index_key_cache(index.data(), Cache::kPages, kBlock, kIndexDim);
      call.index_cache.block_stride = index.stride();
      start(call);
      return bytes_of(cache.results(), index.results());
    });
  }
}

TEST(CudaFarOffsets, Gather) {
  const DeviceMemory table = on_device(std::vector<std::int32_t>{1, 0, 2});
  for (const CacheFormat format : kFormats)
    for (const int keys : {3, 11}) {
      SCOPED_TRACE(to_string(format) + ", rows " + std::to_string(keys));
      std::vector<ChunkMember> member(1);
      member[0].first_key = keys == 3 ? 6 : 1;  // up to the last page's rows
      member[0].num_keys = keys;
      const DeviceMemory members = on_device(member);
      const GatherProblem problem{keys, format, kLora, kRope};
      expect_same_near_and_far(gather_operation(), problem, [&](Place place, auto&& start) {
        const Cache cache(place, format, 4, true);
        const Blocks<bfloat16> rows(place, keys, kLatent);
        GatherCall call;
        call.cache = cache.cache();
        call.block_tables = contiguous(const_data<std::int32_t>(table), 1, Cache::kPages);
        call.members = {const_data<ChunkMember>(members), 1};
        call.rows = rows.rows();
        start(call);
        return bytes_of(rows.results());
      });
    }
}

TEST(CudaFarOffsets, MapSlotsToNumbersNear2To31) {
  constexpr std::int32_t kTopk = 8, kBlock = 64, kBlocks = 0x7FFFFFFF / kBlock, kMaxBlocks = 4;
  // Two requests' pages: the cache's last ones, and one behind it.
  const std::vector<std::int32_t> pages{kBlocks - 1, 3,           kBlocks - 2, 0,
                                        kBlocks - 7, kBlocks - 4, kBlocks,     kBlocks - 3};
  constexpr int kKeys = kBlock * kMaxBlocks - 10;
  for (const int rows : {3, 20}) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    const auto picks = integers(rows * kTopk, 43, -5, kKeys + 10);
    std::vector<std::int32_t> requests(rows), expected, expected_counts;
    for (int row = 0; row < rows; ++row) {
      requests[row] = row % 2;
      int count = 0;
      for (int i = 0; i < kTopk; ++i) {
        const int pick = picks[row * kTopk + i];
        const bool inside = pick >= 0 && pick < kKeys;
        const int page = inside ? pages[requests[row] * kMaxBlocks + pick / kBlock] : kBlocks;
        expected.push_back(page < kBlocks ? page * kBlock + pick % kBlock : -1);
        if (expected.back() >= 0) count = i + 1;
      }
      expected_counts.push_back(count);
    }
    const DeviceMemory request = on_device(requests);
    const DeviceMemory keys = on_device(std::vector<std::int32_t>(rows, kKeys));
    const auto run = [&](Place place, auto&& start) {
      const Blocks<std::int32_t> picked(place, rows, picks), tables(place, 2, pages);
      const Blocks<std::int32_t> slots(place, rows, kTopk), counts(Place::near, 1, rows);
      MapSlotsCall call;
      call.picks = picked.rows();
      call.request_of_token = const_data<std::int32_t>(request);
      call.keys_of_token = const_data<std::int32_t>(keys);
      call.block_tables = tables.rows();
      call.num_blocks = kBlocks;
      call.block_size = kBlock;
      call.slots = slots.rows();
      call.slot_counts = counts.data();
      start(call);
      const auto results = slots.results(), slot_counts = counts.results();
      EXPECT_EQ(results, expected);
      EXPECT_EQ(slot_counts, expected_counts);
      return bytes_of(results, slot_counts);
    };
    expect_same_near_and_far(map_slots_operation(), MapSlotsProblem{rows, kTopk}, run);
  }
}

constexpr std::int64_t kMaxWords = kFar + 4096;  // a bound of the tests' masks

/// Two members' masks, each member's words and tile lists in a block of their own; their query
/// tiles are numbered through, as the layout wants.
struct Masks {
  MaskLayout layout;
  Blocks<std::uint32_t> words;
  Blocks<std::int32_t> counts, ids;
  DeviceMemory members;

  Masks(Place place, const std::vector<ChunkMember>& chunk)
      : layout(plan_masks(chunk, MaskScope::global, {})),
        words(place, 2, layout.num_words),
        counts(Place::near, 1, layout.num_tile_counts),
        ids(place, 2, layout.num_tile_ids) {
    layout.members[0].word_offset = 0;
    layout.members[1].word_offset = words.stride();
    layout.members[1].tile_offset = ids.stride();
    members = on_device(layout.members);
  }
  MaskView view() const {
    return {layout.tile,
            {const_data<MaskMember>(members), layout.members.size()},
            words.data(),
            counts.data(),
            ids.data()};
  }
};

/// Member 0 has `first` queries, member 1 `second`; both attend the same `keys`.
std::vector<ChunkMember> two_members(int first, int second, int context, int keys) {
  std::vector<ChunkMember> members(2);
  members[0].query_len = first;
  members[1].query_start = members[1].packed_token = first;
  members[1].query_len = second;
  for (ChunkMember& member : members) {
    member.context_len = member.first_key = context;
    member.num_keys = keys;
  }
  return members;
}

BuildMasksCall mask_call(const Blocks<std::int32_t>& picks, const DeviceMemory& members,
                         const Masks& masks) {
  BuildMasksCall call;
  call.picks = picks.rows();
  call.members = {const_data<ChunkMember>(members), 2};
  call.mask = masks.view();
  return call;
}

TEST(CudaFarOffsets, BuildMasks) {
  constexpr int kTopk = 8, kContext = 100, kKeys = 60;
  const BuildMasksProblem problem{kMaxWords, kTopk};
  for (const int rows : {3, 74}) {  // 74: member 1 has two query tiles
    SCOPED_TRACE("rows " + std::to_string(rows));
    const auto chunk = two_members(rows == 3 ? 1 : 4, rows == 3 ? 2 : 70, kContext, kKeys);
    const DeviceMemory members = on_device(chunk);
    const auto picked = integers(rows * kTopk, 44, -5, kContext + kKeys + 10);
    expect_same_near_and_far(build_masks_operation(), problem, [&](Place place, auto&& start) {
      const Blocks<std::int32_t> picks(place, rows, picked);
      const Masks masks(rows == 3 ? Place::near : place, chunk);  // three far rows take 17 GB
      start(mask_call(picks, members, masks));
      return bytes_of(masks.words.results(), masks.counts.results(), masks.ids.results());
    });
  }
}

/// What lies far apart, beside the masks of mode masked.
struct AttendCase {
  bool far_queries, far_keys;
  Axis axis;
  int rows;
  AttendMode mode = AttendMode::causal;
};

/// The running partial's first rows are merged, the others written.
void attend_near_and_far(const AttendCase& c) {
  constexpr std::int64_t kHeads = 2, kContext = 4;
  const int keys = c.rows;
  const std::int64_t merged = c.rows / 2;
  // Member 1 stands at the keys behind member 0's.
  auto chunk = two_members(1, c.rows - 1, kContext, keys);
  for (ChunkMember& member : chunk) member.first_key = 0;
  chunk[1].key_row = keys;
  const DeviceMemory members = on_device(chunk);
  const AttendProblem problem{kHeads, kNope, kRope, kValue, c.mode, c.rows, 2 * keys};
  expect_same_near_and_far(attend_operation(), problem, [&](Place place, auto&& start) {
    const Place queries = c.far_queries ? place : Place::near;
    const Place rows = c.far_keys ? place : Place::near;
    const Tensor<bfloat16> q(queries, c.axis, {c.rows, kHeads, kNope + kRope}, 50);
    const Tensor<bfloat16> k_nope(rows, c.axis, {2 * keys, kHeads, kNope}, 51);
    const Tensor<bfloat16> v(rows, c.axis, {2 * keys, kHeads, kValue}, 52);
    const Blocks<bfloat16> k_pe(rows, 2 * keys, normals<bfloat16>(2 * keys * kRope, 53));
    const Tensor<float> out(queries, c.axis, {c.rows, kHeads, kValue}, 54);
    const Blocks<float> lse(queries, kHeads, normals<float>(kHeads * c.rows, 55));
    AttendCall call;
    call.q = q.view();
    call.k_nope = k_nope.view();
    call.k_pe = k_pe.rows();
    call.v = v.view();
    call.members = {const_data<ChunkMember>(members), 2};
    call.softmax_scale = 0.072f;
    call.running = {out.view(), lse.rows()};
    call.merge_row_end = merged;
    std::optional<Masks> masks;
    if (c.mode == AttendMode::masked) {
      masks.emplace(place, chunk);
      const Blocks<std::int32_t> picks(Place::near, c.rows, integers(c.rows * 8, 56, 0, keys));
      const BuildMasksProblem build{kMaxWords, 8};
      const Dispatch dispatch{.backend = Backend::cuda};
      launch(build_masks_operation(), build_masks_operation().choose(build, dispatch), build,
             mask_call(picks, members, *masks));
      call.mask = masks->view();
    }
    start(call);
    return bytes_of(out.results(), lse.results());
  });
}

TEST(CudaFarOffsets, AttendQueriesAndRunningRows) {
  attend_near_and_far({true, false, Axis::rows, 3});
  attend_near_and_far({true, false, Axis::rows, 20});  // more than a tile of few rows
  attend_near_and_far({true, false, Axis::heads, 20});
}

TEST(CudaFarOffsets, AttendKeysAndValues) {
  attend_near_and_far({false, true, Axis::rows, 20});
  attend_near_and_far({false, true, Axis::heads, 3});
  attend_near_and_far({false, true, Axis::heads, 20});
}

TEST(CudaFarOffsets, AttendMasks) {
  attend_near_and_far({false, false, Axis::rows, 3, AttendMode::masked});
  attend_near_and_far({false, false, Axis::rows, 20, AttendMode::masked});
}

TEST(CudaFarOffsets, SparseMqa) {
  constexpr std::int32_t kTopk = 9, kBlock = 16, kSlots = kBlock * Cache::kPages;
  for (const CacheFormat format : kFormats)
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(to_string(format) + ", " + to_string(s));
      std::vector<std::int32_t> chosen;
      for (int token = 0; token < s.rows; ++token)
        for (int i = 0; i < kTopk; ++i) chosen.push_back(i == 4 ? -1 : (token + 7 * i) % kSlots);
      const SparseMqaProblem problem{
          static_cast<int>(s.heads), kLora, kRope, kTopk, format, s.rows};
      expect_same_near_and_far(sparse_mqa_operation(), problem, [&](Place place, auto&& start) {
        const Tensor<bfloat16> q(place, s.axis, {s.rows, s.heads, kLatent}, 57);
        const Cache cache(place, format, kBlock, true);
        // Three far rows of both would be more than these tests take at a time.
        const Blocks<std::int32_t> slots(s.rows == 3 ? Place::near : place, s.rows, chosen);
        const Tensor<bfloat16> out(place, s.axis, {s.rows, s.heads, kLora});
        const Blocks<float> lse(place, s.heads, s.rows);
        SparseMqaCall call;
        call.q = q.view();
        call.cache = cache.cache();
        call.slots = slots.rows();
        call.softmax_scale = 0.03f;
        call.out = out.view();
        call.lse = lse.rows();
        start(call);
        return bytes_of(out.results(), lse.results());
      });
    }
}

TEST(CudaFarOffsets, IndexerScores) {
  constexpr std::int32_t kHeads = 64, kDim = 128, kBlock = 16, kKeys = kBlock * 3;
  const DeviceMemory table = on_device(std::vector<std::int32_t>{2, 0, 1});
  std::vector<std::byte> pages;
  for (int page = 0; page < 3; ++page) {
    const Bytes bytes = bytes_of(normals<fp8_e4m3>(kBlock * kDim, 60 + page),
                                 std::vector<float>(kBlock, 0.5f + page));
    for (const unsigned char byte : bytes) pages.push_back(std::byte{byte});
  }
  for (const int rows : {3, 20}) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    const IndexerProblem problem{kHeads, kDim, rows, kKeys};
    expect_same_near_and_far(indexer_scores_operation(), problem, [&](Place place, auto&& start) {
      const Blocks<fp8_e4m3> q(place, rows, normals<fp8_e4m3>(rows * kHeads * kDim, 63));
      // Three far rows of both would be more than these tests take at a time.
      const Blocks<float> weights(rows == 3 ? Place::near : place, rows,
                                  normals<float>(rows * kHeads, 64));
      const Blocks<std::byte> cache(place, 3, pages);
      const Blocks<float> scores(place, rows, kKeys);
      std::vector<ScoreMember> list(1);
      if (rows == 3) {  // no member's rows are as far from each other: three members of a row
        list.resize(3);
        for (int i = 0; i < 3; ++i) {
          list[i].query_start = list[i].first_row = i;
          list[i].num_rows = 1;
          list[i].first_position = kKeys - 3 + i;
          list[i].row_keys = kKeys;
          list[i].score_offset = i * scores.stride();
        }
      } else {
        list[0].num_rows = rows;
        list[0].first_position = kKeys - rows;
        list[0].row_keys = static_cast<std::int32_t>(scores.stride());
      }
      const DeviceMemory members = on_device(list);
      IndexerCall call;
      call.index_q = q.rows(kHeads);
      call.index_weights = weights.rows();
      call.cache = make_index_key_cache(cache.data(), 3, kBlock, kDim);
      call.cache.block_stride = cache.stride();
      call.block_tables = contiguous(const_data<std::int32_t>(table), 1, 3);
      call.members = {const_data<ScoreMember>(members), list.size()};
      call.scores = scores.data();
      start(call);
      return bytes_of(scores.results());
    });
  }
}

/// Rows in reverse order.
std::vector<std::int32_t> reversed(std::int64_t rows) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::int32_t>(tokens.size() - 1 - i);
  return tokens;
}

TEST(CudaFarOffsets, Projections) {
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(to_string(s));
    const int heads = static_cast<int>(s.heads);
    const auto weights_of = [&](Place place) {  // kv_b_proj [heads, P+V, L]
      return Tensor<bfloat16>(place, Axis::rows, {heads, kNope + kValue, kLora}, 65);
    };
    const DeviceMemory list = on_device(reversed(s.rows));
    const std::span<const std::int32_t> tokens{const_data<std::int32_t>(list),
                                               static_cast<std::size_t>(s.rows)};
    const UpProjectProblem up{heads, kLora, kNope + kValue, s.rows};
    expect_same_near_and_far(up_project_operation(), up, [&](Place place, auto&& start) {
      const Blocks<bfloat16> latent(place, s.rows, normals<bfloat16>(s.rows * kLatent, 66));
      const auto weights = weights_of(place);
      const Tensor<bfloat16> kv(place, s.axis, {s.rows, heads, kNope + kValue});
      start({latent.rows(), weights.view(), kv.view()});
      return bytes_of(kv.results());
    });
    const AbsorbQueryProblem absorb{heads, kLora, kNope, kRope, s.rows};
    expect_same_near_and_far(absorb_query_operation(), absorb, [&](Place place, auto&& start) {
      const Tensor<bfloat16> q(place, s.axis, {s.rows, heads, kNope + kRope}, 67);
      const auto weights = weights_of(place);
      const Tensor<bfloat16> absorbed(place, s.axis, {s.rows, heads, kLatent});
      start({q.view(), weights.view(), tokens, absorbed.view()});
      return bytes_of(absorbed.results());
    });
    ProjectValueProblem project{heads, kLora, kValue, s.rows};
    for (const OutputType type : {OutputType::bf16, OutputType::fp8}) {
      SCOPED_TRACE(to_string(type));
      project.output = type;
      expect_same_near_and_far(project_value_operation(), project, [&](Place place, auto&& start) {
        const Tensor<bfloat16> latent(place, s.axis, {s.rows, heads, kLora}, 68);
        const auto weights = weights_of(place);
        const Tensor<bfloat16> out(place, s.axis, {s.rows, heads, kValue});
        const Tensor<fp8_e4m3> out_fp8(place, s.axis, {s.rows, heads, kValue});
        ProjectValueCall call{latent.view(), weights.view(), tokens, {}};
        if (type == OutputType::fp8)
          call.out_fp8 = out_fp8.view();
        else
          call.out = out.view();
        start(call);
        return type == OutputType::fp8 ? bytes_of(out_fp8.results()) : bytes_of(out.results());
      });
    }
  }
}

TEST(CudaFarOffsets, RotaryAndHadamard) {
  constexpr std::int64_t kPositions = 3, kHadamard = 128;
  std::vector<float> values(kPositions * kRope);
  fill_rotary_table(rotary_inverse_frequencies(10000, kRope), 1,
                    contiguous(values.data(), kPositions, kRope));
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(to_string(s));
    std::vector<std::int64_t> at(static_cast<std::size_t>(s.rows));
    for (std::size_t i = 0; i < at.size(); ++i)
      at[i] = static_cast<std::int64_t>(i + 1) % kPositions;
    const DeviceMemory positions = on_device(at);
    for (const RotaryLayout layout : {RotaryLayout::half_split, RotaryLayout::interleaved}) {
      SCOPED_TRACE(to_string(layout));
      RotaryProblem rotary(layout);
      rotary.max_rows = s.rows;
      expect_same_near_and_far(rotary_operation(), rotary, [&](Place place, auto&& start) {
        const Tensor<bfloat16> in(place, s.axis, {s.rows, s.heads, kRope}, 69);
        const Tensor<bfloat16> out(place, s.axis, {s.rows, s.heads, kRope});
        const Blocks<float> table(place, kPositions, values);
        start({in.view(), out.view(), contiguous(const_data<std::int64_t>(positions), s.rows),
               table.rows()});
        return bytes_of(out.results());
      });
    }
    const HadamardProblem hadamard{kHadamard, s.rows};
    expect_same_near_and_far(hadamard_operation(), hadamard, [&](Place place, auto&& start) {
      const Tensor<bfloat16> in(place, s.axis, {s.rows, s.heads, kHadamard}, 70);
      const Tensor<bfloat16> out(place, s.axis, {s.rows, s.heads, kHadamard});
      start({in.view(), out.view()});
      return bytes_of(out.results());
    });
  }
}

TEST(CudaFarOffsets, InitPartial) {
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(to_string(s));
    const auto rows = static_cast<std::int32_t>(s.rows);
    const DeviceMemory ranges = on_device(std::vector<TokenRange>{{0, 1}, {2, rows}});
    const InitPartialProblem problem{static_cast<int>(s.heads), kValue, rows};
    expect_same_near_and_far(init_partial_operation(), problem, [&](Place place, auto&& start) {
      const Tensor<float> out(place, s.axis, {rows, s.heads, kValue});
      const Blocks<float> lse(place, s.heads, rows);
      start({{const_data<TokenRange>(ranges), 2}, {out.view(), lse.rows()}});
      return bytes_of(out.results(), lse.results());
    });
  }
}

}  // namespace
}  // namespace sparse_mla
