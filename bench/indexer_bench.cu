// The lightning indexer on a GPU: scores alone, and scores with the selection. 64 heads × 128,
// pages of 64 keys in random places. Ragged: one request, row i of q sees keys 0 … kv − q + i.
// Paged: one row per request, over all its keys, with the L2 cache as the last launch left it and
// flushed.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "sparse_mla/indexer.h"

#include "bench/support/gpu.cuh"
#include "bench/support/prepared.cuh"

namespace sparse_mla::bench {
namespace {

constexpr int kHeads = 64, kHeadDim = 128, kTopk = 2048;
constexpr int kBlockSize = 64, kBlockBytes = kBlockSize * (kHeadDim + 4);

/// Byte i of pages: e4m3 keys, then one fp32 scale per key.
struct MakePageByte {
  __device__ std::byte operator()(std::int64_t i) const {
    const auto offset = static_cast<int>(i % kBlockBytes);
    if (offset >= kBlockSize * kHeadDim) {
      const std::uint32_t scale = __float_as_uint(0.01f);
      return static_cast<std::byte>(scale >> (8 * (offset % 4)) & 0xFFu);
    }
    return static_cast<std::byte>(fp8_e4m3(random_normal(3, 0, static_cast<std::uint64_t>(i))).__x);
  }
};

/// Requests of `rows` new tokens each, the last of `keys` tokens.
class IndexerInputs {
 public:
  IndexerInputs(std::int64_t requests, std::int64_t rows, std::int64_t keys)
      : tokens_(requests * rows), keys_(keys), blocks_((keys + kBlockSize - 1) / kBlockSize) {
    q_ = DeviceBuffer<fp8_e4m3>(tokens_ * kHeads * kHeadDim);
    weights_ = DeviceBuffer<float>(tokens_ * kHeads);
    pages_ = DeviceBuffer<std::byte>(requests * blocks_ * kBlockBytes);
    fill_normal(q_, 1, 0);
    fill_normal(weights_, 2, 0, 0.1f);
    fill(pages_, MakePageByte{});
    std::vector<std::int32_t> table(static_cast<std::size_t>(requests * blocks_));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    tables_ = DeviceBuffer<std::int32_t>(table);

    std::vector<ScoreMember> members;
    for (std::int64_t i = 0; i < requests; ++i) {
      ScoreMember member;
      member.request = static_cast<std::int32_t>(i);
      member.query_start = member.first_row = static_cast<std::int32_t>(i * rows);
      member.num_rows = static_cast<std::int32_t>(rows);
      member.first_position = static_cast<std::int32_t>(keys - rows);
      member.row_keys = static_cast<std::int32_t>(keys);
      member.score_offset = i * rows * keys;
      members.push_back(member);
    }
    members_ = DeviceBuffer<ScoreMember>(members);
    call_.index_q = contiguous<const fp8_e4m3>(q_.data(), tokens_, kHeads, kHeadDim);
    call_.index_weights = contiguous<const float>(weights_.data(), tokens_, kHeads);
    call_.cache = make_index_key_cache(pages_.data(), requests * blocks_, kBlockSize, kHeadDim);
    call_.block_tables = contiguous<const std::int32_t>(tables_.data(), requests, blocks_);
    call_.members = members_.span();
    // Σ of the keys that the rows see.
    seen_ = requests * (rows * (keys - rows) + rows * (rows + 1) / 2);
  }

  const IndexerCall& call() const { return call_; }
  IndexerProblem problem() const { return {kHeads, kHeadDim, tokens_, keys_}; }
  std::int64_t num_scores() const { return tokens_ * keys_; }
  std::int64_t tokens() const { return tokens_; }
  double flops() const { return 2.0 * kHeads * kHeadDim * static_cast<double>(seen_); }
  /// Every key and its scale once.
  double key_bytes() const {
    return static_cast<double>(call_.block_tables.extent(0) * keys_ * 132);
  }

 private:
  std::int64_t tokens_, keys_, blocks_, seen_ = 0;
  DeviceBuffer<fp8_e4m3> q_;
  DeviceBuffer<float> weights_;
  DeviceBuffer<std::byte> pages_;
  DeviceBuffer<std::int32_t> tables_;
  DeviceBuffer<ScoreMember> members_;
  IndexerCall call_;
};

void scores(benchmark::State& state, std::int64_t requests, std::int64_t rows, std::int64_t keys,
            bool flush_l2) {
  const IndexerInputs inputs(requests, rows, keys);
  const IndexerProblem problem = inputs.problem();
  const Prepared<IndexerProblem, IndexerCall> prepared(indexer_scores_operation(), problem);
  const DeviceBuffer<float> out(inputs.num_scores());
  IndexerCall call = inputs.call();
  call.scores = out.data();
  const GpuTimes times = time_on_gpu(state, [&](int, Stream stream) { prepared.run(call, stream); },
                                     {.flush_l2 = flush_l2});
  state.SetLabel(prepared.name());
  count_flops(state, times, inputs.flops());
  count_bytes(state, times, inputs.key_bytes());
}

void scores_and_selection(benchmark::State& state, std::int64_t requests, std::int64_t rows,
                          std::int64_t keys) {
  const IndexerInputs inputs(requests, rows, keys);
  SelectFromIndexerProblem problem;
  problem.indexer = inputs.problem();
  problem.topk = kTopk;
  problem.max_scores = inputs.num_scores();
  problem.dispatch = Dispatch::from_environment();
  const Prepared<SelectFromIndexerProblem, SelectFromIndexerCall> prepared(
      select_from_indexer_operation(), problem);
  const DeviceBuffer<std::int32_t> picks(inputs.tokens() * kTopk);
  SelectFromIndexerCall call;
  call.indexer = inputs.call();
  call.piece = {0, static_cast<std::int32_t>(requests), static_cast<std::int32_t>(inputs.tokens()),
                static_cast<std::int32_t>(keys), inputs.num_scores()};
  call.picks = contiguous(picks.data(), inputs.tokens(), kTopk);
  const GpuTimes times =
      time_on_gpu(state, [&](int, Stream stream) { prepared.run(call, stream); });
  state.SetLabel(prepared.name());
  count_flops(state, times, inputs.flops());
}

std::string shape_name(const char* kind, std::int64_t rows, std::int64_t keys) {
  return std::string(kind) + "/" + std::to_string(rows) + "x" + std::to_string(keys);
}

[[maybe_unused]] const bool registered = [] {
  for (const std::int64_t rows : {2048, 4096})
    for (const std::int64_t keys : {8192, 32768, 131072}) {
      register_gpu_bench(
          "indexer_scores/" + shape_name("ragged", rows, keys),
          [=](benchmark::State& state) { scores(state, 1, rows, keys, false); }, 20);
      register_gpu_bench(
          "select_from_indexer/" + shape_name("ragged", rows, keys),
          [=](benchmark::State& state) { scores_and_selection(state, 1, rows, keys); }, 10);
    }
  constexpr std::pair<std::int64_t, std::int64_t> kDecodes[] = {
      {1, 8192}, {1, 32768}, {1, 131072}, {32, 32768}, {64, 65536}, {128, 131072}};
  for (const auto& [requests, keys] : kDecodes) {
    for (const bool flush_l2 : {false, true})
      register_gpu_bench(
          "indexer_scores/" + shape_name("paged", requests, keys) + (flush_l2 ? "/cold" : ""),
          [requests = requests, keys = keys, flush_l2](benchmark::State& state) {
            scores(state, requests, 1, keys, flush_l2);
          });
    register_gpu_bench("select_from_indexer/" + shape_name("paged", requests, keys),
                       [requests = requests, keys = keys](benchmark::State& state) {
                         scores_and_selection(state, requests, 1, keys);
                       });
  }
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
