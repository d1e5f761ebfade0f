/// Seeded inputs of a whole layer call, shared by tests, benchmarks and the command.
///
/// Everything a request holds (cached rows, queries, indexer inputs, random selections) depends on
/// (seed, request id, position) only: a request cut into several batches, or a batch in another
/// order, sees the same numbers.
///
/// Latent rows and queries are scaled so that softmax logits have a standard deviation of about
/// 1.5: neither uniform nor one-hot. Indexer scores have both signs and practically no ties.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sparse_mla/layer.h"
#include "sparse_mla/types.h"

#include "tests/support/buffer.h"
#include "tests/support/latent_rows.h"

namespace sparse_mla::support {

/// Where a layer's picks come from.
enum class SelectionKind {
  indexer,    ///< the layer scores and selects
  random,     ///< handed in: distinct uniform picks, always with the token itself
  clustered,  ///< handed in: a token keeps each pick of the token before it with probability 0.8
};
std::string to_string(SelectionKind kind);

struct LayerProblem {
  ModelDims dims = {};
  std::vector<std::int32_t> query_lens = {};    ///< [requests]
  std::vector<std::int32_t> context_lens = {};  ///< [requests]
  std::vector<std::int64_t> request_ids = {};   ///< [requests]; empty = 0, 1, 2, …
  std::int32_t block_size = 64;
  CacheFormat cache_format = CacheFormat::bf16;
  bool power_of_two_scales = false;  ///< of fp8_ds_mla's context rows; the layer is to be told
  std::uint64_t seed = 1;
  SelectionKind selection = SelectionKind::indexer;
  bool strided = false;  ///< odd gaps, filled with NaN, after the rows of tensors and cache pages

  std::int64_t num_requests() const { return static_cast<std::int64_t>(query_lens.size()); }
  std::int64_t num_tokens() const;
  std::int64_t seq_len(std::int64_t request) const;
  std::int64_t request_id(std::int64_t request) const;
};
std::ostream& operator<<(std::ostream& stream, const LayerProblem& problem);

/// A layer's weights, to be shared by many batches.
struct LayerWeights {
  LayerWeights(const ModelDims& dims, std::uint64_t seed);

  ModelDims dims;
  Buffer<bfloat16> kv_b_proj;  ///< [num_heads, P+V, L]
};

struct TokenPlace {
  std::int64_t request = 0;
  std::int64_t position = 0;  ///< in its sequence: the token sees keys 0 … position
};

struct WrongCacheRows {
  std::int64_t latent = 0;
  std::int64_t index_keys = 0;  ///< keys or scales
};

/// Owned memory of one layer call. Pages are handed out in random order, with spare pages between
/// them, and page table entries that no sequence needs are out of range. The cached rows of the
/// context are written; every other cache byte, `out` and `lse` are NaN; picks that the layer has
/// to find are 0x7FFFFFFF.
class LayerData {
 public:
  /// Throws std::invalid_argument when the lists differ in length or a length is negative.
  explicit LayerData(const LayerProblem& problem);
  LayerData(const LayerProblem& problem, std::shared_ptr<const LayerWeights> weights);

  /// The library's views of this memory. They stay valid while this object lives, moves included.
  LayerTensors tensors();

  /// Does what the layer's first stage should: the new tokens' rows into the cache slots of
  /// `slot_mapping`. For tests of the later stages alone.
  void write_new_rows();

  const LayerProblem& problem() const { return problem_; }
  const LayerWeights& weights() const { return *weights_; }
  std::int64_t num_tokens() const { return query_starts_.back(); }
  std::int64_t max_blocks() const { return max_blocks_; }  ///< columns of the page tables
  std::int64_t num_blocks() const { return num_blocks_; }
  std::span<const std::int64_t> query_starts() const { return query_starts_; }  ///< [requests + 1]
  TokenPlace place(std::int64_t token) const;

  /// Rows as the layer left them, found by this class's own page arithmetic.
  const bfloat16* q(std::int64_t token, std::int64_t head) const;        ///< [P+R]
  const fp8_e4m3* index_q(std::int64_t token, std::int64_t head) const;  ///< [D]
  const float* index_weights(std::int64_t token) const;                  ///< [index_n_heads]
  const bfloat16* out(std::int64_t token, std::int64_t head) const;      ///< [V]
  float lse(std::int64_t token, std::int64_t head) const;
  std::span<const std::int32_t> picks(std::int64_t token) const;          ///< [topk]
  std::span<const std::int32_t> block_table(std::int64_t request) const;  ///< [max_blocks]
  const std::byte* latent_page(std::int64_t block) const;                 ///< rows of a page
  std::int64_t latent_row_stride() const { return latent_row_stride_; }   ///< bytes
  const std::byte* latent_row(std::int64_t request, std::int64_t position) const;
  LatentRowFormat latent_format() const;  ///< of the rows' bytes
  /// The row before it was quantised.
  void latent_values(std::int64_t request, std::int64_t position,
                     bfloat16* values) const;                                     ///< [L+R]
  const std::byte* index_key(std::int64_t request, std::int64_t position) const;  ///< D e4m3
  float index_scale(std::int64_t request, std::int64_t position) const;

  /// Cache rows that do not hold what they should after a layer call: the context untouched, each
  /// new token in its slot of `slot_mapping`, nothing anywhere else.
  WrongCacheRows count_wrong_cache_rows() const;

 private:
  struct Strides {  // elements, between rows and tokens
    std::int64_t q_head, q_token, latent, index_q_head, index_q_token, index_weights, index_k;
    std::int64_t block_tables, picks, out_head, out_token, lse;
  };
  void lay_out();
  void hand_out_pages();
  void write_context();
  void write_new_tokens();
  std::int64_t slot(std::int64_t request, std::int64_t position) const;
  std::int64_t latent_offset(std::int64_t slot) const;       // bytes
  std::int64_t index_key_offset(std::int64_t slot) const;    // bytes
  std::int64_t index_scale_offset(std::int64_t slot) const;  // bytes

  LayerProblem problem_;
  std::shared_ptr<const LayerWeights> weights_;
  Strides strides_{};
  std::vector<std::int64_t> query_starts_;
  std::int64_t max_blocks_ = 0, num_blocks_ = 0;
  std::int64_t latent_row_stride_ = 0, latent_block_stride_ = 0, index_block_stride_ = 0;  // bytes

  Buffer<bfloat16> q_, latent_, out_;
  Buffer<fp8_e4m3> index_q_, index_k_;
  Buffer<float> index_weights_, index_k_scale_, lse_;
  Buffer<std::int64_t> slot_mapping_;
  Buffer<std::int32_t> block_tables_, picks_;
  Buffer<std::byte> latent_cache_, index_cache_;
};

}  // namespace sparse_mla::support
