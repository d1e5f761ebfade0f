// Capacity and BatchMetadata: what is fixed at start-up, what is planned per batch, which path is
// taken and why, and that every size covers the worst step.
#include "sparse_mla/metadata.h"

#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/log.h"

namespace sparse_mla {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Lens = std::vector<std::int32_t>;

Limits limits(int topk = 2048) {
  Limits limits;
  limits.dims.num_heads = 16;
  limits.dims.index_topk = topk;
  limits.max_num_tokens = 4096;
  limits.max_num_seqs = 64;
  limits.max_model_len = 70000;
  return limits;
}

template <class Function>
std::string error_of(Function&& function) {
  try {
    function();
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

template <class T>
std::vector<T> copy(std::span<const T> values) {
  return {values.begin(), values.end()};
}

TEST(Batch, OrdersAMixedBatchItself) {
  const Capacity capacity(limits());
  // decode, prefill, nothing, decode, prefill without context
  const BatchMetadata batch(capacity, Lens{1, 5, 0, 1, 3}, Lens{4000, 3000, 77, 0, 0});
  const std::byte* arena = batch.arena().data();
  const BatchSections& sections = batch.sections();
  EXPECT_EQ(batch.num_tokens(), 10);
  EXPECT_THAT(copy(sections.decode_tokens.at(arena)), ElementsAre(0, 6));
  EXPECT_THAT(copy(sections.prefill_tokens.at(arena)), ElementsAre(1, 2, 3, 4, 5, 7, 8, 9));
  EXPECT_THAT(copy(sections.request_of_token.at(arena)), ElementsAre(0, 1, 1, 1, 1, 1, 3, 4, 4, 4));
  EXPECT_THAT(copy(sections.keys_of_token.at(arena)),
              ElementsAre(4001, 3001, 3002, 3003, 3004, 3005, 1, 1, 2, 3));
  // Tokens that see at most topk keys select them all; the others are scored.
  EXPECT_THAT(copy(sections.whole_selection_tokens.at(arena)), ElementsAre(6, 7, 8, 9));
  const auto scored = sections.score_members.at(arena);
  ASSERT_EQ(scored.size(), 2u);
  EXPECT_EQ(scored[0].request, 0);
  EXPECT_EQ(scored[1].query_start, 1);
  EXPECT_EQ(scored[1].num_rows, 5);
  EXPECT_EQ(scored[1].first_position, 3000);
  const auto suffix = sections.suffix.at(arena);
  ASSERT_EQ(suffix.size(), 2u);
  EXPECT_EQ(suffix[1].request, 4);
  EXPECT_EQ(suffix[1].query_start, 7);
  EXPECT_EQ(suffix[1].packed_token, 5);
  EXPECT_EQ(suffix[1].key_row, 5);
}

TEST(Batch, PagesOfTheLongestRequest) {
  Limits l = limits();
  l.max_model_len = 2147483647;
  for (const auto& [block, pages] :
       {std::pair{1, 2147483647}, std::pair{64, 1 << 25}, std::pair{2147483647, 1}}) {
    l.block_size = block;
    const Capacity capacity(l);
    EXPECT_EQ(BatchMetadata(capacity, Lens{1, 1}, Lens{5, 2147483646}).max_blocks(), pages);
    EXPECT_EQ(BatchMetadata(capacity, Lens{}, Lens{}).max_blocks(), 0);
  }
}

TEST(Batch, TheArenaLiesInTheCallersMemoryWhereItFits) {
  const Capacity capacity(limits());
  const HostWorkspace memory(4096);
  const Lens query{1, 5}, context{4000, 3000};
  const BatchMetadata own(capacity, query, context);
  const BatchMetadata there(capacity, query, context, {}, {}, memory.span());
  EXPECT_EQ(there.arena().data(), memory.span().data());
  ASSERT_EQ(there.arena().size(), own.arena().size());
  const auto read = [](const BatchMetadata& batch) {
    return copy(batch.sections().keys_of_token.at(batch.arena().data()));
  };
  EXPECT_EQ(read(there), read(own));
  for (const auto& small : {memory.span().first(own.arena().size() - 1), memory.span().subspan(8)})
    EXPECT_NE(BatchMetadata(capacity, query, context, {}, {}, small).arena().data(), small.data());
}

TEST(Batch, DecodeThreshold) {
  Limits l = limits();
  l.decode_threshold = 3;
  EXPECT_EQ(BatchMetadata(Capacity(l), Lens{3, 4}, Lens{10, 10}).num_decode_tokens(), 3);
  l.decode_threshold = 0;
  EXPECT_EQ(BatchMetadata(Capacity(l), Lens{1, 4}, Lens{10, 10}).num_decode_tokens(), 0);
}

// What an engine runs while it warms up or captures: padded requests, without a key to see.
TEST(Batch, R32PaddedRequestsAreNoWork) {
  const Capacity capacity(limits());
  for (const std::int32_t last : {0, 1}) {
    Lens query(32, 0);
    query.back() = last;
    const BatchMetadata batch(capacity, query, Lens(32, 0));
    EXPECT_EQ(batch.num_tokens(), last);
    EXPECT_EQ(batch.num_decode_tokens(), last);
    EXPECT_EQ(batch.max_blocks(), last);
    EXPECT_TRUE(batch.score_plan().pieces.empty());
    EXPECT_TRUE(batch.plan().empty());
    EXPECT_EQ(batch.prefill_path(), AttentionPath::none);
  }
}

// Lengths and pages at the end of the range: nothing is counted in 32 bits on the way.
TEST(Batch, LongestRequestAndLargestPage) {
  Limits l = limits();
  l.max_model_len = std::numeric_limits<std::int32_t>::max();
  l.block_size = std::numeric_limits<std::int32_t>::max();
  const BatchMetadata one(Capacity(l), Lens{1}, Lens{l.max_model_len - 1});
  EXPECT_EQ(one.max_blocks(), 1);
  l.block_size = 1;
  const BatchMetadata many(Capacity(l), Lens{7, 1}, Lens{l.max_model_len - 7, 0});
  EXPECT_EQ(many.max_blocks(), l.max_model_len);
}

TEST(Batch, ChunkMembersFollowThePlan) {
  Limits l = limits();
  l.workspace_rows = 1024;
  const Capacity capacity(l);
  BatchOptions options;
  options.path = AttentionPath::masked;
  const BatchMetadata batch(capacity, Lens{1, 8, 1, 8, 8}, Lens{9000, 1500, 9000, 200, 3000},
                            options);
  const auto members = batch.sections().chunk_members.at(batch.arena().data());
  std::vector<std::int64_t> next(5, 0);
  for (std::size_t c = 0; c < batch.plan().chunks.size(); ++c) {
    const ContextChunk& chunk = batch.plan().chunks[c];
    std::int32_t row = 0;
    for (std::int32_t i = 0; i < chunk.num_members(); ++i) {
      const ChunkMember& member = members[chunk.member_begin + i];
      EXPECT_EQ(member.first_key, next[member.request]);
      EXPECT_EQ(member.key_row, row);
      next[member.request] += member.num_keys;
      row += member.num_keys;
    }
  }
  EXPECT_THAT(next, ElementsAre(0, 1500, 0, 200, 3000));
}

TEST(Path, IsChosenAndExplained) {
  const Capacity capacity(limits());
  const BatchMetadata decodes(capacity, Lens{1, 1}, Lens{9000, 100});
  EXPECT_EQ(decodes.prefill_path(), AttentionPath::none);
  EXPECT_TRUE(decodes.plan().empty());
  const BatchMetadata fits(capacity, Lens{1, 48}, Lens{9000, 2000});
  EXPECT_EQ(fits.prefill_path(), AttentionPath::dense);
  EXPECT_THAT(fits.why_path(), HasSubstr("every prefill seq_len ≤ topk"));
  const BatchMetadata longer(capacity, Lens{49}, Lens{2000});
  EXPECT_NE(longer.prefill_path(), AttentionPath::dense);
  EXPECT_THAT(longer.why_path(), HasSubstr("× the cost of sparse MQA"));
}

TEST(Path, AutoFollowsTheCostTable) {
  // A long query over a short context reuses keys: masked. A short query over a long one: sparse.
  const Capacity capacity(limits());
  EXPECT_EQ(BatchMetadata(capacity, Lens{4000}, Lens{1000}).prefill_path(), AttentionPath::masked);
  EXPECT_EQ(BatchMetadata(capacity, Lens{16}, Lens{60000}).prefill_path(), AttentionPath::sparse);
}

TEST(Path, ForcingDenseOnAnythingLongerIsAnError) {
  const Capacity capacity(limits());
  BatchOptions options;
  options.path = AttentionPath::dense;
  EXPECT_EQ(BatchMetadata(capacity, Lens{2048}, Lens{0}, options).prefill_path(),
            AttentionPath::dense);
  const std::string error = error_of([&] {
    BatchMetadata(capacity, Lens{1, 49}, Lens{0, 2000}, options);
  });
  EXPECT_THAT(error, HasSubstr("path: got dense with request 1 of seq_len 2049"));
  options.path = AttentionPath::none;
  EXPECT_THROW(BatchMetadata(capacity, Lens{1}, Lens{0}, options), std::invalid_argument);
}

TEST(Path, MasksGlobalPerChunkOrNotAtAll) {
  const Lens query{33, 64}, context{2048, 4096};
  BatchOptions options;
  options.path = AttentionPath::masked;
  const std::int64_t global = 4 * (33 * 66 + 64 * 130), chunk = 4 * (33 * 64 + 64 * 128);
  for (const auto& [budget, scope] :
       {std::pair{global, MaskScope::global}, std::pair{global - 1, MaskScope::per_chunk},
        std::pair{chunk, MaskScope::per_chunk}}) {
    Limits l = limits();
    l.mask_budget_bytes = budget;
    const BatchMetadata batch(Capacity(l), query, context, options);
    EXPECT_EQ(batch.mask_scope(), scope) << budget;
    EXPECT_TRUE(batch.masked_workspace().fits());
    EXPECT_EQ(batch.masked_workspace().global_bytes, global);
    EXPECT_EQ(batch.masked_workspace().per_chunk_bytes, chunk);
  }
  Limits l = limits();
  l.mask_budget_bytes = chunk - 1;
  const Capacity capacity(l);
  EXPECT_THAT(error_of([&] { BatchMetadata(capacity, query, context, options); }),
              HasSubstr("the mask budget is " + std::to_string(chunk - 1)));
  // auto falls back, and says so.
  std::string said;
  set_log_callback([&](LogLevel, std::string_view message) { said = message; });
  options.path = AttentionPath::automatic;
  const BatchMetadata batch(capacity, query, context, options);
  set_log_callback(nullptr);
  EXPECT_EQ(batch.prefill_path(), AttentionPath::sparse);
  EXPECT_FALSE(batch.masked_workspace().fits());
  EXPECT_THAT(batch.why_path(), HasSubstr("needs " + std::to_string(chunk) + " bytes"));
  EXPECT_THAT(said, HasSubstr(batch.why_path()));
}

TEST(Path, SmallerChunksMakePerChunkMasksFit) {
  Limits l = limits();
  l.workspace_rows = 512;
  l.mask_budget_bytes = 4 * 64 * 16;  // 64 rows of 512 keys
  BatchOptions options;
  options.path = AttentionPath::masked;
  const BatchMetadata batch(Capacity(l), Lens{64}, Lens{4096}, options);
  EXPECT_EQ(batch.mask_scope(), MaskScope::per_chunk);
  EXPECT_EQ(batch.chunk_mask_layouts().size(), 8u);
}

TEST(Batch, EqualSplitBeyondTheWorkspaceIsRefused) {
  Limits l = limits();
  l.workspace_rows = 128;
  BatchOptions options;
  options.schedule = Schedule::equal_split;
  const Lens query(5, 8), context(5, 4000);  // 5 slices of at least 64 rows
  const BatchMetadata automatic(Capacity(l), query, context, options);
  EXPECT_EQ(automatic.prefill_path(), AttentionPath::sparse);
  EXPECT_THAT(automatic.why_path(), HasSubstr("equal-split with 320 rows in a pass"));
  options.path = AttentionPath::masked;
  EXPECT_THAT(error_of([&] { BatchMetadata(Capacity(l), query, context, options); }),
              HasSubstr("equal-split with 320 rows in a pass"));
}

TEST(Batch, BadInputIsNamed) {
  const Capacity capacity(limits());
  const auto error = [&](const Lens& query, const Lens& context) {
    return error_of([&] { BatchMetadata(capacity, query, context); });
  };
  EXPECT_EQ(error({1, 1}, {4, -3}), "context_lens[1]: got -3, expected at least 0");
  EXPECT_EQ(error({-2}, {4}), "query_lens[0]: got -2, expected at least 0");
  EXPECT_THAT(error({1}, {70000}), HasSubstr("seq_len[0]: got 70001"));
  EXPECT_THAT(error({1}, {2147483647}), HasSubstr("seq_len[0]: got 2147483648"));
  EXPECT_THAT(error({4097}, {0}), HasSubstr("max_num_tokens (4096)"));
  EXPECT_THAT(error(Lens(65, 1), Lens(65, 1)), HasSubstr("max_num_seqs (64)"));
  EXPECT_THAT(error({1, 2}, {0}), HasSubstr("query_lens: got 2"));
  EXPECT_EQ(error({}, {}), "");
}

TEST(CapacityTest, BadLimitsAreNamed) {
  const auto error = [](auto&& change) {
    Limits l = limits();
    change(l);
    return error_of([&] { Capacity capacity(l); });
  };
  EXPECT_THAT(error([](Limits& l) { l.max_num_tokens = 0; }), HasSubstr("max_num_tokens: got 0"));
  EXPECT_THAT(error([](Limits& l) { l.max_num_seqs = -1; }), HasSubstr("max_num_seqs: got -1"));
  EXPECT_THAT(error([](Limits& l) { l.max_model_len = 0; }), HasSubstr("max_model_len"));
  EXPECT_THAT(error([](Limits& l) { l.block_size = 0; }), HasSubstr("block_size"));
  EXPECT_THAT(error([](Limits& l) { l.workspace_rows = -1; }), HasSubstr("workspace_rows"));
  EXPECT_THAT(error([](Limits& l) { l.chunk_alignment = 100000; }), HasSubstr("chunk_alignment"));
  EXPECT_THAT(error([](Limits& l) { l.score_budget_bytes = 3; }), HasSubstr("score_budget_bytes"));
  EXPECT_THAT(error([](Limits& l) { l.mask_budget_bytes = -1; }), HasSubstr("mask_budget_bytes"));
  for (std::int64_t Limits::*budget :
       {&Limits::score_budget_bytes, &Limits::mask_budget_bytes, &Limits::projection_budget_bytes})
    EXPECT_THAT(error([&](Limits& l) { l.*budget = std::numeric_limits<std::int64_t>::max(); }),
                HasSubstr("2^56 bytes"));
  EXPECT_THAT(error([](Limits& l) { l.decode_threshold = -1; }), HasSubstr("decode_threshold"));
  EXPECT_THAT(error([](Limits& l) { l.dims.num_heads = 0; }), HasSubstr("num_heads: got 0"));
}

TEST(CapacityTest, WorkspaceIsCarvedAsItWasCounted) {
  Limits l = limits();
  l.max_num_tokens = 64;
  l.max_model_len = 5000;
  l.workspace_rows = 256;
  l.score_budget_bytes = 1 << 20;
  const Capacity capacity(l);
  const HostWorkspace memory(capacity.workspace_bytes());
  std::byte* base = memory.span().data();
  const LayerWorkspace carved = capacity.carve({base, capacity.workspace_bytes()});
  EXPECT_NE(carved.kv, nullptr);
  EXPECT_NE(carved.slots, nullptr);
  std::size_t end = 0;
  for (const WorkspaceBuffer& buffer : capacity.workspace_buffers()) {
    end = std::max(end, buffer.offset + buffer.bytes);
    EXPECT_THAT(buffer.name, ::testing::MatchesRegex("(select|sparse|chunked)\\..*"));
  }
  EXPECT_LE(end, capacity.workspace_bytes());
  EXPECT_GT(end + kWorkspaceAlignment, capacity.workspace_bytes());
  EXPECT_THROW(capacity.carve({base, capacity.workspace_bytes() - 1}), std::invalid_argument);
}

TEST(CapacityTest, HeadsAndTokensAreGroupedUnderTheProjectionBudget) {
  Limits l = limits();
  l.dims.num_heads = 128;
  const std::int64_t head_bytes = std::int64_t{65536} * 256 * 2;
  l.projection_budget_bytes = 40 * head_bytes;
  EXPECT_EQ(Capacity(l).head_group(), 32);  // 4 groups of 32 rather than 40, 40, 40, 8
  l.projection_budget_bytes = 0;
  EXPECT_EQ(Capacity(l).head_group(), 1);
  EXPECT_EQ(Capacity(l).token_tile(), 1);
}

// Whatever a batch within the limits needs, the capacity's buffers hold it.
TEST(CapacityTest, BuffersCoverEveryAdmissibleBatch) {
  std::mt19937 random(3);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int masked = 0, per_chunk = 0;  // batches that reach the mask buffers at all
  for (int trial = 0; trial < 300; ++trial) {
    Limits l = limits(draw(1, 64));
    l.max_num_tokens = draw(1, 300);
    l.max_num_seqs = draw(1, 12);
    l.max_model_len = draw(1, 4000);
    l.block_size = draw(1, 70);
    l.workspace_rows = draw(1, 700);
    l.mask_budget_bytes = draw(0, 40000);
    l.score_budget_bytes = draw(4, 100000);
    l.decode_threshold = draw(0, 2);
    const Capacity capacity(l);
    Lens query, context;
    int tokens = 0;
    for (int i = draw(0, l.max_num_seqs); i > 0; --i) {
      const int most = std::min(l.max_num_tokens - tokens, l.max_model_len);
      query.push_back(draw(0, 2) == 0 ? std::min(1, most) : draw(0, most));
      tokens += query.back();
      context.push_back(draw(0, 3) == 0 ? 0 : draw(0, l.max_model_len - query.back()));
    }
    // Masked wherever it fits: what `auto` takes depends on the cost table.
    BatchOptions options;
    options.path = AttentionPath::masked;
    const auto planned = [&] {
      try {
        return BatchMetadata(capacity, query, context, options);
      } catch (const std::invalid_argument&) {
        options.path = AttentionPath::automatic;
        return BatchMetadata(capacity, query, context, options);
      }
    };
    const BatchMetadata batch = planned();
    masked += batch.prefill_path() == AttentionPath::masked;
    per_chunk += !batch.chunk_mask_layouts().empty();
    const auto& select = capacity.operations().select_from_indexer.problem;
    EXPECT_LE(batch.score_plan().max_scores, select.max_scores);
    EXPECT_LE(batch.score_plan().max_rows, select.indexer.max_rows);
    for (const ContextChunk& chunk : batch.plan().chunks)
      EXPECT_LE(chunk.num_rows, capacity.workspace_rows());
    std::vector<const MaskLayout*> layouts{&batch.suffix_mask_layout()};
    for (const MaskLayout& layout : batch.chunk_mask_layouts()) layouts.push_back(&layout);
    std::size_t words = 0, ids = 0, counts = 0;
    for (const WorkspaceBuffer& buffer : capacity.workspace_buffers()) {
      if (buffer.name == "chunked.mask_words") words = buffer.bytes / 4;
      if (buffer.name == "chunked.mask_tile_ids") ids = buffer.bytes / 4;
      if (buffer.name == "chunked.mask_tile_counts") counts = buffer.bytes / 4;
    }
    for (const MaskLayout* layout : layouts) {
      ASSERT_LE(static_cast<std::size_t>(layout->num_words), words);
      ASSERT_LE(static_cast<std::size_t>(layout->num_tile_ids), ids);
      ASSERT_LE(static_cast<std::size_t>(layout->num_tile_counts), counts);
      ASSERT_LE(layout->num_words, capacity.operations().build_masks.problem.max_words);
    }
  }
  EXPECT_GT(masked, 100);
  EXPECT_GT(per_chunk, 20);
}

/// Bytes of the buffer of this name.
std::int64_t bytes_of(const Capacity& capacity, const std::string& name) {
  for (const WorkspaceBuffer& buffer : capacity.workspace_buffers())
    if (buffer.name == name) return static_cast<std::int64_t>(buffer.bytes);
  ADD_FAILURE() << "no buffer " << name;
  return 0;
}

// An engine reserves once, for its limits; no step that they admit may need more. Lengths sweep
// query × context up to the limits, with odd roundings on the way and pages that do not divide.
TEST(CapacityTest, ReservedBytesCoverTheLargestSteps) {
  for (const std::int32_t block_size : {64, 61, 11000}) {
    for (const std::int64_t score_budget : {std::int64_t{512} << 20, std::int64_t{1} << 20}) {
      Limits l = limits();
      l.max_num_tokens = 8192;
      l.max_num_seqs = 8;
      l.max_model_len = 262144;
      l.block_size = block_size;
      l.score_budget_bytes = score_budget;
      const Capacity capacity(l);
      const auto& select = capacity.operations().select_from_indexer;
      int chunked = 0;
      for (const std::int32_t query_len : {1, 2, 3, 255, 1000, 4095, 4097, 8191, 8192}) {
        for (const std::int32_t seq_len :
             {8192, 8193, 65535, 65537, 131071, 200003, 262143, 262144}) {
          SCOPED_TRACE("block " + std::to_string(block_size) + ", " + std::to_string(query_len) +
                       " of " + std::to_string(seq_len));
          const auto requests = std::min(8192 / query_len, 8);
          BatchOptions options;  // masked wherever the masks fit: it needs the most
          options.path =
              4 * std::int64_t{requests} * query_len * ((seq_len + 31) / 32) <= l.mask_budget_bytes
                  ? AttentionPath::masked
                  : AttentionPath::automatic;
          const BatchMetadata batch(capacity, Lens(requests, query_len),
                                    Lens(requests, seq_len - query_len), options);
          chunked += !batch.plan().chunks.empty();
          // The selection's need for exactly this step.
          SelectFromIndexerProblem step = select.problem;
          step.max_scores = batch.score_plan().max_scores;
          step.indexer.max_rows = batch.score_plan().max_rows;
          step.indexer.max_keys = seq_len;
          const auto needed = static_cast<std::int64_t>(select.entry->workspace_bytes(step));
          ASSERT_LE(needed, bytes_of(capacity, "select.indexer_and_topk"));
          ASSERT_LE(needed, static_cast<std::int64_t>(capacity.workspace_bytes()));
          // A piece is within the budget, or one row.
          ASSERT_LE(4 * batch.score_plan().max_scores,
                    std::max(score_budget, std::int64_t{4} * seq_len));
          const ModelDims& dims = l.dims;
          std::int64_t rows = batch.num_prefill_tokens();
          for (const ContextChunk& chunk : batch.plan().chunks)
            rows = std::max<std::int64_t>(rows, chunk.num_rows);
          ASSERT_LE(rows * dims.latent_dim() * 2, bytes_of(capacity, "chunked.latent_rows"));
          ASSERT_LE(rows * capacity.head_group() * (dims.qk_nope_head_dim + dims.v_head_dim) * 2,
                    bytes_of(capacity, "chunked.keys_and_values"));
          ASSERT_LE(std::int64_t{batch.plan().running_rows} * dims.num_heads * dims.v_head_dim * 4,
                    bytes_of(capacity, "chunked.context_out"));
          ASSERT_LE(batch.suffix_mask_layout().num_words * 4,
                    bytes_of(capacity, "chunked.mask_words"));
        }
      }
      EXPECT_GE(chunked, 20);
    }
  }
}

std::vector<std::array<int, 3>> pieces(const Lens& query, const Lens& seq, std::int64_t budget) {
  std::vector<ScoreRequest> requests;
  for (std::size_t i = 0; i < query.size(); ++i)
    requests.push_back({static_cast<std::int32_t>(i), 0, query[i], seq[i] - query[i]});
  const ScorePlan plan = plan_scores(requests, budget);
  std::vector<std::array<int, 3>> out;  // members, rows, scores
  for (const ScorePiece& piece : plan.pieces)
    out.push_back({piece.member_end - piece.member_begin, piece.num_rows,
                   static_cast<int>(piece.num_scores)});
  return out;
}

TEST(ScorePlan, SplitsByRequestsThenByRows) {
  EXPECT_THAT(
      pieces({10, 10, 10}, {100, 100, 100}, 5000),
      ElementsAre(std::array{1, 10, 1000}, std::array{1, 10, 1000}, std::array{1, 10, 1000}));
  const auto rows = pieces({100, 5}, {1000, 50}, 1000);
  ASSERT_EQ(rows.size(), 101u);
  EXPECT_EQ(rows[99], (std::array{1, 1, 1000}));
  EXPECT_EQ(rows[100], (std::array{1, 5, 250}));
  EXPECT_THAT(pieces({0}, {0}, 1000), IsEmpty());
  EXPECT_THAT(pieces({10, 10}, {100, 100}, 8000), ElementsAre(std::array{2, 20, 2000}));
}

TEST(ScorePlan, EveryRowOnceWithinTheBudget) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<ScoreRequest> requests;
    std::int32_t token = 0;
    for (int i = 0; i < 6; ++i) {
      const auto query = static_cast<std::int32_t>(random() % 40);
      requests.push_back({i, token, query, static_cast<std::int32_t>(random() % 500)});
      token += query;
    }
    const std::int64_t budget = 4 + static_cast<std::int64_t>(random() % 60000);
    const ScorePlan plan = plan_scores(requests, budget);
    std::int32_t next = 0;
    for (const ScorePiece& piece : plan.pieces) {
      EXPECT_TRUE(piece.num_scores * 4 <= budget || piece.num_rows == 1);
      std::int64_t offset = 0;
      std::int32_t row = 0;
      for (std::int32_t m = piece.member_begin; m < piece.member_end; ++m) {
        const ScoreMember& member = plan.members[m];
        EXPECT_EQ(member.query_start, next);
        EXPECT_EQ(member.score_offset, offset);
        EXPECT_EQ(member.first_row, row);
        EXPECT_EQ(member.first_position, requests[member.request].context_len + next -
                                             requests[member.request].query_start);
        next += member.num_rows;
        row += member.num_rows;
        offset += std::int64_t{member.num_rows} * member.row_keys;
      }
      EXPECT_EQ(offset, piece.num_scores);
      EXPECT_LE(piece.num_scores, plan.max_scores);
    }
    EXPECT_EQ(next, token);
  }
}

// 8,192 queries over 300,000 keys would be 9.2 GiB of scores.
TEST(ScorePlan, HugeScoreMatricesAreBounded) {
  const std::vector<ScoreRequest> requests{{0, 0, 8192, 300000 - 8192}};
  const ScorePlan plan = plan_scores(requests, std::int64_t{512} << 20);
  EXPECT_LE(plan.max_scores * 4, std::int64_t{512} << 20);
  EXPECT_EQ(plan.pieces.size(), 19u);
}

}  // namespace
}  // namespace sparse_mla
