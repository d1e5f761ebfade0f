/// Everything that is fixed at capture time: grid bounds, workspace bytes and kernel choices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/limits.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/path_choice.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla {

/// A problem with the entry chosen for it and the scratch counted for it, which stays what it was
/// on the thread that chose: OpenMP's thread count is a setting of each thread.
template <class Problem, class Call>
struct Choice {
  Problem problem;
  const Operation<Problem, Call>* operation = nullptr;
  const Entry<Problem, Call>* entry = nullptr;
  std::size_t bytes = 0;

  Choice(const Operation<Problem, Call>& op, const Problem& bounds, const Dispatch& dispatch)
      : problem(bounds),
        operation(&op),
        entry(&op.choose(bounds, dispatch)),
        bytes(entry->workspace_bytes(bounds)) {}

  std::size_t workspace_bytes() const { return bytes; }
  void run(const Call& call, std::span<std::byte> workspace, Stream stream) const {
    require_workspace(operation->name(), entry->name, workspace, bytes);
    entry->run(problem, call, workspace.first(bytes), stream);
  }
};

/// One choice per operation of the layer, all of one backend.
struct LayerOperations {
  Choice<WriteCacheProblem, WriteCacheCall> write_cache;
  Choice<SelectFromIndexerProblem, SelectFromIndexerCall> select_from_indexer;
  Choice<MapSlotsProblem, MapSlotsCall> map_slots;
  Choice<AbsorbQueryProblem, AbsorbQueryCall> absorb_query;
  Choice<SparseMqaProblem, SparseMqaCall> sparse_mqa;
  Choice<ProjectValueProblem, ProjectValueCall> project_value;
  Choice<GatherProblem, GatherCall> gather;
  Choice<UpProjectProblem, UpProjectCall> up_project;
  Choice<BuildMasksProblem, BuildMasksCall> build_masks;
  Choice<AttendProblem, AttendCall> attend_dense;
  Choice<AttendProblem, AttendCall> attend_causal;
  Choice<AttendProblem, AttendCall> attend_masked;
  Choice<InitPartialProblem, InitPartialCall> init_partial;
  Choice<MergeProblem, MergeCall> merge;
};

/// The layer's workspace, carved. Paths that never run together share memory.
struct LayerWorkspace {
  // Selection.
  std::span<std::byte> selection;  ///< scratch of select_from_indexer
  // Sparse MQA, a tile of tokens at a time.
  std::int32_t* slots = nullptr;        ///< [token_tile, topk]
  std::int32_t* slot_counts = nullptr;  ///< [token_tile]
  bfloat16* absorbed = nullptr;         ///< [token_tile, num_heads, L+R]
  bfloat16* latent_out = nullptr;       ///< [token_tile, num_heads, L]
  std::span<std::byte> sparse_scratch;  ///< of the operation that runs
  // Chunked MHA.
  bfloat16* latent_rows = nullptr;  ///< [latent_rows, L+R]
  bfloat16* kv = nullptr;           ///< [latent_rows, head_group, P+V]
  float* context_out = nullptr;     ///< [max_num_tokens, num_heads, V]
  float* context_lse = nullptr;     ///< [num_heads, max_num_tokens]
  float* suffix_out = nullptr;      ///< [max_num_tokens, num_heads, V]
  float* suffix_lse = nullptr;      ///< [num_heads, max_num_tokens]
  std::uint32_t* mask_words = nullptr;
  std::int32_t* mask_tile_counts = nullptr;
  std::int32_t* mask_tile_ids = nullptr;
  std::span<std::byte> chunked_scratch;  ///< of the operation that runs
};

/// Immutable after construction; safe to use from several threads, each with its own workspace.
class Capacity {
 public:
  /// All operations run on one backend: the one that `dispatch` names, else CUDA where every
  /// operation has a usable CUDA entry, else the CPU. On CUDA it is made for the current device,
  /// which has to be current in run_layer, too. Throws std::invalid_argument for limits out of
  /// range and for forces that cannot be met.
  explicit Capacity(const Limits& limits, Dispatch dispatch = Dispatch::from_environment());

  const Limits& limits() const { return limits_; }
  const Dispatch& dispatch() const { return dispatch_; }
  const LayerOperations& operations() const { return operations_; }
  Backend backend() const { return *dispatch_.backend; }
  /// By whose rates automatic batches choose their path.
  PathMachine path_machine() const;
  /// Differs between capacities made apart; copies share it.
  std::uint64_t id() const { return id_; }

  std::int32_t workspace_rows() const { return workspace_rows_; }  ///< of context, per chunk
  std::int32_t chunk_alignment() const { return chunk_alignment_; }
  std::int32_t head_group() const { return head_group_; }  ///< heads projected at a time
  std::int32_t token_tile() const { return token_tile_; }  ///< tokens absorbed at a time
  MaskTile mask_tile() const { return {}; }

  /// Bytes that hold the arena of any batch within the limits; for Schedule::packed (an equal split
  /// has more members than any bound worth reserving).
  std::size_t max_arena_bytes() const;
  /// Bytes that run_layer needs, for the worst step that the limits admit.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  /// Where they go.
  const std::vector<WorkspaceBuffer>& workspace_buffers() const { return workspace_buffers_; }
  /// Carves `memory`, which must hold workspace_bytes().
  LayerWorkspace carve(std::span<std::byte> memory) const;

  /// Every operation's entries, which one was chosen and why the others were not.
  std::vector<OperationReport> explain() const;

 private:
  /// Counts (`count`) or carves; one code path, so that what was counted is what is carved.
  std::size_t carve(std::span<std::byte> memory, bool count, LayerWorkspace* workspace,
                    std::vector<WorkspaceBuffer>* buffers) const;

  Limits limits_;
  Dispatch dispatch_;  ///< names a backend
  std::uint64_t id_ = 0;
  std::int32_t workspace_rows_ = 0;
  std::int32_t chunk_alignment_ = 0;
  std::int32_t head_group_ = 0;
  std::int32_t token_tile_ = 0;
  LayerOperations operations_;
  std::size_t workspace_bytes_ = 0;
  std::vector<WorkspaceBuffer> workspace_buffers_;
};

/// The choices that a Capacity with these limits would make, for `sparse-mla info`: unlike a
/// Capacity it never throws for an operation without a usable entry.
std::vector<OperationReport> explain_operations(const Limits& limits, const Dispatch& dispatch);

}  // namespace sparse_mla
