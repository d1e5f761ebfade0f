#include "sparse_mla/metadata.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include "sparse_mla/error.h"
#include "sparse_mla/log.h"

namespace sparse_mla {
namespace {

/// Lays records of several types out in one block, each section aligned for any of them.
class ArenaBuilder {
 public:
  template <class T>
  ArenaSection<T> reserve(std::size_t count) {
    const ArenaSection<T> section{bytes_, count};
    bytes_ = (bytes_ + count * sizeof(T) + 15) / 16 * 16;
    return section;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

template <class T>
void store(std::byte* arena, const ArenaSection<T>& section, std::span<const T> records) {
  if (!records.empty()) std::memcpy(arena + section.offset, records.data(), records.size_bytes());
}

/// Texts are made for the request at fault only: this runs for every batch.
void check_lengths(const Limits& limits, std::span<const std::int32_t> query_lens,
                   std::span<const std::int32_t> context_lens) {
  require(query_lens.size() == context_lens.size(), "query_lens", query_lens.size(),
          "as many entries as context_lens (" + std::to_string(context_lens.size()) + ")");
  require(query_lens.size() <= static_cast<std::size_t>(limits.max_num_seqs), "query_lens",
          query_lens.size(), "at most max_num_seqs (" + std::to_string(limits.max_num_seqs) + ")");
  std::int64_t num_tokens = 0;
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    const std::int64_t query_len = query_lens[i], context_len = context_lens[i];
    num_tokens += query_len;
    if (query_len >= 0 && context_len >= 0 && query_len + context_len <= limits.max_model_len)
      continue;
    const std::string index = "[" + std::to_string(i) + "]";
    require(query_len >= 0, "query_lens" + index, query_len, "at least 0");
    require(context_len >= 0, "context_lens" + index, context_len, "at least 0");
    throw_invalid("seq_len" + index, std::to_string(query_len + context_len),
                  "at most max_model_len (" + std::to_string(limits.max_model_len) + ")");
  }
  require(num_tokens <= limits.max_num_tokens, "query_lens", num_tokens,
          "at most max_num_tokens (" + std::to_string(limits.max_num_tokens) + ") in all");
}

void check_padding(const Limits& limits, std::span<const std::int32_t> query_lens,
                   const BatchOptions& options) {
  const std::int32_t padded = options.padded_query_len;
  require(padded >= 0 && padded <= limits.decode_threshold, "padded_query_len", padded,
          "0 … decode_threshold (" + std::to_string(limits.decode_threshold) + ")");
  if (padded == 0) return;
  for (std::size_t i = 0; i < query_lens.size(); ++i)
    if (query_lens[i] > padded)
      throw_invalid("query_lens[" + std::to_string(i) + "]", std::to_string(query_lens[i]),
                    "at most padded_query_len (" + std::to_string(padded) + ")");
  const std::int64_t tokens = static_cast<std::int64_t>(query_lens.size()) * padded;
  require(tokens <= limits.max_num_tokens, "padded_query_len", padded,
          "at most max_num_tokens (" + std::to_string(limits.max_num_tokens) + ") rows in all");
}

/// `scored`: requests with more than topk keys are.
void check_index_keys(const Limits& limits, std::span<const std::int32_t> query_lens,
                      std::span<const std::int32_t> context_lens,
                      std::span<const std::int32_t> index_key_lens, bool scored) {
  require(index_key_lens.size() == query_lens.size(), "index_key_lens", index_key_lens.size(),
          "none or one entry per request (" + std::to_string(query_lens.size()) + ")");
  const std::int32_t topk = limits.dims.index_topk;
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    const std::int32_t keys = index_key_lens[i], context_len = context_lens[i];
    if (keys == context_len) continue;
    const std::string index = "index_key_lens[" + std::to_string(i) + "]";
    const std::string length = "context_len (" + std::to_string(context_len) + ")";
    require(keys >= 0 && keys < context_len, index, keys, "0 … " + length);
    require(!scored || query_lens[i] == 0 || context_len + query_lens[i] <= topk, index, keys,
            length + ": request " + std::to_string(i) + " has more than topk (" +
                std::to_string(topk) +
                ") keys to score, and a cached prefix without indexer keys cannot be");
  }
}

std::vector<std::int32_t> lens_of(std::span<const ChunkMember> members,
                                  std::int32_t ChunkMember::*len) {
  std::vector<std::int32_t> lens;
  lens.reserve(members.size());
  for (const ChunkMember& member : members) lens.push_back(member.*len);
  return lens;
}

/// The context members of a plan: the suffix's records, moved to the chunk's keys.
std::vector<ChunkMember> members_of(const ContextPlan& plan, std::span<const ChunkMember> suffix) {
  std::vector<ChunkMember> members;
  members.reserve(plan.member_starts.size());
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    const ContextChunk& chunk = plan.chunks[c];
    const auto rows = plan.cu_seq_lens(c);
    for (std::int32_t i = 0; i < chunk.num_members(); ++i) {
      ChunkMember member = suffix[chunk.request_begin + i];
      member.first_key = plan.starts(c)[i];
      member.num_keys = plan.seq_lens(c)[i];
      member.key_row = rows[i];
      members.push_back(member);
    }
  }
  return members;
}

std::span<const ChunkMember> members_of_chunk(const ContextPlan& plan, std::size_t chunk,
                                              std::span<const ChunkMember> members) {
  return members.subspan(plan.chunks[chunk].member_begin, plan.chunks[chunk].num_members());
}

}  // namespace

BatchMetadata::BatchMetadata(const Capacity& capacity, std::span<const std::int32_t> query_lens,
                             std::span<const std::int32_t> context_lens,
                             const BatchOptions& options,
                             std::span<const std::int32_t> index_key_lens,
                             std::span<std::byte> arena_memory)
    : options_(options), capacity_id_(capacity.id()) {
  require(options.path != AttentionPath::none, "path", "none", "auto, dense, masked or sparse");
  require(!options.counted_picks || !options.select, "counted_picks", "true with select",
          "false: counts belong to picks that are handed in");
  check_lengths(capacity.limits(), query_lens, context_lens);
  check_padding(capacity.limits(), query_lens, options);
  if (!index_key_lens.empty())
    check_index_keys(capacity.limits(), query_lens, context_lens, index_key_lens, options.select);
  num_requests_ = static_cast<std::int32_t>(query_lens.size());

  // Requests without new tokens take no part; short ones are decodes, the others prefill.
  const Limits& limits = capacity.limits();
  std::vector<ChunkMember> suffix;
  suffix.reserve(query_lens.size());
  TokenCounts counts;
  if (options_.padded_query_len > 0) {
    plan_padded(limits, query_lens, context_lens);
    counts.decode = num_tokens_;
    build_arena(limits, query_lens, context_lens, suffix, counts, arena_memory);
    return;
  }
  std::int32_t longest_seq = 0;
  for (std::int32_t i = 0; i < num_requests_; ++i) {
    const std::int32_t query_len = query_lens[i], context_len = context_lens[i];
    if (query_len == 0) continue;
    longest_seq = std::max(longest_seq, context_len + query_len);
    if (query_len > limits.decode_threshold) {
      suffix.push_back({i, num_tokens_, query_len, counts.prefill, context_len, context_len,
                        query_len, counts.prefill});
      counts.prefill += query_len;
    } else {
      counts.decode += query_len;
    }
    num_tokens_ += query_len;
  }
  max_blocks_ = longest_seq / limits.block_size + (longest_seq % limits.block_size > 0);
  choose_path(capacity, suffix);

  // A request that sees at most topk keys picks them all: nothing to score.
  if (options_.select) {
    std::vector<ScoreRequest> to_score;
    to_score.reserve(query_lens.size());
    std::int32_t token = 0;
    for (std::int32_t i = 0; i < num_requests_; token += query_lens[i], ++i)
      if (context_lens[i] + query_lens[i] <= limits.dims.index_topk)
        counts.whole += query_lens[i];
      else
        to_score.push_back({i, token, query_lens[i], context_lens[i]});
    score_plan_ = plan_scores(to_score, limits.score_budget_bytes);
  }
  build_arena(limits, query_lens, context_lens, suffix, counts, arena_memory);
}

void BatchMetadata::plan_padded(const Limits& limits, std::span<const std::int32_t> query_lens,
                                std::span<const std::int32_t> context_lens) {
  const std::int32_t rows = options_.padded_query_len;
  num_tokens_ = num_requests_ * rows;
  max_blocks_ =
      limits.max_model_len / limits.block_size + (limits.max_model_len % limits.block_size > 0);
  why_path_ = "no prefill request in the batch";

  // Every row is a member of its own with room for the longest sequence, a whole number of them to
  // a piece: neither offsets nor pieces depend on lengths.
  if (options_.select) {
    const std::int64_t row_keys = limits.max_model_len;
    const std::int64_t piece_rows =
        std::max<std::int64_t>(1, limits.score_budget_bytes / 4 / row_keys);
    for (std::int32_t token = 0; token < num_tokens_; ++token) {
      const std::int32_t request = token / rows, j = token % rows;
      if (token % piece_rows == 0) {
        ScorePiece piece;
        piece.member_begin = piece.member_end = token;
        piece.max_keys = limits.max_model_len;
        score_plan_.pieces.push_back(piece);
      }
      ScorePiece& piece = score_plan_.pieces.back();
      ScoreMember member;
      member.request = request;
      member.query_start = token;
      member.num_rows = 1;
      member.first_position = j < query_lens[request] ? context_lens[request] + j : -1;
      member.row_keys = limits.max_model_len;
      member.first_row = piece.num_rows;
      member.score_offset = piece.num_scores;
      score_plan_.members.push_back(member);
      ++piece.member_end;
      ++piece.num_rows;
      piece.num_scores += row_keys;
      score_plan_.max_rows = std::max(score_plan_.max_rows, piece.num_rows);
      score_plan_.max_scores = std::max(score_plan_.max_scores, piece.num_scores);
    }
  }
}

void BatchMetadata::choose_path(const Capacity& capacity, std::span<const ChunkMember> suffix) {
  const Limits& limits = capacity.limits();
  if (suffix.empty()) {
    why_path_ = "no prefill request in the batch";
    return;
  }
  const auto longest = std::max_element(
      suffix.begin(), suffix.end(), [](const ChunkMember& a, const ChunkMember& b) {
        return a.context_len + a.query_len < b.context_len + b.query_len;
      });
  const std::int32_t longest_seq = longest->context_len + longest->query_len;
  const bool all_short = longest_seq <= limits.dims.index_topk;
  const bool dense_is_exact = all_short && !options_.counted_picks;
  const std::string topk = std::to_string(limits.dims.index_topk);
  const bool automatic = options_.path == AttentionPath::automatic;
  if (options_.path == AttentionPath::dense && !all_short)
    throw_invalid("path",
                  "dense with request " + std::to_string(longest->request) + " of seq_len " +
                      std::to_string(longest_seq),
                  "every prefill seq_len at most topk (" + topk +
                      "): dense attention would ignore the selection");
  require(options_.path != AttentionPath::dense || dense_is_exact, "path",
          "dense with counted_picks", "masked or sparse: dense attention would ignore the counts");
  if (options_.path == AttentionPath::sparse) return take_sparse("forced");

  // The chunked paths need the context plan, and the masked one its masks.
  const std::vector<std::int32_t> query_lens = lens_of(suffix, &ChunkMember::query_len);
  const std::vector<std::int32_t> context_lens = lens_of(suffix, &ChunkMember::context_len);
  const PlannerOptions planner{capacity.workspace_rows(), capacity.chunk_alignment()};
  plan_ = options_.schedule == Schedule::packed
              ? plan_context_chunks(query_lens, context_lens, planner)
              : plan_equal_split(query_lens, context_lens, planner);
  // Only the equal split can: each request gets at least one aligned slice.
  for (const ContextChunk& chunk : plan_.chunks) {
    if (chunk.num_rows <= capacity.workspace_rows()) continue;
    const std::string got = to_string(options_.schedule) + " with " +
                            std::to_string(chunk.num_rows) + " rows in a pass";
    const std::string most =
        "at most the workspace's " + std::to_string(capacity.workspace_rows()) + " rows";
    if (!automatic) throw_invalid("schedule", got, most);
    return fall_back_to_sparse(got + ", the chunked paths need " + most);
  }
  if (options_.path == AttentionPath::dense || (automatic && dense_is_exact)) {
    path_ = AttentionPath::dense;
    why_path_ = automatic
                    ? "every prefill seq_len ≤ topk (" + topk + "): the selection is everything"
                    : "forced";
    return;
  }

  const std::vector<ChunkMember> members = members_of(plan_, suffix);
  MaskedWorkspace& masks = masked_workspace_;
  masks.budget_bytes = limits.mask_budget_bytes;
  masks.global_bytes = 4 * mask_budget_words(suffix, MaskScope::global);
  masks.per_chunk_bytes = 4 * mask_budget_words(suffix, MaskScope::per_chunk);
  for (std::size_t c = 0; c < plan_.chunks.size(); ++c)
    masks.per_chunk_bytes =
        std::max(masks.per_chunk_bytes,
                 4 * mask_budget_words(members_of_chunk(plan_, c, members), MaskScope::per_chunk));
  masks.global_fits = masks.global_bytes <= masks.budget_bytes;
  masks.per_chunk_fits = masks.per_chunk_bytes <= masks.budget_bytes;

  mask_scope_ = masks.global_fits ? MaskScope::global : MaskScope::per_chunk;

  if (!masks.fits()) {
    const std::string reason = "the largest mask of a chunk or of the suffix needs " +
                               std::to_string(masks.per_chunk_bytes) +
                               " bytes, the mask budget is " + std::to_string(masks.budget_bytes);
    if (!automatic) throw_invalid("path", "masked, but " + reason, "masks that fit the budget");
    return fall_back_to_sparse(reason);
  }
  why_path_ = "forced";
  if (automatic) {
    const PathCosts costs = estimate_path_costs(capacity.path_machine(), limits.dims, suffix);
    std::ostringstream reason;
    reason.precision(2);
    reason << std::fixed << "masked MHA is estimated at " << costs.masked_cost / costs.sparse_cost
           << "× the cost of sparse MQA; masks fit (" << to_string(mask_scope_) << ")";
    if (costs.masked_cost > costs.sparse_cost) return take_sparse(reason.str());
    why_path_ = reason.str();
  }
  path_ = AttentionPath::masked;
  suffix_masks_ = plan_masks(suffix, mask_scope_, capacity.mask_tile());
  if (mask_scope_ == MaskScope::per_chunk)
    for (std::size_t c = 0; c < plan_.chunks.size(); ++c)
      chunk_masks_.push_back(plan_masks(members_of_chunk(plan_, c, members), MaskScope::per_chunk,
                                        capacity.mask_tile()));
}

void BatchMetadata::take_sparse(std::string why) {
  path_ = AttentionPath::sparse;
  why_path_ = std::move(why);
  plan_ = {};
}

void BatchMetadata::fall_back_to_sparse(const std::string& why) {
  log(LogLevel::info, "prefill takes the sparse path: " + why);
  take_sparse(why);
}

void BatchMetadata::build_arena(const Limits& limits, std::span<const std::int32_t> query_lens,
                                std::span<const std::int32_t> context_lens,
                                std::span<const ChunkMember> suffix, const TokenCounts& counts,
                                std::span<std::byte> arena_memory) {
  const std::vector<ChunkMember> members = members_of(plan_, suffix);
  ArenaBuilder builder;
  sections_.suffix = builder.reserve<ChunkMember>(suffix.size());
  sections_.chunk_members = builder.reserve<ChunkMember>(members.size());
  sections_.init_ranges = builder.reserve<TokenRange>(plan_.init_token_ranges.size());
  sections_.suffix_masks = builder.reserve<MaskMember>(suffix_masks_.members.size());
  sections_.chunk_masks =
      builder.reserve<MaskMember>(chunk_masks_.empty() ? std::size_t{0} : members.size());
  sections_.score_members = builder.reserve<ScoreMember>(score_plan_.members.size());
  sections_.decode_tokens = builder.reserve<std::int32_t>(counts.decode);
  sections_.prefill_tokens = builder.reserve<std::int32_t>(counts.prefill);
  sections_.whole_selection_tokens = builder.reserve<std::int32_t>(counts.whole);
  sections_.request_of_token = builder.reserve<std::int32_t>(num_tokens_);
  sections_.keys_of_token = builder.reserve<std::int32_t>(num_tokens_);
  const bool fits = builder.bytes() <= arena_memory.size() &&
                    reinterpret_cast<std::uintptr_t>(arena_memory.data()) % 16 == 0;
  if (!fits) own_arena_ = std::make_unique_for_overwrite<std::byte[]>(builder.bytes());
  arena_ = {fits ? arena_memory.data() : own_arena_.get(), builder.bytes()};

  store<ChunkMember>(arena_.data(), sections_.suffix, suffix);
  store<ChunkMember>(arena_.data(), sections_.chunk_members, members);
  store<TokenRange>(arena_.data(), sections_.init_ranges, plan_.init_token_ranges);
  store<MaskMember>(arena_.data(), sections_.suffix_masks, suffix_masks_.members);
  for (std::size_t c = 0; c < chunk_masks_.size(); ++c) {
    ArenaSection<MaskMember> part = sections_.chunk_masks;
    part.offset += plan_.chunks[c].member_begin * sizeof(MaskMember);
    store<MaskMember>(arena_.data(), part, chunk_masks_[c].members);
  }
  store<ScoreMember>(arena_.data(), sections_.score_members, score_plan_.members);

  // Token lists are written in place: they are most of the arena's bytes.
  const auto place = [&](const ArenaSection<std::int32_t>& section) {
    return reinterpret_cast<std::int32_t*>(arena_.data() + section.offset);
  };
  std::int32_t* decode = place(sections_.decode_tokens);
  std::int32_t* prefill = place(sections_.prefill_tokens);
  std::int32_t* whole = place(sections_.whole_selection_tokens);
  std::int32_t* request_of_token = place(sections_.request_of_token);
  std::int32_t* keys_of_token = place(sections_.keys_of_token);
  std::int32_t token = 0;
  if (options_.padded_query_len > 0) {
    for (; token < num_tokens_; ++token) {
      const std::int32_t i = token / options_.padded_query_len;
      const std::int32_t j = token % options_.padded_query_len;
      decode[token] = token;
      request_of_token[token] = i;
      keys_of_token[token] = j < query_lens[i] ? context_lens[i] + j + 1 : 0;
    }
    return;
  }
  for (std::int32_t i = 0; i < num_requests_; ++i) {
    const std::int32_t query_len = query_lens[i], context_len = context_lens[i];
    std::int32_t*& list = query_len <= limits.decode_threshold ? decode : prefill;
    std::iota(list, list + query_len, token);
    list += query_len;
    if (options_.select && context_len + query_len <= limits.dims.index_topk) {
      std::iota(whole, whole + query_len, token);
      whole += query_len;
    }
    std::fill_n(request_of_token + token, query_len, i);
    // Not std::iota, which counts one past the last: that may be 2^31.
    for (std::int32_t j = 0; j < query_len; ++j) keys_of_token[token + j] = context_len + 1 + j;
    token += query_len;
  }
}

}  // namespace sparse_mla
