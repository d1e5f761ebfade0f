// Operation `map_slots` on CUDA.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/cache_checks.h"
#include "kernels/common/request_pages.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kMaxThreads = 256;

struct MapArguments {
  View2<const std::int32_t> picks;         ///< [num_tokens, topk]
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks]
  View2<std::int32_t> slots;               ///< [rows, topk]
  const std::int32_t* tokens;              ///< [rows] or null
  const std::int32_t* request_of_token;    ///< [num_tokens]
  const std::int32_t* keys_of_token;       ///< [num_tokens]
  const std::int32_t* counts;              ///< [num_tokens] or null
  std::int32_t* slot_counts;               ///< [rows] or null
  std::int64_t num_blocks;
  std::int32_t block_size;
  int topk;
};

/// The slot of a pick, −1 unless 0 ≤ pick < limit and its page is known.
__device__ std::int32_t map_pick(const RequestPages& pages, std::int32_t pick, std::int32_t limit) {
  return pick < 0 || pick >= limit ? -1 : pages.slot_of(pick);
}

// Tile: one row of picks, kPicks neighbours to a thread and turn. 8 bytes a pick; the row of the
// block table (2 KB for 32,768 keys in pages of 64) stays in L1. kPicks 4 needs aligned rows of
// picks and slots.
template <int kPicks>
__global__ void __launch_bounds__(kMaxThreads) map_slots_kernel(const MapArguments a) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t token = a.tokens == nullptr ? row : a.tokens[row];
  RequestPages pages;
  std::int32_t limit = 0;  // keys that may be picked
  int count = 0;           // picks that are looked at
  if (token >= 0 && token < a.picks.extent(0)) {
    const std::int32_t request = a.request_of_token[token];
    if (request >= 0 && request < a.block_tables.extent(0)) {
      pages = RequestPages(a.block_tables, request, a.block_size, a.num_blocks);
      limit = a.keys_of_token[token];
      count = a.counts == nullptr ? a.topk : min(a.counts[token], a.topk);
    }
  }
  int last = 0;  // one past the thread's last valid slot
  for (int first = static_cast<int>(threadIdx.x) * kPicks; first < a.topk;
       first += static_cast<int>(blockDim.x) * kPicks) {
    std::int32_t slots[kPicks];
    if constexpr (kPicks == 4) {
      int4 picks{-1, -1, -1, -1};
      if (first + 4 <= count) {
        picks = __ldg(reinterpret_cast<const int4*>(address(a.picks, token, first)));
      } else if (first < count) {  // what lies past the count is not read
        picks.x = *address(a.picks, token, first);
        if (first + 1 < count) picks.y = *address(a.picks, token, first + 1);
        if (first + 2 < count) picks.z = *address(a.picks, token, first + 2);
      }
      slots[0] = map_pick(pages, picks.x, limit);
      slots[1] = map_pick(pages, picks.y, limit);
      slots[2] = map_pick(pages, picks.z, limit);
      slots[3] = map_pick(pages, picks.w, limit);
      *reinterpret_cast<int4*>(address(a.slots, row, first)) = {slots[0], slots[1], slots[2],
                                                                slots[3]};
    } else {
      const std::int32_t pick = first < count ? *address(a.picks, token, first) : -1;
      slots[0] = map_pick(pages, pick, limit);
      *address(a.slots, row, first) = slots[0];
    }
#pragma unroll
    for (int i = 0; i < kPicks; ++i)
      if (slots[i] >= 0) last = first + i + 1;
  }
  if (a.slot_counts == nullptr) return;
  __shared__ int of_warp[kMaxThreads / 32];
  last = __reduce_max_sync(~0u, last);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = last;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) last = max(last, of_warp[warp]);
  a.slot_counts[row] = last;
}

void run(const MapSlotsProblem& problem, const MapSlotsCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  if (call.slots.extent(0) == 0) return;
  const MapArguments arguments{call.picks,      call.block_tables,     call.slots,
                               call.tokens,     call.request_of_token, call.keys_of_token,
                               call.counts,     call.slot_counts,      call.num_blocks,
                               call.block_size, problem.topk};
  constexpr int kPicks = 4;
  const bool vector =
      problem.topk % kPicks == 0 && aligned_rows(call.picks, 16) && aligned_rows(call.slots, 16);
  const int units = vector ? problem.topk / kPicks : problem.topk;
  const auto threads = static_cast<unsigned>(std::clamp((units + 31) / 32 * 32, 32, kMaxThreads));
  const auto blocks = static_cast<unsigned>(call.slots.extent(0));
  if (vector)
    map_slots_kernel<kPicks><<<blocks, threads, 0, stream>>>(arguments);
  else
    map_slots_kernel<1><<<blocks, threads, 0, stream>>>(arguments);
  check_launch("map_slots_kernel");
}

}  // namespace

std::vector<Entry<MapSlotsProblem, MapSlotsCall>> map_slots_entries() {
  return {{"cuda", Backend::cuda, "a row of picks per block",
           [](const MapSlotsProblem&) { return why_no_device(); },
           [](const MapSlotsProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
