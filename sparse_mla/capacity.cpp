#include "sparse_mla/capacity.h"

#include <algorithm>
#include <atomic>
#include <string_view>

#include "kernels/sm90/entries.h"
#include "sparse_mla/error.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/planner.h"
#include "sparse_mla/rotary.h"

namespace sparse_mla {
namespace {

/// Rows of the latent buffer: one chunk of context, or the whole suffix.
std::int64_t latent_rows(const Limits& limits, std::int64_t workspace_rows) {
  return std::max<std::int64_t>(workspace_rows, limits.max_num_tokens);
}

std::int64_t mask_capacity_words(const Limits& limits) {
  const std::int64_t worst =
      std::int64_t{limits.max_num_tokens} * ((std::int64_t{limits.max_model_len} + 31) / 32);
  return std::min(limits.mask_budget_bytes / 4, worst);
}

std::int32_t fitting_heads(const Limits& limits, std::int64_t workspace_rows) {
  const std::int64_t head_bytes = latent_rows(limits, workspace_rows) *
                                  (limits.dims.qk_nope_head_dim + limits.dims.v_head_dim) * 2;
  const std::int64_t heads = limits.dims.num_heads;
  const std::int64_t most =
      std::clamp<std::int64_t>(limits.projection_budget_bytes / head_bytes, 1, heads);
  const std::int64_t groups = (heads + most - 1) / most;
  return static_cast<std::int32_t>((heads + groups - 1) / groups);  // groups of about equal size
}

std::int32_t fitting_tokens(const Limits& limits) {
  const std::int64_t token_bytes = std::int64_t{limits.dims.num_heads} *
                                       (limits.dims.latent_dim() + limits.dims.kv_lora_rank) * 2 +
                                   std::int64_t{limits.dims.index_topk} * 4;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(
      limits.projection_budget_bytes / token_bytes, 1, limits.max_num_tokens));
}

struct LayerProblems {
  WriteCacheProblem write_cache;
  SelectFromIndexerProblem select_from_indexer;
  MapSlotsProblem map_slots;
  AbsorbQueryProblem absorb_query;
  SparseMqaProblem sparse_mqa;
  ProjectValueProblem project_value;
  GatherProblem gather;
  UpProjectProblem up_project;
  BuildMasksProblem build_masks;
  AttendProblem attend_dense, attend_causal, attend_masked;
  InitPartialProblem init_partial;
  MergeProblem merge;
};

LayerProblems problems_of(const Limits& limits, const Dispatch& dispatch,
                          std::int64_t workspace_rows, std::int32_t head_group,
                          std::int32_t token_tile) {
  const ModelDims& dims = limits.dims;
  const std::int64_t rows = latent_rows(limits, workspace_rows);
  LayerProblems p;
  p.write_cache = {limits.max_num_tokens, limits.cache_format, dims.kv_lora_rank,
                   dims.qk_rope_head_dim, dims.index_head_dim};
  p.select_from_indexer.indexer = {dims.index_n_heads, dims.index_head_dim, limits.max_num_tokens,
                                   limits.max_model_len};
  p.select_from_indexer.topk = dims.index_topk;
  p.select_from_indexer.max_scores =
      std::min(std::max<std::int64_t>(limits.score_budget_bytes / 4, limits.max_model_len),
               std::int64_t{limits.max_num_tokens} * limits.max_model_len);
  p.select_from_indexer.dispatch = dispatch;
  p.map_slots = {token_tile, dims.index_topk};
  p.absorb_query = {dims.num_heads, dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim,
                    token_tile};
  p.sparse_mqa.num_heads = dims.num_heads;
  p.sparse_mqa.kv_lora_rank = dims.kv_lora_rank;
  p.sparse_mqa.qk_rope_head_dim = dims.qk_rope_head_dim;
  p.sparse_mqa.topk = dims.index_topk;
  p.sparse_mqa.format = limits.cache_format;
  p.sparse_mqa.max_tokens = token_tile;
  p.project_value = {dims.num_heads, dims.kv_lora_rank, dims.v_head_dim, token_tile, limits.output};
  p.gather = {rows, limits.cache_format, dims.kv_lora_rank, dims.qk_rope_head_dim};
  p.up_project = {head_group, dims.kv_lora_rank, dims.qk_nope_head_dim + dims.v_head_dim, rows};
  p.build_masks = {mask_capacity_words(limits) + limits.max_num_tokens, dims.index_topk};
  p.attend_dense = {head_group,
                    dims.qk_nope_head_dim,
                    dims.qk_rope_head_dim,
                    dims.v_head_dim,
                    AttendMode::dense,
                    limits.max_num_tokens,
                    rows,
                    limits.cache_format == CacheFormat::fp8_ds_mla};
  p.attend_causal = p.attend_masked = p.attend_dense;
  p.attend_causal.mode = AttendMode::causal;
  p.attend_masked.mode = AttendMode::masked;
  p.init_partial = {dims.num_heads, dims.v_head_dim, limits.max_num_tokens};
  p.merge = {dims.num_heads, dims.v_head_dim, limits.max_num_tokens, limits.output};
  return p;
}

LayerOperations choose_operations(const LayerProblems& p, const Dispatch& dispatch) {
  return {{write_cache_operation(), p.write_cache, dispatch},
          {select_from_indexer_operation(), p.select_from_indexer, dispatch},
          {map_slots_operation(), p.map_slots, dispatch},
          {absorb_query_operation(), p.absorb_query, dispatch},
          {sparse_mqa_operation(), p.sparse_mqa, dispatch},
          {project_value_operation(), p.project_value, dispatch},
          {gather_operation(), p.gather, dispatch},
          {up_project_operation(), p.up_project, dispatch},
          {build_masks_operation(), p.build_masks, dispatch},
          {attend_operation(), p.attend_dense, dispatch},
          {attend_operation(), p.attend_causal, dispatch},
          {attend_operation(), p.attend_masked, dispatch},
          {init_partial_operation(), p.init_partial, dispatch},
          {merge_operation(), p.merge, dispatch}};
}

std::vector<OperationReport> explain_problems(const LayerProblems& p, const Dispatch& dispatch) {
  SelectProblem select;
  select.max_rows = p.select_from_indexer.indexer.max_rows;
  select.max_row_len = p.select_from_indexer.indexer.max_keys;
  select.k = p.select_from_indexer.topk;
  select.order = SelectOrder::by_index;
  // In front of the layer: the caller runs them on queries and keys, in its model's layout.
  RotaryProblem rotary(RotaryLayout::half_split);
  rotary.dims = p.absorb_query.qk_rope_head_dim;
  rotary.max_rows = p.write_cache.max_tokens;
  const HadamardProblem hadamard{p.write_cache.index_head_dim, p.write_cache.max_tokens};
  return {rotary_operation().explain(rotary, dispatch),
          hadamard_operation().explain(hadamard, dispatch),
          write_cache_operation().explain(p.write_cache, dispatch),
          select_from_indexer_operation().explain(p.select_from_indexer, dispatch),
          indexer_scores_operation().explain(p.select_from_indexer.indexer, dispatch),
          select_operation().explain(select, dispatch),
          map_slots_operation().explain(p.map_slots, dispatch),
          absorb_query_operation().explain(p.absorb_query, dispatch),
          sparse_mqa_operation().explain(p.sparse_mqa, dispatch),
          project_value_operation().explain(p.project_value, dispatch),
          build_masks_operation().explain(p.build_masks, dispatch),
          gather_operation().explain(p.gather, dispatch),
          up_project_operation().explain(p.up_project, dispatch),
          attend_operation().explain(p.attend_masked, dispatch),
          init_partial_operation().explain(p.init_partial, dispatch),
          merge_operation().explain(p.merge, dispatch)};
}

const Limits& validated(const Limits& limits) {
  validate(limits);
  return limits;
}

std::int32_t rows_of(const Limits& limits) {
  return static_cast<std::int32_t>(context_workspace_rows(
      limits.max_model_len, limits.max_num_seqs, limits.block_size, limits.workspace_rows));
}

std::int32_t alignment_of(const Limits& limits) {
  return limits.chunk_alignment == 0 ? limits.block_size : limits.chunk_alignment;
}

/// `dispatch` with a backend: CUDA if the whole layer can run there, else the CPU, whose objections
/// are the ones worth reading.
Dispatch on_one_backend(const Limits& limits, Dispatch dispatch) {
  if (dispatch.backend) return dispatch;
  const std::int32_t rows = rows_of(limits);
  dispatch.backend = Backend::cuda;
  const auto problems =
      problems_of(limits, dispatch, rows, fitting_heads(limits, rows), fitting_tokens(limits));
  try {
    choose_operations(problems, dispatch);
  } catch (const std::invalid_argument&) {
    dispatch.backend = Backend::cpu;
  }
  return dispatch;
}

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> count{0};
  return ++count;
}

}  // namespace

void validate(const Limits& limits) {
  validate(limits.dims);
  latent_row_bytes(limits.cache_format, limits.dims);  // throws where the format has no such row
  require(limits.max_num_tokens >= 1, "max_num_tokens", limits.max_num_tokens, "at least 1");
  require(limits.max_num_seqs >= 1, "max_num_seqs", limits.max_num_seqs, "at least 1");
  require(limits.max_model_len >= 1, "max_model_len", limits.max_model_len, "at least 1");
  require(limits.block_size >= 1, "block_size", limits.block_size, "at least 1");
  require(limits.decode_threshold >= 0, "decode_threshold", limits.decode_threshold, "at least 0");
  require(limits.workspace_rows >= 0, "workspace_rows", limits.workspace_rows,
          "at least 0 (0: no cap)");
  require(limits.chunk_alignment >= 0, "chunk_alignment", limits.chunk_alignment,
          "at least 0 (0: block_size)");
  require(alignment_of(limits) <= rows_of(limits), "chunk_alignment", alignment_of(limits),
          "at most the workspace's " + std::to_string(rows_of(limits)) + " rows");
  require(limits.output == OutputType::bf16 || limits.output == OutputType::fp8, "output",
          to_string(limits.output), "bf16 or fp8");
  // No memory is larger; sums of sizes stay inside 64 bits.
  constexpr std::int64_t kMaxBudget = std::int64_t{1} << 56;
  const auto require_budget = [](const char* name, std::int64_t bytes, std::int64_t least) {
    require(bytes >= least && bytes <= kMaxBudget, name, bytes,
            std::to_string(least) + " … 2^56 bytes");
  };
  require_budget("score_budget_bytes", limits.score_budget_bytes, 4);  // one score
  require_budget("mask_budget_bytes", limits.mask_budget_bytes, 0);
  require_budget("projection_budget_bytes", limits.projection_budget_bytes, 0);
}

Capacity::Capacity(const Limits& limits, Dispatch dispatch)
    : limits_(validated(limits)),
      dispatch_(on_one_backend(limits_, std::move(dispatch))),
      id_(next_id()),
      workspace_rows_(rows_of(limits_)),
      chunk_alignment_(alignment_of(limits_)),
      head_group_(fitting_heads(limits_, workspace_rows_)),
      token_tile_(fitting_tokens(limits_)),
      operations_(choose_operations(
          problems_of(limits_, dispatch_, workspace_rows_, head_group_, token_tile_), dispatch_)) {
  workspace_bytes_ = carve({}, true, nullptr, &workspace_buffers_);
}

std::size_t Capacity::max_arena_bytes() const {
  const std::size_t tokens = limits_.max_num_tokens, seqs = limits_.max_num_seqs;
  // A request in a chunked path: what fits behind its neighbour, whole workspaces, a rest.
  const std::int64_t whole = workspace_rows_ / chunk_alignment_ * std::int64_t{chunk_alignment_};
  const std::size_t chunk_members =
      seqs * static_cast<std::size_t>(2 + limits_.max_model_len / whole);
  // Scores are cut by requests, then by rows.
  const std::size_t score_members = tokens + seqs;
  constexpr std::size_t kSections = 11, kTokenLists = 5;
  return (seqs + chunk_members) * (sizeof(ChunkMember) + sizeof(MaskMember)) +
         (seqs + 1) * sizeof(TokenRange) + score_members * sizeof(ScoreMember) +
         kTokenLists * tokens * sizeof(std::int32_t) + kSections * 16;
}

LayerWorkspace Capacity::carve(std::span<std::byte> memory) const {
  require(memory.size() >= workspace_bytes_, "workspace", std::to_string(memory.size()) + " bytes",
          "at least " + std::to_string(workspace_bytes_) + " bytes");
  LayerWorkspace workspace;
  carve(memory, false, &workspace, nullptr);
  return workspace;
}

std::size_t Capacity::carve(std::span<std::byte> memory, bool count, LayerWorkspace* workspace,
                            std::vector<WorkspaceBuffer>* buffers) const {
  LayerWorkspace unused;
  LayerWorkspace& w = workspace == nullptr ? unused : *workspace;
  const ModelDims& dims = limits_.dims;
  const std::int64_t tokens = limits_.max_num_tokens, heads = dims.num_heads;
  const std::int64_t rows = latent_rows(limits_, workspace_rows_);
  std::size_t bytes = 0;
  // Selection, sparse MQA and chunked MHA never run at the same time: each starts at the base.
  const auto group = [&](const char* name, auto&& take) {
    WorkspaceCarver carver = count ? WorkspaceCarver() : WorkspaceCarver(memory);
    take(carver);
    bytes = std::max(bytes, carver.bytes());
    if (buffers == nullptr) return;
    for (WorkspaceBuffer buffer : carver.buffers()) {
      buffer.name = std::string(name) + "." + buffer.name;
      buffers->push_back(std::move(buffer));
    }
  };
  group("select", [&](WorkspaceCarver& carver) {
    w.selection =
        carver.take_span("indexer_and_topk", operations_.select_from_indexer.workspace_bytes());
  });
  group("sparse", [&](WorkspaceCarver& carver) {
    const std::int64_t tile = token_tile_;
    w.slots = carver.take<std::int32_t>("slots", tile * dims.index_topk);
    w.slot_counts = carver.take<std::int32_t>("slot_counts", tile);
    w.absorbed = carver.take<bfloat16>("absorbed_query", tile * heads * dims.latent_dim());
    w.latent_out = carver.take<bfloat16>("latent_out", tile * heads * dims.kv_lora_rank);
    w.sparse_scratch =
        carver.take_span("scratch", std::max({operations_.map_slots.workspace_bytes(),
                                              operations_.absorb_query.workspace_bytes(),
                                              operations_.sparse_mqa.workspace_bytes(),
                                              operations_.project_value.workspace_bytes()}));
  });
  group("chunked", [&](WorkspaceCarver& carver) {
    const std::int64_t words = mask_capacity_words(limits_);
    w.latent_rows = carver.take<bfloat16>("latent_rows", rows * dims.latent_dim());
    w.kv = carver.take<bfloat16>("keys_and_values",
                                 rows * head_group_ * (dims.qk_nope_head_dim + dims.v_head_dim));
    w.context_out = carver.take<float>("context_out", tokens * heads * dims.v_head_dim);
    w.context_lse = carver.take<float>("context_lse", heads * tokens);
    w.suffix_out = carver.take<float>("suffix_out", tokens * heads * dims.v_head_dim);
    w.suffix_lse = carver.take<float>("suffix_lse", heads * tokens);
    // One pad word per row. A query tile has at least one row, and a row's words/4 + 2 tiles are
    // the most that its keys can touch, so words/4 + 2·tokens ids hold every list.
    w.mask_words = carver.take<std::uint32_t>("mask_words", words + tokens);
    w.mask_tile_counts = carver.take<std::int32_t>("mask_tile_counts", tokens);
    w.mask_tile_ids = carver.take<std::int32_t>("mask_tile_ids", words / 4 + 2 * tokens);
    w.chunked_scratch = carver.take_span(
        "scratch",
        std::max(
            {operations_.write_cache.workspace_bytes(), operations_.gather.workspace_bytes(),
             operations_.up_project.workspace_bytes(), operations_.build_masks.workspace_bytes(),
             operations_.attend_dense.workspace_bytes(),
             operations_.attend_causal.workspace_bytes(),
             operations_.attend_masked.workspace_bytes(),
             operations_.init_partial.workspace_bytes(), operations_.merge.workspace_bytes()}));
  });
  return bytes;
}

PathMachine Capacity::path_machine() const {
  if (backend() == Backend::cpu) return PathMachine::cpu;
  // The table was measured with this kernel.
  return std::string_view(operations_.attend_masked.entry->name) == sm90::kMaskedMhaEntry
             ? PathMachine::hopper
             : PathMachine::gpu;
}

std::vector<OperationReport> Capacity::explain() const {
  return explain_problems(
      problems_of(limits_, dispatch_, workspace_rows_, head_group_, token_tile_), dispatch_);
}

std::vector<OperationReport> explain_operations(const Limits& limits, const Dispatch& dispatch) {
  validate(limits);
  const std::int32_t rows = rows_of(limits);
  return explain_problems(
      problems_of(limits, dispatch, rows, fitting_heads(limits, rows), fitting_tokens(limits)),
      dispatch);
}

}  // namespace sparse_mla
