/// Items of `sparse_mqa` whose keys the CTAs of a cluster share: which keys a CTA takes, and how
/// the parts of all of them are joined through distributed shared memory:
///   all write their parts, expect_parts, the cluster's barrier, send_parts, join_parts, the
///   barrier again, behind which parts may be written over.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/finished_row.h"
#include "kernels/cuda/write_lse.cuh"
#include "kernels/sm90/sparse_mqa_softmax.cuh"
#include "kernels/sm90/wgmma.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

/// CTAs of a cluster at most.
constexpr int kMaxSplits = 16;
/// Keys of a block, which no two CTAs share.
constexpr int kShareKeys = 64;
/// Of a row of a part: 512 numbers of fp16 and a PartScale. So many that eight rows, 16 bytes of
/// each, or every other of eight, 32 of each, touch each bank once.
constexpr int kPartRowBytes = 512 * 2 + 16;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// A CTA's share of an item's slots: whole blocks of keys, as even as they come.
struct Share {
  int begin, end;  ///< slots [begin, end)

  __device__ Share(int count, int splits) {
    const int blocks = (count + kShareKeys - 1) / kShareKeys;
    const int rank = static_cast<int>(ptx::cluster_rank());
    const auto before = [&](int r) {
      return static_cast<int>(static_cast<unsigned>(blocks * r) / static_cast<unsigned>(splits));
    };
    begin = before(rank) * kShareKeys;
    end = min(count, before(rank + 1) * kShareKeys);
  }
  /// Pairs of blocks that hold it.
  __device__ int pairs() const {
    return (max(end - begin, 0) + 2 * kShareKeys - 1) / (2 * kShareKeys);
  }
};

/// What a row of a part is worth.
struct alignas(16) PartScale {
  float reference;  ///< what weights are relative to (base 2)
  float sum;        ///< of weights; 0 = no key: the row is zeros
  float scale;      ///< the row's numbers are sums / (sum of weights · scale), as fp16 holds them
};
/// Where an item's results go: row r to head `head` + r of the token.
struct JoinedRows {
  int token, head, rows;
};

/// The CTA's share of the item's rows × 512 results from the parts of all CTAs of the cluster,
/// which lie at the shared-memory address `parts` in each; in the order of the CTAs from this one
/// on, so that not all read the same one at a time. By 256 threads; a warp takes a row, or half of
/// one where there are more than eight parts, and a lane has up to 16 loads on their way, eight
/// columns of a part each: wide ones, for requests are what other CTAs' memory is slow at. Lane c
/// knows what CTA c's part counts.
__device__ __forceinline__ void join_parts(const SparseMqaCall& call, int splits,
                                           std::uint32_t parts, int thread, const JoinedRows& to) {
  constexpr int kLoads = kMaxSplits, kWarps = 256 / 32, kColumns = 8;  // of a load
  const int shift = splits <= 8 ? 3 : 4;                               // log2 of parts, at most
  const int row_shift = shift - 3;                                     // log2 of a row's chunks
  const int lane = thread % 32, rank = static_cast<int>(ptx::cluster_rank());
  const int chunks = to.rows << row_shift, end = chunks * (rank + 1) / splits;
  // As generic addresses, made of one that the compiler does not know the making of: it would read
  // a special register before every load.
  const void* own_part = __cvta_shared_to_generic(parts);
  asm volatile("" : "+l"(own_part));
  const auto in_cta = [&](int bytes, int cta) {
    return ptx::map_to_block(static_cast<const std::byte*>(own_part) + bytes,
                             static_cast<std::uint32_t>(cta));
  };
  const auto part_of = [&](int i) {
    const int part = rank + (i & ((1 << shift) - 1));
    return part < splits ? part : part - splits;
  };
  const auto is_part = [&](int i) { return (i & ((1 << shift) - 1)) < splits; };
  bool arrived = false;
  for (int chunk = chunks * rank / splits + thread / 32; chunk < end; chunk += kWarps) {
    const int row = chunk >> row_shift;
    const int column = (chunk & row_shift) * 32 * kColumns + kColumns * lane;
    PartScale part{-HUGE_VALF, 0, 0};
    if (lane < splits)
      part = *static_cast<const PartScale*>(in_cta((row + 1) * kPartRowBytes - 16, lane));
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      values[i] = uint4{0, 0, 0, 0};
      if (is_part(i))
        values[i] = *static_cast<const uint4*>(
            in_cta(row * kPartRowBytes + 2 * column + 512 * (i >> shift), part_of(i)));
    }
    if (chunk + kWarps >= end) {
#pragma unroll
      for (uint4& of_part : values)  // all have landed
        asm volatile("" : "+r"(of_part.x), "+r"(of_part.y), "+r"(of_part.z), "+r"(of_part.w));
      asm volatile("" : "+f"(part.reference), "+f"(part.sum), "+f"(part.scale));
      ptx::cluster_arrive_relaxed();
      arrived = true;
    }
    float top = part.reference;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    top = __shfl_sync(~0u, top, 0);
    const float weight = part.sum == 0.0f ? 0.0f : ptx::ex2(part.reference - top) * part.sum;
    float total = weight;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    total = __shfl_sync(~0u, total, 0);
    const bool empty = total == 0.0f;
    const float lse = empty ? -HUGE_VALF : (top + log2f(total)) * kLn2;
    const int head = to.head + row;
    float factor = empty ? 0.0f : 1.0f / total;
    if (call.sink.data_handle() != nullptr) factor *= sink_factor(call.sink(head), lse);
    if (column == 0) cuda::write_lse(call, to.token, head, lse);
    auto* out = reinterpret_cast<uint4*>(address(call.out, to.token, head, column));
    float sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float share = __shfl_sync(~0u, weight * factor * part.scale, part_of(i));
      if (is_part(i)) {
        const std::uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = ptx::unpack_f16(words[j]);
          sum[2 * j] = fmaf(share, two.x, sum[2 * j]);
          sum[2 * j + 1] = fmaf(share, two.y, sum[2 * j + 1]);
        }
      }
      if (i % 8 == 7 && (i + 1) % (1 << shift) == 0) {
        *out = uint4{ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
                     ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
        out += 32;  // to the row's second half
#pragma unroll
        for (float& of_column : sum) of_column = 0;
      }
    }
  }
  if (!arrived) ptx::cluster_arrive_relaxed();
}

#endif

}  // namespace sparse_mla::sm90
