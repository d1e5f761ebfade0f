// The operations that only move memory, on large inputs that are not in the cache. GB/s counts
// every byte that has to be read or written once; `% of copy` compares it with a device-to-device
// copy of 1 GiB in the same run. "copy" is what smaller copies take under the operations' timing.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "sparse_mla/cache.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/rotary.h"

#include "bench/support/gpu.cuh"
#include "bench/support/prepared.cuh"

namespace sparse_mla::bench {
namespace {

constexpr int kLora = 512, kRope = 64, kWidth = kLora + kRope, kValue = 128, kIndexDim = 128;
constexpr std::int32_t kBlock = 64;

/// Bytes per second, read and written, of the driver's own copy: the median of 20.
double copy_rate() {
  static const double rate = [] {
    constexpr std::int64_t kBytes = std::int64_t{1} << 30;
    constexpr int kCopies = 20;
    const DeviceBuffer<std::byte> from(kBytes), to(kBytes);
    cudaEvent_t begin = nullptr, end = nullptr;
    cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
    cuda::check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> milliseconds(kCopies);
    for (float& took : milliseconds) {
      cuda::check(cudaEventRecord(begin), "cudaEventRecord");
      cuda::check(cudaMemcpyAsync(to.data(), from.data(), to.bytes(), cudaMemcpyDeviceToDevice),
                  "cudaMemcpyAsync");
      cuda::check(cudaEventRecord(end), "cudaEventRecord");
      cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
      cuda::check(cudaEventElapsedTime(&took, begin, end), "cudaEventElapsedTime");
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(milliseconds.begin(), milliseconds.end());
    return 2.0 * kBytes / (1e-3 * double{milliseconds[kCopies / 2]});
  }();
  return rate;
}

template <class Problem, class Call>
void measure(benchmark::State& state, const Operation<Problem, Call>& operation,
             const Problem& problem, const Call& call, double bytes) {
  const Prepared<Problem, Call> prepared(operation, problem);
  const double copy = copy_rate();
  TimingOptions options;
  options.flush_l2 = true;
  const GpuTimes times = time_on_gpu(
      state, [&](int, Stream stream) { prepared.run(call, stream); }, options);
  count_bytes(state, times, bytes);
  state.counters["copy_GB/s"] = 1e-9 * copy;
  if (times.median() > 0) state.counters["% of copy"] = 100 * bytes / times.median() / copy;
}

/// The driver's copy of `megabytes` / 2, timed as the operations are: with an L2 that the flush has
/// left full of lines to be written back, and with the cost of a launch. What an operation that
/// moves as many bytes can be held against, where 1 GiB hides both.
void copy(benchmark::State& state, std::int64_t megabytes) {
  const DeviceBuffer<std::byte> from(megabytes * 500000), to(megabytes * 500000);
  TimingOptions options;
  options.flush_l2 = true;
  const GpuTimes times = time_on_gpu(
      state,
      [&](int, Stream stream) {
        cuda::check(
            cudaMemcpyAsync(to.data(), from.data(), to.bytes(), cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
      },
      options);
  count_bytes(state, times, 2.0 * static_cast<double>(to.size()));
  state.counters["copy_GB/s"] = 1e-9 * copy_rate();
}

void merge(benchmark::State& state, std::int64_t tokens, int heads, OutputType type) {
  const std::int64_t numbers = tokens * heads * kValue;
  const DeviceBuffer<float> a(numbers), b(numbers), lse_a(heads * tokens), lse_b(heads * tokens),
      lse(heads * tokens);
  fill_normal(a, 1, 0);
  fill_normal(b, 1, 1);
  fill_normal(lse_a, 1, 2);
  fill_normal(lse_b, 1, 3);
  const DeviceBuffer<std::byte> out(numbers * 4);
  MergeCall call;
  call.a = {contiguous<const float>(a.data(), tokens, heads, kValue),
            contiguous<const float>(lse_a.data(), heads, tokens)};
  call.b = {contiguous<const float>(b.data(), tokens, heads, kValue),
            contiguous<const float>(lse_b.data(), heads, tokens)};
  call.lse = contiguous(lse.data(), heads, tokens);
  call.out_scale = 0.05f;
  int out_bytes = 4;
  if (type == OutputType::f32) {
    call.out_f32 = contiguous(reinterpret_cast<float*>(out.data()), tokens, heads, kValue);
  } else if (type == OutputType::bf16) {
    call.out_bf16 = contiguous(reinterpret_cast<bfloat16*>(out.data()), tokens, heads, kValue);
    out_bytes = 2;
  } else {
    call.out_fp8 = contiguous(reinterpret_cast<fp8_e4m3*>(out.data()), tokens, heads, kValue);
    out_bytes = 1;
  }
  measure(state, merge_operation(), MergeProblem{heads, kValue, tokens, type}, call,
          static_cast<double>(tokens * heads) * (kValue * (8.0 + out_bytes) + 12));
}

/// Every page of a permuted cache once, as the context of `requests` requests of equal length.
struct PagedRows {
  std::int64_t blocks;
  DeviceBuffer<std::byte> memory;
  DeviceBuffer<std::int32_t> tables;
  LatentCache cache;

  PagedRows(CacheFormat format, std::int64_t rows)
      : blocks(rows / kBlock), memory(rows * latent_row_bytes(format, kLora, kRope)) {
    fill(memory, MakeCode{});
    ModelDims dims;
    dims.kv_lora_rank = kLora;
    dims.qk_rope_head_dim = kRope;
    cache = make_latent_cache(format, memory.span(), blocks, kBlock, dims);
    std::vector<std::int32_t> pages(static_cast<std::size_t>(blocks));
    // An odd step visits all of a power of two.
    for (std::size_t i = 0; i < pages.size(); ++i)
      pages[i] = static_cast<std::int32_t>(i * 389 % pages.size());
    tables = DeviceBuffer<std::int32_t>(pages);
  }

  /// Bytes that are neither NaN nor infinite, read as e4m3, bf16 or fp32.
  struct MakeCode {
    __device__ std::byte operator()(std::int64_t i) const {
      return static_cast<std::byte>(32 + i % 31);
    }
  };
};

void gather(benchmark::State& state, CacheFormat format, std::int64_t rows) {
  constexpr std::int64_t kRequests = 32;
  const PagedRows paged(format, rows);
  const auto each = static_cast<std::int32_t>(rows / kRequests);
  std::vector<ChunkMember> members(kRequests);
  for (std::int32_t m = 0; m < kRequests; ++m) {
    members[static_cast<std::size_t>(m)].request = m;
    members[static_cast<std::size_t>(m)].num_keys = each;
    members[static_cast<std::size_t>(m)].key_row = m * each;
  }
  const DeviceBuffer<ChunkMember> on_device(members);
  const DeviceBuffer<bfloat16> out(rows * kWidth);
  GatherCall call;
  call.cache = paged.cache;
  call.block_tables =
      contiguous<const std::int32_t>(paged.tables.data(), kRequests, paged.blocks / kRequests);
  call.members = on_device.span();
  call.rows = contiguous(out.data(), rows, kWidth);
  measure(state, gather_operation(), GatherProblem{rows, format, kLora, kRope}, call,
          static_cast<double>(rows * (latent_row_bytes(format, kLora, kRope) + 2 * kWidth)));
}

/// Row r of a member with `context` cached keys picks one key of each of `topk` equal parts of what
/// it sees; ascending, or in an order that jumps through the row.
struct MakePick {
  std::int64_t context, topk;
  bool ascending;
  __device__ std::int32_t operator()(std::int64_t i) const {
    const std::int64_t keys = context + i / topk + 1;
    const std::int64_t part = ascending ? i % topk : i % topk * 1021 % topk;
    const std::int64_t begin = part * keys / topk, end = (part + 1) * keys / topk;
    if (end == begin) return -1;
    return static_cast<std::int32_t>(begin + random_bits(5, 1, static_cast<std::uint64_t>(i)) %
                                                 (end - begin));
  }
};

void build_masks(benchmark::State& state, std::int32_t rows, std::int32_t keys, int topk,
                 bool ascending) {
  ChunkMember member;
  member.query_len = rows;
  member.context_len = member.first_key = keys - rows;
  member.num_keys = rows;
  const MaskLayout layout = plan_masks({&member, 1}, MaskScope::global, {});
  const DeviceBuffer<ChunkMember> members(std::vector<ChunkMember>{member});
  const DeviceBuffer<MaskMember> masks(layout.members);
  const DeviceBuffer<std::int32_t> picks(std::int64_t{rows} * topk);
  fill(picks, MakePick{keys - rows, topk, ascending});
  const DeviceBuffer<std::uint32_t> words(layout.num_words);
  const DeviceBuffer<std::int32_t> counts(layout.num_tile_counts), ids(layout.num_tile_ids);
  BuildMasksCall call;
  call.picks = contiguous<const std::int32_t>(picks.data(), rows, topk);
  call.members = members.span();
  call.mask = {layout.tile, masks.span(), words.data(), counts.data(), ids.data()};
  measure(state, build_masks_operation(), BuildMasksProblem{layout.num_words, topk}, call,
          4.0 * static_cast<double>(picks.size() + words.size() + ids.size() + counts.size()));
}

void map_slots(benchmark::State& state, std::int64_t tokens, int topk) {
  constexpr std::int64_t kKeys = 32768;
  const DeviceBuffer<std::int32_t> picks(tokens * topk), slots(tokens * topk);
  fill(picks, MakePick{kKeys - tokens, topk, true});
  const DeviceBuffer<std::int32_t> request(
      std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 0));
  const DeviceBuffer<std::int32_t> keys(
      std::vector<std::int32_t>(static_cast<std::size_t>(tokens), kKeys));
  const PagedRows paged(CacheFormat::fp8, kKeys);
  MapSlotsCall call;
  call.picks = contiguous<const std::int32_t>(picks.data(), tokens, topk);
  call.request_of_token = request.data();
  call.keys_of_token = keys.data();
  call.block_tables = contiguous<const std::int32_t>(paged.tables.data(), 1, paged.blocks);
  call.num_blocks = paged.blocks;
  call.block_size = kBlock;
  call.slots = contiguous(slots.data(), tokens, topk);
  measure(state, map_slots_operation(), MapSlotsProblem{tokens, topk}, call,
          8.0 * static_cast<double>(tokens * topk));
}

void write_cache(benchmark::State& state, CacheFormat format, std::int64_t tokens) {
  const PagedRows paged(format, tokens);
  const DeviceBuffer<bfloat16> latent(tokens * kWidth);
  fill_normal(latent, 1, 0);
  const DeviceBuffer<fp8_e4m3> keys(tokens * kIndexDim);
  fill_normal(keys, 1, 1);
  const DeviceBuffer<float> scales(std::vector<float>(static_cast<std::size_t>(tokens), 0.5f));
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
  const DeviceBuffer<std::int64_t> slot_mapping(slots);
  const DeviceBuffer<std::byte> index(paged.blocks * index_page_bytes(kBlock, kIndexDim));
  WriteCacheCall call;
  call.latent = contiguous<const bfloat16>(latent.data(), tokens, kWidth);
  call.index_k = contiguous<const fp8_e4m3>(keys.data(), tokens, kIndexDim);
  call.index_k_scale = contiguous<const float>(scales.data(), tokens);
  call.slot_mapping = contiguous<const std::int64_t>(slot_mapping.data(), tokens);
  call.latent_cache = paged.cache;
  call.index_cache = make_index_key_cache(index.data(), paged.blocks, kBlock, kIndexDim);
  measure(state, write_cache_operation(),
          WriteCacheProblem{tokens, format, kLora, kRope, kIndexDim}, call,
          static_cast<double>(tokens * (2 * kWidth + latent_row_bytes(format, kLora, kRope) +
                                        2 * (kIndexDim + 4) + 8)));
}

void init_partial(benchmark::State& state, std::int32_t rows, int heads) {
  const DeviceBuffer<float> out(std::int64_t{rows} * heads * kValue),
      lse(std::int64_t{heads} * rows);
  const DeviceBuffer<TokenRange> ranges(std::vector<TokenRange>{{0, rows / 2}, {rows / 2, rows}});
  InitPartialCall call;
  call.ranges = ranges.span();
  call.running = {contiguous(out.data(), rows, heads, kValue), contiguous(lse.data(), heads, rows)};
  measure(state, init_partial_operation(), InitPartialProblem{heads, kValue, rows}, call,
          4.0 * static_cast<double>(out.size() + lse.size()));
}

void rotary(benchmark::State& state, RotaryLayout layout, std::int64_t rows, int heads) {
  const DeviceBuffer<bfloat16> data(rows * heads * kRope);
  fill_normal(data, 1, 0);
  const DeviceBuffer<float> table(rows * kRope);
  fill_normal(table, 1, 1);
  std::vector<std::int64_t> places(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int64_t>(i);
  const DeviceBuffer<std::int64_t> positions(places);
  RotaryProblem problem(layout);
  problem.dims = kRope;
  problem.max_rows = rows;
  RotaryCall call;
  call.in = contiguous<const bfloat16>(data.data(), rows, heads, kRope);
  call.out = contiguous(data.data(), rows, heads, kRope);
  call.positions = contiguous<const std::int64_t>(positions.data(), rows);
  call.table = contiguous<const float>(table.data(), rows, kRope);
  measure(state, rotary_operation(), problem, call,
          static_cast<double>(rows) * (4.0 * heads * kRope + 4.0 * kRope + 8));
}

void hadamard(benchmark::State& state, std::int64_t rows, int heads) {
  const DeviceBuffer<bfloat16> in(rows * heads * kIndexDim), out(rows * heads * kIndexDim);
  fill_normal(in, 1, 0);
  HadamardCall call;
  call.in = contiguous<const bfloat16>(in.data(), rows, heads, kIndexDim);
  call.out = contiguous(out.data(), rows, heads, kIndexDim);
  measure(state, hadamard_operation(), HadamardProblem{kIndexDim, rows}, call,
          4.0 * static_cast<double>(in.size()));
}

[[maybe_unused]] const bool registered = [] {
  constexpr int kTopk = 2048;
  for (const std::int64_t megabytes : {20, 40, 80, 120, 160, 200, 300})
    register_gpu_bench("copy/MB:" + std::to_string(megabytes),
                       [=](benchmark::State& state) { copy(state, megabytes); });
  for (const int heads : {16, 32, 64, 128})
    for (const OutputType type : {OutputType::f32, OutputType::bf16, OutputType::fp8})
      register_gpu_bench("merge/tokens:8192/heads:" + std::to_string(heads) + "/" + to_string(type),
                         [=](benchmark::State& state) { merge(state, 8192, heads, type); });
  for (const std::int64_t rows : {65536, 131072})
    for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8})
      register_gpu_bench("gather/rows:" + std::to_string(rows) + "/" + to_string(format),
                         [=](benchmark::State& state) { gather(state, format, rows); });
  for (const std::int32_t rows : {513, 8192, 16384})
    for (const bool ascending : {true, false})
      register_gpu_bench(
          "build_masks/rows:" + std::to_string(rows) + "/keys:32768/" +
              (ascending ? "ascending" : "scattered"),
          [=](benchmark::State& state) { build_masks(state, rows, 32768, kTopk, ascending); });
  register_gpu_bench("map_slots/tokens:8192",
                     [](benchmark::State& state) { map_slots(state, 8192, kTopk); });
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8})
    register_gpu_bench("write_cache/tokens:8192/" + to_string(format),
                       [=](benchmark::State& state) { write_cache(state, format, 8192); });
  register_gpu_bench("init_partial/rows:8192/heads:128",
                     [](benchmark::State& state) { init_partial(state, 8192, 128); });
  for (const RotaryLayout layout : {RotaryLayout::half_split, RotaryLayout::interleaved})
    register_gpu_bench("rotary/rows:8192/heads:64/" + to_string(layout),
                       [=](benchmark::State& state) { rotary(state, layout, 8192, 64); });
  register_gpu_bench("hadamard/rows:8192/heads:64",
                     [](benchmark::State& state) { hadamard(state, 8192, 64); });
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
