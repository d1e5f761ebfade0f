/// A batch's integers: planned on the host, sent to the device in one copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sparse_mla/capacity.h"
#include "sparse_mla/chunk_member.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/path_choice.h"
#include "sparse_mla/planner.h"

namespace sparse_mla {

struct BatchOptions {
  AttentionPath path = AttentionPath::automatic;
  Schedule schedule = Schedule::packed;
  /// false: the caller hands in the picks, nothing is scored. How layers share picks: the layer
  /// that selects writes its picks, the layers after it run with `select` false over the same
  /// buffer, which they only read. Such a layer needs no indexer: with LayerTensors::index_k empty,
  /// no indexer key is written and no indexer tensor looked at. Picks may come in any order;
  /// entries that are no key of the token (−1, anything outside [0, position]) are skipped wherever
  /// they stand. On the dense path they are not read: there the selection is everything.
  bool select = true;
  /// The picks handed in have a count per token (LayerTensors::pick_counts). A selection then need
  /// not be everything even where seq_len ≤ topk, so the dense path is not taken.
  bool counted_picks = false;
  /// > 0: a step of decodes whose shape depends on the number of requests alone, to be captured in
  /// a CUDA graph once and replayed with other lengths. Every request has exactly so many rows in
  /// every tensor, of which the first query_lens[i] (0 … padded_query_len) are tokens; the others
  /// see no key: picks −1, out 0, lse −inf. Their slot_mapping has to be −1. At most
  /// decode_threshold. The arena's sections, the launches and their sizes are then the same for
  /// every batch of as many requests, and block tables need a column for every page of
  /// max_model_len.
  std::int32_t padded_query_len = 0;
};

/// Does the masked path fit its workspace? (design: the global mask if it fits, else per chunk.)
struct MaskedWorkspace {
  bool global_fits = false;
  bool per_chunk_fits = false;
  std::int64_t global_bytes = 0;     ///< mask words of whole sequences
  std::int64_t per_chunk_bytes = 0;  ///< the largest of any chunk's and the suffix's
  std::int64_t budget_bytes = 0;
  bool fits() const { return global_fits || per_chunk_fits; }
};

/// A run of T-typed records inside the batch's arena.
template <class T>
struct ArenaSection {
  std::size_t offset = 0;  ///< bytes
  std::size_t count = 0;
  /// The records in an arena at `base`: the host's, or its copy on a device.
  std::span<const T> at(const std::byte* base) const {
    return {reinterpret_cast<const T*>(base + offset), count};
  }
};

/// What lies where in the arena. Chunk c's members and mask members are the consecutive records
/// from plan().chunks[c].member_begin on.
struct BatchSections {
  ArenaSection<ChunkMember> suffix;         ///< [prefill requests]
  ArenaSection<ChunkMember> chunk_members;  ///< [members of all chunks]
  ArenaSection<TokenRange> init_ranges;     ///< running rows that start out empty
  ArenaSection<MaskMember> suffix_masks;    ///< [prefill requests]; scope global: serves all chunks
  ArenaSection<MaskMember> chunk_masks;     ///< scope per_chunk: [members of all chunks]
  ArenaSection<ScoreMember> score_members;  ///< of all pieces
  ArenaSection<std::int32_t> decode_tokens;           ///< tokens that take sparse MQA as decodes
  ArenaSection<std::int32_t> prefill_tokens;          ///< packed order → the caller's token
  ArenaSection<std::int32_t> whole_selection_tokens;  ///< tokens whose picks are all their keys
  ArenaSection<std::int32_t> request_of_token;        ///< [num_tokens]
  ArenaSection<std::int32_t> keys_of_token;  ///< [num_tokens] keys it may see: position + 1
};

/// Immutable after construction; safe to read from several threads.
class BatchMetadata {
 public:
  /// `query_lens`, `context_lens` [requests] in the caller's order; tokens are numbered request by
  /// request in that order. Requests with query_len ≤ decode_threshold are decodes, the others
  /// prefill; requests without new tokens take no part. Throws std::invalid_argument for negative
  /// lengths, for a batch beyond the capacity's limits and for a path that cannot be taken.
  ///
  /// `index_key_lens` [requests]: the first so many context rows have their keys in the indexer's
  /// cache; empty = all have. A prefix that was restored without its indexer keys is refused, by
  /// name, where a selection over it would be scored. It may be used where nothing is scored:
  /// seq_len ≤ topk, or picks handed in.
  ///
  /// `arena_memory`: where the arena goes if it fits and starts on 16 bytes: pinned memory, or
  /// memory that batch after batch uses again. It has to outlive this object. Otherwise the object
  /// allocates its own.
  BatchMetadata(const Capacity& capacity, std::span<const std::int32_t> query_lens,
                std::span<const std::int32_t> context_lens, const BatchOptions& options = {},
                std::span<const std::int32_t> index_key_lens = {},
                std::span<std::byte> arena_memory = {});

  std::int32_t num_requests() const { return num_requests_; }
  std::int32_t num_tokens() const { return num_tokens_; }
  std::int32_t num_decode_tokens() const {
    return static_cast<std::int32_t>(sections_.decode_tokens.count);
  }
  std::int32_t num_prefill_tokens() const {
    return static_cast<std::int32_t>(sections_.prefill_tokens.count);
  }
  std::int32_t max_blocks() const { return max_blocks_; }  ///< pages of the longest request

  AttentionPath prefill_path() const { return path_; }
  const std::string& why_path() const { return why_path_; }  ///< one line for people
  const BatchOptions& options() const { return options_; }
  std::uint64_t capacity_id() const {
    return capacity_id_;
  }  ///< of the Capacity it was planned with

  /// Context of the prefill requests; empty on the sparse path. Its requests are numbered as in
  /// sections().suffix, its tokens in packed order.
  const ContextPlan& plan() const { return plan_; }
  const ScorePlan& score_plan() const { return score_plan_; }
  MaskScope mask_scope() const { return mask_scope_; }
  const MaskedWorkspace& masked_workspace() const { return masked_workspace_; }
  const MaskLayout& suffix_mask_layout() const { return suffix_masks_; }  ///< sizes
  const std::vector<MaskLayout>& chunk_mask_layouts() const { return chunk_masks_; }

  const BatchSections& sections() const { return sections_; }
  /// Everything that kernels read, one block.
  std::span<const std::byte> arena() const { return arena_; }

 private:
  void choose_path(const Capacity& capacity, std::span<const ChunkMember> suffix);
  void plan_padded(const Limits& limits, std::span<const std::int32_t> query_lens,
                   std::span<const std::int32_t> context_lens);
  void take_sparse(std::string why);
  void fall_back_to_sparse(const std::string& why);
  struct TokenCounts {
    std::int32_t decode = 0, prefill = 0;
    std::int32_t whole = 0;  ///< whose picks are all their keys
  };
  void build_arena(const Limits& limits, std::span<const std::int32_t> query_lens,
                   std::span<const std::int32_t> context_lens, std::span<const ChunkMember> suffix,
                   const TokenCounts& counts, std::span<std::byte> arena_memory);

  std::int32_t num_requests_ = 0;
  std::int32_t num_tokens_ = 0;
  std::int32_t max_blocks_ = 0;
  BatchOptions options_;
  std::uint64_t capacity_id_ = 0;
  AttentionPath path_ = AttentionPath::none;
  std::string why_path_;
  ContextPlan plan_;
  ScorePlan score_plan_;
  MaskScope mask_scope_ = MaskScope::global;
  MaskedWorkspace masked_workspace_;
  MaskLayout suffix_masks_;
  std::vector<MaskLayout> chunk_masks_;
  BatchSections sections_;
  std::span<std::byte> arena_;  ///< in the caller's memory or in own_arena_
  std::unique_ptr<std::byte[]> own_arena_;
};

}  // namespace sparse_mla
