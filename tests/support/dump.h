/// Writes what a layer call read and computed as .npy files, so that anyone can recompute it:
/// tests/check_dump.py does, with numpy alone. Its docstring lists the same files.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "tests/support/checked_tokens.h"
#include "tests/support/problem.h"

namespace sparse_mla::support {

/// Creates `dir` if needed and writes, for the T checked tokens:
///
///   meta.json          num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim,
///                      index_topk, softmax_scale, block_size, cache_format ("bf16",
///                      "fp8_ds_mla" or "fp8"), cache_scale (of fp8), and lists with an entry per
///                      checked token: tokens, requests, positions, paths ("decode" or the prefill
///                      path), all_visible (true: its keys are 0 … position, its row of picks means
///                      nothing)
///   q.npy              uint16 (bf16)  [T, num_heads, P+R]
///   latent_cache.npy   uint8          [num_blocks, block_size, row bytes], after the call
///   block_tables.npy   int32          [requests, max_blocks]; entries past a sequence are no pages
///   kv_b_proj.npy      uint16 (bf16)  [num_heads, P+V, L]
///   picks.npy          int32          [T, index_topk], request-local positions, −1 = none
///   out.npy            uint16 (bf16)  [T, num_heads, V]
///   lse.npy            float32        [T, num_heads], natural logarithm
///
/// Throws std::runtime_error naming a file that cannot be written.
void write_dump(const std::filesystem::path& dir, const LayerData& data,
                std::span<const CheckedToken> tokens, const std::string& prefill_path);

}  // namespace sparse_mla::support
