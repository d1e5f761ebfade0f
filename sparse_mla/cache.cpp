#include "sparse_mla/cache.h"

#include <array>

#include "sparse_mla/error.h"

namespace sparse_mla {

namespace {

constexpr std::array kCacheFormats = {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8};

}  // namespace

std::string to_string(CacheFormat format) {
  switch (format) {
    case CacheFormat::bf16:
      return "bf16";
    case CacheFormat::fp8_ds_mla:
      return "fp8_ds_mla";
    case CacheFormat::fp8:
      return "fp8";
  }
  return "unknown";
}

CacheFormat parse_cache_format(std::string_view text) {
  std::string names;
  for (const CacheFormat format : kCacheFormats) {
    if (text == to_string(format)) return format;
    names += (names.empty() ? "" : ", ") + to_string(format);
  }
  throw_invalid("cache format", text, "one of " + names);
}

std::int64_t latent_row_bytes(CacheFormat format, int kv_lora_rank, int qk_rope_head_dim) {
  const std::int64_t lora = kv_lora_rank, rope = qk_rope_head_dim;
  switch (format) {
    case CacheFormat::bf16:
      return 2 * (lora + rope);
    case CacheFormat::fp8_ds_mla:
      require(lora % kLatentScaleGroup == 0, "kv_lora_rank", lora,
              "a multiple of " + std::to_string(kLatentScaleGroup) + " in a cache of format " +
                  to_string(format));
      return lora + lora / kLatentScaleGroup * 4 + 2 * rope;
    case CacheFormat::fp8:
      return lora + rope;
  }
  throw_invalid("cache format", std::to_string(static_cast<int>(format)), "a known format");
}

std::int64_t latent_row_bytes(CacheFormat format, const ModelDims& dims) {
  return latent_row_bytes(format, dims.kv_lora_rank, dims.qk_rope_head_dim);
}

LatentCache make_latent_cache(CacheFormat format, std::span<std::byte> memory,
                              std::int64_t num_blocks, std::int32_t block_size,
                              const ModelDims& dims) {
  require(num_blocks >= 0, "num_blocks", num_blocks, "at least 0");
  require(block_size >= 1, "block_size", block_size, "at least 1");
  LatentCache cache;
  cache.format = format;
  cache.data = memory.data();
  cache.num_blocks = num_blocks;
  cache.block_size = block_size;
  cache.row_stride = latent_row_bytes(format, dims);
  cache.block_stride = cache.row_stride * block_size;
  require(static_cast<std::int64_t>(memory.size()) == num_blocks * cache.block_stride, "memory",
          std::to_string(memory.size()) + " bytes",
          std::to_string(num_blocks * cache.block_stride) + " bytes: " +
              std::to_string(num_blocks) + " pages of " + std::to_string(block_size) + " rows of " +
              std::to_string(cache.row_stride) + " bytes (" + to_string(format) + ")");
  return cache;
}

void validate(const LatentCache& cache, CacheFormat format, int kv_lora_rank, int qk_rope_head_dim,
              std::string_view name) {
  const auto field = [&](const char* text) { return std::string(name) + text; };
  require(cache.format == format, field(".format"), to_string(cache.format), to_string(format));
  require(cache.num_blocks >= 0, field(".num_blocks"), cache.num_blocks, "at least 0");
  require(cache.block_size >= 1, field(".block_size"), cache.block_size, "at least 1");
  if (cache.num_blocks == 0) return;
  require(cache.data != nullptr, field(".data"), "null", "the cache's pages");
  const std::int64_t row_bytes = latent_row_bytes(format, kv_lora_rank, qk_rope_head_dim);
  require(cache.row_stride >= row_bytes, field(".row_stride"), cache.row_stride,
          "at least a row's " + std::to_string(row_bytes) + " bytes (" + to_string(format) + ")");
  const std::int64_t page_bytes = (cache.block_size - 1) * cache.row_stride + row_bytes;
  require(cache.num_blocks == 1 || cache.block_stride >= page_bytes, field(".block_stride"),
          cache.block_stride,
          "at least a page's " + std::to_string(page_bytes) + " bytes (" + to_string(format) + ")");
}

float gathered_latent_scale(const LatentCache& cache) {
  return cache.format == CacheFormat::fp8 ? cache.scale : 1.0f;
}

std::int64_t index_page_bytes(std::int32_t block_size, std::int32_t head_dim) {
  return std::int64_t{block_size} * (head_dim + 4);
}

IndexKeyCache make_index_key_cache(std::byte* data, std::int64_t num_blocks,
                                   std::int32_t block_size, std::int32_t head_dim) {
  require(num_blocks >= 0, "num_blocks", num_blocks, "at least 0");
  require(block_size >= 1, "block_size", block_size, "at least 1");
  require(head_dim >= 1, "head_dim", head_dim, "at least 1");
  IndexKeyCache cache;
  cache.data = data;
  cache.num_blocks = num_blocks;
  cache.block_size = block_size;
  cache.head_dim = head_dim;
  cache.block_stride = index_page_bytes(block_size, head_dim);
  return cache;
}

}  // namespace sparse_mla
