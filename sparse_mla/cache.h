/// Paged caches, readable in place from an engine's own memory: latent rows and indexer keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "sparse_mla/chunk_member.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// How a latent row is stored. A reader honours any fp32 scale; numbers of several bytes are read
/// and written bytewise, so that rows may start at any address.
enum class CacheFormat {
  bf16,        ///< (L+R) × bf16
  fp8_ds_mla,  ///< L × e4m3 | L/128 × fp32 scale, one per 128 | R × bf16; L a multiple of 128
  fp8,         ///< (L+R) × e4m3 under one scale for the whole cache
};
std::string to_string(CacheFormat format);
/// The format that to_string() names so. Throws std::invalid_argument for any other text.
CacheFormat parse_cache_format(std::string_view text);

/// Latent elements under one scale of fp8_ds_mla.
inline constexpr int kLatentScaleGroup = 128;

/// Latent rows in pages. slot = block · block_size + offset lives at
/// data + block · block_stride + offset · row_stride (bytes).
struct LatentCache {
  CacheFormat format = CacheFormat::bf16;
  std::byte* data = nullptr;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 64;   ///< rows per page
  std::int64_t block_stride = 0;  ///< bytes
  std::int64_t row_stride = 0;    ///< bytes
  float scale = 1;                ///< format fp8: a number is its e4m3 byte · scale

  SPARSE_MLA_HOST_DEVICE std::int64_t num_slots() const { return num_blocks * block_size; }
  SPARSE_MLA_HOST_DEVICE std::byte* row(std::int64_t slot) const {
    return data + (slot / block_size) * block_stride + (slot % block_size) * row_stride;
  }
};

/// Bytes of one row in `format`: 1,152, 656 and 576 at L 512, R 64. Throws std::invalid_argument
/// where the format cannot hold such a row.
std::int64_t latent_row_bytes(CacheFormat format, int kv_lora_rank, int qk_rope_head_dim);
std::int64_t latent_row_bytes(CacheFormat format, const ModelDims& dims);

/// A cache over `memory`, which has to be exactly `num_blocks` contiguous pages of contiguous rows:
/// memory that was laid out for another format is refused.
LatentCache make_latent_cache(CacheFormat format, std::span<std::byte> memory,
                              std::int64_t num_blocks, std::int32_t block_size,
                              const ModelDims& dims);

/// Throws std::invalid_argument, naming `name`'s field, unless `cache` has this format, memory,
/// rows that fit their stride and pages that do not overlap.
void validate(const LatentCache& cache, CacheFormat format, int kv_lora_rank, int qk_rope_head_dim,
              std::string_view name);

/// Indexer keys in pages: first block_size · D e4m3 bytes for all tokens, then block_size fp32
/// scales. (Not interleaved per token: both layouts have the same byte size, so that a mix-up shows
/// only as bad output.) Scales are read and written bytewise: no alignment is needed.
struct IndexKeyCache {
  std::byte* data = nullptr;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 64;
  std::int32_t head_dim = 128;    ///< D
  std::int64_t block_stride = 0;  ///< bytes, at least block_size · (D + 4)

  SPARSE_MLA_HOST_DEVICE std::int64_t num_slots() const { return num_blocks * block_size; }
  SPARSE_MLA_HOST_DEVICE std::byte* key(std::int64_t slot) const {  ///< D e4m3 bytes
    return data + (slot / block_size) * block_stride + (slot % block_size) * head_dim;
  }
  SPARSE_MLA_HOST_DEVICE std::byte* scale(std::int64_t slot) const {  ///< 4 bytes of one fp32
    return data + (slot / block_size) * block_stride + std::int64_t{block_size} * head_dim +
           (slot % block_size) * 4;
  }
};

/// Bytes of one page of indexer keys: block_size · (D + 4).
std::int64_t index_page_bytes(std::int32_t block_size, std::int32_t head_dim);
IndexKeyCache make_index_key_cache(std::byte* data, std::int64_t num_blocks,
                                   std::int32_t block_size, std::int32_t head_dim);

/// Operation `write_cache`: the new tokens' latent rows and indexer keys into their slots. Slot −1
/// writes nothing. Any other slot outside the cache throws std::invalid_argument before a byte is
/// written (a device-side backend, which cannot look, skips it).
///
/// A quantised number is e4m3(x / scale), divided in fp32 and rounded to nearest, ties to even: it
/// saturates at ±448, keeps −0, and only NaN becomes NaN. fp8_ds_mla's scale is
/// max(amax / 448, 1e-4) of its group of 128, so that a group of zeros has a scale too; amax passes
/// NaN over and takes ±inf for the largest bf16. fp8's scale is the cache's, which has to be a
/// positive number.
struct WriteCacheProblem {
  std::int64_t max_tokens = 0;
  CacheFormat format = CacheFormat::bf16;
  int kv_lora_rank = 512;     ///< L
  int qk_rope_head_dim = 64;  ///< R
  int index_head_dim = 128;   ///< D; 0 = no indexer keys
};
struct WriteCacheCall {
  View2<const bfloat16> latent;  ///< [num_tokens, L+R]
  /// [num_tokens, D], after rotary and Hadamard; without data, no indexer key is written
  View2<const fp8_e4m3> index_k;
  View1<const float> index_k_scale;        ///< [num_tokens], ≥ 0
  View1<const std::int64_t> slot_mapping;  ///< [num_tokens] −1 = nowhere; the others distinct
  LatentCache latent_cache;
  IndexKeyCache index_cache;
  bool power_of_two_scales = false;  ///< fp8_ds_mla: scales are rounded up to powers of two
};
const Operation<WriteCacheProblem, WriteCacheCall>& write_cache_operation();

/// Operation `gather`: cached rows [first_key, first_key + num_keys) of each member into workspace
/// rows [key_row, …) as bf16. fp8_ds_mla: e4m3 · scale, multiplied in fp32 and rounded to nearest.
/// fp8: the rope part so, the latent part without its scale, see gathered_latent_scale(). Any
/// start, also inside a page. A row whose page lies outside the block table or the cache is set to
/// 0; nothing is read for it.
struct GatherProblem {
  std::int64_t max_rows = 0;
  CacheFormat format = CacheFormat::bf16;
  int kv_lora_rank = 512;     ///< L
  int qk_rope_head_dim = 64;  ///< R
};
struct GatherCall {
  LatentCache cache;
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks] page numbers
  std::span<const ChunkMember> members;
  View2<bfloat16> rows;  ///< [workspace rows, L+R]
};
const Operation<GatherProblem, GatherCall>& gather_operation();

/// What the latent part of gathered rows is still to be multiplied by, which up_project does: the
/// scale of an fp8 cache, else 1. e4m3 is exact in bf16; a product with one scale for all would be
/// rounded the same way wherever the mantissa is the same, an error that no sum averages out.
float gathered_latent_scale(const LatentCache& cache);

/// Operation `map_slots`: request-local picks to cache slots. A pick outside [0, num_keys) of its
/// row, at or past its token's count, outside the block table or outside the cache becomes −1, so
/// that picks never cross requests. Every element of `slots` is written.
struct MapSlotsProblem {
  std::int64_t max_tokens = 0;
  int topk = 0;
};
struct MapSlotsCall {
  View2<const std::int32_t> picks;  ///< [num_tokens, topk] request-local positions, −1 = none
  const std::int32_t* tokens = nullptr;            ///< [rows] the picks' row of each output row
  const std::int32_t* request_of_token = nullptr;  ///< [num_tokens] row of block_tables
  const std::int32_t* keys_of_token = nullptr;     ///< [num_tokens] keys that the token may see
  const std::int32_t* counts = nullptr;  ///< optional [num_tokens]: only picks [0, count) are used
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks]
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 64;
  View2<std::int32_t> slots;            ///< [rows, topk]
  std::int32_t* slot_counts = nullptr;  ///< optional [rows] ← one past the row's last valid slot
};
const Operation<MapSlotsProblem, MapSlotsCall>& map_slots_operation();

}  // namespace sparse_mla
