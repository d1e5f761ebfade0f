/// Written by bench/path_table.py: NVIDIA H200, commit d593b7a, 2026-11-30.
#pragma once

namespace sparse_mla {

/// Picoseconds per head: of the masked path for each pair of a query token and a key that it sees,
/// of the sparse path for each selected key.
struct PathCost {
  float masked, sparse;
};

// clang-format off
inline constexpr int kPathHeads[] = {16, 128};
inline constexpr int kPathQueryLens[] = {16, 128, 1024};
inline constexpr int kPathSeqLens[] = {4096, 16384, 65536};
/// By heads, query length and sequence length, the last one fastest.
inline constexpr PathCost kPathCosts[] = {
    {48.8, 36.6},  // 16 heads, 16 × 4096
    {43.79, 42.5},  // 16 heads, 16 × 16384
    {44.65, 77.36},  // 16 heads, 16 × 65536
    {8.538, 34.16},  // 16 heads, 128 × 4096
    {5.875, 36.79},  // 16 heads, 128 × 16384
    {5.749, 40.14},  // 16 heads, 128 × 65536
    {4.117, 33.53},  // 16 heads, 1024 × 4096
    {2.021, 35.27},  // 16 heads, 1024 × 16384
    {1.611, 36.29},  // 16 heads, 1024 × 65536
    {36.16, 13.44},  // 128 heads, 16 × 4096
    {36.49, 13.99},  // 128 heads, 16 × 16384
    {36.44, 17.95},  // 128 heads, 16 × 65536
    {5.071, 11.37},  // 128 heads, 128 × 4096
    {4.712, 11.64},  // 128 heads, 128 × 16384
    {4.587, 12.26},  // 128 heads, 128 × 65536
    {2.037, 11.22},  // 128 heads, 1024 × 4096
    {1.54, 11.34},  // 128 heads, 1024 × 16384
    {1.427, 11.65},  // 128 heads, 1024 × 65536
};
// clang-format on

}  // namespace sparse_mla
