// The registry: every operation with its entries. A backend that is built in puts its list in front
// of the CPU's, whose scalar references come last.
#include "kernels/cpu/entries.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla {
namespace {

template <class EntryType>
std::vector<EntryType> join(std::vector<EntryType> first, std::vector<EntryType> second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

const Operation<RotaryProblem, RotaryCall>& rotary_operation() {
  static const Operation operation("rotary", join(cuda::rotary_entries(), cpu::rotary_entries()));
  return operation;
}

const Operation<HadamardProblem, HadamardCall>& hadamard_operation() {
  static const Operation operation("hadamard",
                                   join(cuda::hadamard_entries(), cpu::hadamard_entries()));
  return operation;
}

const Operation<WriteCacheProblem, WriteCacheCall>& write_cache_operation() {
  static const Operation operation("write_cache",
                                   join(cuda::write_cache_entries(), cpu::write_cache_entries()));
  return operation;
}

const Operation<IndexerProblem, IndexerCall>& indexer_scores_operation() {
  static const Operation operation(
      "indexer_scores", join(cuda::indexer_scores_entries(), cpu::indexer_scores_entries()));
  return operation;
}

const Operation<SelectProblem, SelectCall>& select_operation() {
  static const Operation operation("select", join(cuda::select_entries(), cpu::select_entries()));
  return operation;
}

const Operation<SelectFromIndexerProblem, SelectFromIndexerCall>& select_from_indexer_operation() {
  static const Operation operation("select_from_indexer", join(cuda::select_from_indexer_entries(),
                                                               cpu::select_from_indexer_entries()));
  return operation;
}

const Operation<MapSlotsProblem, MapSlotsCall>& map_slots_operation() {
  static const Operation operation("map_slots",
                                   join(cuda::map_slots_entries(), cpu::map_slots_entries()));
  return operation;
}

const Operation<AbsorbQueryProblem, AbsorbQueryCall>& absorb_query_operation() {
  static const Operation operation("absorb_query",
                                   join(cuda::absorb_query_entries(), cpu::absorb_query_entries()));
  return operation;
}

const Operation<SparseMqaProblem, SparseMqaCall>& sparse_mqa_operation() {
  static const Operation operation("sparse_mqa",
                                   join(cuda::sparse_mqa_entries(), cpu::sparse_mqa_entries()));
  return operation;
}

const Operation<ProjectValueProblem, ProjectValueCall>& project_value_operation() {
  static const Operation operation(
      "project_value", join(cuda::project_value_entries(), cpu::project_value_entries()));
  return operation;
}

const Operation<GatherProblem, GatherCall>& gather_operation() {
  static const Operation operation("gather", join(cuda::gather_entries(), cpu::gather_entries()));
  return operation;
}

const Operation<UpProjectProblem, UpProjectCall>& up_project_operation() {
  static const Operation operation("up_project",
                                   join(cuda::up_project_entries(), cpu::up_project_entries()));
  return operation;
}

const Operation<BuildMasksProblem, BuildMasksCall>& build_masks_operation() {
  static const Operation operation("build_masks",
                                   join(cuda::build_masks_entries(), cpu::build_masks_entries()));
  return operation;
}

const Operation<AttendProblem, AttendCall>& attend_operation() {
  static const Operation operation("attend", join(cuda::attend_entries(), cpu::attend_entries()));
  return operation;
}

const Operation<InitPartialProblem, InitPartialCall>& init_partial_operation() {
  static const Operation operation("init_partial",
                                   join(cuda::init_partial_entries(), cpu::init_partial_entries()));
  return operation;
}

const Operation<MergeProblem, MergeCall>& merge_operation() {
  static const Operation operation("merge", join(cuda::merge_entries(), cpu::merge_entries()));
  return operation;
}

}  // namespace sparse_mla
