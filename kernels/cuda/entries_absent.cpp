#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<RotaryProblem, RotaryCall>> rotary_entries() { return {}; }
std::vector<Entry<HadamardProblem, HadamardCall>> hadamard_entries() { return {}; }
std::vector<Entry<WriteCacheProblem, WriteCacheCall>> write_cache_entries() { return {}; }
std::vector<Entry<IndexerProblem, IndexerCall>> indexer_scores_entries() { return {}; }
std::vector<Entry<SelectProblem, SelectCall>> select_entries() { return {}; }
std::vector<Entry<SelectFromIndexerProblem, SelectFromIndexerCall>> select_from_indexer_entries() {
  return {};
}
std::vector<Entry<MapSlotsProblem, MapSlotsCall>> map_slots_entries() { return {}; }
std::vector<Entry<AbsorbQueryProblem, AbsorbQueryCall>> absorb_query_entries() { return {}; }
std::vector<Entry<SparseMqaProblem, SparseMqaCall>> sparse_mqa_entries() { return {}; }
std::vector<Entry<ProjectValueProblem, ProjectValueCall>> project_value_entries() { return {}; }
std::vector<Entry<GatherProblem, GatherCall>> gather_entries() { return {}; }
std::vector<Entry<UpProjectProblem, UpProjectCall>> up_project_entries() { return {}; }
std::vector<Entry<BuildMasksProblem, BuildMasksCall>> build_masks_entries() { return {}; }
std::vector<Entry<AttendProblem, AttendCall>> attend_entries() { return {}; }
std::vector<Entry<InitPartialProblem, InitPartialCall>> init_partial_entries() { return {}; }
std::vector<Entry<MergeProblem, MergeCall>> merge_entries() { return {}; }

}  // namespace sparse_mla::cuda
