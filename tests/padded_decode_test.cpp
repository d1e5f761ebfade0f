// Decode steps of fixed shape: padding rows are empty, tokens are what they are in a batch of their
// own, and nothing that is fixed at capture time depends on lengths.
#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/layer.h"

#include "tests/support/layer_runner.h"
#include "tests/support/padded_step.h"
#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::LayerRunner;
using support::LayerWeights;
using support::PaddedStep;
using support::StepLengths;
using ::testing::HasSubstr;

constexpr std::int32_t kTopk = 64, kLongest = 700;

Limits limits_of(CacheFormat format = CacheFormat::bf16, std::int64_t score_budget = 512 << 20) {
  Limits limits;
  limits.dims.num_heads = 8;
  limits.dims.index_topk = kTopk;
  limits.dims.index_n_heads = 8;
  limits.cache_format = format;
  limits.max_num_tokens = 64;
  limits.max_num_seqs = 8;
  limits.max_model_len = kLongest;
  limits.block_size = 16;
  limits.decode_threshold = 3;
  limits.score_budget_bytes = score_budget;
  return limits;
}

BatchOptions padded(std::int32_t rows) {
  BatchOptions options;
  options.padded_query_len = rows;
  return options;
}

// Sequence lengths 0, 1, k − 1, k, k + 1 and the limit; some requests bring fewer tokens than rows.
const StepLengths kSteps[] = {
    {{0, 1, 1, 2, 3, 3}, {0, 0, 62, 62, 62, kLongest - 3}},
    {{3, 3, 0, 1, 1, 2}, {kLongest - 3, 300, 0, 0, 63, 100}},
    {{0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}},
    {{1, 1, 1, 1, 1, 1}, {63, 64, 65, 62, 61, 0}},
};

TEST(PaddedDecode, TokensAreExactAndPaddingIsEmpty) {
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla})
    for (const std::int64_t budget : {std::int64_t{512} << 20, std::int64_t{4} * kLongest * 5}) {
      const Limits limits = limits_of(format, budget);
      const Capacity capacity(limits, support::tested_dispatch());
      LayerRunner runner(capacity);
      const auto weights = std::make_shared<LayerWeights>(limits.dims, 3);
      PaddedStep step(limits, 6, 3);
      std::uint64_t seed = 1;
      for (const StepLengths& lengths : kSteps) {
        SCOPED_TRACE(to_string(format) + " step " + std::to_string(seed));
        step.fill(lengths, weights, seed++);
        const BatchMetadata batch(capacity, lengths.query_lens, lengths.context_lens, padded(3));
        runner.run(batch, step.tensors());
        const auto errors = measure_step(step, limits);
        EXPECT_TRUE(errors.within_bf16(format)) << errors;
        // The selection is the exact top-k: all keys while they are few, else as many as topk.
        for (std::int64_t token = 0; token < step.num_tokens(); ++token) {
          const std::int32_t* picks = step.picks().data() + token * kTopk;
          const std::int64_t keys =
              step.real(token) ? lengths.context_lens[token / 3] + token % 3 + 1 : 0;
          for (std::int64_t i = 0; i < kTopk; ++i) {
            if (i >= keys)
              ASSERT_EQ(picks[i], -1) << token << ' ' << i;
            else if (keys <= kTopk)
              ASSERT_EQ(picks[i], i) << token;
            else
              ASSERT_TRUE(picks[i] >= 0 && picks[i] < keys && (i == 0 || picks[i] > picks[i - 1]))
                  << token << ' ' << i << ' ' << picks[i];
          }
        }
      }
    }
}

TEST(PaddedDecode, WhatIsCapturedDoesNotDependOnLengths) {
  const Limits limits = limits_of(CacheFormat::bf16, std::int64_t{4} * kLongest * 5);
  const Capacity capacity(limits, support::tested_dispatch());
  const BatchMetadata first(capacity, kSteps[0].query_lens, kSteps[0].context_lens, padded(3));
  EXPECT_EQ(first.num_tokens(), 18);
  EXPECT_EQ(first.num_decode_tokens(), 18);
  EXPECT_EQ(first.score_plan().pieces.size(), 4u);  // of 5 rows at most
  for (const StepLengths& lengths : kSteps) {
    const BatchMetadata batch(capacity, lengths.query_lens, lengths.context_lens, padded(3));
    EXPECT_EQ(batch.arena().size(), first.arena().size());
    EXPECT_LE(batch.arena().size(), capacity.max_arena_bytes());
    EXPECT_EQ(batch.max_blocks(), first.max_blocks());
    EXPECT_EQ(batch.sections().score_members.offset, first.sections().score_members.offset);
    EXPECT_EQ(batch.sections().score_members.count, first.sections().score_members.count);
    EXPECT_EQ(batch.sections().decode_tokens.count, first.sections().decode_tokens.count);
    EXPECT_EQ(batch.sections().keys_of_token.offset, first.sections().keys_of_token.offset);
    EXPECT_EQ(batch.sections().whole_selection_tokens.count, 0u);
    ASSERT_EQ(batch.score_plan().pieces.size(), first.score_plan().pieces.size());
    for (std::size_t i = 0; i < first.score_plan().pieces.size(); ++i) {
      const ScorePiece &a = batch.score_plan().pieces[i], &b = first.score_plan().pieces[i];
      EXPECT_EQ(a.num_rows, b.num_rows);
      EXPECT_EQ(a.max_keys, b.max_keys);
      EXPECT_EQ(a.num_scores, b.num_scores);
      EXPECT_LE(4 * a.num_scores, limits.score_budget_bytes);
    }
  }
}

TEST(PaddedDecode, BadInputIsNamed) {
  const Capacity capacity(limits_of(), support::tested_dispatch());
  const auto error = [&](std::vector<std::int32_t> query_lens, std::int32_t rows) {
    const std::vector<std::int32_t> context_lens(query_lens.size(), 5);
    try {
      BatchMetadata(capacity, query_lens, context_lens, padded(rows));
      return std::string("no error");
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(error({1, 2, 3}, 3), "no error");
  EXPECT_THAT(error({1}, 4),
              HasSubstr("padded_query_len: got 4, expected 0 … decode_threshold (3)"));
  EXPECT_THAT(error({1}, -1), HasSubstr("padded_query_len: got -1"));
  EXPECT_THAT(error({1, 3}, 2), HasSubstr("query_lens[1]: got 3, expected at most padded"));
  Limits few = limits_of();
  few.max_num_tokens = 11;
  const Capacity small(few, support::tested_dispatch());
  const std::vector<std::int32_t> query_lens(4, 1), context_lens(4, 5);
  EXPECT_THROW(BatchMetadata(small, query_lens, context_lens, padded(3)), std::invalid_argument);
  EXPECT_NO_THROW(BatchMetadata(small, query_lens, context_lens, padded(2)));
}

TEST(ArenaBound, HoldsEveryPackedBatch) {
  // Many requests that all need splitting, every token a score piece of its own, masks per chunk.
  Limits limits = limits_of(CacheFormat::bf16, 4);
  limits.workspace_rows = 47;
  limits.mask_budget_bytes = 400;
  const Capacity capacity(limits, support::tested_dispatch());
  const std::vector<std::int32_t> query_lens(8, 8), context_lens(8, kLongest - 8);
  for (const AttentionPath path : {AttentionPath::masked, AttentionPath::sparse}) {
    BatchOptions options;
    options.path = path;
    const BatchMetadata batch(capacity, query_lens, context_lens, options);
    EXPECT_LE(batch.arena().size(), capacity.max_arena_bytes());
  }
}

}  // namespace
}  // namespace sparse_mla
