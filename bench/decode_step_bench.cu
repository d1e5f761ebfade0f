// One layer's decode step as an engine replays it: caches written, keys scored, top 2,048 picked,
// mapped to slots, attended and projected, captured as one CUDA graph. DeepSeek-V3.2's widths, one
// token per request, pages of 64 in random order.
//
// Names: cache format/heads/requests x context. The L2 cache is flushed before every replay. The
// counters <stage>_us come from runs outside of the graph, each stage between two events, their
// gaps included.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sparse_mla/layer.h"

#include "bench/support/cache_bytes.cuh"
#include "bench/support/gpu.cuh"

namespace sparse_mla::bench {
namespace {

struct Case {
  CacheFormat format;
  int heads;
  std::int32_t requests, context;  ///< context: keys of each request, the new token's included
};

Limits limits_of(const Case& c) {
  Limits limits;
  limits.dims.num_heads = c.heads;
  limits.cache_format = c.format;
  limits.max_num_tokens = limits.max_num_seqs = c.requests;
  limits.max_model_len = c.context;
  return limits;
}

Dispatch cuda_only() {
  Dispatch dispatch = Dispatch::from_environment();
  dispatch.backend = Backend::cuda;
  return dispatch;
}

BatchOptions padded() {
  BatchOptions options;
  options.padded_query_len = 1;
  return options;
}

class Step {
 public:
  explicit Step(const Case& c)
      : limits_(limits_of(c)),
        capacity_(limits_, cuda_only()),
        batch_(capacity_, std::vector<std::int32_t>(static_cast<std::size_t>(c.requests), 1),
               std::vector<std::int32_t>(static_cast<std::size_t>(c.requests), c.context - 1),
               padded()) {
    const ModelDims& dims = limits_.dims;
    const std::int64_t tokens = c.requests;
    const std::int32_t block = limits_.block_size;
    const std::int64_t columns = (c.context + block - 1) / block, blocks = tokens * columns;

    std::vector<std::int32_t> pages(static_cast<std::size_t>(blocks));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
    std::vector<std::int64_t> slots;
    for (std::int64_t r = 0; r < tokens; ++r)
      slots.push_back(std::int64_t{pages[static_cast<std::size_t>((r + 1) * columns - 1)]} * block +
                      (c.context - 1) % block);
    block_tables_ = DeviceBuffer<std::int32_t>(pages);
    slots_ = DeviceBuffer<std::int64_t>(slots);

    const std::int64_t row_bytes = latent_row_bytes(c.format, dims);
    rows_ = DeviceBuffer<std::byte>(blocks * block * row_bytes);
    fill(rows_, MakeRowByte{c.format, dims.kv_lora_rank, row_bytes});
    const std::int64_t page_bytes = index_page_bytes(block, dims.index_head_dim);
    index_pages_ = DeviceBuffer<std::byte>(blocks * page_bytes);
    fill(index_pages_, MakeIndexByte{std::int64_t{block} * dims.index_head_dim, page_bytes});

    q_ = normal<bfloat16>(tokens * c.heads * dims.qk_head_dim(), 1, 0.3f);
    latent_ = normal<bfloat16>(tokens * dims.latent_dim(), 2, 1);
    index_q_ = normal<fp8_e4m3>(tokens * dims.index_n_heads * dims.index_head_dim, 3, 1);
    index_weights_ = normal<float>(tokens * dims.index_n_heads, 4, 0.1f);
    index_k_ = normal<fp8_e4m3>(tokens * dims.index_head_dim, 5, 1);
    index_k_scale_ =
        DeviceBuffer<float>(std::vector<float>(static_cast<std::size_t>(tokens), 0x1p-6f));
    weights_ = normal<bfloat16>(
        std::int64_t{c.heads} * (dims.qk_nope_head_dim + dims.v_head_dim) * dims.kv_lora_rank, 6,
        1 / std::sqrt(static_cast<float>(dims.kv_lora_rank)));
    picks_ = DeviceBuffer<std::int32_t>(tokens * dims.index_topk);
    out_ = DeviceBuffer<bfloat16>(tokens * c.heads * dims.v_head_dim);
    lse_ = DeviceBuffer<float>(tokens * c.heads);
    workspace_ = DeviceBuffer<std::byte>(static_cast<std::int64_t>(capacity_.workspace_bytes()));
    arena_ = DeviceBuffer<std::byte>(
        std::vector<std::byte>(batch_.arena().begin(), batch_.arena().end()));

    tensors_.q = contiguous<const bfloat16>(q_.data(), tokens, c.heads, dims.qk_head_dim());
    tensors_.latent = contiguous<const bfloat16>(latent_.data(), tokens, dims.latent_dim());
    tensors_.index_q = contiguous<const fp8_e4m3>(index_q_.data(), tokens, dims.index_n_heads,
                                                  dims.index_head_dim);
    tensors_.index_weights =
        contiguous<const float>(index_weights_.data(), tokens, dims.index_n_heads);
    tensors_.index_k = contiguous<const fp8_e4m3>(index_k_.data(), tokens, dims.index_head_dim);
    tensors_.index_k_scale = contiguous<const float>(index_k_scale_.data(), tokens);
    tensors_.slot_mapping = contiguous<const std::int64_t>(slots_.data(), tokens);
    tensors_.block_tables = contiguous<const std::int32_t>(block_tables_.data(), tokens, columns);
    tensors_.latent_cache = make_latent_cache(c.format, rows_.span(), blocks, block, dims);
    tensors_.index_cache =
        make_index_key_cache(index_pages_.data(), blocks, block, dims.index_head_dim);
    tensors_.kv_b_proj = contiguous<const bfloat16>(
        weights_.data(), c.heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank);
    tensors_.picks = contiguous(picks_.data(), tokens, dims.index_topk);
    tensors_.out = contiguous(out_.data(), tokens, c.heads, dims.v_head_dim);
    tensors_.lse = contiguous(lse_.data(), c.heads, tokens);
  }

  void run(Stream stream, RunOptions options = {}) const {
    options.arena = arena_.data();
    run_layer(capacity_, batch_, tensors_, workspace_.span(), stream, options);
  }

 private:
  template <class T>
  static DeviceBuffer<T> normal(std::int64_t size, std::uint64_t stream, float deviation) {
    DeviceBuffer<T> buffer(size);
    fill_normal(buffer, 9, stream, deviation);
    return buffer;
  }

  Limits limits_;
  Capacity capacity_;
  BatchMetadata batch_;
  DeviceBuffer<std::int32_t> block_tables_, picks_;
  DeviceBuffer<std::int64_t> slots_;
  DeviceBuffer<std::byte> rows_, index_pages_, workspace_, arena_;
  DeviceBuffer<bfloat16> q_, latent_, weights_, out_;
  DeviceBuffer<fp8_e4m3> index_q_, index_k_;
  DeviceBuffer<float> index_weights_, index_k_scale_, lse_;
  LayerTensors tensors_;
};

/// A step's graph.
class StepGraph {
 public:
  explicit StepGraph(const Step& step) {
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin of capture");
    step.run(stream);
    cudaGraph_t graph = nullptr;
    cuda::check(cudaStreamEndCapture(stream, &graph), "end of capture");
    cuda::check(cudaGraphGetNodes(graph, nullptr, &num_nodes_), "cudaGraphGetNodes");
    cuda::check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
  ~StepGraph() { cudaGraphExecDestroy(executable_); }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  void launch(Stream stream) const {
    cuda::check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }
  std::size_t num_nodes() const { return num_nodes_; }

 private:
  cudaGraphExec_t executable_ = nullptr;
  std::size_t num_nodes_ = 0;
};

/// Medians of the stages' times in runs outside of the graph, as counters.
void count_stages(benchmark::State& state, const Step& step) {
  constexpr int kRuns = 11;
  std::map<std::string, std::vector<double>> times;
  const DeviceBuffer<std::byte> flush(std::int64_t{2} * cuda::current_device().l2_bytes);
  for (int i = 0; i < kRuns; ++i) {
    std::vector<std::pair<std::string, cudaEvent_t>> marks;
    cuda::check(cudaMemsetAsync(flush.data(), 0, flush.bytes(), cudaStreamPerThread), "flush");
    RunOptions options;
    options.on_stage = [&](Stage stage, bool) {
      marks.emplace_back(to_string(stage), nullptr);
      cuda::check(cudaEventCreate(&marks.back().second), "cudaEventCreate");
      cuda::check(cudaEventRecord(marks.back().second, cudaStreamPerThread), "cudaEventRecord");
    };
    step.run(cudaStreamPerThread, options);
    cuda::check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
    std::map<std::string, double> of_run;  // a stage may come in several pieces
    for (std::size_t m = 0; m + 1 < marks.size(); m += 2) {
      float milliseconds = 0;
      cuda::check(cudaEventElapsedTime(&milliseconds, marks[m].second, marks[m + 1].second),
                  "cudaEventElapsedTime");
      of_run[marks[m].first] += 1e3 * double{milliseconds};
    }
    for (const auto& mark : marks) cudaEventDestroy(mark.second);
    for (const auto& [stage, microseconds] : of_run) times[stage].push_back(microseconds);
  }
  for (auto& [stage, all] : times) {
    std::sort(all.begin(), all.end());
    state.counters[stage + "_us"] = all[all.size() / 2];
  }
}

const bool kRegistered = [] {
  for (const CacheFormat format : {CacheFormat::fp8_ds_mla, CacheFormat::bf16})
    for (const int heads : {128, 16})
      for (const std::int32_t context : {32768, 131072})
        for (const std::int32_t requests : {1, 8, 32, 128}) {
          const Case c{format, heads, requests, context};
          register_gpu_bench(
              "decode_step/" + to_string(format) + "/" + std::to_string(heads) + "_heads/" +
                  std::to_string(requests) + "x" + std::to_string(context),
              [c](benchmark::State& state) {
                const Step step(c);
                const StepGraph graph(step);
                time_on_gpu(state, [&](int, Stream stream) { graph.launch(stream); },
                            {.warm_ups = 5, .flush_l2 = true});
                state.counters["graph_nodes"] = static_cast<double>(graph.num_nodes());
                count_stages(state, step);
              },
              30);
        }
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
