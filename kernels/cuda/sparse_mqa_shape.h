/// The tensor-core sparse MQA kernel's tile and its shared memory: numbers that host and device
/// both need.
#pragma once

#include <cstdint>

#include "sparse_mla/attention.h"
#include "sparse_mla/host_device.h"

namespace sparse_mla::cuda {

/// Columns of a tile's rows: DeepSeek's widths; narrower ones are padded with zeros.
inline constexpr int kTileLatent = 512, kTileRope = 64, kTileWidth = kTileLatent + kTileRope;
/// Keys of a tile. 64: two tiles of 72 KiB and the queries of 64 heads just fit a Hopper SM, and a
/// softmax step is paid once per 64 keys.
inline constexpr int kTileKeys = 64;
/// Two warps per scheduler; with 255 registers each, a warp holds 64 heads × 64 columns of sums.
inline constexpr int kMqaThreads = 256, kMqaWarps = kMqaThreads / 32;
/// fp8_ds_mla: the columns' groups, each with a scale of its own per key.
inline constexpr int kScaleGroups = kTileLatent / kLatentScaleGroup;

inline constexpr int kTileRowBytes = 2 * kTileWidth;  ///< of queries and keys in shared memory

/// Heads of a CTA's tile in units of 16 (an MMA's rows): 1, 2 or 4. More would not leave registers,
/// fewer than the heads would gather every row again.
constexpr int wanted_head_units(int num_heads) {
  return num_heads <= 16 ? 1 : num_heads <= 32 ? 2 : 4;
}

/// Bytes of a row as it is fetched, before it becomes bf16; 0 = it is bf16 already.
SPARSE_MLA_HOST_DEVICE constexpr int raw_row_bytes(CacheFormat format) {
  switch (format) {
    case CacheFormat::bf16:
      return 0;
    case CacheFormat::fp8_ds_mla:
      return kTileLatent + 4 * kScaleGroups + 2 * kTileRope;
    case CacheFormat::fp8:
      return kTileWidth;
  }
  return 0;
}

/// Offsets into a CTA's dynamic shared memory, bytes. With `heads` = 16 · head units:
struct MqaShared {
  int q = 0;          ///< [heads, 576] bf16, swizzled
  int keys = 0;       ///< [stages, 64, 576] bf16, swizzled
  int raw = 0;        ///< [64, raw row] bytes, quantised formats only
  int weights = 0;    ///< [groups, heads, 64] bf16, swizzled; one group unless fp8_ds_mla
  int scales = 0;     ///< [64, 4] fp32, fp8_ds_mla only
  int reference = 0;  ///< [2, 4] fp32: a group's reference scale and its inverse
  int reduce = 0;     ///< [8 / head units, heads] fp32
  int factor = 0;     ///< [heads] fp32
  int valid = 0;      ///< [2, 64] bytes
  int bytes = 0;

  SPARSE_MLA_HOST_DEVICE constexpr MqaShared(int head_units, CacheFormat format, int stages) {
    const int heads = 16 * head_units;
    int end = 0;
    const auto take = [&end](int size) {
      const int begin = end;
      end += (size + 127) / 128 * 128;  // swizzled rows start on 128-byte boundaries
      return begin;
    };
    const bool groups = format == CacheFormat::fp8_ds_mla;
    q = take(heads * kTileRowBytes);
    keys = take(stages * kTileKeys * kTileRowBytes);
    raw = take(kTileKeys * raw_row_bytes(format));
    weights = take((groups ? kScaleGroups : 1) * heads * kTileKeys * 2);
    scales = take(groups ? kTileKeys * kScaleGroups * 4 : 0);
    reference = take(groups ? 2 * kScaleGroups * 4 : 0);
    reduce = take(kMqaWarps / head_units * heads * 4);
    factor = take(heads * 4);
    valid = take(2 * kTileKeys);
    bytes = end;
  }
};

/// What a launch is made of; `head_units` 0 = no tile fits the device.
struct MqaTile {
  int head_units = 0, stages = 1;
};

/// The largest tile up to the wanted one that fits `shared_bytes`: the next keys come in while a
/// tile is worked on if there is room for two of them. Quantised rows wait in their own buffer.
constexpr MqaTile choose_mqa_tile(int num_heads, CacheFormat format, int shared_bytes) {
  for (int units = wanted_head_units(num_heads); units >= 1; units /= 2)
    for (int stages = format == CacheFormat::bf16 ? 2 : 1; stages >= 1; --stages)
      if (MqaShared(units, format, stages).bytes <= shared_bytes) return {units, stages};
  return {};
}

constexpr int kHopperSharedBytes = 227 * 1024;
static_assert(choose_mqa_tile(128, CacheFormat::bf16, kHopperSharedBytes).head_units == 4);
static_assert(choose_mqa_tile(128, CacheFormat::bf16, kHopperSharedBytes).stages == 2);
static_assert(choose_mqa_tile(128, CacheFormat::fp8_ds_mla, kHopperSharedBytes).head_units == 4);
static_assert(choose_mqa_tile(16, CacheFormat::bf16, 99 * 1024).head_units == 1);

/// Splits of a token's keys at most: the join's warp has a lane for each.
inline constexpr int kMaxSplits = 32;

/// Parts that a token's keys are split into: whole tiles of keys, and only while CTAs leave SMs
/// idle (one CTA fills an SM).
constexpr int key_splits(std::int64_t tokens, std::int64_t head_tiles, std::int64_t topk,
                         int num_sms) {
  const std::int64_t ctas = tokens * head_tiles, tiles = (topk + kTileKeys - 1) / kTileKeys;
  std::int64_t splits = ctas == 0 ? 1 : num_sms / ctas;
  if (splits > tiles) splits = tiles;
  if (splits > kMaxSplits) splits = kMaxSplits;
  return splits < 1 ? 1 : static_cast<int>(splits);
}
static_assert(key_splits(1, 2, 2048, 132) == 32 && key_splits(8, 2, 2048, 132) == 8);
static_assert(key_splits(128, 2, 2048, 132) == 1 && key_splits(1, 1, 0, 132) == 1);

}  // namespace sparse_mla::cuda
