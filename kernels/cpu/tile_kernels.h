/// The vectorised inner loops of the CPU backend. One source, tile_kernels.inl.h, is compiled for
/// the x86-64 baseline and for AVX2; an entry passes its table down, so nothing is dispatched
/// twice.
///
/// Only plain types appear here: a translation unit with wider instructions must not instantiate an
/// inline function that baseline code might then be linked to.
#pragma once

#include <cstdint>

namespace sparse_mla::cpu {

/// Packed panels. A matrix B [depth, columns] lies as ceil(columns / panel_columns) panels of
/// [depth, panel_columns], the last one padded with zero columns. A product's element is one chain
/// of multiply-adds over depth, in order, whatever its neighbours: results do not depend on how
/// rows are tiled, which no BLAS promises.
struct TileKernels {
  /// Columns of a panel: two vectors.
  std::int64_t panel_columns;

  /// out[i] = in[i]; bf16 bit patterns.
  void (*bf16_to_float)(const std::uint16_t* in, float* out, std::int64_t count);
  /// out[i] = factor · in[i]
  void (*scale_bf16_to_float)(const std::uint16_t* in, float factor, float* out,
                              std::int64_t count);
  /// Round to nearest, ties to even; NaN stays NaN.
  void (*float_to_bf16)(const float* in, std::uint16_t* out, std::int64_t count);
  /// e4m3 bit patterns, exact.
  void (*e4m3_to_float)(const std::uint8_t* in, float* out, std::int64_t count);
  /// out[i] = factor · in[i]
  void (*scale_e4m3_to_float)(const std::uint8_t* in, float factor, float* out, std::int64_t count);
  /// out[i] = in[i] / divisor as e4m3: round to nearest, ties to even, saturating at ±448; −0 is
  /// kept, NaN becomes 0x7F.
  void (*float_to_e4m3)(const float* in, float divisor, std::uint8_t* out, std::int64_t count);
  void (*bf16_to_e4m3)(const std::uint16_t* in, float divisor, std::uint8_t* out,
                       std::int64_t count);
  /// The largest |in[i]|, of bf16 bit patterns: NaN is passed over, ±inf counts as the largest
  /// finite number. 0 for nothing.
  float (*max_magnitude_bf16)(const std::uint16_t* in, std::int64_t count);
  /// values[i] ·= factor
  void (*scale)(float* values, float factor, std::int64_t count);

  /// One row's step of the online softmax. scores [width] → exp(score − new maximum), 0 where the
  /// key is not seen: at or past `visible`, or bit clear in `mask` (null: all set). Elements up to
  /// the next multiple of kScorePadding are written too, as 0; mask words cover them. Returns the
  /// factor for what was accumulated before (1 = nothing to do). A NaN score makes `sum` NaN.
  float (*softmax_row)(float* scores, std::int64_t width, std::int64_t visible,
                       const std::uint32_t* mask, float* maximum, float* sum);

  /// panels ← B with B[d, c] = in[c · stride + d] (in is [columns, depth], bf16).
  void (*pack_columns_bf16)(const std::uint16_t* in, std::int64_t stride, std::int64_t columns,
                            std::int64_t depth, float* panels);
  /// panels ← B with B[d, c] = in[d · stride + c] (in is [depth, columns], bf16).
  void (*pack_rows_bf16)(const std::uint16_t* in, std::int64_t stride, std::int64_t columns,
                         std::int64_t depth, float* panels);
  /// panels ← B with B[d, c] = in[c · stride + d] (in is [columns, depth], e4m3).
  void (*pack_columns_e4m3)(const std::uint8_t* in, std::int64_t stride, std::int64_t columns,
                            std::int64_t depth, float* panels);

  /// out = a · B. a [rows, depth] with `a_stride`; out [rows, columns rounded up to whole panels]
  /// with `out_stride`.
  void (*multiply_panels)(const float* a, std::int64_t a_stride, std::int64_t rows,
                          const float* panels, std::int64_t columns, std::int64_t depth, float* out,
                          std::int64_t out_stride);

  /// One query row of the indexer against `count` ≤ kIndexKeys keys:
  ///   scores[k] = scales[k] · Σ_h weights[h] · relu(keys[k] · q[h]), relu(NaN) = NaN.
  /// keys [kIndexKeys, depth]; q_panels: heads are the columns; weights [heads rounded up to whole
  /// panels], 0 in the padding. Heads are added in one fixed order.
  void (*index_scores)(const float* keys, std::int64_t count, std::int64_t depth,
                       const float* q_panels, const float* weights, std::int64_t heads,
                       const float* scales, float* scores);
};

/// Score rows are padded to whole vectors: of eight floats, the widest.
inline constexpr std::int64_t kScorePadding = 8;
/// Keys per call of index_scores: with one panel of q (128 deep) they fit a 32 KiB L1 cache, and
/// they are whole groups of the six rows that the register tile holds.
inline constexpr std::int64_t kIndexKeys = 24;
/// The widest panel of any table, for buffer sizes.
inline constexpr std::int64_t kMaxPanelColumns = 16;

/// Elements of `columns` columns packed into panels, for any table.
constexpr std::int64_t panel_elements(std::int64_t columns, std::int64_t depth) {
  return (columns + kMaxPanelColumns - 1) / kMaxPanelColumns * kMaxPanelColumns * depth;
}

const TileKernels& baseline_tile_kernels();
const TileKernels& avx2_tile_kernels();

}  // namespace sparse_mla::cpu
