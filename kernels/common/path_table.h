/// Written by bench/path_table.py: NVIDIA H200, commit 72fef5c, 2026-11-30.
#pragma once

namespace sparse_mla {

/// Picoseconds per head: of the masked path for each pair of a query token and a key that it sees,
/// of the sparse path for each selected key.
struct PathCost {
  float masked, sparse;
};

// clang-format off
inline constexpr int kPathHeads[] = {8, 16, 64, 128};
inline constexpr int kPathQueryLens[] = {16, 128, 1024};
inline constexpr int kPathSeqLens[] = {4096, 16384, 65536};
/// By heads, query length and sequence length, the last one fastest.
inline constexpr PathCost kPathCosts[] = {
    {60.36, 18.4},  // 8 heads, 16 × 4096
    {50.08, 51.47},  // 8 heads, 16 × 16384
    {57.67, 80.29},  // 8 heads, 16 × 65536
    {8.817, 16.05},  // 8 heads, 128 × 4096
    {6.762, 33.14},  // 8 heads, 128 × 16384
    {7.259, 53.87},  // 8 heads, 128 × 65536
    {4.658, 16.09},  // 8 heads, 1024 × 4096
    {2.208, 30.57},  // 8 heads, 1024 × 16384
    {1.662, 42.08},  // 8 heads, 1024 × 65536
    {47.73, 12.51},  // 16 heads, 16 × 4096
    {42.35, 25.06},  // 16 heads, 16 × 16384
    {43.19, 48.31},  // 16 heads, 16 × 65536
    {7.135, 12.1},  // 16 heads, 128 × 4096
    {5.574, 19.42},  // 16 heads, 128 × 16384
    {5.581, 24.26},  // 16 heads, 128 × 65536
    {3.086, 11.02},  // 16 heads, 1024 × 4096
    {1.856, 18.8},  // 16 heads, 1024 × 16384
    {1.551, 21.43},  // 16 heads, 1024 × 65536
    {36.74, 5.958},  // 64 heads, 16 × 4096
    {36.83, 7.644},  // 64 heads, 16 × 16384
    {37.3, 13.78},  // 64 heads, 16 × 65536
    {5.162, 5.947},  // 64 heads, 128 × 4096
    {4.801, 6.129},  // 64 heads, 128 × 16384
    {5.034, 7.054},  // 64 heads, 128 × 65536
    {2.008, 5.834},  // 64 heads, 1024 × 4096
    {1.571, 5.893},  // 64 heads, 1024 × 16384
    {1.435, 5.889},  // 64 heads, 1024 × 65536
    {39.48, 6.343},  // 128 heads, 16 × 4096
    {39.57, 7.993},  // 128 heads, 16 × 16384
    {39.58, 11.9},  // 128 heads, 16 × 65536
    {5.008, 5.626},  // 128 heads, 128 × 4096
    {4.965, 6.08},  // 128 heads, 128 × 16384
    {5.225, 6.937},  // 128 heads, 128 × 65536
    {1.916, 5.602},  // 128 heads, 1024 × 4096
    {1.525, 5.56},  // 128 heads, 1024 × 16384
    {1.48, 6.083},  // 128 heads, 1024 × 65536
};
// clang-format on

}  // namespace sparse_mla
