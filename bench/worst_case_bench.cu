// One long request beside 31 short ones (513 new tokens each; contexts of 60,000 and 31 × 16 rows;
// 16 heads, pages of 16 rows, a workspace of 65,536): the whole context path – gather,
// up-projection, attention, accumulation – under both schedules, with the same kernels.
//
//   packed                one chunk; attention writes the running partial
//   equal_split           the baseline: in every pass the same kernels over all requests, then one
//                         merge of all tokens
//   equal_split_fused     the strongest form of the baseline: only requests with rows left, and
//                         attention merges by itself
//   packed_gather, …      the packed schedule's kernels alone, for the sum that `packed` is held to
#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/planner.h"
#include "sparse_mla/workspace.h"

#include "bench/support/gpu.cuh"
#include "bench/support/prepared.cuh"

namespace sparse_mla::bench {
namespace {

constexpr int kHeads = 16, kLora = 512, kRope = 64, kNope = 128, kValue = 128, kTopk = 2048;
constexpr std::int32_t kRequests = 32, kQueryLen = 513, kBlock = 16, kRows = 65536;
constexpr std::int32_t kLongContext = 60000, kShortContext = 16;

/// One pass over members of the context, ready to launch.
struct Pass {
  std::int64_t num_rows = 0;
  std::int64_t merge_row_end = 0;
  DeviceBuffer<ChunkMember> members;
  DeviceBuffer<MaskMember> masks;
};

class ContextPath {
 public:
  explicit ContextPath(AttendMode mode)
      : mode_(mode),
        gather_(gather_operation(), {kRows, CacheFormat::bf16, kLora, kRope}),
        up_project_(up_project_operation(), {kHeads, kLora, kNope + kValue, kRows}),
        attend_(attend_operation(),
                {kHeads, kNope, kRope, kValue, mode, kRequests * kQueryLen, kRows}),
        merge_(merge_operation(), {kHeads, kValue, kRequests * kQueryLen, OutputType::f32}) {
    query_lens_.assign(kRequests, kQueryLen);
    context_lens_.assign(kRequests, kShortContext);
    context_lens_[0] = kLongContext;
    std::int32_t pages = 0;
    const std::int32_t columns = (kLongContext + kQueryLen + kBlock - 1) / kBlock;
    std::vector<std::int32_t> tables(static_cast<std::size_t>(kRequests * columns), 0);
    for (std::int32_t r = 0; r < kRequests; ++r) {
      suffix_.push_back({r, r * kQueryLen, kQueryLen, r * kQueryLen, context_lens_[r],
                         context_lens_[r], kQueryLen, r * kQueryLen});
      for (std::int32_t c = 0; c * kBlock < context_lens_[r] + kQueryLen; ++c)
        tables[static_cast<std::size_t>(r * columns + c)] = pages++;
    }
    block_tables_ = DeviceBuffer<std::int32_t>(tables);
    const std::int64_t row_bytes = 2 * (kLora + kRope), tokens = kRequests * kQueryLen;
    cache_values_ = DeviceBuffer<bfloat16>(std::int64_t{pages} * kBlock * (kLora + kRope));
    fill_normal(cache_values_, 1, 0);
    cache_.data = reinterpret_cast<std::byte*>(cache_values_.data());
    cache_.num_blocks = pages;
    cache_.block_size = kBlock;
    cache_.row_stride = row_bytes;
    cache_.block_stride = kBlock * row_bytes;
    q_ = DeviceBuffer<bfloat16>(tokens * kHeads * (kNope + kRope));
    fill_normal(q_, 1, 1);
    weights_ = DeviceBuffer<bfloat16>(std::int64_t{kHeads} * (kNope + kValue) * kLora);
    fill_normal(weights_, 1, 2, 1 / std::sqrt(float{kLora}));
    rows_ = DeviceBuffer<bfloat16>(std::int64_t{kRows} * (kLora + kRope));
    kv_ = DeviceBuffer<bfloat16>(std::int64_t{kRows} * kHeads * (kNope + kValue));
    for (DeviceBuffer<float>* out : {&running_out_, &chunk_out_})
      *out = DeviceBuffer<float>(tokens * kHeads * kValue);
    for (DeviceBuffer<float>* lse : {&running_lse_, &chunk_lse_})
      *lse = DeviceBuffer<float>(tokens * kHeads);
    if (mode_ == AttendMode::masked) build_masks();
  }

  std::vector<Pass> passes(Schedule schedule, bool drop_empty) const {
    const PlannerOptions options{kRows, kBlock};
    const ContextPlan plan = schedule == Schedule::packed
                                 ? plan_context_chunks(query_lens_, context_lens_, options)
                                 : plan_equal_split(query_lens_, context_lens_, options);
    std::vector<Pass> passes;
    for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
      std::vector<ChunkMember> members;
      std::vector<MaskMember> masks;
      for (std::int32_t i = 0; i < plan.chunks[c].num_members(); ++i) {
        ChunkMember member = suffix_[plan.chunks[c].request_begin + i];
        member.first_key = plan.starts(c)[i];
        member.num_keys = plan.seq_lens(c)[i];
        member.key_row = plan.cu_seq_lens(c)[i];
        if (drop_empty && member.num_keys == 0) continue;
        members.push_back(member);
        if (mode_ == AttendMode::masked)
          masks.push_back(layout_.members[plan.chunks[c].request_begin + i]);
      }
      Pass pass;
      pass.num_rows = plan.chunks[c].num_rows;
      // Every token that the pass touches has a partial from the first pass on.
      pass.merge_row_end = c == 0 ? 0 : kRequests * kQueryLen;
      pass.members = DeviceBuffer<ChunkMember>(members);
      pass.masks = DeviceBuffer<MaskMember>(masks);
      passes.push_back(std::move(pass));
    }
    return passes;
  }

  void gather(const Pass& pass, Stream stream) const {
    GatherCall call;
    call.cache = cache_;
    call.block_tables = contiguous<const std::int32_t>(block_tables_.data(), kRequests,
                                                       block_tables_.size() / kRequests);
    call.members = pass.members.span();
    call.rows = contiguous(rows_.data(), pass.num_rows, kLora + kRope);
    gather_.run(call, stream);
  }

  void up_project(const Pass& pass, Stream stream) const {
    UpProjectCall call;
    call.latent = contiguous<const bfloat16>(rows_.data(), pass.num_rows, kLora + kRope);
    call.kv_b_proj = contiguous<const bfloat16>(weights_.data(), kHeads, kNope + kValue, kLora);
    call.kv = contiguous(kv_.data(), pass.num_rows, kHeads, kNope + kValue);
    up_project_.run(call, stream);
  }

  void attend(const Pass& pass, bool into_running, bool fused_merge, Stream stream) const {
    const std::int64_t head_stride = kNope + kValue, row_stride = kHeads * head_stride;
    AttendCall call;
    call.q = contiguous<const bfloat16>(q_.data(), kRequests * kQueryLen, kHeads, kNope + kRope);
    call.k_nope = strided<const bfloat16, 3>(kv_.data(), {pass.num_rows, kHeads, kNope},
                                             {row_stride, head_stride, 1});
    call.v = strided<const bfloat16, 3>(kv_.data() + kNope, {pass.num_rows, kHeads, kValue},
                                        {row_stride, head_stride, 1});
    call.k_pe = strided<const bfloat16, 2>(rows_.data() + kLora, {pass.num_rows, kRope},
                                           {kLora + kRope, 1});
    call.members = pass.members.span();
    if (mode_ == AttendMode::masked)
      call.mask = {layout_.tile, pass.masks.span(), words_.data(), tile_counts_.data(),
                   tile_ids_.data()};
    call.softmax_scale = 1 / std::sqrt(float{kNope + kRope});
    call.running =
        into_running ? partial(running_out_, running_lse_) : partial(chunk_out_, chunk_lse_);
    call.merge_row_end = fused_merge ? pass.merge_row_end : 0;
    attend_.run(call, stream);
  }

  void merge(Stream stream) const {
    MergeCall call;
    call.a = partial(running_out_, running_lse_);
    call.b = partial(chunk_out_, chunk_lse_);
    call.out_f32 = partial(running_out_, running_lse_).out;
    call.lse = partial(running_out_, running_lse_).lse;
    merge_.run(call, stream);
  }

  /// `fused`: attention merges into the running partial; else a merge of all tokens follows.
  void run(const std::vector<Pass>& passes, bool fused, Stream stream) const {
    for (const Pass& pass : passes) {
      gather(pass, stream);
      up_project(pass, stream);
      attend(pass, fused, fused, stream);
      if (!fused) merge(stream);
    }
  }

  /// Runs and waits.
  void run_once(const std::vector<Pass>& passes, bool fused) const {
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    run(passes, fused, stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    cudaStreamDestroy(stream);
  }

  /// The running partial's state before a baseline run that merges from the first pass on.
  void clear_running() const {
    const std::vector<float> empty(static_cast<std::size_t>(running_lse_.size()), -HUGE_VALF);
    cuda::check(
        cudaMemcpy(running_lse_.data(), empty.data(), running_lse_.bytes(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
    cuda::check(cudaMemset(running_out_.data(), 0, running_out_.bytes()), "cudaMemset");
  }

  std::vector<float> running_lse() const { return running_lse_.to_host(); }

 private:
  static Partial partial(const DeviceBuffer<float>& out, const DeviceBuffer<float>& lse) {
    return {contiguous(out.data(), kRequests * kQueryLen, kHeads, kValue),
            contiguous(lse.data(), kHeads, kRequests * kQueryLen)};
  }

  /// Each token's picks: one of every stretch of its keys, all of them where they are few.
  void build_masks() {
    layout_ = plan_masks(suffix_, MaskScope::global, {});
    std::vector<std::int32_t> picks(static_cast<std::size_t>(kRequests * kQueryLen) * kTopk, -1);
    for (const ChunkMember& member : suffix_)
      for (std::int32_t j = 0; j < kQueryLen; ++j) {
        const std::int64_t keys = member.context_len + j + 1, token = member.query_start + j;
        for (std::int64_t i = 0; i < std::min<std::int64_t>(keys, kTopk); ++i) {
          const std::int64_t begin = keys <= kTopk ? i : i * keys / kTopk;
          const std::int64_t end = keys <= kTopk ? i + 1 : (i + 1) * keys / kTopk;
          picks[static_cast<std::size_t>(token * kTopk + i)] =
              static_cast<std::int32_t>(begin + random_bits(9, static_cast<std::uint64_t>(token),
                                                            static_cast<std::uint64_t>(i)) %
                                                    (end - begin));
        }
      }
    const DeviceBuffer<std::int32_t> device_picks(picks);
    const DeviceBuffer<ChunkMember> members(suffix_);
    const DeviceBuffer<MaskMember> masks(layout_.members);
    words_ = DeviceBuffer<std::uint32_t>(layout_.num_words);
    tile_counts_ = DeviceBuffer<std::int32_t>(layout_.num_tile_counts);
    tile_ids_ = DeviceBuffer<std::int32_t>(layout_.num_tile_ids);
    const Prepared<BuildMasksProblem, BuildMasksCall> build(build_masks_operation(),
                                                            {layout_.num_words, kTopk});
    BuildMasksCall call;
    call.picks = contiguous<const std::int32_t>(device_picks.data(), kRequests * kQueryLen, kTopk);
    call.members = members.span();
    call.mask = {layout_.tile, masks.span(), words_.data(), tile_counts_.data(), tile_ids_.data()};
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    build.run(call, stream);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    cudaStreamDestroy(stream);
  }

  AttendMode mode_;
  Prepared<GatherProblem, GatherCall> gather_;
  Prepared<UpProjectProblem, UpProjectCall> up_project_;
  Prepared<AttendProblem, AttendCall> attend_;
  Prepared<MergeProblem, MergeCall> merge_;
  std::vector<std::int32_t> query_lens_, context_lens_;
  std::vector<ChunkMember> suffix_;
  DeviceBuffer<std::int32_t> block_tables_;
  DeviceBuffer<bfloat16> cache_values_, q_, weights_, rows_, kv_;
  LatentCache cache_;
  DeviceBuffer<float> running_out_, running_lse_, chunk_out_, chunk_lse_;
  MaskLayout layout_;
  DeviceBuffer<std::uint32_t> words_;
  DeviceBuffer<std::int32_t> tile_counts_, tile_ids_;
};

/// All benchmarks of a mode share one set of data.
const ContextPath& context_path(AttendMode mode) {
  static std::unique_ptr<ContextPath> path;
  static AttendMode held = mode;
  if (!path || held != mode) {
    path.reset();
    path = std::make_unique<ContextPath>(mode);
    held = mode;
  }
  return *path;
}

void require_same_lse(const std::vector<float>& a, const std::vector<float>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(a[i] - b[i]) < 1e-2f) && a[i] != b[i])
      throw std::runtime_error("the schedules disagree: lse " + std::to_string(a[i]) + " and " +
                               std::to_string(b[i]));
}

void register_mode(AttendMode mode) {
  const std::string name = "worst_case/" + to_string(mode) + "/";
  const auto add = [&](const std::string& part, auto&& launch) {
    register_gpu_bench(name + part, [mode, launch](benchmark::State& state) {
      launch(state, context_path(mode));
    });
  };
  add("packed", [](benchmark::State& state, const ContextPath& path) {
    const auto passes = path.passes(Schedule::packed, false);
    time_on_gpu(state, [&](int, Stream stream) { path.run(passes, true, stream); });
    state.counters["passes"] = static_cast<double>(passes.size());
  });
  add("equal_split", [](benchmark::State& state, const ContextPath& path) {
    // The schedules compute the same partial: seen before anything is timed.
    path.run_once(path.passes(Schedule::packed, false), true);
    const std::vector<float> expected = path.running_lse();
    const auto passes = path.passes(Schedule::equal_split, false);
    path.clear_running();
    path.run_once(passes, false);
    require_same_lse(expected, path.running_lse());
    path.clear_running();
    time_on_gpu(state, [&](int, Stream stream) { path.run(passes, false, stream); });
    state.counters["passes"] = static_cast<double>(passes.size());
  });
  add("equal_split_fused", [](benchmark::State& state, const ContextPath& path) {
    const auto passes = path.passes(Schedule::equal_split, true);
    time_on_gpu(state, [&](int, Stream stream) { path.run(passes, true, stream); });
    state.counters["passes"] = static_cast<double>(passes.size());
  });
  add("packed_gather", [](benchmark::State& state, const ContextPath& path) {
    const auto passes = path.passes(Schedule::packed, false);
    time_on_gpu(state, [&](int, Stream stream) { path.gather(passes[0], stream); });
  });
  add("packed_up_project", [](benchmark::State& state, const ContextPath& path) {
    const auto passes = path.passes(Schedule::packed, false);
    const auto times =
        time_on_gpu(state, [&](int, Stream stream) { path.up_project(passes[0], stream); });
    count_flops(state, times, 2.0 * passes[0].num_rows * kHeads * (kNope + kValue) * kLora);
  });
  add("packed_attend", [](benchmark::State& state, const ContextPath& path) {
    const auto passes = path.passes(Schedule::packed, false);
    const auto times =
        time_on_gpu(state, [&](int, Stream stream) { path.attend(passes[0], true, true, stream); });
    count_flops(state, times,
                2.0 * kQueryLen * passes[0].num_rows * kHeads * (kNope + kRope + kValue));
  });
  add("merge_all_tokens", [](benchmark::State& state, const ContextPath& path) {
    path.clear_running();
    const auto times = time_on_gpu(state, [&](int, Stream stream) { path.merge(stream); });
    count_bytes(state, times, 3.0 * kRequests * kQueryLen * kHeads * (kValue + 1) * 4);
  });
}

[[maybe_unused]] const bool registered = [] {
  register_mode(AttendMode::dense);
  register_mode(AttendMode::masked);
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
