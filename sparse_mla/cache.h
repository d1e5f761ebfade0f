/// Paged caches, readable in place from an engine's own memory: latent rows and indexer keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sparse_mla/chunk_member.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

enum class CacheFormat {
  bf16,  ///< (L+R) × bf16 per row
};
std::string to_string(CacheFormat format);

/// Latent rows in pages. slot = block · block_size + offset lives at
/// data + block · block_stride + offset · row_stride (bytes).
struct LatentCache {
  CacheFormat format = CacheFormat::bf16;
  std::byte* data = nullptr;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 64;   ///< rows per page
  std::int64_t block_stride = 0;  ///< bytes
  std::int64_t row_stride = 0;    ///< bytes

  std::int64_t num_slots() const { return num_blocks * block_size; }
  std::byte* row(std::int64_t slot) const {
    return data + (slot / block_size) * block_stride + (slot % block_size) * row_stride;
  }
};

/// Bytes of one row in `format`.
std::int64_t latent_row_bytes(CacheFormat format, const ModelDims& dims);

/// A cache over contiguous pages at `data`.
LatentCache make_latent_cache(CacheFormat format, std::byte* data, std::int64_t num_blocks,
                              std::int32_t block_size, const ModelDims& dims);

/// Indexer keys in pages: first block_size · D e4m3 bytes for all tokens, then block_size fp32
/// scales. (Not interleaved per token: both layouts have the same byte size, so that a mix-up shows
/// only as bad output.) Scales are read and written bytewise: no alignment is needed.
struct IndexKeyCache {
  std::byte* data = nullptr;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 64;
  std::int32_t head_dim = 128;    ///< D
  std::int64_t block_stride = 0;  ///< bytes, at least block_size · (D + 4)

  std::int64_t num_slots() const { return num_blocks * block_size; }
  std::byte* key(std::int64_t slot) const {  ///< D e4m3 bytes
    return data + (slot / block_size) * block_stride + (slot % block_size) * head_dim;
  }
  std::byte* scale(std::int64_t slot) const {  ///< 4 bytes of one fp32
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
struct WriteCacheProblem {
  std::int64_t max_tokens = 0;
  CacheFormat format = CacheFormat::bf16;
  int latent_dim = 576;      ///< L+R
  int index_head_dim = 128;  ///< D; 0 = no indexer keys
};
struct WriteCacheCall {
  View2<const bfloat16> latent;  ///< [num_tokens, L+R]
  /// [num_tokens, D], after rotary and Hadamard; without data, no indexer key is written
  View2<const fp8_e4m3> index_k;
  View1<const float> index_k_scale;        ///< [num_tokens], ≥ 0
  View1<const std::int64_t> slot_mapping;  ///< [num_tokens]
  LatentCache latent_cache;
  IndexKeyCache index_cache;
};
const Operation<WriteCacheProblem, WriteCacheCall>& write_cache_operation();

/// Operation `gather`: cached rows [first_key, first_key + num_keys) of each member into workspace
/// rows [key_row, …) as bf16. Any start, also inside a page. A row whose page lies outside the
/// block table or the cache is set to 0; nothing is read for it.
struct GatherProblem {
  std::int64_t max_rows = 0;
  CacheFormat format = CacheFormat::bf16;
  int latent_dim = 576;  ///< L+R
};
struct GatherCall {
  LatentCache cache;
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks] page numbers
  std::span<const ChunkMember> members;
  View2<bfloat16> rows;  ///< [workspace rows, L+R]
};
const Operation<GatherProblem, GatherCall>& gather_operation();

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
