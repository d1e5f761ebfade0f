/// Written by bench/path_table.py: NVIDIA H200, commit f2a657a, 2026-11-30.
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
    {60.28, 40.98},  // 8 heads, 16 × 4096
    {49.65, 47.21},  // 8 heads, 16 × 16384
    {57.52, 75.65},  // 8 heads, 16 × 65536
    {8.907, 40.35},  // 8 heads, 128 × 4096
    {6.889, 41.43},  // 8 heads, 128 × 16384
    {7.065, 42.91},  // 8 heads, 128 × 65536
    {3.949, 39.72},  // 8 heads, 1024 × 4096
    {2.271, 39.94},  // 8 heads, 1024 × 16384
    {1.635, 39.04},  // 8 heads, 1024 × 65536
    {47.66, 19.95},  // 16 heads, 16 × 4096
    {42.35, 25.4},  // 16 heads, 16 × 16384
    {43.06, 40.67},  // 16 heads, 16 × 65536
    {7.518, 21.23},  // 16 heads, 128 × 4096
    {5.645, 21},  // 16 heads, 128 × 16384
    {5.527, 21.84},  // 16 heads, 128 × 65536
    {2.871, 20},  // 16 heads, 1024 × 4096
    {1.82, 19.67},  // 16 heads, 1024 × 16384
    {1.554, 20.71},  // 16 heads, 1024 × 65536
    {37.08, 6.227},  // 64 heads, 16 × 4096
    {36.53, 7.174},  // 64 heads, 16 × 16384
    {37.04, 12.5},  // 64 heads, 16 × 65536
    {5.078, 5.943},  // 64 heads, 128 × 4096
    {4.721, 5.94},  // 64 heads, 128 × 16384
    {4.571, 6.194},  // 64 heads, 128 × 65536
    {1.971, 5.799},  // 64 heads, 1024 × 4096
    {1.522, 5.657},  // 64 heads, 1024 × 16384
    {1.468, 5.957},  // 64 heads, 1024 × 65536
    {38.65, 6.078},  // 128 heads, 16 × 4096
    {38.55, 7.332},  // 128 heads, 16 × 16384
    {39.14, 13.5},  // 128 heads, 16 × 65536
    {4.888, 5.612},  // 128 heads, 128 × 4096
    {4.642, 5.59},  // 128 heads, 128 × 16384
    {4.958, 6.799},  // 128 heads, 128 × 65536
    {1.899, 5.548},  // 128 heads, 1024 × 4096
    {1.521, 5.558},  // 128 heads, 1024 × 16384
    {1.544, 5.913},  // 128 heads, 1024 × 65536
};
// clang-format on

}  // namespace sparse_mla
