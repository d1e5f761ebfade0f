// Operation `attend` on compute capability 9.0: the list of work and the joining of cut keys are
// the portable backend's, the kernel between them is Hopper's own
// (docs/kernels/masked_mha_sm90.md).
#include <string>

#include "kernels/cuda/alignment.h"
#include "kernels/cuda/attend_launch.cuh"
#include "kernels/cuda/device.h"
#include "kernels/sm90/entries.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/masked_mha/masked_mha.cuh"
#include "kernels/sm90/tensor_map.h"

namespace sparse_mla::sm90 {
namespace {

/// Rows of a tile up to which one warpgroup computes alone; the time of such a tile per block, in
/// sixteenths of a full one's.
constexpr int one_group_rows() { return MhaShape::kGroupRows; }
constexpr int one_group_cost() { return 10; }
/// Blocks below which a tile's keys are not cut, the 512 keys of the portable kernels.
constexpr int least_piece_blocks() {
  return cuda::least_piece_blocks() * cuda::key_block() / MhaShape::kKeys;
}

std::string why_not(const AttendProblem& problem) {
  if (problem.qk_nope_head_dim != MhaShape::kNope || problem.qk_rope_head_dim != MhaShape::kRope ||
      problem.v_head_dim != MhaShape::kValue)
    return "made for widths 128+64 / 128";
  if (problem.two_term_weights) return "rounds softmax weights to one bf16 term";
  return why_no_hopper(MhaShape::kSharedBytes + MhaShape::kStaticSharedBytes);
}

/// False where the copy engine or the 16-byte stores cannot serve the call's views, or where its
/// scale is not positive (the maximum is taken before scaling).
bool make_maps(const AttendCall& call, MhaMaps& maps) {
  return call.softmax_scale > 0 && cuda::aligned_rows(call.running.out, 16) &&
         make_map(call.q, MhaShape::kRows, maps.q) &&
         make_map(call.k_nope, MhaShape::kKeys, maps.k_nope) &&
         make_map(call.k_pe, MhaShape::kKeys, maps.k_pe) &&
         make_map(call.v, MhaShape::kKeys, maps.v);
}

template <bool kMasked>
void launch(const AttendProblem& problem, const MhaMaps& maps, const AttendArguments& args,
            const AttendPlan& plan, Stream stream) {
  const auto kernel = masked_mha_kernel<kMasked>;
  cuda::allow_shared(kernel, MhaShape::kSharedBytes);
  cuda::launch_plan(args, plan, stream);
  kernel<<<cuda::grid_size(problem, args, plan), MhaShape::kThreads, MhaShape::kSharedBytes,
           stream>>>(maps, args, plan);
  cuda::check_launch("masked_mha_kernel");
  cuda::launch_join(args, plan, stream);
}

void run(const AttendProblem& problem, const AttendCall& call, std::span<std::byte> workspace,
         Stream stream) {
  if (!cuda::check_call(problem, call)) return;
  MhaMaps maps;
  if (!make_maps(call, maps)) {
    cuda::run_attend_mma(problem, call, workspace, stream);
    return;
  }
  WorkspaceCarver carver(workspace);
  const std::int64_t parts = cuda::max_parts(problem);
  AttendPlan plan = cuda::carve_plan(carver, problem, MhaShape::kRows, parts);
  const AttendArguments args = cuda::arguments_of(problem, call);
  plan.max_slots = static_cast<std::int32_t>(parts / args.num_heads);
  plan.num_ctas = cuda::current_device().num_sms;
  plan.key_block = MhaShape::kKeys;
  plan.least_piece_blocks = least_piece_blocks();
  plan.few_rows = one_group_rows();
  plan.few_cost = one_group_cost();
  if (problem.mode == AttendMode::masked)
    launch<true>(problem, maps, args, plan, stream);
  else
    launch<false>(problem, maps, args, plan, stream);
}

}  // namespace

Entry<AttendProblem, AttendCall> masked_mha_entry() {
  // The portable entry, which serves the calls that this one cannot, needs as much workspace.
  static_assert(MhaShape::kRows == cuda::DeepSeekShape::kRows);
  return {kMaskedMhaEntry,
          Backend::cuda,
          "wgmma tiles, TMA, online softmax, empty mask tiles skipped",
          why_not,
          cuda::attend_mma_bytes,
          run};
}

}  // namespace sparse_mla::sm90
