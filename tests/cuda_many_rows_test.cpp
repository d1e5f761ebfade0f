// More rows than a grid's second axis has (65,535).
#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/attention.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/random.h"
#include "sparse_mla/rotary.h"
#include "sparse_mla/select.h"

#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::run_entry;
using support::same_bits;

constexpr std::int64_t kManyRows = 70001;

std::vector<bfloat16> normals(std::int64_t count, std::uint64_t stream) {
  std::vector<bfloat16> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = __float2bfloat16_rn(random_normal(7, stream, i));
  return values;
}

std::vector<float> floats(std::int64_t count, std::uint64_t stream) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = random_normal(7, stream, i);
  return values;
}

/// The fastest CPU entry's name, and every CUDA entry's.
template <class Problem, class Call>
std::string cpu_entry(const Operation<Problem, Call>& operation, const Problem& problem) {
  Dispatch dispatch;
  dispatch.backend = Backend::cpu;
  return operation.choose(problem, dispatch).name;
}

/// Runs `call_of(output)` on the CPU and with every CUDA entry; equal bits are expected.
template <class Problem, class Call, class T, class Make>
void expect_same_as_cpu(const Operation<Problem, Call>& operation, const Problem& problem,
                        const std::vector<T>& spoiled, Make&& call_of) {
  std::vector<T> expected = spoiled;
  run_entry(operation, cpu_entry(operation, problem), problem, call_of(expected));
  const auto entries = support::usable_entries(operation, problem);
  ASSERT_FALSE(entries.empty()) << operation.name();
  for (const std::string& entry : entries) {
    std::vector<T> got = spoiled;
    run_entry(operation, entry, problem, call_of(got));
    EXPECT_TRUE(same_bits(got, expected)) << operation.name() << ':' << entry;
  }
}

TEST(CudaManyRows, Select) {
  const std::vector<float> scores = floats(kManyRows * 40, 1);
  SelectProblem problem{kManyRows, 40, 7};
  problem.order = SelectOrder::by_value;
  expect_same_as_cpu(select_operation(), problem,
                     std::vector<std::int32_t>(kManyRows * 7, 0x7FFFFFFF), [&](auto& out) {
                       SelectCall call;
                       call.scores = {scores.data(), ScoreType::f32, kManyRows, 40, 40, nullptr};
                       call.indices = contiguous(out.data(), kManyRows, 7);
                       return call;
                     });
}

TEST(CudaManyRows, RotaryAndHadamard) {
  const std::vector<bfloat16> in = normals(kManyRows * 64, 2);
  std::vector<std::int64_t> positions(kManyRows);
  for (std::int64_t i = 0; i < kManyRows; ++i) positions[i] = i % 50;
  std::vector<float> table(50 * 64);
  fill_rotary_table(rotary_inverse_frequencies(10000, 64), 1, contiguous(table.data(), 50, 64));
  RotaryProblem rotary(RotaryLayout::half_split);
  rotary.max_rows = kManyRows;
  const auto spoiled = support::poisoned<bfloat16>(kManyRows * 64);
  expect_same_as_cpu(rotary_operation(), rotary, spoiled, [&](auto& out) {
    RotaryCall call;
    call.in = contiguous<const bfloat16>(in.data(), kManyRows, 1, 64);
    call.out = contiguous(out.data(), kManyRows, 1, 64);
    call.positions = contiguous<const std::int64_t>(positions.data(), kManyRows);
    call.table = contiguous<const float>(table.data(), 50, 64);
    return call;
  });
  expect_same_as_cpu(hadamard_operation(), HadamardProblem{64, kManyRows}, spoiled, [&](auto& out) {
    HadamardCall call;
    call.in = contiguous<const bfloat16>(in.data(), kManyRows, 1, 64);
    call.out = contiguous(out.data(), kManyRows, 1, 64);
    return call;
  });
}

TEST(CudaManyRows, WriteCacheGatherAndMapSlots) {
  constexpr int kLora = 128, kRope = 16, kWidth = kLora + kRope;
  const std::vector<bfloat16> latent = normals(kManyRows * kWidth, 3);
  std::vector<std::int64_t> slots(kManyRows);
  for (std::int64_t i = 0; i < kManyRows; ++i) slots[i] = (i * 7919) % kManyRows;
  const std::int64_t blocks = (kManyRows + 15) / 16;
  const std::int64_t row_bytes = latent_row_bytes(CacheFormat::fp8_ds_mla, kLora, kRope);
  LatentCache cache;
  cache.format = CacheFormat::fp8_ds_mla;
  cache.num_blocks = blocks;
  cache.block_size = 16;
  cache.row_stride = row_bytes;
  cache.block_stride = 16 * row_bytes;
  const std::vector<std::byte> empty(static_cast<std::size_t>(blocks * cache.block_stride),
                                     std::byte{0x11});  // numbers: a NaN's bits may differ
  std::vector<std::byte> written = empty;
  const WriteCacheProblem write{kManyRows, CacheFormat::fp8_ds_mla, kLora, kRope, 0};
  const auto write_call = [&](std::vector<std::byte>& bytes) {
    WriteCacheCall call;
    call.latent = contiguous<const bfloat16>(latent.data(), kManyRows, kWidth);
    call.slot_mapping = contiguous<const std::int64_t>(slots.data(), kManyRows);
    call.latent_cache = cache;
    call.latent_cache.data = bytes.data();
    return call;
  };
  expect_same_as_cpu(write_cache_operation(), write, empty, write_call);
  run_entry(write_cache_operation(), cpu_entry(write_cache_operation(), write), write,
            write_call(written));

  std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
  for (std::int64_t i = 0; i < blocks; ++i) table[i] = static_cast<std::int32_t>((i * 31) % blocks);
  std::vector<ChunkMember> members(1);
  members[0].num_keys = kManyRows;
  expect_same_as_cpu(gather_operation(),
                     GatherProblem{kManyRows, CacheFormat::fp8_ds_mla, kLora, kRope},
                     support::poisoned<bfloat16>(kManyRows * kWidth), [&](auto& out) {
                       GatherCall call;
                       call.cache = cache;
                       call.cache.data = written.data();
                       call.block_tables = contiguous<const std::int32_t>(table.data(), 1, blocks);
                       call.members = members;
                       call.rows = contiguous(out.data(), kManyRows, kWidth);
                       return call;
                     });

  const std::vector<std::int32_t> requests(kManyRows, 0), keys(kManyRows, 1000);
  std::vector<std::int32_t> picks(kManyRows * 5);
  for (std::size_t i = 0; i < picks.size(); ++i)
    picks[i] = static_cast<std::int32_t>(random_bits(7, 4, i) % 1100) - 50;
  expect_same_as_cpu(map_slots_operation(), MapSlotsProblem{kManyRows, 5},
                     std::vector<std::int32_t>(kManyRows * 5, 99), [&](auto& out) {
                       MapSlotsCall call;
                       call.picks = contiguous<const std::int32_t>(picks.data(), kManyRows, 5);
                       call.request_of_token = requests.data();
                       call.keys_of_token = keys.data();
                       call.block_tables = contiguous<const std::int32_t>(table.data(), 1, blocks);
                       call.num_blocks = blocks;
                       call.block_size = 16;
                       call.slots = contiguous(out.data(), kManyRows, 5);
                       return call;
                     });
}

TEST(CudaManyRows, BuildMasks) {
  constexpr int kPicks = 6;
  std::vector<ChunkMember> members(1);
  members[0].query_len = kManyRows;
  members[0].context_len = members[0].first_key = 100;
  members[0].num_keys = 60;  // the bits go up to key 160, so rows past the 60th see all of them
  const MaskLayout layout = plan_masks(members, MaskScope::global, {});
  std::vector<std::int32_t> picks(kManyRows * kPicks);
  for (std::size_t i = 0; i < picks.size(); ++i)
    picks[i] = static_cast<std::int32_t>(random_bits(7, 5, i) % 170) - 5;
  std::vector<std::int32_t> counts(layout.num_tile_counts), ids(layout.num_tile_ids);
  expect_same_as_cpu(
      build_masks_operation(), BuildMasksProblem{layout.num_words, kPicks},
      std::vector<std::uint32_t>(layout.num_words, 0xABABABAB), [&](auto& out) {
        BuildMasksCall call;
        call.picks = contiguous<const std::int32_t>(picks.data(), kManyRows, kPicks);
        call.members = members;
        call.mask = {layout.tile, layout.members, out.data(), counts.data(), ids.data()};
        return call;
      });
}

/// Rows whose errors are those of bf16 arithmetic, row by row against the CPU's.
void expect_close(const std::vector<float>& got, const std::vector<float>& expected,
                  std::int64_t width, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t row = 0; row * width < got.size(); ++row) {
    double error = 0, norm = 0;
    for (std::int64_t i = 0; i < width; ++i) {
      const double a = got[row * width + i], b = expected[row * width + i];
      error += (a - b) * (a - b);
      norm += b * b;
    }
    // Two bf16 computations, each within 1e-2 of the truth.
    ASSERT_LE(std::sqrt(error), 2e-2 * std::sqrt(norm) + 1e-6) << what << " row " << row;
  }
}

TEST(CudaManyRows, Attend) {
  constexpr int kHeads = 1, kKeys = 40;
  AttendProblem problem{kHeads, 128, 64, 128, AttendMode::dense, kManyRows, kKeys};
  const auto q = normals(kManyRows * 192, 6), k = normals(kKeys * 128, 7),
             rope = normals(kKeys * 64, 8), v = normals(kKeys * 128, 9);
  std::vector<ChunkMember> members(1);
  members[0].query_len = kManyRows;
  members[0].num_keys = members[0].context_len = kKeys;
  const auto run = [&](const std::string& entry) {
    std::vector<float> out(kManyRows * 128, NAN), lse(kManyRows, NAN);
    AttendCall call;
    call.q = contiguous<const bfloat16>(q.data(), kManyRows, kHeads, 192);
    call.k_nope = contiguous<const bfloat16>(k.data(), kKeys, kHeads, 128);
    call.k_pe = contiguous<const bfloat16>(rope.data(), kKeys, 64);
    call.v = contiguous<const bfloat16>(v.data(), kKeys, kHeads, 128);
    call.members = members;
    call.softmax_scale = 0.072f;
    call.running = {contiguous(out.data(), kManyRows, kHeads, 128),
                    contiguous(lse.data(), kHeads, kManyRows)};
    run_entry(attend_operation(), entry, problem, call);
    return out;
  };
  const auto expected = run(cpu_entry(attend_operation(), problem));
  for (const std::string& entry : support::usable_entries(attend_operation(), problem))
    expect_close(run(entry), expected, 128, entry);
}

TEST(CudaManyRows, SparseMqa) {
  constexpr int kHeads = 1, kTopk = 9, kSlots = 64;
  SparseMqaProblem problem{kHeads, 512, 64, kTopk, CacheFormat::bf16, kManyRows};
  const auto q = normals(kManyRows * 576, 10);
  auto rows = normals(kSlots * 576, 11);
  std::vector<std::int32_t> slots(kManyRows * kTopk);
  for (std::int64_t token = 0; token < kManyRows; ++token)
    for (int i = 0; i < kTopk; ++i)
      slots[token * kTopk + i] = i == 4 ? -1 : static_cast<std::int32_t>((token + 7 * i) % kSlots);
  const auto run = [&](const std::string& entry) {
    auto out = support::poisoned<bfloat16>(kManyRows * 512);
    std::vector<float> lse(kManyRows, NAN);
    SparseMqaCall call;
    call.q = contiguous<const bfloat16>(q.data(), kManyRows, kHeads, 576);
    call.cache.data = reinterpret_cast<std::byte*>(rows.data());
    call.cache.num_blocks = 1;
    call.cache.block_size = kSlots;
    call.cache.row_stride = 2 * 576;
    call.cache.block_stride = kSlots * 2 * 576;
    call.slots = contiguous<const std::int32_t>(slots.data(), kManyRows, kTopk);
    call.softmax_scale = 0.03f;
    call.out = contiguous(out.data(), kManyRows, kHeads, 512);
    call.lse = contiguous(lse.data(), kHeads, kManyRows);
    run_entry(sparse_mqa_operation(), entry, problem, call);
    std::vector<float> values(out.size());
    for (std::size_t i = 0; i < out.size(); ++i) values[i] = __bfloat162float(out[i]);
    return values;
  };
  const auto expected = run(cpu_entry(sparse_mqa_operation(), problem));
  for (const std::string& entry : support::usable_entries(sparse_mqa_operation(), problem))
    expect_close(run(entry), expected, 512, entry);
}

TEST(CudaManyRows, Merge) {
  const auto a = floats(kManyRows * 2 * 8, 12), b = floats(kManyRows * 2 * 8, 13);
  const auto lse_a = floats(kManyRows * 2, 14), lse_b = floats(kManyRows * 2, 15);
  const MergeProblem problem{2, 8, kManyRows};
  const auto run = [&](const std::string& entry) {
    std::vector<float> out(a.size(), NAN), lse(lse_a.size(), NAN);
    MergeCall call;
    call.a = {contiguous<const float>(a.data(), kManyRows, 2, 8),
              contiguous<const float>(lse_a.data(), 2, kManyRows)};
    call.b = {contiguous<const float>(b.data(), kManyRows, 2, 8),
              contiguous<const float>(lse_b.data(), 2, kManyRows)};
    call.out_f32 = contiguous(out.data(), kManyRows, 2, 8);
    call.lse = contiguous(lse.data(), 2, kManyRows);
    run_entry(merge_operation(), entry, problem, call);
    return out;
  };
  const auto expected = run(cpu_entry(merge_operation(), problem));
  for (const std::string& entry : support::usable_entries(merge_operation(), problem)) {
    const auto got = run(entry);
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], expected[i], 4e-6 * (1 + std::abs(expected[i]))) << entry << ' ' << i;
  }
}

}  // namespace
}  // namespace sparse_mla
