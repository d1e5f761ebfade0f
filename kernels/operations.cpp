// The registry: every operation with its entries. A backend that is built in puts its list in front
// of the CPU's, whose scalar references come last.
#include "kernels/cpu/entries.h"

namespace sparse_mla {

const Operation<RotaryProblem, RotaryCall>& rotary_operation() {
  static const Operation operation("rotary", cpu::rotary_entries());
  return operation;
}

const Operation<HadamardProblem, HadamardCall>& hadamard_operation() {
  static const Operation operation("hadamard", cpu::hadamard_entries());
  return operation;
}

const Operation<WriteCacheProblem, WriteCacheCall>& write_cache_operation() {
  static const Operation operation("write_cache", cpu::write_cache_entries());
  return operation;
}

const Operation<IndexerProblem, IndexerCall>& indexer_scores_operation() {
  static const Operation operation("indexer_scores", cpu::indexer_scores_entries());
  return operation;
}

const Operation<SelectProblem, SelectCall>& select_operation() {
  static const Operation operation("select", cpu::select_entries());
  return operation;
}

const Operation<SelectFromIndexerProblem, SelectFromIndexerCall>& select_from_indexer_operation() {
  static const Operation operation("select_from_indexer", cpu::select_from_indexer_entries());
  return operation;
}

const Operation<MapSlotsProblem, MapSlotsCall>& map_slots_operation() {
  static const Operation operation("map_slots", cpu::map_slots_entries());
  return operation;
}

const Operation<AbsorbQueryProblem, AbsorbQueryCall>& absorb_query_operation() {
  static const Operation operation("absorb_query", cpu::absorb_query_entries());
  return operation;
}

const Operation<SparseMqaProblem, SparseMqaCall>& sparse_mqa_operation() {
  static const Operation operation("sparse_mqa", cpu::sparse_mqa_entries());
  return operation;
}

const Operation<ProjectValueProblem, ProjectValueCall>& project_value_operation() {
  static const Operation operation("project_value", cpu::project_value_entries());
  return operation;
}

const Operation<GatherProblem, GatherCall>& gather_operation() {
  static const Operation operation("gather", cpu::gather_entries());
  return operation;
}

const Operation<UpProjectProblem, UpProjectCall>& up_project_operation() {
  static const Operation operation("up_project", cpu::up_project_entries());
  return operation;
}

const Operation<BuildMasksProblem, BuildMasksCall>& build_masks_operation() {
  static const Operation operation("build_masks", cpu::build_masks_entries());
  return operation;
}

const Operation<AttendProblem, AttendCall>& attend_operation() {
  static const Operation operation("attend", cpu::attend_entries());
  return operation;
}

const Operation<InitPartialProblem, InitPartialCall>& init_partial_operation() {
  static const Operation operation("init_partial", cpu::init_partial_entries());
  return operation;
}

const Operation<MergeProblem, MergeCall>& merge_operation() {
  static const Operation operation("merge", cpu::merge_entries());
  return operation;
}

}  // namespace sparse_mla
