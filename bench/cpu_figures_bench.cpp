// The CPU backend's figures: each compares our routine with a yardstick of the same machine in the
// same run, as a ratio of interleaved medians. Counters: `figure` (the number that counts), `must`
// and `goal` (its bounds), `at_least` (1: bounds from below, 0: from above), and the times behind
// it. bench/figures.py makes the table.
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include <benchmark/benchmark.h>
#include <cblas.h>

#include "sparse_mla/attention.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/metadata.h"
#include "sparse_mla/random.h"
#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"

#include "bench/support/interleaved.h"
#include "tests/support/score_data.h"

namespace sparse_mla::bench {
namespace {

Dispatch cpu() {
  Dispatch dispatch;
  dispatch.backend = Backend::cpu;
  return dispatch;
}

Dispatch cpu(const std::string& force) {
  Dispatch dispatch = cpu();
  dispatch.force(force);
  return dispatch;
}

enum class Bound { at_least, at_most };

void report(benchmark::State& state, double figure, Bound bound, double must, double goal) {
  state.counters["figure"] = figure;
  state.counters["at_least"] = bound == Bound::at_least;
  state.counters["must"] = must;
  state.counters["goal"] = goal;
}

std::vector<bfloat16> normal_bf16(std::int64_t count, std::uint64_t stream, float scale = 1) {
  std::vector<bfloat16> values(count);
#pragma omp parallel for
  for (std::int64_t i = 0; i < count; ++i)
    values[i] = __float2bfloat16_rn(scale * random_normal(1, stream, i));
  return values;
}

/// OpenBLAS's own sgemm, all threads: the yardstick of matrix work.
class Sgemm {
 public:
  Sgemm() : a_(kSize * kSize), b_(kSize * kSize), c_(kSize * kSize) {
    for (std::int64_t i = 0; i < kSize * kSize; ++i) {
      a_[i] = random_normal(1, 90, i);
      b_[i] = random_normal(1, 91, i);
    }
  }
  void operator()() {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0f, a_.data(),
                kSize, b_.data(), kSize, 0.0f, c_.data(), kSize);
    benchmark::DoNotOptimize(c_.data());
  }
  static constexpr double flops() { return 2.0 * kSize * kSize * kSize; }

 private:
  static constexpr int kSize = 1536;
  std::vector<float> a_, b_, c_;
};

// Planning and all metadata of a mixed batch, one core.
void plan_metadata(benchmark::State& state) {
  const auto requests = static_cast<int>(state.range(0));
  std::mt19937 random(1);
  std::vector<std::int32_t> query(requests), context(requests);
  for (int i = 0; i < requests; ++i) {
    query[i] = random() % 2 == 0 ? 1 : static_cast<std::int32_t>(1 + random() % 60);
    context[i] = static_cast<std::int32_t>(random() % 8 == 0   ? 0
                                           : random() % 4 == 0 ? random() % 60000
                                                               : random() % 4000);
  }
  Limits limits;
  limits.max_num_seqs = requests;
  limits.max_num_tokens = 64 * requests;
  const Capacity capacity(limits, cpu());
  BatchOptions options;
  options.path = AttentionPath::masked;  // plan, masks and score pieces: the most there is to do
  std::vector<std::byte> arena(std::size_t{4} << 20);  // used again and again, as an engine does
  for (auto _ : state) {
    Interleaved timing;
    std::size_t chunks = 0;
    timing.add([&] {
      const BatchMetadata batch(capacity, query, context, options, {}, arena);
      chunks = batch.plan().chunks.size();
      benchmark::DoNotOptimize(batch.arena().data());
    });
    timing.run(201);
    state.counters["chunks"] = static_cast<double>(chunks);
    const double per_thousand = timing.median(0) * 1e6 * 1024 / requests;
    report(state, per_thousand, Bound::at_most, 200, 50);
  }
}
BENCHMARK(plan_metadata)
    ->Name("plan_metadata_us_per_1024")
    ->Arg(256)
    ->Arg(1024)
    ->Arg(4096)
    ->Iterations(1);

// The default selector against nth_element on packed pairs and a full sort, same threads.
void select_ratio(benchmark::State& state, support::ScoreData data, const char* against,
                  double must, double goal) {
  constexpr std::int64_t kRows = 64, kLen = 131072;
  constexpr int kK = 2048;
  std::vector<float> scores(kRows * kLen);
  for (std::int64_t row = 0; row < kRows; ++row)
    support::fill_scores(data, std::span(scores).subspan(row * kLen, kLen), 1,
                         static_cast<std::uint64_t>(row));
  std::vector<std::int32_t> picks(kRows * kK);
  SelectCall call;
  call.scores = {scores.data(), ScoreType::f32, kRows, kLen, kLen, nullptr};
  call.indices = contiguous(picks.data(), kRows, kK);
  const SelectProblem problem = problem_of(call);
  const auto work = [&](const Dispatch& dispatch) {
    const auto& entry = select_operation().choose(problem, dispatch);
    auto workspace = std::make_shared<HostWorkspace>(entry.workspace_bytes(problem));
    return [&, workspace] {
      select_operation().run(entry, problem, call, workspace->span(), nullptr);
      benchmark::DoNotOptimize(picks.data());
    };
  };
  for (auto _ : state) {
    Interleaved timing;
    const std::size_t ours = timing.add(work(cpu()));
    const std::size_t other = timing.add(work(cpu(std::string("select:") + against)));
    timing.run(5);
    state.counters["ours_ms"] = timing.median(ours) * 1e3;
    state.counters["other_ms"] = timing.median(other) * 1e3;
    report(state, timing.median(other) / timing.median(ours), Bound::at_least, must, goal);
  }
}
BENCHMARK_CAPTURE(select_ratio, nth_element_normal, support::ScoreData::normal, "cpu_nth_element",
                  2, 4)
    ->Name("topk_speedup_over_nth_element/normal")
    ->Iterations(1);
BENCHMARK_CAPTURE(select_ratio, nth_element_ties, support::ScoreData::ties, "cpu_nth_element", 2, 4)
    ->Name("topk_speedup_over_nth_element/ties")
    ->Iterations(1);
BENCHMARK_CAPTURE(select_ratio, sort_normal, support::ScoreData::normal, "cpu_sort", 10, 10)
    ->Name("topk_speedup_over_full_sort/normal")
    ->Iterations(1);

// Masked MHA, 192/128 wide, every bit set or every other tile empty.
struct MhaProblem {
  static constexpr int kHeads = 4, kQueries = 512, kKeys = 2048;
  std::vector<bfloat16> q = normal_bf16(std::int64_t{kQueries} * kHeads * 192, 1);
  std::vector<bfloat16> kv = normal_bf16(std::int64_t{kKeys} * kHeads * 256, 2);
  std::vector<bfloat16> k_pe = normal_bf16(std::int64_t{kKeys} * 64, 3);
  std::vector<float> out = std::vector<float>(std::size_t{kQueries} * kHeads * 128);
  std::vector<float> lse = std::vector<float>(std::size_t{kQueries} * kHeads);
  std::vector<ChunkMember> members;
  MaskLayout layout;
  std::vector<std::uint32_t> words;
  std::vector<std::int32_t> counts, ids;
  AttendCall call;
  AttendProblem problem;

  explicit MhaProblem(bool checkerboard) {
    ChunkMember member;
    member.query_len = kQueries;
    member.context_len = kKeys;
    member.num_keys = kKeys;
    members.push_back(member);
    layout = plan_masks(members, MaskScope::per_chunk, {});
    words.assign(layout.num_words, 0);
    counts.assign(layout.num_tile_counts, 0);
    ids.assign(layout.num_tile_ids, 0);
    const MaskMember& mask = layout.members[0];
    for (int row = 0; row < kQueries; ++row)
      for (int key = 0; key < kKeys; ++key) {
        const bool empty = checkerboard && (row / layout.tile.queries + key / layout.tile.keys) % 2;
        if (!empty)
          words[mask.word_offset + std::int64_t{row} * mask.row_words + key / 32] |= 1u << key % 32;
      }
    for (int tile = 0; tile < kQueries / layout.tile.queries; ++tile)
      for (int t = 0; t < mask.max_tiles; ++t)
        if (!checkerboard || (tile + t) % 2 == 0)
          ids[mask.tile_offset + tile * mask.max_tiles + counts[tile]++] = t;
    call.q = contiguous(static_cast<const bfloat16*>(q.data()), kQueries, kHeads, 192);
    call.k_nope =
        strided<const bfloat16, 3>(kv.data(), {kKeys, kHeads, 128}, {kHeads * 256, 256, 1});
    call.v =
        strided<const bfloat16, 3>(kv.data() + 128, {kKeys, kHeads, 128}, {kHeads * 256, 256, 1});
    call.k_pe = contiguous(static_cast<const bfloat16*>(k_pe.data()), kKeys, 64);
    call.members = members;
    call.mask = {layout.tile, layout.members, words.data(), counts.data(), ids.data()};
    call.softmax_scale = 0.0721688f;
    call.running.out = contiguous(out.data(), kQueries, kHeads, 128);
    call.running.lse = contiguous(lse.data(), kHeads, kQueries);
    problem = {kHeads, 128, 64, 128, AttendMode::masked, kQueries, kKeys};
  }
  static constexpr double flops() { return 2.0 * kHeads * kQueries * kKeys * (192 + 128); }
};

void masked_mha(benchmark::State& state) {
  MhaProblem full(false), half(true);
  Sgemm sgemm;
  const auto& entry = attend_operation().choose(full.problem, cpu());
  const HostWorkspace workspace(entry.workspace_bytes(full.problem));
  const auto work = [&](MhaProblem& p) {
    return [&] { attend_operation().run(entry, p.problem, p.call, workspace.span(), nullptr); };
  };
  for (auto _ : state) {
    Interleaved timing;
    const std::size_t yardstick = timing.add([&] { sgemm(); });
    const std::size_t whole = timing.add(work(full));
    const std::size_t halved = timing.add(work(half));
    timing.run(15);
    const double rate = MhaProblem::flops() / timing.median(whole);
    const double sgemm_rate = Sgemm::flops() / timing.median(yardstick);
    state.counters["mha_GFLOPs"] = rate * 1e-9;
    state.counters["sgemm_GFLOPs"] = sgemm_rate * 1e-9;
    if (state.range(0) == 0)
      report(state, rate / sgemm_rate, Bound::at_least, 0.5, 0.8);
    else
      report(state, timing.median(halved) / timing.median(whole), Bound::at_most, 0.6, 0.6);
  }
}
BENCHMARK(masked_mha)->Name("masked_mha_part_of_sgemm/full_mask")->Arg(0)->Iterations(1);
BENCHMARK(masked_mha)->Name("masked_mha_time_ratio/half_of_the_tiles_empty")->Arg(1)->Iterations(1);

// 2,048 of 32,768 keys against all of them, 64 tokens, 16 heads.
void sparse_mqa(benchmark::State& state) {
  constexpr int kTokens = 64, kHeads = 16, kKeys = 32768, kTopk = 2048;
  ModelDims dims;
  auto rows = normal_bf16(std::int64_t{kKeys} * 576, 11, 0.3f);
  const auto q = normal_bf16(std::int64_t{kTokens} * kHeads * 576, 12);
  std::vector<bfloat16> out(std::size_t{kTokens} * kHeads * 512);
  std::vector<float> lse(std::size_t{kTokens} * kHeads);
  const auto slots = [&](int count) {
    std::vector<std::int32_t> all(std::size_t{kTokens} * count);
    std::mt19937 random(5);
    std::vector<std::int32_t> order(kKeys);
    std::iota(order.begin(), order.end(), 0);
    for (int token = 0; token < kTokens; ++token) {
      std::shuffle(order.begin(), order.end(), random);
      std::copy_n(order.begin(), count, all.begin() + std::int64_t{token} * count);
    }
    return all;
  };
  const auto few = slots(kTopk), all = slots(kKeys);
  SparseMqaCall call;
  call.q = contiguous(q.data(), kTokens, kHeads, 576);
  call.cache = make_latent_cache(CacheFormat::bf16, std::as_writable_bytes(std::span(rows)),
                                 kKeys / 64, 64, dims);
  call.softmax_scale = 0.0721688f;
  call.out = contiguous(out.data(), kTokens, kHeads, 512);
  call.lse = contiguous(lse.data(), kHeads, kTokens);
  const auto work = [&](const std::vector<std::int32_t>& chosen, int count) {
    SparseMqaProblem problem;
    problem.num_heads = kHeads;
    problem.topk = count;
    problem.max_tokens = kTokens;
    const auto& entry = sparse_mqa_operation().choose(problem, cpu());
    auto workspace = std::make_shared<HostWorkspace>(entry.workspace_bytes(problem));
    SparseMqaCall mine = call;
    mine.slots = contiguous(chosen.data(), kTokens, count);
    return [=, &entry] {
      sparse_mqa_operation().run(entry, problem, mine, workspace->span(), nullptr);
    };
  };
  for (auto _ : state) {
    Interleaved timing;
    const std::size_t selected = timing.add(work(few, kTopk));
    const std::size_t whole = timing.add(work(all, kKeys));
    timing.run(3);
    state.counters["selected_ms"] = timing.median(selected) * 1e3;
    state.counters["all_keys_ms"] = timing.median(whole) * 1e3;
    report(state, timing.median(selected) / timing.median(whole), Bound::at_most, 0.125, 0.125);
  }
}
BENCHMARK(sparse_mqa)->Name("sparse_mqa_time_ratio/2048_of_32768_keys")->Iterations(1);

// Indexer scores against sgemm: 64 heads of width 128.
void indexer(benchmark::State& state) {
  constexpr int kRows = 64, kKeys = 8192, kHeads = 64, kDim = 128;
  std::vector<fp8_e4m3> q(std::size_t{kRows} * kHeads * kDim);
  std::vector<float> weights(std::size_t{kRows} * kHeads), scores(std::size_t{kRows} * kKeys);
  std::vector<std::byte> pages(kKeys / 64 * index_page_bytes(64, kDim));
  IndexKeyCache cache = make_index_key_cache(pages.data(), kKeys / 64, 64, kDim);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = fp8_e4m3(20 * random_normal(1, 21, i));
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = random_normal(1, 22, i);
  const float scale = 0.01f;
  for (std::int64_t key = 0; key < kKeys; ++key) {
    for (int i = 0; i < kDim; ++i) {
      const fp8_e4m3 value(20 * random_normal(1, 23, key * kDim + i));
      std::memcpy(cache.key(key) + i, &value, 1);
    }
    std::memcpy(cache.scale(key), &scale, 4);
  }
  std::vector<std::int32_t> table(kKeys / 64);
  std::iota(table.begin(), table.end(), 0);
  ScoreMember member;
  member.num_rows = kRows;
  member.first_position = kKeys - kRows;
  member.row_keys = kKeys;
  IndexerCall call;
  call.index_q = contiguous(static_cast<const fp8_e4m3*>(q.data()), kRows, kHeads, kDim);
  call.index_weights = contiguous(static_cast<const float*>(weights.data()), kRows, kHeads);
  call.cache = cache;
  call.block_tables = contiguous(static_cast<const std::int32_t*>(table.data()), 1, kKeys / 64);
  call.members = {&member, 1};
  call.scores = scores.data();
  const IndexerProblem problem{kHeads, kDim, kRows, kKeys};
  const auto& entry = indexer_scores_operation().choose(problem, cpu());
  const HostWorkspace workspace(entry.workspace_bytes(problem));
  Sgemm sgemm;
  const double flops = 2.0 * kHeads * kDim * kRows * (kKeys - kRows / 2.0);
  for (auto _ : state) {
    Interleaved timing;
    const std::size_t yardstick = timing.add([&] { sgemm(); });
    const std::size_t ours = timing.add(
        [&] { indexer_scores_operation().run(entry, problem, call, workspace.span(), nullptr); });
    timing.run(15);
    const double rate = flops / timing.median(ours);
    const double sgemm_rate = Sgemm::flops() / timing.median(yardstick);
    state.counters["indexer_GFLOPs"] = rate * 1e-9;
    state.counters["sgemm_GFLOPs"] = sgemm_rate * 1e-9;
    report(state, rate / sgemm_rate, Bound::at_least, 0.4, 0.7);
  }
}
BENCHMARK(indexer)->Name("indexer_scores_part_of_sgemm")->Iterations(1);

}  // namespace
}  // namespace sparse_mla::bench
