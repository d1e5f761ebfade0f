/// Attention in MLA's two forms, and the projections between them.
///
/// MHA form (compute friendly): k_nope, v = latent[:, :L] @ kv_b_proj per head, k = [k_nope, k_pe];
/// head width P+R, value width V.
/// MQA form (absorbed, memory friendly): q' = [q_nope @ W_UK, q_pe], L+R wide, attends latent rows
/// directly; the value is a row's first L elements, then @ W_UV.
/// (The method: DeepSeek-V2's technical report, multi-head latent attention.)
#pragma once

#include <cstdint>
#include <span>

#include "sparse_mla/cache.h"
#include "sparse_mla/chunk_member.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

enum class AttendMode {
  dense,   ///< every key of the member
  causal,  ///< row j sees keys at positions ≤ context_len + j
  masked,  ///< the keys whose mask bit is set
};
std::string to_string(AttendMode mode);

/// Operation `attend`: MHA over the members of one chunk (or of the suffix), with the partial's
/// epilogue folded in: rows of the running partial before `merge_row_end` are merged, the others
/// written. A row that sees no key gives out 0, lse −inf. Rows of k and v that belong to no member
/// may hold anything, NaN included. A member's own values must be finite: one that is not may reach
/// every query row whose tile holds its key, seen or not (its weight is 0, and 0 · NaN is NaN).
struct AttendProblem {
  int num_heads = 128;
  int qk_nope_head_dim = 128;
  int qk_rope_head_dim = 64;
  int v_head_dim = 128;
  AttendMode mode = AttendMode::dense;
  std::int64_t max_query_tokens = 0;
  std::int64_t max_key_rows = 0;
  /// For keys and values that carry a rounding of their own beside bf16's (gathered fp8_ds_mla): an
  /// entry that would round softmax weights to bf16 takes two terms of them.
  bool two_term_weights = false;
};
struct AttendCall {
  View3<const bfloat16> q;       ///< [num_tokens, num_heads, P+R], the caller's token numbering
  View3<const bfloat16> k_nope;  ///< [rows, num_heads, P]
  View2<const bfloat16> k_pe;    ///< [rows, R], shared by all heads
  View3<const bfloat16> v;       ///< [rows, num_heads, V]
  std::span<const ChunkMember> members;
  MaskView mask;  ///< mode masked only; mask.members runs parallel to members
  float softmax_scale = 0;
  Partial running;                 ///< rows numbered by ChunkMember::packed_token
  std::int64_t merge_row_end = 0;  ///< running rows [0, merge_row_end) are merged
};
const Operation<AttendProblem, AttendCall>& attend_operation();

/// Operation `sparse_mqa`: absorbed attention that touches only the selected rows; a quantised
/// number is read as e4m3 · scale in fp32 (Hopper's entries round it: the one for few tokens to
/// bf16, as gather does, the other to fp16 times a power of two, within 2^−10). Slot −1 or outside
/// the cache = skip (the row is not read). A token's slots must be distinct. No valid slot → out 0,
/// lse −inf.
struct SparseMqaProblem {
  int num_heads = 128;
  int kv_lora_rank = 512;
  int qk_rope_head_dim = 64;
  int topk = 2048;
  CacheFormat format = CacheFormat::bf16;
  std::int64_t max_tokens = 0;
};
struct SparseMqaCall {
  View3<const bfloat16> q;  ///< [num_tokens, num_heads, L+R] absorbed
  LatentCache cache;
  View2<const std::int32_t> slots;  ///< [num_tokens, topk]
  const std::int32_t* counts =
      nullptr;  ///< optional [num_tokens]: only slots [0, count) are looked at
  float softmax_scale = 0;
  View3<bfloat16> out;  ///< [num_tokens, num_heads, L]
  View2<float> lse;     ///< [num_heads, tokens]
  const std::int32_t* lse_tokens =
      nullptr;  ///< [num_tokens] column of `lse`; null: the token itself
  /// Optional [num_heads] attention sink (see MergeCall::sink), where `out` is finished: not where
  /// it is a part that is yet to be merged. `lse` excludes it.
  View1<const float> sink;
};
const Operation<SparseMqaProblem, SparseMqaCall>& sparse_mqa_operation();

/// Operation `up_project`: kv[r, h, :] = latent_scale · latent[r, :L] @ kv_b_proj[h]^T.
struct UpProjectProblem {
  int num_heads = 128;
  int kv_lora_rank = 512;
  int kv_head_dim = 256;  ///< P+V
  std::int64_t max_rows = 0;
};
struct UpProjectCall {
  View2<const bfloat16> latent;     ///< [rows, ≥ L]
  View3<const bfloat16> kv_b_proj;  ///< [num_heads, P+V, L]
  View3<bfloat16> kv;               ///< [rows, num_heads, P+V], k_nope first
  float latent_scale = 1;           ///< see gathered_latent_scale()
};
const Operation<UpProjectProblem, UpProjectCall>& up_project_operation();

/// Operation `absorb_query`: q'[i] = [q_nope @ W_UK, q_pe] of token tokens[i].
struct AbsorbQueryProblem {
  int num_heads = 128;
  int kv_lora_rank = 512;
  int qk_nope_head_dim = 128;
  int qk_rope_head_dim = 64;
  std::int64_t max_tokens = 0;
};
struct AbsorbQueryCall {
  View3<const bfloat16> q;               ///< [num_tokens, num_heads, P+R]
  View3<const bfloat16> kv_b_proj;       ///< [num_heads, P+V, L]; its first P rows are W_UK
  std::span<const std::int32_t> tokens;  ///< rows of q to absorb
  View3<bfloat16> absorbed;              ///< [tokens.size(), num_heads, L+R]
};
const Operation<AbsorbQueryProblem, AbsorbQueryCall>& absorb_query_operation();

/// Operation `project_value`: out[tokens[i], h] = latent_out[i, h] @ W_UV^T, in bf16 or fp8.
struct ProjectValueProblem {
  int num_heads = 128;
  int kv_lora_rank = 512;
  int v_head_dim = 128;
  std::int64_t max_tokens = 0;
  OutputType output = OutputType::bf16;  ///< bf16 or fp8
};
struct ProjectValueCall {
  View3<const bfloat16> latent_out;  ///< [tokens.size(), num_heads, L]
  View3<const bfloat16> kv_b_proj;   ///< [num_heads, P+V, L]; its last V rows are W_UV
  std::span<const std::int32_t> tokens;
  /// The one that ProjectValueProblem::output names, the other without data:
  View3<bfloat16> out;           ///< [num_tokens, num_heads, V]
  View3<fp8_e4m3> out_fp8 = {};  ///< [num_tokens, num_heads, V] ← quantise(fp32 result / out_scale)
  float out_scale = 1;           ///< of out_fp8: finite, > 0
};
const Operation<ProjectValueProblem, ProjectValueCall>& project_value_operation();

}  // namespace sparse_mla
