/// Every piece of memory that a call, or a layer's tensors, points to.
///
/// visit_memory(problem, call, visit) calls visit(pointer, bytes) once for each, `pointer` being a
/// reference to a typed pointer; pointers to const are inputs. A visitor may put another address
/// there: whole calls are moved to a device that way (device_mirror.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/layer.h"
#include "sparse_mla/limits.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/rotary.h"
#include "sparse_mla/select.h"

namespace sparse_mla::support {

template <class Visit, class T>
void visit_array(T*& data, std::int64_t count, Visit& visit) {
  if (data != nullptr && count > 0) visit(data, static_cast<std::size_t>(count) * sizeof(T));
}

/// The bytes from a view's first to its last element; strides are not negative.
template <class T, class Extents, class Visit>
void visit_view(::cuda::std::mdspan<T, Extents, ::cuda::std::layout_stride>& view, Visit& visit) {
  T* data = view.data_handle();
  if (data == nullptr) return;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < Extents::rank(); ++axis) {
    if (view.extent(axis) == 0) return;
    last += (view.extent(axis) - 1) * view.stride(axis);
  }
  visit_array(data, last + 1, visit);
  view = {data, view.mapping()};
}

template <class T, class Visit>
void visit_span(std::span<const T>& list, Visit& visit) {
  const T* data = list.data();
  visit_array(data, static_cast<std::int64_t>(list.size()), visit);
  list = {data, list.size()};
}

/// `row_bytes` of the format: the last row of a cache need not have a whole stride behind it.
template <class Visit>
void visit_cache(LatentCache& cache, std::int64_t row_bytes, Visit& visit) {
  if (cache.num_blocks > 0)
    visit_array(cache.data,
                (cache.num_blocks - 1) * cache.block_stride +
                    (cache.block_size - 1) * cache.row_stride + row_bytes,
                visit);
}

template <class Visit>
void visit_cache(IndexKeyCache& cache, Visit& visit) {
  if (cache.num_blocks > 0)
    visit_array(cache.data,
                (cache.num_blocks - 1) * cache.block_stride +
                    index_page_bytes(cache.block_size, cache.head_dim),
                visit);
}

template <class Visit>
void visit_partial(Partial& partial, Visit& visit) {
  visit_view(partial.out, visit);
  visit_view(partial.lse, visit);
}

template <class Visit>
void visit_partial(ConstPartial& partial, Visit& visit) {
  visit_view(partial.out, visit);
  visit_view(partial.lse, visit);
}

template <class Visit>
void visit_memory(const RotaryProblem&, RotaryCall& call, Visit&& visit) {
  visit_view(call.in, visit);
  visit_view(call.out, visit);
  visit_view(call.positions, visit);
  visit_view(call.table, visit);
}

template <class Visit>
void visit_memory(const HadamardProblem&, HadamardCall& call, Visit&& visit) {
  visit_view(call.in, visit);
  visit_view(call.out, visit);
}

template <class Visit>
void visit_memory(const WriteCacheProblem& problem, WriteCacheCall& call, Visit&& visit) {
  visit_view(call.latent, visit);
  visit_view(call.index_k, visit);
  visit_view(call.index_k_scale, visit);
  visit_view(call.slot_mapping, visit);
  visit_cache(call.latent_cache,
              latent_row_bytes(problem.format, problem.kv_lora_rank, problem.qk_rope_head_dim),
              visit);
  visit_cache(call.index_cache, visit);
}

template <class Visit>
void visit_memory(const IndexerProblem&, IndexerCall& call, Visit&& visit) {
  std::int64_t scores = 0;
  for (const ScoreMember& member : call.members)
    if (member.num_rows > 0)
      scores = std::max(scores, member.score_offset +
                                    std::int64_t{member.num_rows - 1} * member.row_keys +
                                    member.first_position + member.num_rows);
  visit_array(call.scores, scores, visit);
  visit_view(call.index_q, visit);
  visit_view(call.index_weights, visit);
  visit_cache(call.cache, visit);
  visit_view(call.block_tables, visit);
  visit_span(call.members, visit);
}

template <class Visit>
void visit_memory(const SelectProblem&, SelectCall& call, Visit&& visit) {
  ScoreRows& scores = call.scores;
  const std::int64_t end_row =
      (scores.num_rows - 1) * scores.row_stride;  // strides may be negative
  std::int64_t first = std::min<std::int64_t>(0, end_row),
               last = std::max<std::int64_t>(0, end_row);
  if (scores.row_offsets != nullptr) {
    first = 0;
    last = 0;
    for (std::int64_t r = 0; r < scores.num_rows; ++r) last = std::max(last, scores.row_offsets[r]);
  }
  if (scores.data != nullptr && scores.num_rows > 0 && scores.row_len > 0) {
    const std::int64_t width = scores.type == ScoreType::f32 ? 4 : 2;
    const std::byte* bytes = static_cast<const std::byte*>(scores.data) + first * width;
    visit_array(bytes, (last - first + scores.row_len) * width, visit);
    scores.data = bytes - first * width;
  }
  visit_array(scores.row_offsets, scores.num_rows, visit);
  visit_array(call.starts, scores.num_rows, visit);
  visit_array(call.ends, scores.num_rows, visit);
  visit_array(call.out_rows, scores.num_rows, visit);
  visit_view(call.indices, visit);
  visit_view(call.values, visit);
  visit_view(call.slot_map.block_tables, visit);
  visit_array(call.slot_map.request_of_row, scores.num_rows, visit);
  visit_view(call.slot_map.slots, visit);
  visit_view(call.hints, visit);
}

template <class Visit>
void visit_memory(const SelectFromIndexerProblem&, SelectFromIndexerCall& call, Visit&& visit) {
  visit_view(call.indexer.index_q, visit);
  visit_view(call.indexer.index_weights, visit);
  visit_cache(call.indexer.cache, visit);
  visit_view(call.indexer.block_tables, visit);
  visit_span(call.indexer.members, visit);
  visit_span(call.whole_tokens, visit);
  visit_array(call.keys_of_token, call.picks.extent(0), visit);
  visit_view(call.picks, visit);
}

template <class Visit>
void visit_memory(const MapSlotsProblem&, MapSlotsCall& call, Visit&& visit) {
  const std::int64_t tokens = call.picks.extent(0), rows = call.slots.extent(0);
  visit_view(call.picks, visit);
  visit_array(call.tokens, rows, visit);
  visit_array(call.request_of_token, tokens, visit);
  visit_array(call.keys_of_token, tokens, visit);
  visit_array(call.counts, tokens, visit);
  visit_view(call.block_tables, visit);
  visit_view(call.slots, visit);
  visit_array(call.slot_counts, rows, visit);
}

template <class Visit>
void visit_memory(const AbsorbQueryProblem&, AbsorbQueryCall& call, Visit&& visit) {
  visit_view(call.q, visit);
  visit_view(call.kv_b_proj, visit);
  visit_span(call.tokens, visit);
  visit_view(call.absorbed, visit);
}

template <class Visit>
void visit_memory(const SparseMqaProblem& problem, SparseMqaCall& call, Visit&& visit) {
  visit_view(call.q, visit);
  visit_cache(call.cache,
              latent_row_bytes(problem.format, problem.kv_lora_rank, problem.qk_rope_head_dim),
              visit);
  visit_view(call.slots, visit);
  visit_array(call.counts, call.slots.extent(0), visit);
  visit_view(call.out, visit);
  visit_view(call.lse, visit);
  visit_array(call.lse_tokens, call.slots.extent(0), visit);
  visit_view(call.sink, visit);
}

template <class Visit>
void visit_memory(const ProjectValueProblem&, ProjectValueCall& call, Visit&& visit) {
  visit_view(call.latent_out, visit);
  visit_view(call.kv_b_proj, visit);
  visit_span(call.tokens, visit);
  visit_view(call.out, visit);
  visit_view(call.out_fp8, visit);
}

template <class Visit>
void visit_memory(const GatherProblem& problem, GatherCall& call, Visit&& visit) {
  visit_cache(call.cache,
              latent_row_bytes(problem.format, problem.kv_lora_rank, problem.qk_rope_head_dim),
              visit);
  visit_view(call.block_tables, visit);
  visit_span(call.members, visit);
  visit_view(call.rows, visit);
}

template <class Visit>
void visit_memory(const UpProjectProblem&, UpProjectCall& call, Visit&& visit) {
  visit_view(call.latent, visit);
  visit_view(call.kv_b_proj, visit);
  visit_view(call.kv, visit);
}

/// `members` and `masks` while both still lie on the host.
template <class Visit>
void visit_masks(std::span<const ChunkMember> members, MaskView& mask, Visit& visit) {
  std::int64_t words = 0, ids = 0, counts = 0;
  for (std::size_t i = 0; i < mask.members.size() && i < members.size(); ++i) {
    const MaskMember& member = mask.members[i];
    const std::int64_t rows = members[i].query_len;
    const std::int64_t tiles = (rows + mask.tile.queries - 1) / mask.tile.queries;
    words = std::max(words, member.word_offset + rows * member.row_words);
    ids = std::max(ids, member.tile_offset + tiles * member.max_tiles);
    counts = std::max(counts, member.tile_count_offset + tiles);
  }
  visit_array(mask.words, words, visit);
  visit_array(mask.tile_counts, counts, visit);
  visit_array(mask.tile_ids, ids, visit);
  visit_span(mask.members, visit);
}

template <class Visit>
void visit_memory(const BuildMasksProblem&, BuildMasksCall& call, Visit&& visit) {
  visit_masks(call.members, call.mask, visit);
  visit_view(call.picks, visit);
  visit_array(call.counts, call.picks.extent(0), visit);
  visit_span(call.members, visit);
}

template <class Visit>
void visit_memory(const AttendProblem& problem, AttendCall& call, Visit&& visit) {
  if (problem.mode == AttendMode::masked) visit_masks(call.members, call.mask, visit);
  visit_view(call.q, visit);
  visit_view(call.k_nope, visit);
  visit_view(call.k_pe, visit);
  visit_view(call.v, visit);
  visit_span(call.members, visit);
  visit_partial(call.running, visit);
}

template <class Visit>
void visit_memory(const InitPartialProblem&, InitPartialCall& call, Visit&& visit) {
  visit_span(call.ranges, visit);
  visit_partial(call.running, visit);
}

template <class Visit>
void visit_memory(const MergeProblem&, MergeCall& call, Visit&& visit) {
  visit_partial(call.a, visit);
  visit_partial(call.b, visit);
  visit_view(call.out_f32, visit);
  visit_view(call.out_bf16, visit);
  visit_view(call.out_fp8, visit);
  visit_view(call.lse, visit);
  visit_view(call.sink, visit);
  visit_array(call.out_tokens, call.b.out.extent(0), visit);
}

template <class Visit>
void visit_memory(const Limits& limits, LayerTensors& t, Visit&& visit) {
  visit_view(t.q, visit);
  visit_view(t.latent, visit);
  visit_view(t.index_q, visit);
  visit_view(t.index_weights, visit);
  visit_view(t.index_k, visit);
  visit_view(t.index_k_scale, visit);
  visit_view(t.slot_mapping, visit);
  visit_view(t.block_tables, visit);
  visit_cache(t.latent_cache, latent_row_bytes(limits.cache_format, limits.dims), visit);
  visit_cache(t.index_cache, visit);
  visit_view(t.kv_b_proj, visit);
  visit_view(t.sink, visit);
  visit_view(t.picks, visit);
  visit_view(t.pick_counts, visit);
  visit_view(t.out, visit);
  visit_view(t.out_fp8, visit);
  visit_view(t.lse, visit);
}

}  // namespace sparse_mla::support
