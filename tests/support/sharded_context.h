/// Contexts whose rows are dealt to ranks (sparse_mla/context_sharding.h), the slow and plain way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "sparse_mla/cache.h"
#include "sparse_mla/context_sharding.h"

#include "tests/support/run_entry.h"

namespace sparse_mla::support {

/// Who holds a position, by walking there turn by turn: (rank, place among the rank's rows).
inline std::vector<std::pair<std::int32_t, std::int32_t>> deal(const ContextSharding& sharding,
                                                               std::int32_t positions) {
  std::vector<std::pair<std::int32_t, std::int32_t>> places;
  std::vector<std::int32_t> held(sharding.world, 0);
  for (std::int32_t rank = 0; static_cast<std::int32_t>(places.size()) < positions;
       rank = (rank + 1) % sharding.world)
    for (std::int32_t i = 0;
         i < sharding.interleave && static_cast<std::int32_t>(places.size()) < positions; ++i)
      places.emplace_back(rank, held[rank]++);
  return places;
}

/// bf16 rows of requests, in pages in random order.
struct PagedRows {
  LatentCache cache;
  std::vector<bfloat16> data;
  std::vector<std::int32_t> tables;  ///< [requests, columns]
  std::int64_t requests, columns = 1;

  /// Rows of each request, `width` wide, in pages in random order; all bytes 0xFF.
  PagedRows(const std::vector<std::int32_t>& lens, std::int32_t block_size, int width,
            std::uint32_t seed)
      : requests(static_cast<std::int64_t>(lens.size())) {
    std::int64_t pages = 1;
    for (const std::int32_t len : lens) {
      columns = std::max<std::int64_t>(columns, (len + block_size - 1) / block_size);
      pages += (len + block_size - 1) / block_size;
    }
    std::vector<std::int32_t> free(static_cast<std::size_t>(pages));
    std::iota(free.begin(), free.end(), 0);
    std::mt19937 random(seed);
    std::shuffle(free.begin(), free.end(), random);
    tables.assign(static_cast<std::size_t>(requests * columns), -1);
    for (std::int64_t request = 0; request < requests; ++request)
      for (std::int32_t row = 0; row < lens[static_cast<std::size_t>(request)]; row += block_size) {
        tables[static_cast<std::size_t>(request * columns + row / block_size)] = free.back();
        free.pop_back();
      }
    data = support::poisoned<bfloat16>(pages * block_size * width);
    cache.data = reinterpret_cast<std::byte*>(data.data());
    cache.num_blocks = pages;
    cache.block_size = block_size;
    cache.row_stride = 2 * std::int64_t{width};
    cache.block_stride = block_size * cache.row_stride;
  }

  View2<const std::int32_t> table_view() const {
    return contiguous<const std::int32_t>(tables.data(), requests, columns);
  }
  std::byte* row(std::int64_t request, std::int64_t row) {
    const std::int64_t block =
        tables[static_cast<std::size_t>(request * columns + row / cache.block_size)];
    return cache.row(block * cache.block_size + row % cache.block_size);
  }
};

/// A context that one cache holds whole and the ranks' caches hold in shards, row for row the same
/// bytes.
struct ShardedContext {
  ContextSharding sharding;
  PagedRows whole;
  std::vector<PagedRows> shards;  ///< [world]

  template <class Fill>
  ShardedContext(const std::vector<std::int32_t>& lens, const ContextSharding& shard_by,
                 std::int32_t block_size, int width, Fill fill)
      : sharding(shard_by), whole(lens, block_size, width, 1) {
    for (std::int32_t rank = 0; rank < sharding.world; ++rank) {
      std::vector<std::int32_t> local;
      for (const std::int32_t len : lens) {
        const auto places = deal(sharding, len);
        local.push_back(static_cast<std::int32_t>(std::count_if(
            places.begin(), places.end(), [&](const auto& place) { return place.first == rank; })));
      }
      shards.emplace_back(local, block_size, width, 2 + static_cast<std::uint32_t>(rank));
    }
    for (std::size_t request = 0; request < lens.size(); ++request) {
      const auto places = deal(sharding, lens[request]);
      for (std::int32_t position = 0; position < lens[request]; ++position) {
        std::byte* row = whole.row(static_cast<std::int64_t>(request), position);
        fill(reinterpret_cast<bfloat16*>(row), request, position);
        const auto [rank, place] = places[position];
        std::memcpy(shards[rank].row(static_cast<std::int64_t>(request), place), row,
                    static_cast<std::size_t>(2 * width));
      }
    }
  }
};

}  // namespace sparse_mla::support
