// Sparse MQA, topk 2048, at DeepSeek-V3.2's widths.
//
//   prefill  4,096 tokens of one context of bf16 or fp8_ds_mla rows. `random`: every token picks
//   uniformly;
//            `clustered`: it keeps each pick of the token before with probability 0.8 and draws the
//            rest anew (its own key among them).
//   decode   batch × query tokens, each request's context of 32,768 rows on pages of 64 in random
//            order. Launches take turns over the batches of 128 requests, so that rows come from
//            memory, and through an L2 cache whose lines need not be written back first.
// Picks are distinct. Rates count 2 · (576 + 512) operations per head and pick, and the bytes of
// every picked row once per token.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"

#include "bench/support/cache_bytes.cuh"
#include "bench/support/gpu.cuh"

namespace sparse_mla::bench {
namespace {

constexpr int kLora = 512, kRope = 64, kTopk = 2048, kBlock = 64, kContext = 32768;
constexpr int kPrefillTokens = 4096, kDecodeRequests = 128;

struct Case {
  int heads = 128;
  CacheFormat format = CacheFormat::bf16;
  int requests = 1, query_len = 1;
  std::int32_t context = kContext;
  bool clustered = false;
  int batches = 1;  ///< of so many requests each, which launches take turns over

  std::int64_t tokens() const { return std::int64_t{requests} * query_len; }
  int all_requests() const { return batches * requests; }
};

/// The first `count` of a row of keys become a uniform choice of distinct ones.
template <class Random>
void draw(std::vector<std::int32_t>& keys, std::size_t begin, std::size_t count, Random& random) {
  for (std::size_t i = begin; i < count; ++i)
    std::swap(keys[i], keys[i + random() % (keys.size() - i)]);
}

/// [batches · tokens, topk] slots: request r's key s lies on page pages[r][s / 64].
std::vector<std::int32_t> make_slots(const Case& c) {
  std::mt19937 random(7);
  const std::int32_t pages_each = c.context / kBlock;
  std::vector<std::int32_t> pages(static_cast<std::size_t>(c.all_requests() * pages_each));
  std::iota(pages.begin(), pages.end(), 0);
  if (c.all_requests() > 1 || c.query_len == 1) std::shuffle(pages.begin(), pages.end(), random);
  std::vector<std::int32_t> slots;
  slots.reserve(static_cast<std::size_t>(c.batches * c.tokens() * kTopk));
  std::vector<std::int32_t> keys(static_cast<std::size_t>(c.context));
  for (int r = 0; r < c.all_requests(); ++r) {
    std::iota(keys.begin(), keys.end(), 0);
    for (int j = 0; j < c.query_len; ++j) {
      std::size_t kept = 0;
      if (c.clustered && j > 0) {
        // Kept picks move to the front; draws then come from everything behind them.
        for (std::size_t i = 0; i < kTopk; ++i)
          if (random() % 5 != 0) std::swap(keys[i], keys[kept++]);
        const auto own = std::find(keys.begin(), keys.end(), j);
        if (own >= keys.begin() + static_cast<std::ptrdiff_t>(kept)) {
          std::swap(*own, keys[kept]);
          ++kept;
        }
      }
      draw(keys, kept, kTopk, random);
      for (std::size_t i = 0; i < kTopk; ++i)
        slots.push_back(pages[static_cast<std::size_t>(r * pages_each + keys[i] / kBlock)] *
                            kBlock +
                        keys[i] % kBlock);
    }
  }
  return slots;
}

class Run {
 public:
  Run(const Case& c, const std::string& entry)
      : heads_(c.heads),
        tokens_(c.tokens()),
        rows_(std::int64_t{c.all_requests()} * c.context *
              latent_row_bytes(c.format, kLora, kRope)) {
    const std::int64_t row_bytes = latent_row_bytes(c.format, kLora, kRope);
    const std::int64_t all_tokens = c.batches * tokens_;
    fill(rows_, MakeRowByte{c.format, kLora, row_bytes});
    slots_ = DeviceBuffer<std::int32_t>(make_slots(c));
    q_ = DeviceBuffer<bfloat16>(all_tokens * heads_ * (kLora + kRope));
    fill_normal(q_, 3, 2, 0.3f);
    out_ = DeviceBuffer<bfloat16>(all_tokens * heads_ * kLora);
    lse_ = DeviceBuffer<float>(all_tokens * heads_);
    cache_.format = c.format;
    cache_.data = rows_.data();
    cache_.num_blocks = std::int64_t{c.all_requests()} * c.context / kBlock;
    cache_.block_size = kBlock;
    cache_.row_stride = row_bytes;
    cache_.block_stride = row_bytes * kBlock;
    problem_ = {heads_, kLora, kRope, kTopk, c.format, tokens_};
    Dispatch dispatch;
    dispatch.forced["sparse_mqa"] = entry;
    entry_ = &sparse_mqa_operation().choose(problem_, dispatch);
    workspace_ =
        DeviceBuffer<std::byte>(static_cast<std::int64_t>(entry_->workspace_bytes(problem_)));
  }

  void operator()(int batch, Stream stream) const {
    const std::int64_t first = batch * tokens_, first_head = first * heads_;
    SparseMqaCall call;
    call.cache = cache_;
    call.q = contiguous<const bfloat16>(q_.data() + first_head * (kLora + kRope), tokens_, heads_,
                                        kLora + kRope);
    call.slots = contiguous<const std::int32_t>(slots_.data() + first * kTopk, tokens_, kTopk);
    call.softmax_scale = ModelDims{}.softmax_scale;
    call.out = contiguous(out_.data() + first_head * kLora, tokens_, heads_, kLora);
    call.lse = contiguous(lse_.data() + first_head, heads_, tokens_);
    sparse_mqa_operation().run(*entry_, problem_, call, workspace_.span(), stream);
  }

 private:
  int heads_;
  std::int64_t tokens_;  // of a batch
  DeviceBuffer<std::byte> rows_;
  DeviceBuffer<std::int32_t> slots_;
  DeviceBuffer<bfloat16> q_, out_;
  DeviceBuffer<float> lse_;
  LatentCache cache_;
  SparseMqaProblem problem_;
  const Entry<SparseMqaProblem, SparseMqaCall>* entry_ = nullptr;
  DeviceBuffer<std::byte> workspace_;
};

void add(const std::string& name, const Case& c) {
  for (const auto& entry : sparse_mqa_operation().entries()) {
    if (entry.backend != Backend::cuda || std::string(entry.name) == "cuda_rows") continue;
    const std::string forced = entry.name;
    register_gpu_bench(
        "sparse_mqa/" + forced + "/" + name,
        [c, forced](benchmark::State& state) {
          const Run run(c, forced);
          // Every batch has been read once before any is timed.
          const GpuTimes times =
              time_on_gpu(state, [&](int batch, Stream stream) { run(batch, stream); },
                          {.warm_ups = c.batches + 5, .num_inputs = c.batches});
          const double picks = static_cast<double>(c.tokens()) * kTopk;
          count_flops(state, times, picks * c.heads * 2 * (2 * kLora + kRope));
          count_bytes(state, times,
                      picks * static_cast<double>(latent_row_bytes(c.format, kLora, kRope)));
        },
        c.tokens() < kPrefillTokens ? 50 : 10);
  }
}

const bool kRegistered = [] {
  // 24 heads: a tile to a token, where 16 heads share tiles among tokens.
  for (const int heads : {128, 64, 24, 16})
    for (const int keys : {8192, 32768, 65536, 131072})
      for (const bool clustered : {false, true}) {
        if ((heads < 64 && keys != 32768 && keys != 131072) || (clustered && keys != 32768))
          continue;
        add("prefill/" + std::to_string(heads) + "_heads/4096x" + std::to_string(keys) +
                (clustered ? "/clustered" : "/random"),
            {heads, CacheFormat::bf16, 1, kPrefillTokens, keys, clustered});
      }
  for (const int heads : {128, 64, 16})
    for (const bool clustered : {false, true}) {
      if (clustered && heads != 16) continue;
      add("prefill/" + to_string(CacheFormat::fp8_ds_mla) + "/" + std::to_string(heads) +
              "_heads/4096x32768" + (clustered ? "/clustered" : "/random"),
          {heads, CacheFormat::fp8_ds_mla, 1, kPrefillTokens, 32768, clustered});
    }
  const std::pair<int, int> batches[] = {{1, 1},  {8, 1},  {32, 1}, {128, 1},
                                         {32, 2}, {64, 2}, {128, 2}};
  for (const CacheFormat format : {CacheFormat::fp8_ds_mla, CacheFormat::bf16})
    for (const int heads : {128, 64, 16})
      for (const auto& [requests, query_len] : batches) {
        if (heads == 16 && query_len == 2) continue;
        add("decode/" + to_string(format) + "/" + std::to_string(heads) + "_heads/" +
                std::to_string(requests) + "x" + std::to_string(query_len),
            {heads, format, requests, query_len, kContext, false, kDecodeRequests / requests});
      }
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
