// The bodies of the tile kernels. A translation unit includes this once, after it has defined, in
// this namespace's anonymous part: Vector, IntVector, kLanes, kLaneIndex, load, store, broadcast,
// multiply_add, load_u16, load_u8. Everything here, the table kTileKernels too, has internal
// linkage.

namespace sparse_mla::cpu {
namespace {

using UnsignedVector [[gnu::vector_size(sizeof(IntVector))]] = std::uint32_t;
using ShortVector [[gnu::vector_size(sizeof(IntVector) / 2)]] = std::uint16_t;
using ByteVector [[gnu::vector_size(sizeof(IntVector) / 4)]] = std::uint8_t;

constexpr float kInfinity = __builtin_inff();
constexpr std::int64_t kPanelColumns = 2 * kLanes;
/// Rows of the register tile: 6 × 2 accumulators, 2 panel vectors and 1 broadcast fill the 16
/// registers of either instruction set, and 12 chains hide a multiply-add's latency.
constexpr int kTileRows = 6;
static_assert(kPanelColumns <= kMaxPanelColumns && kScorePadding % kLanes == 0);
static_assert(kIndexKeys % kTileRows == 0);

inline Vector as_float(IntVector bits) { return (Vector)bits; }
inline IntVector as_bits(Vector value) { return (IntVector)value; }
inline IntVector splat(std::int32_t value) { return value - IntVector{}; }

// ---- number formats

inline Vector decode_bf16(IntVector bits) { return as_float(bits << 16); }

inline ShortVector encode_bf16(Vector value) {
  const UnsignedVector bits = (UnsignedVector)value;
  const UnsignedVector rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const UnsignedVector quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(value == value ? rounded : quiet, ShortVector);
}

/// Exponents move by 120. A subnormal m · 2^-9 is 2^-6 · (1 + m/8) − 2^-6, so that no fp32
/// subnormal is touched, which a flush-to-zero mode would lose.
inline Vector decode_e4m3(IntVector bits) {
  const IntVector magnitude = (bits & 0x7F) << 20;
  const Vector normal = as_float(magnitude + (120 << 23));
  const Vector subnormal = as_float(magnitude + (121 << 23)) - broadcast(0x1p-6f);
  const IntVector value = as_bits((bits & 0x78) == 0 ? subnormal : normal);
  const IntVector sign = (bits & 0x80) << 24;
  return as_float(((bits & 0x7F) == 0x7F ? splat(0x7FC00000) : value) | sign);
}

/// To nearest, ties to even, saturating. Above 2^-6 the kept fraction is rounded in place: a carry
/// moves into the exponent, as it should. Below, e4m3's numbers are the multiples of 2^-9: added to
/// 1.5 · 2^14, whose last place that is, a magnitude is rounded by the adder.
inline ByteVector encode_e4m3(Vector value) {
  const IntVector bits = as_bits(value);
  const IntVector magnitude = bits & 0x7FFFFFFF;
  const IntVector largest = as_bits(broadcast(448.0f));
  const IntVector limited = magnitude > largest ? largest : magnitude;
  const IntVector normal = ((limited + 0x7FFFF + ((limited >> 20) & 1)) >> 20) - (120 << 3);
  const IntVector subnormal = as_bits(as_float(limited) + broadcast(0x1.8p14f)) & 0xF;
  const IntVector code = limited < as_bits(broadcast(0x1p-6f)) ? subnormal : normal;
  const IntVector sign = (bits >> 24) & 0x80;
  return __builtin_convertvector(
      (UnsignedVector)(magnitude > 0x7F800000 ? splat(0x7F) : code | sign), ByteVector);
}

/// The last, incomplete vector of a row goes through a buffer, bytewise: rows of a cache may start
/// at any address.
template <class In, class Out, class Convert>
inline void convert_row(const In* in, Out* out, std::int64_t count, Convert convert) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) convert(in + i, out + i);
  if (i == count) return;
  In in_tail[kLanes] = {};
  Out out_tail[kLanes];
  __builtin_memcpy(in_tail, in + i, static_cast<std::size_t>(count - i) * sizeof(In));
  convert(in_tail, out_tail);
  __builtin_memcpy(out + i, out_tail, static_cast<std::size_t>(count - i) * sizeof(Out));
}

void bf16_to_float(const std::uint16_t* in, float* out, std::int64_t count) {
  convert_row(in, out, count,
              [](const std::uint16_t* from, float* to) { store(to, decode_bf16(load_u16(from))); });
}

void scale_bf16_to_float(const std::uint16_t* in, float factor, float* out, std::int64_t count) {
  convert_row(in, out, count, [factor](const std::uint16_t* from, float* to) {
    store(to, decode_bf16(load_u16(from)) * factor);
  });
}

void float_to_bf16(const float* in, std::uint16_t* out, std::int64_t count) {
  convert_row(in, out, count, [](const float* from, std::uint16_t* to) {
    const ShortVector encoded = encode_bf16(load(from));
    __builtin_memcpy(to, &encoded, sizeof encoded);
  });
}

void e4m3_to_float(const std::uint8_t* in, float* out, std::int64_t count) {
  convert_row(in, out, count,
              [](const std::uint8_t* from, float* to) { store(to, decode_e4m3(load_u8(from))); });
}

void scale_e4m3_to_float(const std::uint8_t* in, float factor, float* out, std::int64_t count) {
  convert_row(in, out, count, [factor](const std::uint8_t* from, float* to) {
    store(to, decode_e4m3(load_u8(from)) * factor);
  });
}

void float_to_e4m3(const float* in, float divisor, std::uint8_t* out, std::int64_t count) {
  convert_row(in, out, count, [divisor](const float* from, std::uint8_t* to) {
    const ByteVector encoded = encode_e4m3(load(from) / divisor);
    __builtin_memcpy(to, &encoded, sizeof encoded);
  });
}

void bf16_to_e4m3(const std::uint16_t* in, float divisor, std::uint8_t* out, std::int64_t count) {
  convert_row(in, out, count, [divisor](const std::uint16_t* from, std::uint8_t* to) {
    const ByteVector encoded = encode_e4m3(decode_bf16(load_u16(from)) / divisor);
    __builtin_memcpy(to, &encoded, sizeof encoded);
  });
}

float max_magnitude_bf16(const std::uint16_t* in, std::int64_t count) {
  // Magnitudes are ordered as their bit patterns are.
  const auto step = [](IntVector largest, IntVector bits) {
    const IntVector magnitude = bits & 0x7FFF;
    const IntVector finite = magnitude == 0x7F80 ? splat(0x7F7F) : magnitude;
    const IntVector candidate = finite > 0x7F80 ? IntVector{} : finite;
    return candidate > largest ? candidate : largest;
  };
  IntVector largest{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) largest = step(largest, load_u16(in + i));
  if (i < count) {
    std::uint16_t tail[kLanes] = {};
    __builtin_memcpy(tail, in + i, static_cast<std::size_t>(count - i) * sizeof(std::uint16_t));
    largest = step(largest, load_u16(tail));
  }
  std::int32_t top = 0;
  for (std::int64_t lane = 0; lane < kLanes; ++lane)
    top = largest[lane] > top ? largest[lane] : top;
  return as_float(splat(top) << 16)[0];
}

void scale(float* values, float factor, std::int64_t count) {
  convert_row(values, values, count,
              [factor](const float* from, float* to) { store(to, load(from) * factor); });
}

// ---- softmax

/// e^x for x ≤ 0, about 2 ulp; 0 below −87.3, where the result would be subnormal; NaN stays NaN.
/// x = n ln 2 + r with |r| ≤ ln 2 / 2 (ln 2 in two pieces), then Taylor's polynomial: its first
/// term left out, r^8 / 8!, is below 6e-9.
inline Vector exponential(Vector x) {
  const Vector magic = broadcast(0x1.8p23f);  // adding it leaves n in the low bits
  const Vector shifted = multiply_add(x, broadcast(1.44269504f), magic);
  const Vector n = shifted - magic;
  Vector r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Vector sum = broadcast(1.0f / 5040);
  sum = multiply_add(sum, r, broadcast(1.0f / 720));
  sum = multiply_add(sum, r, broadcast(1.0f / 120));
  sum = multiply_add(sum, r, broadcast(1.0f / 24));
  sum = multiply_add(sum, r, broadcast(1.0f / 6));
  sum = multiply_add(sum, r, broadcast(0.5f));
  sum = multiply_add(sum, r, broadcast(1.0f));
  sum = multiply_add(sum, r, broadcast(1.0f));
  // Far below the limit the exponent wraps around; the last line discards that.
  const Vector scaled = (Vector)((UnsignedVector)sum + ((UnsignedVector)shifted << 23));
  return x < broadcast(-87.3f) ? Vector{} : scaled;
}

inline IntVector seen_lanes(std::int64_t first, std::int32_t visible, const std::uint32_t* mask) {
  IntVector seen = kLaneIndex + static_cast<std::int32_t>(first) < visible;
  if (mask != nullptr) {
    const IntVector lane_bit = 1 << kLaneIndex;
    const auto bits = static_cast<std::int32_t>(mask[first >> 5] >> (first & 31));
    seen &= (bits & lane_bit) != 0;
  }
  return seen;
}

float softmax_row(float* scores, std::int64_t width, std::int64_t visible,
                  const std::uint32_t* mask, float* maximum, float* sum) {
  const std::int64_t padded = (width + kScorePadding - 1) / kScorePadding * kScorePadding;
  const auto limit = static_cast<std::int32_t>(visible < width ? visible : width);
  const bool all_seen = mask == nullptr && limit == padded;

  Vector top = broadcast(-kInfinity);
  if (all_seen) {
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      const Vector score = load(scores + i);
      top = score > top ? score : top;
    }
  } else {
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      const Vector score = seen_lanes(i, limit, mask) ? load(scores + i) : broadcast(-kInfinity);
      store(scores + i, score);
      top = score > top ? score : top;
    }
  }
  const float before = *maximum;
  float now = before;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) now = top[lane] > now ? top[lane] : now;

  // Without a finite score so far every exponential below is that of −inf (or of NaN).
  const Vector base = broadcast(now == -kInfinity ? 0.0f : now);
  Vector partial_sums{};
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const Vector weight = exponential(load(scores + i) - base);
    store(scores + i, weight);
    partial_sums += weight;
  }
  float total = 0;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) total += partial_sums[lane];

  const float factor = now == before ? 1.0f : exponential(broadcast(before) - base)[0];
  *maximum = now;
  *sum = *sum * factor + total;
  return factor;
}

// ---- packed panels

/// B[d, c] = in[c · stride + d].
template <class In, class Decode>
inline void pack_columns(const In* in, std::int64_t stride, std::int64_t columns,
                         std::int64_t depth, float* panels, Decode decode) {
  // A vector of each column at a time, then transposed through the panel's rows.
  for (std::int64_t first = 0; first < columns; first += kPanelColumns) {
    for (std::int64_t c = 0; c < kPanelColumns; ++c) {
      float* to = panels + c;
      if (first + c >= columns) {
        for (std::int64_t d = 0; d < depth; ++d) to[d * kPanelColumns] = 0;
        continue;
      }
      const In* from = in + (first + c) * stride;
      std::int64_t d = 0;
      for (; d + kLanes <= depth; d += kLanes) {
        const Vector values = decode(from + d);
        for (std::int64_t lane = 0; lane < kLanes; ++lane)
          to[(d + lane) * kPanelColumns] = values[lane];
      }
      if (d == depth) continue;
      In tail[kLanes] = {};
      for (std::int64_t i = d; i < depth; ++i) tail[i - d] = from[i];
      const Vector values = decode(tail);
      for (std::int64_t i = d; i < depth; ++i) to[i * kPanelColumns] = values[i - d];
    }
    panels += kPanelColumns * depth;
  }
}

void pack_columns_bf16(const std::uint16_t* in, std::int64_t stride, std::int64_t columns,
                       std::int64_t depth, float* panels) {
  pack_columns(in, stride, columns, depth, panels,
               [](const std::uint16_t* from) { return decode_bf16(load_u16(from)); });
}

void pack_columns_e4m3(const std::uint8_t* in, std::int64_t stride, std::int64_t columns,
                       std::int64_t depth, float* panels) {
  pack_columns(in, stride, columns, depth, panels,
               [](const std::uint8_t* from) { return decode_e4m3(load_u8(from)); });
}

void pack_rows_bf16(const std::uint16_t* in, std::int64_t stride, std::int64_t columns,
                    std::int64_t depth, float* panels) {
  for (std::int64_t first = 0; first < columns; first += kPanelColumns) {
    const std::int64_t count = columns - first < kPanelColumns ? columns - first : kPanelColumns;
    for (std::int64_t d = 0; d < depth; ++d, panels += kPanelColumns) {
      bf16_to_float(in + d * stride + first, panels, count);
      for (std::int64_t c = count; c < kPanelColumns; ++c) panels[c] = 0;
    }
  }
}

/// tile += rows of a [kRows, depth] times one panel.
template <int kRows>
[[gnu::always_inline]] inline void multiply_tile(const float* a, std::int64_t a_stride,
                                                 const float* panel, std::int64_t depth,
                                                 Vector (&tile)[kRows][2]) {
  for (std::int64_t d = 0; d < depth; ++d) {
    const Vector left = load(panel + d * kPanelColumns);
    const Vector right = load(panel + d * kPanelColumns + kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Vector value = broadcast(a[r * a_stride + d]);
      tile[r][0] = multiply_add(value, left, tile[r][0]);
      tile[r][1] = multiply_add(value, right, tile[r][1]);
    }
  }
}

template <int kRows>
void multiply_rows(const float* a, std::int64_t a_stride, const float* panel, std::int64_t depth,
                   float* out, std::int64_t out_stride) {
  Vector tile[kRows][2] = {};
  multiply_tile<kRows>(a, a_stride, panel, depth, tile);
  for (int r = 0; r < kRows; ++r) {
    store(out + r * out_stride, tile[r][0]);
    store(out + r * out_stride + kLanes, tile[r][1]);
  }
}

void multiply_panels(const float* a, std::int64_t a_stride, std::int64_t rows, const float* panels,
                     std::int64_t columns, std::int64_t depth, float* out,
                     std::int64_t out_stride) {
  for (std::int64_t first = 0; first < columns; first += kPanelColumns) {
    const float* panel = panels + first * depth;
    std::int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows)
      multiply_rows<kTileRows>(a + row * a_stride, a_stride, panel, depth,
                               out + row * out_stride + first, out_stride);
    for (; row < rows; ++row)
      multiply_rows<1>(a + row * a_stride, a_stride, panel, depth, out + row * out_stride + first,
                       out_stride);
  }
}

// ---- indexer

void index_scores(const float* keys, std::int64_t count, std::int64_t depth, const float* q_panels,
                  const float* weights, std::int64_t heads, const float* scales, float* scores) {
  Vector sums[kIndexKeys] = {};
  for (std::int64_t head = 0; head < heads; head += kPanelColumns) {
    const float* panel = q_panels + head * depth;
    const Vector weight_left = load(weights + head), weight_right = load(weights + head + kLanes);
    for (std::int64_t key = 0; key < count; key += kTileRows) {
      Vector tile[kTileRows][2] = {};
      multiply_tile<kTileRows>(keys + key * depth, depth, panel, depth, tile);
      for (int r = 0; r < kTileRows; ++r) {
        // Written so that NaN, which is not below 0, stays.
        const Vector left = tile[r][0] < Vector{} ? Vector{} : tile[r][0];
        const Vector right = tile[r][1] < Vector{} ? Vector{} : tile[r][1];
        sums[key + r] = multiply_add(left, weight_left, sums[key + r]);
        sums[key + r] = multiply_add(right, weight_right, sums[key + r]);
      }
    }
  }
  for (std::int64_t key = 0; key < count; ++key) {
    float sum = 0;
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += sums[key][lane];
    scores[key] = scales[key] * sum;
  }
}

constexpr TileKernels kTileKernels = {
    .panel_columns = kPanelColumns,
    .bf16_to_float = bf16_to_float,
    .scale_bf16_to_float = scale_bf16_to_float,
    .float_to_bf16 = float_to_bf16,
    .e4m3_to_float = e4m3_to_float,
    .scale_e4m3_to_float = scale_e4m3_to_float,
    .float_to_e4m3 = float_to_e4m3,
    .bf16_to_e4m3 = bf16_to_e4m3,
    .max_magnitude_bf16 = max_magnitude_bf16,
    .scale = scale,
    .softmax_row = softmax_row,
    .pack_columns_bf16 = pack_columns_bf16,
    .pack_rows_bf16 = pack_rows_bf16,
    .pack_columns_e4m3 = pack_columns_e4m3,
    .multiply_panels = multiply_panels,
    .index_scores = index_scores,
};

}  // namespace
}  // namespace sparse_mla::cpu
