#include "sparse_mla/layer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/profiler_range.h"
#include "kernels/common/view_checks.h"
#include "sparse_mla/error.h"

namespace sparse_mla {
namespace {

template <class View>
void require_shape(const char* name, const View& view,
                   const std::array<std::int64_t, View::rank()>& expected) {
  std::string text = "[";
  bool same = true, nonempty = true;
  for (std::size_t axis = 0; axis < View::rank(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(expected[axis]);
    same = same && view.extent(axis) == expected[axis];
    nonempty = nonempty && expected[axis] > 0;
  }
  if (!same) throw_invalid(name, shape_text(view), text + "]");
  if (nonempty && view.data_handle() == nullptr) throw_invalid(name, "null", text + "] elements");
}

/// False for a layer that uses the picks of another one and has no indexer of its own.
bool with_index(const BatchMetadata& batch, const LayerTensors& t) {
  return batch.options().select || t.index_k.data_handle() != nullptr;
}

/// A list that kernels read by pointer.
template <class T>
void require_dense(const char* name, const View1<T>& view, std::int64_t expected) {
  require_shape(name, view, {expected});
  require(expected <= 1 || view.stride(0) == 1, name, "stride " + std::to_string(view.stride(0)),
          "stride 1");
}

void check(const Limits& limits, const BatchMetadata& batch, const LayerTensors& t) {
  const ModelDims& dims = limits.dims;
  const std::int64_t tokens = batch.num_tokens();
  require_shape("q", t.q, {tokens, dims.num_heads, dims.qk_head_dim()});
  require_shape("latent", t.latent, {tokens, dims.latent_dim()});
  require_shape("slot_mapping", t.slot_mapping, {tokens});
  if (with_index(batch, t)) {
    require_shape("index_k", t.index_k, {tokens, dims.index_head_dim});
    require_shape("index_k_scale", t.index_k_scale, {tokens});
    require(t.index_cache.block_size == limits.block_size, "index_cache.block_size",
            t.index_cache.block_size, std::to_string(limits.block_size));
  }
  if (!batch.score_plan().pieces.empty()) {
    require_shape("index_q", t.index_q, {tokens, dims.index_n_heads, dims.index_head_dim});
    require_shape("index_weights", t.index_weights, {tokens, dims.index_n_heads});
  }
  require_shape("kv_b_proj", t.kv_b_proj,
                {dims.num_heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank});
  require_shape("picks", t.picks, {tokens, dims.index_topk});
  if (batch.options().counted_picks)
    require_dense("pick_counts", t.pick_counts, tokens);
  else
    require(t.pick_counts.data_handle() == nullptr, "pick_counts", "counts",
            "none without BatchOptions::counted_picks");
  if (t.sink.data_handle() != nullptr) require_shape("sink", t.sink, {dims.num_heads});
  if (limits.output == OutputType::fp8) {
    require_shape("out_fp8", t.out_fp8, {tokens, dims.num_heads, dims.v_head_dim});
    require(t.out_scale > 0 && t.out_scale < HUGE_VALF, "out_scale", t.out_scale,
            "a finite value above 0");
    require(t.out.data_handle() == nullptr, "out", "a bf16 tensor", "none: Limits::output is fp8");
  } else {
    require_shape("out", t.out, {tokens, dims.num_heads, dims.v_head_dim});
    require(t.out_fp8.data_handle() == nullptr, "out_fp8", "an fp8 tensor",
            "none: Limits::output is bf16");
  }
  require_shape("lse", t.lse, {dims.num_heads, tokens});
  require(t.block_tables.extent(0) == batch.num_requests() &&
              (tokens == 0 || t.block_tables.extent(1) >= batch.max_blocks()),
          "block_tables", shape_text(t.block_tables),
          "[" + std::to_string(batch.num_requests()) + ", at least " +
              std::to_string(batch.max_blocks()) + "]");
  require(t.latent_cache.block_size == limits.block_size, "latent_cache.block_size",
          t.latent_cache.block_size, std::to_string(limits.block_size));
}

/// What the operations ask of the tensors' memory, all of it before the first of them writes.
void check_memory(const Limits& limits, const BatchMetadata& batch, const LayerTensors& t) {
  require_contiguous_rows("q", t.q);
  require_contiguous_rows("latent", t.latent);
  require_contiguous_rows("index_q", t.index_q);
  require_contiguous_rows("index_k", t.index_k);
  require_contiguous_rows("kv_b_proj", t.kv_b_proj);
  require_contiguous_rows("picks", t.picks);
  require_contiguous_rows("out", t.out);
  require_contiguous_rows("out_fp8", t.out_fp8);
  const LatentCache& latent = t.latent_cache;
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / limits.block_size;
  validate(latent, limits.cache_format, limits.dims.kv_lora_rank, limits.dims.qk_rope_head_dim,
           "latent_cache");
  require(latent.num_blocks <= most, "latent_cache.num_blocks", latent.num_blocks,
          "0 … " + std::to_string(most) + ": slots are 32-bit");
  const IndexKeyCache& index = t.index_cache;
  if (!with_index(batch, t) || (index.data == nullptr && index.num_blocks == 0)) return;
  require(index.num_blocks >= 0 && index.data != nullptr, "index_cache.data",
          index.data == nullptr ? "null" : std::to_string(index.num_blocks) + " pages", "pages");
  require(index.head_dim == limits.dims.index_head_dim, "index_cache.head_dim", index.head_dim,
          "index_head_dim (" + std::to_string(limits.dims.index_head_dim) + ")");
  const std::int64_t page_bytes = index_page_bytes(limits.block_size, index.head_dim);
  require(index.block_stride >= page_bytes, "index_cache.block_stride", index.block_stride,
          "at least a page's " + std::to_string(page_bytes) + " bytes");
}

/// Elements [begin, begin + count) of a view's second axis.
template <class T>
View3<T> heads_of(const View3<T>& view, std::int64_t begin, std::int64_t count) {
  return strided<T, 3>(address(view, 0, begin, 0), {view.extent(0), count, view.extent(2)},
                       {view.stride(0), view.stride(1), view.stride(2)});
}

/// Elements [begin, begin + count) of a view's last axis.
template <class T>
View3<T> columns_of(const View3<T>& view, std::int64_t begin, std::int64_t count) {
  return strided<T, 3>(address(view, 0, 0, begin), {view.extent(0), view.extent(1), count},
                       {view.stride(0), view.stride(1), view.stride(2)});
}

/// One run of the layer: the pieces of work in order, each between its stage's two callbacks.
class LayerRun {
 public:
  LayerRun(const Capacity& capacity, const BatchMetadata& batch, const LayerTensors& tensors,
           const LayerWorkspace& workspace, Stream stream, const RunOptions& options)
      : capacity_(capacity),
        ops_(capacity.operations()),
        dims_(capacity.limits().dims),
        batch_(batch),
        arena_(options.arena == nullptr ? batch.arena().data() : options.arena),
        t_(tensors),
        w_(workspace),
        stream_(stream),
        options_(options) {}

  void run() {
    write_cache();
    select();
    sparse(batch_.sections().decode_tokens.at(arena_));
    switch (batch_.prefill_path()) {
      case AttentionPath::sparse:
        return sparse(batch_.sections().prefill_tokens.at(arena_));
      case AttentionPath::dense:
      case AttentionPath::masked:
        return chunked();
      default:
        return;
    }
  }

 private:
  template <class Work>
  void stage(Stage stage, Work&& work) {
    if (options_.on_stage) options_.on_stage(stage, true);
    {
      const ProfilerRange range(stage);
      work();
    }
    if (options_.on_stage) options_.on_stage(stage, false);
  }

  void write_cache() {
    WriteCacheCall call;
    call.latent = t_.latent;
    call.index_k = t_.index_k;
    call.index_k_scale = t_.index_k_scale;
    call.slot_mapping = t_.slot_mapping;
    call.latent_cache = t_.latent_cache;
    call.index_cache = t_.index_cache;
    call.power_of_two_scales = options_.power_of_two_scales;
    stage(Stage::write_cache, [&] { ops_.write_cache.run(call, w_.chunked_scratch, stream_); });
  }

  void select() {
    if (!batch_.options().select) return;
    const auto members = batch_.sections().score_members.at(arena_);
    SelectFromIndexerCall call;
    call.indexer.index_q = t_.index_q;
    call.indexer.index_weights = t_.index_weights;
    call.indexer.cache = t_.index_cache;
    call.indexer.block_tables = t_.block_tables;
    call.picks = t_.picks;
    call.whole_tokens = batch_.sections().whole_selection_tokens.at(arena_);
    call.keys_of_token = batch_.sections().keys_of_token.at(arena_).data();
    stage(Stage::select, [&] {
      // Tokens that see at most topk keys go with the first call, which may have no piece.
      const auto& pieces = batch_.score_plan().pieces;
      for (std::size_t i = 0; i < std::max<std::size_t>(pieces.size(), 1); ++i) {
        if (i > 0) call.whole_tokens = {};
        if (i < pieces.size()) {
          call.piece = pieces[i];
          call.indexer.members = members.subspan(pieces[i].member_begin,
                                                 pieces[i].member_end - pieces[i].member_begin);
        }
        ops_.select_from_indexer.run(call, w_.selection, stream_);
      }
    });
  }

  /// Sparse MQA over the selected rows, a tile of tokens at a time.
  void sparse(std::span<const std::int32_t> tokens) {
    for (std::size_t begin = 0; begin < tokens.size(); begin += capacity_.token_tile())
      sparse_tile(tokens.subspan(
          begin, std::min<std::size_t>(capacity_.token_tile(), tokens.size() - begin)));
  }

  void sparse_tile(std::span<const std::int32_t> tokens) {
    const auto count = static_cast<std::int64_t>(tokens.size());
    const auto slots = contiguous(w_.slots, count, dims_.index_topk);
    const auto absorbed = contiguous(w_.absorbed, count, dims_.num_heads, dims_.latent_dim());
    const auto latent_out = contiguous(w_.latent_out, count, dims_.num_heads, dims_.kv_lora_rank);

    MapSlotsCall map;
    map.picks = t_.picks;
    map.tokens = tokens.data();
    map.request_of_token = batch_.sections().request_of_token.at(arena_).data();
    map.keys_of_token = batch_.sections().keys_of_token.at(arena_).data();
    map.block_tables = t_.block_tables;
    map.num_blocks = t_.latent_cache.num_blocks;
    map.block_size = t_.latent_cache.block_size;
    map.slots = slots;
    map.slot_counts = w_.slot_counts;
    map.counts = t_.pick_counts.data_handle();
    stage(Stage::map_slots, [&] { ops_.map_slots.run(map, w_.sparse_scratch, stream_); });

    AbsorbQueryCall absorb;
    absorb.q = t_.q;
    absorb.kv_b_proj = t_.kv_b_proj;
    absorb.tokens = tokens;
    absorb.absorbed = absorbed;
    stage(Stage::absorb_query, [&] { ops_.absorb_query.run(absorb, w_.sparse_scratch, stream_); });

    SparseMqaCall mqa;
    mqa.q = absorbed;
    mqa.cache = t_.latent_cache;
    mqa.slots = slots;
    mqa.counts = w_.slot_counts;
    mqa.softmax_scale = dims_.softmax_scale;
    mqa.out = latent_out;
    mqa.lse = t_.lse;
    mqa.lse_tokens = tokens.data();
    mqa.sink = t_.sink;
    stage(Stage::sparse_mqa, [&] { ops_.sparse_mqa.run(mqa, w_.sparse_scratch, stream_); });

    ProjectValueCall project;
    project.latent_out = latent_out;
    project.kv_b_proj = t_.kv_b_proj;
    project.tokens = tokens;
    project.out = t_.out;
    project.out_fp8 = t_.out_fp8;
    project.out_scale = t_.out_scale;
    stage(Stage::project_value,
          [&] { ops_.project_value.run(project, w_.sparse_scratch, stream_); });
  }

  /// Dense or masked MHA: the suffix gives one partial, the context chunk by chunk the other, one
  /// merge joins the two.
  void chunked() {
    const ContextPlan& plan = batch_.plan();
    const bool masked = batch_.prefill_path() == AttentionPath::masked;
    const bool global = batch_.mask_scope() == MaskScope::global;
    const std::int64_t tokens = batch_.num_prefill_tokens();
    const auto suffix = batch_.sections().suffix.at(arena_);
    const auto context = batch_.sections().chunk_members.at(arena_);
    const auto suffix_masks = batch_.sections().suffix_masks.at(arena_);
    const auto chunk_masks = batch_.sections().chunk_masks.at(arena_);
    const Partial suffix_partial = partial(w_.suffix_out, w_.suffix_lse, tokens);
    const Partial running = partial(w_.context_out, w_.context_lse, plan.running_rows);

    if (masked) build_masks(suffix, suffix_masks);
    attend(masked ? ops_.attend_masked : ops_.attend_causal, suffix, suffix_masks, tokens,
           suffix_partial, 0);
    InitPartialCall init;
    init.ranges = batch_.sections().init_ranges.at(arena_);
    init.running = running;
    stage(Stage::merge, [&] { ops_.init_partial.run(init, w_.chunked_scratch, stream_); });
    for (const ContextChunk& chunk : plan.chunks) {
      const auto members = context.subspan(chunk.member_begin, chunk.num_members());
      std::span<const MaskMember> masks;
      if (masked && global) {
        masks = suffix_masks.subspan(chunk.request_begin, chunk.num_members());
      } else if (masked) {
        masks = chunk_masks.subspan(chunk.member_begin, chunk.num_members());
        build_masks(members, masks);
      }
      attend(masked ? ops_.attend_masked : ops_.attend_dense, members, masks, chunk.num_rows,
             running, chunk.continuation_token_end);
    }

    MergeCall merge;
    merge.a = running;
    merge.b = suffix_partial;
    merge.out_bf16 = t_.out;
    merge.out_fp8 = t_.out_fp8;
    merge.out_scale = t_.out_scale;
    merge.sink = t_.sink;
    merge.lse = t_.lse;
    merge.out_tokens = batch_.sections().prefill_tokens.at(arena_).data();
    stage(Stage::merge, [&] { ops_.merge.run(merge, w_.chunked_scratch, stream_); });
  }

  Partial partial(float* out, float* lse, std::int64_t rows) const {
    return {contiguous(out, rows, dims_.num_heads, dims_.v_head_dim),
            contiguous(lse, dims_.num_heads, rows)};
  }

  MaskView mask_view(std::span<const MaskMember> members) const {
    return {capacity_.mask_tile(), members, w_.mask_words, w_.mask_tile_counts, w_.mask_tile_ids};
  }

  void build_masks(std::span<const ChunkMember> members, std::span<const MaskMember> masks) {
    BuildMasksCall call;
    call.picks = t_.picks;
    call.counts = t_.pick_counts.data_handle();
    call.members = members;
    call.mask = mask_view(masks);
    stage(Stage::build_masks, [&] { ops_.build_masks.run(call, w_.chunked_scratch, stream_); });
  }

  /// Gathers the members' rows, then projects and attends a group of heads at a time.
  void attend(const Choice<AttendProblem, AttendCall>& operation,
              std::span<const ChunkMember> members, std::span<const MaskMember> masks,
              std::int64_t num_rows, const Partial& running, std::int64_t merge_row_end) {
    const auto rows = contiguous(w_.latent_rows, num_rows, dims_.latent_dim());
    GatherCall gather;
    gather.cache = t_.latent_cache;
    gather.block_tables = t_.block_tables;
    gather.members = members;
    gather.rows = rows;
    stage(Stage::gather, [&] { ops_.gather.run(gather, w_.chunked_scratch, stream_); });

    const int nope = dims_.qk_nope_head_dim, value = dims_.v_head_dim;
    for (int head = 0; head < dims_.num_heads; head += capacity_.head_group()) {
      const int heads = std::min(capacity_.head_group(), dims_.num_heads - head);
      const auto kv = contiguous(w_.kv, num_rows, heads, nope + value);
      UpProjectCall project;
      project.latent = rows;
      project.kv_b_proj = strided<const bfloat16, 3>(
          address(t_.kv_b_proj, head, 0, 0), {heads, nope + value, dims_.kv_lora_rank},
          {t_.kv_b_proj.stride(0), t_.kv_b_proj.stride(1), t_.kv_b_proj.stride(2)});
      project.kv = kv;
      project.latent_scale = gathered_latent_scale(t_.latent_cache);
      stage(Stage::up_project, [&] { ops_.up_project.run(project, w_.chunked_scratch, stream_); });

      const View3<const bfloat16> projected = kv;
      AttendCall call;
      call.q = heads_of(t_.q, head, heads);
      call.k_nope = columns_of(projected, 0, nope);
      call.v = columns_of(projected, nope, value);
      call.k_pe = strided<const bfloat16, 2>(address(rows, 0, dims_.kv_lora_rank),
                                             {num_rows, dims_.qk_rope_head_dim},
                                             {rows.stride(0), rows.stride(1)});
      call.members = members;
      if (operation.problem.mode == AttendMode::masked) call.mask = mask_view(masks);
      call.softmax_scale = dims_.softmax_scale;
      call.running.out = heads_of(running.out, head, heads);
      call.running.lse =
          strided<float, 2>(address(running.lse, head, 0), {heads, running.lse.extent(1)},
                            {running.lse.stride(0), running.lse.stride(1)});
      call.merge_row_end = merge_row_end;
      stage(Stage::attend, [&] { operation.run(call, w_.chunked_scratch, stream_); });
    }
  }

  const Capacity& capacity_;
  const LayerOperations& ops_;
  const ModelDims& dims_;
  const BatchMetadata& batch_;
  const std::byte* arena_;
  const LayerTensors& t_;
  const LayerWorkspace& w_;
  Stream stream_;
  const RunOptions& options_;
};

}  // namespace

std::string to_string(Stage stage) {
  switch (stage) {
    case Stage::write_cache:
      return "write_cache";
    case Stage::select:
      return "select";
    case Stage::map_slots:
      return "map_slots";
    case Stage::absorb_query:
      return "absorb_query";
    case Stage::sparse_mqa:
      return "sparse_mqa";
    case Stage::project_value:
      return "project_value";
    case Stage::build_masks:
      return "build_masks";
    case Stage::gather:
      return "gather";
    case Stage::up_project:
      return "up_project";
    case Stage::attend:
      return "attend";
    case Stage::merge:
      return "merge";
  }
  return "unknown";
}

void run_layer(const Capacity& capacity, const BatchMetadata& metadata, const LayerTensors& tensors,
               std::span<std::byte> workspace, Stream stream, const RunOptions& options) {
  require(metadata.capacity_id() == capacity.id(), "metadata", "a batch of another capacity",
          "one planned with this capacity");
  if (metadata.num_tokens() == 0) return;
  check(capacity.limits(), metadata, tensors);
  check_memory(capacity.limits(), metadata, tensors);
  require(capacity.backend() == Backend::cpu || options.arena != nullptr, "options.arena", "null",
          "the batch's arena on the device");
  const LayerWorkspace carved = capacity.carve(workspace);
  LayerRun(capacity, metadata, tensors, carved, stream, options).run();
}

}  // namespace sparse_mla
