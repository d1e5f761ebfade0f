// Operation `attend` on the GPU: a small kernel lists the work, a kernel of resident CTAs does it,
// and where the keys of a tile were cut into pieces a third joins them
// (docs/kernels/attend_cuda.md).
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/attend_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/attend_launch.cuh"
#include "kernels/cuda/attend_mma.cuh"
#include "kernels/cuda/attend_plan.cuh"
#include "kernels/cuda/attend_rows.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/sm90/entries.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kJoinThreads = 256;
/// CTAs that an SM is given. Where only one fits, the others start when it has gone and find the
/// list empty.
constexpr int ctas_per_sm() { return 2; }

bool has_widths(const AttendProblem& problem, int nope, int rope, int value) {
  return problem.qk_nope_head_dim == nope && problem.qk_rope_head_dim == rope &&
         problem.v_head_dim == value;
}
template <class Shape>
bool has_widths(const AttendProblem& problem) {
  return has_widths(problem, Shape::kNope, Shape::kRope, Shape::kValue);
}

}  // namespace

std::int64_t max_parts(const AttendProblem& problem) {
  if (problem.max_key_rows < 2 * least_piece_blocks() * key_block() - key_block() + 1) return 0;
  return std::int64_t{half_parts_per_cta()} * ctas_per_sm() * current_device().num_sms / 2;
}

AttendPlan carve_plan(WorkspaceCarver& carver, const AttendProblem& problem, int tile_rows,
                      std::int64_t parts) {
  AttendPlan plan;
  // A tile has a row at least; with one head every part is an item of its own.
  plan.max_items = problem.max_query_tokens + parts;
  plan.counts = carver.take<AttendCounts>("attend_counts", 1);
  plan.items = carver.take<AttendItem>("attend_items", plan.max_items);
  plan.cut_tiles = carver.take<CutTile>("attend_cut_tiles", parts / 2);
  plan.part_lse = carver.take<float>("attend_part_lse", parts * tile_rows);
  plan.part_out = carver.take<float>("attend_part_out", parts * tile_rows * problem.v_head_dim);
  plan.tile_rows = tile_rows;
  return plan;
}

AttendArguments arguments_of(const AttendProblem& problem, const AttendCall& call) {
  AttendArguments args;
  args.q = call.q;
  args.k_nope = call.k_nope;
  args.k_pe = call.k_pe;
  args.v = call.v;
  args.out = call.running.out;
  args.lse = call.running.lse;
  args.members = call.members.data();
  args.merge_row_end = call.merge_row_end;
  args.softmax_scale = call.softmax_scale;
  args.num_members = static_cast<int>(call.members.size());
  args.num_heads = static_cast<int>(call.q.extent(1));
  args.causal = problem.mode == AttendMode::causal;
  if (problem.mode == AttendMode::masked) {
    args.mask_members = call.mask.members.data();
    args.mask_words = call.mask.words;
    args.mask_tile_counts = call.mask.tile_counts;
    args.mask_tile_ids = call.mask.tile_ids;
    args.mask_tile = call.mask.tile;
  }
  return args;
}

bool check_call(const AttendProblem& problem, const AttendCall& call) {
  check_shapes(problem, call);
  if (call.members.empty() || problem.max_query_tokens == 0 || call.q.extent(1) == 0) return false;
  if (problem.mode == AttendMode::masked) check_mask_arrays(call.mask);
  return true;
}

int grid_size(const AttendProblem& problem, const AttendArguments& args, const AttendPlan& plan) {
  // Tiles ≤ rows / tile_rows + members, and parts.
  const std::int64_t tiles = problem.max_query_tokens / plan.tile_rows +
                             std::min<std::int64_t>(args.num_members, problem.max_query_tokens) +
                             plan.max_slots;
  return static_cast<int>(std::min<std::int64_t>(plan.num_ctas, tiles * args.num_heads));
}

void launch_plan(const AttendArguments& args, const AttendPlan& plan, Stream stream) {
  plan_attend_kernel<kPlanThreads><<<1, kPlanThreads, 0, stream>>>(args, plan);
  check_launch("plan_attend_kernel");
}

void launch_join(const AttendArguments& args, const AttendPlan& plan, Stream stream) {
  if (plan.max_slots == 0) return;
  const auto kernel = args.v.extent(2) == 128 ? join_pieces_kernel<kJoinThreads, 128>
                                              : join_pieces_kernel<kJoinThreads, 256>;
  kernel<<<current_device().num_sms * 4, kJoinThreads, 0, stream>>>(args, plan);
  check_launch("join_pieces_kernel");
}

namespace {

template <class Shape, bool kMasked, bool kTwoTerm>
void launch_mma(const AttendProblem& problem, const AttendArguments& args, const AttendPlan& plan,
                Stream stream) {
  const auto kernel = attend_mma_kernel<Shape, kMasked, kTwoTerm>;
  allow_shared(kernel, Shape::kSharedBytes);
  const bool vector_loads = aligned_rows(args.q, 16) && aligned_rows(args.k_nope, 16) &&
                            aligned_rows(args.k_pe, 16) && aligned_rows(args.v, 16);
  launch_plan(args, plan, stream);
  kernel<<<grid_size(problem, args, plan), Shape::kThreads, Shape::kSharedBytes, stream>>>(
      args, plan, vector_loads, aligned_rows(args.out, 16));
  check_launch("attend_mma_kernel");
  launch_join(args, plan, stream);
}

template <class Shape>
void run_shape(const AttendProblem& problem, const AttendCall& call, std::span<std::byte> workspace,
               Stream stream) {
  WorkspaceCarver carver(workspace);
  const std::int64_t parts = max_parts(problem);
  AttendPlan plan = carve_plan(carver, problem, Shape::kRows, parts);
  const AttendArguments args = arguments_of(problem, call);
  plan.max_slots = static_cast<std::int32_t>(parts / args.num_heads);
  plan.few_rows = Shape::kFewRows;
  plan.num_ctas = ctas_per_sm() * current_device().num_sms;
  const bool masked = problem.mode == AttendMode::masked;
  if (masked && problem.two_term_weights)
    launch_mma<Shape, true, true>(problem, args, plan, stream);
  else if (masked)
    launch_mma<Shape, true, false>(problem, args, plan, stream);
  else if (problem.two_term_weights)
    launch_mma<Shape, false, true>(problem, args, plan, stream);
  else
    launch_mma<Shape, false, false>(problem, args, plan, stream);
}

std::string why_not_mma(const AttendProblem& problem) {
  if (std::string reason = why_no_device(80); !reason.empty()) return reason;
  if (!has_widths<DeepSeekShape>(problem) && !has_widths<Glm5Shape>(problem))
    return "made for widths 128+64 / 128 and 192+64 / 256";
  const int needed =
      has_widths<Glm5Shape>(problem) ? Glm5Shape::kSharedBytes : DeepSeekShape::kSharedBytes;
  if (current_device().max_shared_bytes < needed)
    return "needs " + std::to_string(needed) + " bytes of shared memory per block";
  return "";
}

}  // namespace

std::size_t attend_mma_bytes(const AttendProblem& problem) {
  WorkspaceCarver carver;
  carve_plan(carver, problem,
             has_widths<Glm5Shape>(problem) ? Glm5Shape::kRows : DeepSeekShape::kRows,
             max_parts(problem));
  return carver.bytes();
}

void run_attend_mma(const AttendProblem& problem, const AttendCall& call,
                    std::span<std::byte> workspace, Stream stream) {
  if (!check_call(problem, call)) return;
  if (has_widths<Glm5Shape>(problem))
    run_shape<Glm5Shape>(problem, call, workspace, stream);
  else
    run_shape<DeepSeekShape>(problem, call, workspace, stream);
}

namespace {

std::string why_not_rows(const AttendProblem& problem) {
  if (std::string reason = why_no_device(80); !reason.empty()) return reason;
  const std::int64_t needed = rows_kernel_shared_bytes(problem) + rows_kernel_static_bytes();
  if (needed > current_device().max_shared_bytes)
    return "needs " + std::to_string(needed) + " bytes of shared memory per block";
  return "";
}

std::size_t rows_bytes(const AttendProblem& problem) {
  WorkspaceCarver carver;
  carve_plan(carver, problem, rows_kernel_tile(), 0);
  return carver.bytes();
}

void run_rows(const AttendProblem& problem, const AttendCall& call, std::span<std::byte> workspace,
              Stream stream) {
  if (!check_call(problem, call)) return;
  WorkspaceCarver carver(workspace);
  AttendPlan plan = carve_plan(carver, problem, rows_kernel_tile(), 0);
  const AttendArguments args = arguments_of(problem, call);
  plan.num_ctas = rows_kernel_ctas_per_sm() * current_device().num_sms;
  const auto shared_bytes = static_cast<int>(rows_kernel_shared_bytes(problem));
  allow_shared(attend_rows_kernel, current_device().max_shared_bytes - rows_kernel_static_bytes());
  launch_plan(args, plan, stream);
  attend_rows_kernel<<<grid_size(problem, args, plan), rows_kernel_threads(), shared_bytes,
                       stream>>>(args, plan, problem.qk_nope_head_dim, problem.qk_rope_head_dim,
                                 problem.v_head_dim);
  check_launch("attend_rows_kernel");
}

}  // namespace

std::vector<Entry<AttendProblem, AttendCall>> attend_entries() {
  return {sm90::masked_mha_entry(),
          {"cuda_mma", Backend::cuda, "mma.sync tiles, online softmax, empty mask tiles skipped",
           why_not_mma, attend_mma_bytes, run_attend_mma},
          {"cuda_rows", Backend::cuda, "fp32, a query row at a time, any widths", why_not_rows,
           rows_bytes, run_rows}};
}

}  // namespace sparse_mla::cuda
