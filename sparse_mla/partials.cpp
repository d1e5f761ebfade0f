#include "sparse_mla/partials.h"

#include <string>

#include "kernels/common/view_checks.h"
#include "sparse_mla/error.h"

namespace sparse_mla {
namespace {

void check_partial(const char* name, const ConstPartial& partial) {
  require(partial.lse.extent(0) == partial.out.extent(1) &&
              partial.lse.extent(1) == partial.out.extent(0),
          std::string(name) + ".lse", shape_text(partial.lse),
          "[num_heads, rows] of out " + shape_text(partial.out));
}

/// Rows [begin, end) of a partial.
Partial rows_of(const Partial& partial, std::int64_t begin, std::int64_t end) {
  return {strided<float, 3>(address(partial.out, begin, 0, 0),
                            {end - begin, partial.out.extent(1), partial.out.extent(2)},
                            {partial.out.stride(0), partial.out.stride(1), partial.out.stride(2)}),
          strided<float, 2>(address(partial.lse, 0, begin), {partial.lse.extent(0), end - begin},
                            {partial.lse.stride(0), partial.lse.stride(1)})};
}

void copy_partial(const Partial& from, const Partial& to) {
  for (std::int64_t row = 0; row < from.out.extent(0); ++row)
    for (std::int64_t head = 0; head < from.out.extent(1); ++head) {
      to.lse(head, row) = from.lse(head, row);
      for (std::int64_t i = 0; i < from.out.extent(2); ++i)
        to.out(row, head, i) = from.out(row, head, i);
    }
}

}  // namespace

void merge_partials(const ConstPartial& a, const ConstPartial& b, const Partial& out,
                    const Dispatch& dispatch, Stream stream) {
  MergeProblem problem;
  problem.num_heads = static_cast<int>(b.out.extent(1));
  problem.v_head_dim = static_cast<int>(b.out.extent(2));
  problem.max_rows = b.out.extent(0);
  MergeCall call;
  call.a = a;
  call.b = b;
  call.out_f32 = out.out;
  call.lse = out.lse;
  merge_operation().run(problem, call, {}, dispatch, stream);
}

void init_context_partial(const ContextPlan& plan, const Partial& running) {
  check_partial("running", running);
  require(running.out.extent(0) >= plan.running_rows, "running", running.out.extent(0),
          "at least " + std::to_string(plan.running_rows) + " rows");
  Dispatch dispatch;
  dispatch.backend = Backend::cpu;  // the plan lies on the host, and so does this partial
  init_partial_operation().run({static_cast<int>(running.out.extent(1)),
                                static_cast<int>(running.out.extent(2)), running.out.extent(0)},
                               {plan.init_token_ranges, running}, {}, dispatch, nullptr);
}

Partial accumulate_context_chunk(const ContextPlan& plan, std::size_t chunk_index,
                                 const Partial& chunk_partial, const Partial& running) {
  require(chunk_index < plan.chunks.size(), "chunk", chunk_index,
          "below the plan's " + std::to_string(plan.chunks.size()) + " chunks");
  check_partial("chunk_partial", chunk_partial);
  const ContextChunk& chunk = plan.chunks[chunk_index];
  const std::int64_t num_rows = chunk.token_end - chunk.token_begin;
  require(chunk_partial.out.extent(0) == num_rows, "chunk_partial", chunk_partial.out.extent(0),
          "one row per token of the chunk (" + std::to_string(num_rows) + ")");
  if (plan.single_covering_chunk()) return chunk_partial;
  check_partial("running", running);
  require(running.out.extent(0) >= plan.running_rows &&
              running.out.extent(1) == chunk_partial.out.extent(1) &&
              running.out.extent(2) == chunk_partial.out.extent(2),
          "running", shape_text(running.out),
          "at least " + std::to_string(plan.running_rows) + " rows of the chunk's heads and width");
  const std::int64_t merged = chunk.continuation_token_end - chunk.token_begin;
  const Partial target = rows_of(running, chunk.token_begin, chunk.token_end);
  if (merged > 0)
    merge_partials(rows_of(target, 0, merged), rows_of(chunk_partial, 0, merged),
                   rows_of(target, 0, merged));
  copy_partial(rows_of(chunk_partial, merged, num_rows), rows_of(target, merged, num_rows));
  return running;
}

}  // namespace sparse_mla
