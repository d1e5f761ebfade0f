/// The host side that the CUDA entries of `attend` share: checks, workspace, the launches before
/// and behind an entry's own kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/attend_plan.cuh"
#include "sparse_mla/attention.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla::cuda {

/// (tile, piece, head) partials of cut tiles that the workspace holds. 0 where no member can have
/// the keys for two pieces.
std::int64_t max_parts(const AttendProblem& problem);

/// The plan's buffers, counted and carved by the same code.
AttendPlan carve_plan(WorkspaceCarver& carver, const AttendProblem& problem, int tile_rows,
                      std::int64_t parts);

AttendArguments arguments_of(const AttendProblem& problem, const AttendCall& call);

/// Throws what is wrong with the shapes. True when there is something to launch.
bool check_call(const AttendProblem& problem, const AttendCall& call);

/// CTAs that are worth starting.
int grid_size(const AttendProblem& problem, const AttendArguments& args, const AttendPlan& plan);

/// plan_attend_kernel.
void launch_plan(const AttendArguments& args, const AttendPlan& plan, Stream stream);
/// join_pieces_kernel, where keys may have been cut. V is 128 or 256.
void launch_join(const AttendArguments& args, const AttendPlan& plan, Stream stream);

/// The portable tensor-core entry, for an entry that leaves some calls to it.
std::size_t attend_mma_bytes(const AttendProblem& problem);
void run_attend_mma(const AttendProblem& problem, const AttendCall& call,
                    std::span<std::byte> workspace, Stream stream);

}  // namespace sparse_mla::cuda
