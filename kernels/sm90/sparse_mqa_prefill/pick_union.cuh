/// The union of what neighbouring tokens picked, for tiles that hold the heads of several tokens.
#pragma once

#include <cstdint>

#include "kernels/sm90/sparse_mqa_prefill/pick_union.h"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

constexpr int kUnionThreads = 512, kUnionWarps = kUnionThreads / 32;
/// Entries of the hash table at most: 5 bytes each, in shared memory.
constexpr int kMaxUnionTable = 1 << 15;
/// Entries for so many picks: at most half of them are taken.
constexpr std::int64_t union_table(std::int64_t picks) {
  std::int64_t table = 32;
  while (table < 2 * picks) table *= 2;
  return table;
}
constexpr int union_bytes(std::int64_t table) { return static_cast<int>(5 * table); }

/// Whether the whole table pays, when of so many picks of the first two tokens so many are the
/// other's too. It costs about a twentieth of what the attention takes over picks that share
/// nothing; four tokens whose picks are shared by twos at 1 in 25 save as much.
__host__ __device__ constexpr bool table_pays(int picks, int repeated) {
  return 50 * repeated >= picks;
}

/// CTA = item. All picks go into a hash table in shared memory, slot and token bits; then each pick
/// that no token before has is written, in order: a warp has a span of every token's picks, and
/// knows how many the spans before yield. Where the first two tokens share few picks, the others
/// are spared the table, and every pick is written. Where a slot lies in the table depends on the
/// race, what is written does not.
__global__ void __launch_bounds__(kUnionThreads)
    pick_union_kernel(const __grid_constant__ SparseMqaCall call, std::int64_t first_token,
                      const __grid_constant__ PickUnion picks, int table) {
  extern __shared__ std::uint32_t union_shared[];
  std::uint32_t* const keys = union_shared;                             // [table] slot, ~0 = free
  std::uint32_t* const tokens = union_shared + table;                   // [table] bytes
  __shared__ std::int32_t yields[PickUnion::kMaxTokens * kUnionWarps];  // [token][warp]
  __shared__ int tried, repeated;  // picks of the first two tokens; of them in both
  constexpr std::uint32_t kFree = ~0u;
  constexpr int kAtOnce = 4;  // loads in flight

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int item = static_cast<int>(blockIdx.x), num_tokens = 1 << picks.shift;
  const std::int64_t token_0 = first_token + (std::int64_t{item} << picks.shift);
  const std::int64_t num_slots = call.cache.num_slots();
  const int all = static_cast<int>(call.slots.extent(1));
  for (int i = thread; i < table; i += kUnionThreads) keys[i] = kFree;
  for (int i = thread; i < table / 4; i += kUnionThreads) tokens[i] = 0;
  for (int i = thread; i < PickUnion::kMaxTokens * kUnionWarps; i += kUnionThreads) yields[i] = 0;
  if (thread == 0) tried = repeated = 0;
  __syncthreads();

  const auto hash = [&](std::uint32_t slot) {
    return slot * 0x9E3779B1u >> 12 & static_cast<std::uint32_t>(table - 1);
  };
  const auto next = [&](std::uint32_t at) {
    return (at + 1) & static_cast<std::uint32_t>(table - 1);
  };
  const auto count_of = [&](int j) {
    if (token_0 + j >= call.slots.extent(0)) return 0;
    return call.counts == nullptr ? all : max(0, min(all, call.counts[token_0 + j]));
  };
  // Slots first, first + step, … of token j: kFree where there is none to read.
  const auto load = [&](int j, int first, int step, int end, std::uint32_t(&slot)[kAtOnce]) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = first + u * step;
      const std::int32_t value = i < end ? call.slots(token_0 + j, i) : -1;
      slot[u] = value >= 0 && value < num_slots ? static_cast<std::uint32_t>(value) : kFree;
    }
  };

  int picked = 0, taken = 0;  // by this thread; entries that it took
  const auto insert = [&](int j) {
    const int count = count_of(j);
    for (int i = thread; i < count; i += kAtOnce * kUnionThreads) {
      std::uint32_t slot[kAtOnce];
      load(j, i, kUnionThreads, count, slot);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (slot[u] == kFree) continue;
        ++picked;
        std::uint32_t at = hash(slot[u]);
        for (;; at = next(at)) {
          // Most entries are looked at without an atomic operation: it costs several times as much.
          std::uint32_t found = static_cast<volatile std::uint32_t*>(keys)[at];
          if (found == kFree) {
            found = atomicCAS(&keys[at], kFree, slot[u]);
            if (found == kFree) ++taken;
          }
          if (found == kFree || found == slot[u]) break;
        }
        atomicOr(&tokens[at / 4], 1u << (at % 4 * 8 + j));
      }
    }
  };
  insert(0);
  insert(1);
  picked = __reduce_add_sync(~0u, picked);
  taken = __reduce_add_sync(~0u, taken);
  if (lane == 0) {
    atomicAdd(&tried, picked);
    atomicAdd(&repeated, picked - taken);
  }
  __syncthreads();
  const bool has_table = table_pays(tried, repeated);
  if (has_table)
    for (int j = 2; j < num_tokens; ++j) insert(j);
  __syncthreads();

  const auto tokens_of = [&](std::uint32_t slot) {
    std::uint32_t at = hash(slot);
    while (keys[at] != slot) at = next(at);
    return tokens[at / 4] >> (at % 4 * 8) & 0xFFu;
  };
  const int span = (all + kUnionThreads - 1) / kUnionThreads * 32;
  // Calls use(slot, tokens, is the first appearance) for every pick of the warp's span of token j.
  const auto walk = [&](int j, auto use) {
    const int end = min(count_of(j), (warp + 1) * span);
    for (int i = warp * span; i < end; i += kAtOnce * 32) {
      std::uint32_t slot[kAtOnce];
      load(j, i + lane, 32, end, slot);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        std::uint32_t by = 0;
        if (slot[u] != kFree) by = has_table ? tokens_of(slot[u]) : 1u << j;
        use(slot[u], by, (by & ((2u << j) - 1)) == 1u << j);
      }
    }
  };
  for (int j = 0; j < num_tokens; ++j) {
    int yield = 0;
    walk(j, [&](std::uint32_t, std::uint32_t, bool first) {
      yield += __popc(__ballot_sync(~0u, first));
    });
    if (lane == 0) yields[j * kUnionWarps + warp] = yield;
  }
  __syncthreads();
  std::int32_t* const to_slots = picks.slots + item * picks.row;
  std::uint8_t* const to_tokens = picks.tokens + item * picks.row;
  int before = 0;  // what is written in front of the span
  int counted = 0;
  for (int j = 0; j < num_tokens; ++j) {
    for (; counted < j * kUnionWarps + warp; ++counted) before += yields[counted];
    int to = before;
    walk(j, [&](std::uint32_t slot, std::uint32_t by, bool first) {
      const std::uint32_t firsts = __ballot_sync(~0u, first);
      if (first) {
        const int at = to + __popc(firsts & ((1u << lane) - 1));
        to_slots[at] = static_cast<std::int32_t>(slot);
        to_tokens[at] = static_cast<std::uint8_t>(by);
      }
      to += __popc(firsts);
    });
  }
  if (thread == kUnionThreads - 1) {
    for (; counted < num_tokens * kUnionWarps; ++counted) before += yields[counted];
    picks.counts[item] = before;
  }
}

}  // namespace sparse_mla::sm90
