/// Partial attention results (out, lse) and the one set of routines that every path and backend
/// uses to start, extend and join them.
///
/// lse is the natural logarithm of the softmax denominator, fp32. A partial over no keys is
/// *empty*: lse −inf, out 0. +inf is read as empty too (some kernels report it so). A NaN lse
/// propagates, so that a fault stays visible.
#pragma once

#include <cstdint>
#include <span>

#include "sparse_mla/operation.h"
#include "sparse_mla/planner.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

struct Partial {
  View3<float> out;  ///< [rows, num_heads, V], any strides
  View2<float> lse;  ///< [num_heads, rows], any strides
};

struct ConstPartial {
  View3<const float> out;  ///< [rows, num_heads, V], any strides
  View2<const float> lse;  ///< [num_heads, rows], any strides

  ConstPartial() = default;
  ConstPartial(View3<const float> out_view, View2<const float> lse_view)
      : out(out_view), lse(lse_view) {}
  ConstPartial(const Partial& partial) : out(partial.out), lse(partial.lse) {}
};

/// Operation `merge`: joins two partials row by row into fp32, bf16 or fp8. Its last use for a row
/// may apply the attention sink; a merge whose result is a partial again must not.
struct MergeProblem {
  int num_heads = 0;
  int v_head_dim = 0;
  std::int64_t max_rows = 0;
  OutputType output = OutputType::f32;
};

struct MergeCall {
  ConstPartial a;  ///< rows [0, a.rows); a row past its end is empty
  ConstPartial b;  ///< rows [0, rows)
  /// The one that MergeProblem::output names, the others without data:
  View3<float> out_f32;      ///< [tokens, num_heads, V]; may be a's or b's own view
  View3<bfloat16> out_bf16;  ///< [tokens, num_heads, V]
  View3<fp8_e4m3> out_fp8;   ///< [tokens, num_heads, V] ← quantise(out / out_scale)
  float out_scale = 1;       ///< of out_fp8: finite, > 0
  View2<float> lse;          ///< [num_heads, tokens]; may be a's or b's own view; without the sink
  /// Optional [num_heads] logits in natural-log units, after scaling: out ·= 1/(1+exp(sink − lse)),
  /// in fp32 before `out` is rounded. Rows without keys stay 0; −inf = none, +inf → out 0.
  View1<const float> sink;
  const std::int32_t* out_tokens = nullptr;  ///< [rows] where row r goes; null: to token r
};

const Operation<MergeProblem, MergeCall>& merge_operation();

/// out, lse ← merge of a and b, row by row:
///   lse = log(exp(lse_a) + exp(lse_b)),  out = Σ exp(lse_i − lse) · out_i
/// Both empty → out 0, lse −inf. A part with weight 0 contributes nothing, even if its values are
/// NaN or inf; one empty part returns the other bit for bit. 64-bit offsets, any strides. `out` may
/// be a or b itself. Throws std::invalid_argument when shapes differ (a may have fewer rows).
void merge_partials(const ConstPartial& a, const ConstPartial& b, const Partial& out,
                    const Dispatch& dispatch = {.backend = Backend::cpu}, Stream stream = nullptr);

/// Operation `init_partial`: rows of a running partial that start out empty (out 0, lse −inf).
struct InitPartialProblem {
  int num_heads = 0;
  int v_head_dim = 0;
  std::int64_t max_rows = 0;
};
struct InitPartialCall {
  std::span<const TokenRange> ranges;  ///< rows of `running`
  Partial running;
};
const Operation<InitPartialProblem, InitPartialCall>& init_partial_operation();

/// Sets out 0, lse −inf in `plan.init_token_ranges` of the running partial; the other rows are
/// written by the chunks.
void init_context_partial(const ContextPlan& plan, const Partial& running);

/// Adds one chunk's partial, whose row 0 is token `chunk.token_begin`, to the running partial: the
/// continuation's tokens are merged, the rest written. When the plan has one covering chunk, the
/// chunk's partial is returned as it is and nothing is copied; else `running` is returned.
Partial accumulate_context_chunk(const ContextPlan& plan, std::size_t chunk,
                                 const Partial& chunk_partial, const Partial& running);

}  // namespace sparse_mla
