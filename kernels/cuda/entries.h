/// The CUDA backend's entries, fastest first. One source file per operation defines its list; in a
/// build without CUDA every list is empty.
#pragma once

#include <vector>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/rotary.h"
#include "sparse_mla/select.h"

namespace sparse_mla::cuda {

std::vector<Entry<RotaryProblem, RotaryCall>> rotary_entries();
std::vector<Entry<HadamardProblem, HadamardCall>> hadamard_entries();
std::vector<Entry<WriteCacheProblem, WriteCacheCall>> write_cache_entries();
std::vector<Entry<IndexerProblem, IndexerCall>> indexer_scores_entries();
std::vector<Entry<SelectProblem, SelectCall>> select_entries();
std::vector<Entry<SelectFromIndexerProblem, SelectFromIndexerCall>> select_from_indexer_entries();
std::vector<Entry<MapSlotsProblem, MapSlotsCall>> map_slots_entries();
std::vector<Entry<AbsorbQueryProblem, AbsorbQueryCall>> absorb_query_entries();
std::vector<Entry<SparseMqaProblem, SparseMqaCall>> sparse_mqa_entries();
std::vector<Entry<ProjectValueProblem, ProjectValueCall>> project_value_entries();
std::vector<Entry<GatherProblem, GatherCall>> gather_entries();
std::vector<Entry<UpProjectProblem, UpProjectCall>> up_project_entries();
std::vector<Entry<BuildMasksProblem, BuildMasksCall>> build_masks_entries();
std::vector<Entry<AttendProblem, AttendCall>> attend_entries();
std::vector<Entry<InitPartialProblem, InitPartialCall>> init_partial_entries();
std::vector<Entry<MergeProblem, MergeCall>> merge_entries();

}  // namespace sparse_mla::cuda
