#include "sparse_mla/cache.h"

#include "sparse_mla/error.h"

namespace sparse_mla {

std::string to_string(CacheFormat) { return "bf16"; }

std::int64_t latent_row_bytes(CacheFormat, const ModelDims& dims) {
  return 2 * std::int64_t{dims.latent_dim()};
}

LatentCache make_latent_cache(CacheFormat format, std::byte* data, std::int64_t num_blocks,
                              std::int32_t block_size, const ModelDims& dims) {
  require(num_blocks >= 0, "num_blocks", num_blocks, "at least 0");
  require(block_size >= 1, "block_size", block_size, "at least 1");
  LatentCache cache;
  cache.format = format;
  cache.data = data;
  cache.num_blocks = num_blocks;
  cache.block_size = block_size;
  cache.row_stride = latent_row_bytes(format, dims);
  cache.block_stride = cache.row_stride * block_size;
  return cache;
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
