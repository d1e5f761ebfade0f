/// What every entry of `up_project`, `absorb_query` and `project_value` requires of shapes. What
/// `tokens` holds is not looked at: it may be device memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/common/view_checks.h"
#include "sparse_mla/attention.h"
#include "sparse_mla/error.h"

namespace sparse_mla {

inline void check_token_count(std::span<const std::int32_t> tokens, std::int64_t max_tokens) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  require(count <= max_tokens, "tokens", count,
          "at most the problem's " + std::to_string(max_tokens));
}

inline void check_shapes(const UpProjectProblem& problem, const UpProjectCall& call) {
  const std::int64_t rows = call.kv.extent(0), heads = call.kv.extent(1);
  require(rows <= problem.max_rows, "kv", shape_text(call.kv),
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  require(heads <= problem.num_heads, "kv", shape_text(call.kv),
          "at most the problem's " + std::to_string(problem.num_heads) + " heads");
  require_extent("kv", call.kv, 2, problem.kv_head_dim, "P+V");
  require_extent("latent", call.latent, 0, rows, "kv's rows");
  require(call.latent.extent(1) >= problem.kv_lora_rank, "latent", shape_text(call.latent),
          "at least L (" + std::to_string(problem.kv_lora_rank) + ") columns");
  require_extent("kv_b_proj", call.kv_b_proj, 0, heads, "kv's heads");
  require_extent("kv_b_proj", call.kv_b_proj, 1, problem.kv_head_dim, "P+V");
  require_extent("kv_b_proj", call.kv_b_proj, 2, problem.kv_lora_rank, "L");
  require_contiguous_rows("latent", call.latent);
  require_contiguous_rows("kv_b_proj", call.kv_b_proj);
  require_contiguous_rows("kv", call.kv);
}

inline void check_shapes(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call) {
  const std::int64_t heads = problem.num_heads;
  require_extent("q", call.q, 1, heads, "num_heads");
  require_extent("q", call.q, 2, problem.qk_nope_head_dim + problem.qk_rope_head_dim, "P+R");
  require_extent("kv_b_proj", call.kv_b_proj, 0, heads, "num_heads");
  require(call.kv_b_proj.extent(1) >= problem.qk_nope_head_dim, "kv_b_proj",
          shape_text(call.kv_b_proj),
          "at least P (" + std::to_string(problem.qk_nope_head_dim) + ") along axis 1");
  require_extent("kv_b_proj", call.kv_b_proj, 2, problem.kv_lora_rank, "L");
  require_extent("absorbed", call.absorbed, 0, static_cast<std::int64_t>(call.tokens.size()),
                 "tokens");
  require_extent("absorbed", call.absorbed, 1, heads, "num_heads");
  require_extent("absorbed", call.absorbed, 2, problem.kv_lora_rank + problem.qk_rope_head_dim,
                 "L+R");
  require_contiguous_rows("q", call.q);
  require_contiguous_rows("kv_b_proj", call.kv_b_proj);
  require_contiguous_rows("absorbed", call.absorbed);
  check_token_count(call.tokens, problem.max_tokens);
}

inline void check_shapes(const ProjectValueProblem& problem, const ProjectValueCall& call) {
  const std::int64_t heads = problem.num_heads;
  require_extent("latent_out", call.latent_out, 0, static_cast<std::int64_t>(call.tokens.size()),
                 "tokens");
  require_extent("latent_out", call.latent_out, 1, heads, "num_heads");
  require_extent("latent_out", call.latent_out, 2, problem.kv_lora_rank, "L");
  require_extent("kv_b_proj", call.kv_b_proj, 0, heads, "num_heads");
  require(call.kv_b_proj.extent(1) >= problem.v_head_dim, "kv_b_proj", shape_text(call.kv_b_proj),
          "at least V (" + std::to_string(problem.v_head_dim) + ") along axis 1");
  require_extent("kv_b_proj", call.kv_b_proj, 2, problem.kv_lora_rank, "L");
  require_contiguous_rows("latent_out", call.latent_out);
  require_contiguous_rows("kv_b_proj", call.kv_b_proj);
  const auto check_out = [&](const char* name, const auto& out) {
    require_extent(name, out, 1, heads, "num_heads");
    require_extent(name, out, 2, problem.v_head_dim, "V");
    require_contiguous_rows(name, out);
    check_token_count(call.tokens, problem.max_tokens);
  };
  if (problem.output == OutputType::bf16) return check_out("out", call.out);
  require(problem.output == OutputType::fp8, "output", to_string(problem.output), "bf16 or fp8");
  require(call.out_scale > 0 && call.out_scale < HUGE_VALF, "out_scale", call.out_scale,
          "a finite value above 0");
  check_out("out_fp8", call.out_fp8);
}

}  // namespace sparse_mla
