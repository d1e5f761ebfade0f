// The whole layer against the fp64 reference: every path, head count, schedule and mask scope, the
// edges of the selection, repeatability, and bad input.
#include "sparse_mla/layer.h"

#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include "sparse_mla/workspace.h"

#include "tests/support/checked_tokens.h"
#include "tests/support/compare.h"
#include "tests/support/layer_runner.h"
#include "tests/support/problem.h"
#include "tests/support/reference.h"
#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::LayerData;
using support::LayerProblem;
using support::SelectionKind;
using ::testing::HasSubstr;
using Lens = std::vector<std::int32_t>;

struct LayerCase {
  Lens query_lens, context_lens;
  AttentionPath path = AttentionPath::automatic;
  int num_heads = 8;
  int topk = 64;
  std::int32_t block_size = 16;
  std::int32_t workspace_rows = 0;
  Schedule schedule = Schedule::packed;
  std::int64_t mask_budget = std::int64_t{128} << 20;
  std::int64_t projection_budget = std::int64_t{1} << 30;
  std::int64_t score_budget = std::int64_t{512} << 20;
  SelectionKind selection = SelectionKind::indexer;
  bool glm = false;
  std::string force = "";
  std::uint64_t seed = 1;
  std::vector<std::int64_t> request_ids = {};
  CacheFormat cache = CacheFormat::bf16;
  bool power_of_two_scales = false;
};

std::ostream& operator<<(std::ostream& out, const LayerCase& c) {
  out << to_string(c.path) << ' ' << to_string(c.schedule) << ' ' << c.num_heads << " heads topk "
      << c.topk << " block " << c.block_size << " workspace " << c.workspace_rows << " masks "
      << c.mask_budget << " projections " << c.projection_budget << " scores " << c.score_budget
      << ' ' << support::to_string(c.selection) << (c.glm ? " glm " : " ") << c.force << " cache "
      << to_string(c.cache) << (c.power_of_two_scales ? " (power-of-two scales)" : "")
      << " query/context:";
  for (std::size_t i = 0; i < c.query_lens.size(); ++i)
    out << ' ' << c.query_lens[i] << '/' << c.context_lens[i];
  return out;
}

ModelDims dims_of(const LayerCase& c) {
  ModelDims dims;
  dims.num_heads = c.num_heads;
  dims.index_topk = c.topk;
  dims.index_n_heads = 8;
  if (c.glm) {
    dims.qk_nope_head_dim = 192;
    dims.v_head_dim = 256;
    dims.softmax_scale = 0.0625f;
  }
  return dims;
}

Limits limits_of(const LayerCase& c) {
  Limits limits;
  limits.dims = dims_of(c);
  limits.max_num_tokens = std::max(1, std::accumulate(c.query_lens.begin(), c.query_lens.end(), 0));
  limits.max_num_seqs = std::max<std::int32_t>(1, static_cast<std::int32_t>(c.query_lens.size()));
  limits.max_model_len = 1;
  for (std::size_t i = 0; i < c.query_lens.size(); ++i)
    limits.max_model_len = std::max(limits.max_model_len, c.query_lens[i] + c.context_lens[i]);
  limits.cache_format = c.cache;
  limits.block_size = c.block_size;
  limits.workspace_rows = c.workspace_rows;
  limits.mask_budget_bytes = c.mask_budget;
  limits.projection_budget_bytes = c.projection_budget;
  limits.score_budget_bytes = c.score_budget;
  return limits;
}

Dispatch cpu() {
  Dispatch dispatch;
  dispatch.backend = Backend::cpu;
  return dispatch;
}

// One run of the layer, with everything it needs alive.
struct RanLayer {
  Capacity capacity;
  BatchMetadata batch;
  LayerData data;

  static Dispatch dispatch(const LayerCase& c) {
    Dispatch dispatch = support::tested_dispatch();
    dispatch.force(c.force);
    return dispatch;
  }
  static BatchOptions options(const LayerCase& c) {
    return {c.path, c.schedule, c.selection == SelectionKind::indexer};
  }
  static LayerProblem problem(const LayerCase& c) {
    LayerProblem problem;
    problem.dims = dims_of(c);
    problem.query_lens = c.query_lens;
    problem.context_lens = c.context_lens;
    problem.request_ids = c.request_ids;
    problem.block_size = c.block_size;
    problem.cache_format = c.cache;
    problem.power_of_two_scales = c.power_of_two_scales;
    problem.seed = c.seed;
    problem.selection = c.selection;
    problem.strided = true;
    return problem;
  }

  explicit RanLayer(const LayerCase& c) : RanLayer(c, dispatch(c)) {}
  RanLayer(const LayerCase& c, const Dispatch& dispatch)
      : capacity(limits_of(c), dispatch),
        batch(capacity, c.query_lens, c.context_lens, options(c)),
        data(problem(c)) {
    RunOptions run_options;
    run_options.power_of_two_scales = c.power_of_two_scales;
    support::LayerRunner(capacity).run(batch, data.tensors(), run_options);
  }
};

void check_against_reference(const LayerCase& c, RanLayer& run) {
  auto tokens = support::sample_tokens(run.data.problem(), 1, 48);
  for (auto& token : tokens)
    token.all_visible = run.batch.prefill_path() == AttentionPath::dense &&
                        token.kind != support::RequestKind::decode;
  const auto errors =
      support::measure_errors(run.data, tokens, support::reference_attention(run.data, tokens));
  if (!tokens.empty()) {
    EXPECT_TRUE(errors.within_bf16(c.cache)) << errors;
    if (c.cache != CacheFormat::bf16) {
      const auto unquantised = support::measure_errors(
          run.data, tokens,
          support::reference_attention(run.data, tokens, support::ReferenceRows::unquantised));
      // The format's error is there, and it is the format's.
      EXPECT_GT(unquantised.rel_error(), 1e-2) << unquantised;
      if (!c.power_of_two_scales) {
        EXPECT_LE(unquantised.rel_error(), support::max_quantisation_error(c.cache)) << unquantised;
      }
    }
  }
  const auto wrong = run.data.count_wrong_cache_rows();
  EXPECT_EQ(wrong.latent, 0);
  EXPECT_EQ(wrong.index_keys, 0);
  if (c.selection != SelectionKind::indexer) return;
  // Every row of picks is a selection: min(topk, keys) distinct ascending positions, then −1.
  for (std::int64_t token = 0; token < run.data.num_tokens(); ++token) {
    const auto picks = run.data.picks(token);
    const std::int64_t keys = run.data.place(token).position + 1;
    for (std::int64_t i = 0; i < c.topk; ++i) {
      if (i >= keys) {
        ASSERT_EQ(picks[i], -1) << "token " << token;
      } else {
        ASSERT_TRUE(picks[i] >= 0 && picks[i] < keys && (i == 0 || picks[i - 1] < picks[i]))
            << "token " << token << " pick " << i << " is " << picks[i];
      }
    }
  }
}

class Layer : public ::testing::TestWithParam<LayerCase> {};

TEST_P(Layer, MatchesTheReference) {
  const LayerCase& c = GetParam();
  RanLayer run(c);
  if (c.path != AttentionPath::automatic && run.batch.prefill_path() != AttentionPath::none) {
    EXPECT_EQ(run.batch.prefill_path(), c.path);
  }
  check_against_reference(c, run);
}

// Decodes and prefill mixed, members without new tokens, without context, and both.
const Lens kMixedQueries{1, 37, 0, 5, 1, 70, 0, 130, 1, 2};
const Lens kMixedContexts{300, 200, 90, 0, 0, 411, 0, 64, 63, 62};
// For the dense path: nothing prefilled is longer than topk 64.
const Lens kShortQueries{1, 20, 0, 64, 1, 3, 2};
const Lens kShortContexts{300, 44, 50, 0, 10, 61, 0};

std::vector<LayerCase> layer_cases() {
  std::vector<LayerCase> cases;
  const auto mixed = [](AttentionPath path) {
    LayerCase c;
    const bool dense = path == AttentionPath::dense;
    c.query_lens = dense ? kShortQueries : kMixedQueries;
    c.context_lens = dense ? kShortContexts : kMixedContexts;
    c.path = path;
    return c;
  };
  const AttentionPath paths[] = {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse,
                                 AttentionPath::automatic};
  for (const AttentionPath path : paths)
    for (const int heads : {1, 8, 16, 24, 128}) {
      LayerCase c = mixed(path);
      c.num_heads = heads;
      cases.push_back(c);
    }
  for (const AttentionPath path : paths) {
    for (const Schedule schedule : {Schedule::packed, Schedule::equal_split})
      for (const std::int32_t block : {1, 16, 61, 64}) {
        // Many chunks, continuations, starts inside a mask tile and a page.
        LayerCase c = mixed(path);
        c.schedule = schedule;
        c.block_size = block;
        c.workspace_rows = schedule == Schedule::packed ? 67 : 512;
        cases.push_back(c);
      }
    LayerCase c = mixed(path);
    c.projection_budget = 0;  // a head and a token at a time
    c.num_heads = 3;
    cases.push_back(c);
    c = mixed(path);
    c.score_budget = 3000;  // several pieces, some a single row
    cases.push_back(c);
    c = mixed(path);
    c.glm = true;
    cases.push_back(c);
    for (const SelectionKind kind : {SelectionKind::random, SelectionKind::clustered}) {
      c = mixed(path);
      c.selection = kind;
      cases.push_back(c);
    }
  }
  for (const CacheFormat cache : {CacheFormat::fp8_ds_mla, CacheFormat::fp8})
    for (const AttentionPath path : paths)
      for (const int heads : {1, 16, 128}) {
        LayerCase c = mixed(path);
        c.cache = cache;
        c.num_heads = heads;
        c.power_of_two_scales = heads == 1 && cache == CacheFormat::fp8_ds_mla;
        if (heads == 16) {  // rows of another width, pages of another size, several chunks
          c.glm = true;
          c.block_size = 61;
          c.workspace_rows = 67;
        }
        cases.push_back(c);
        if (heads > 1) continue;
        for (const char* level : {"cpu_baseline", "cpu_reference"}) {
          c.force = std::string("write_cache:") + level + ",gather:" + level +
                    ",sparse_mqa:" + level + ",up_project:" + level;
          cases.push_back(c);
        }
      }
  for (const std::int64_t budget : {1900, 3000, 4500}) {  // per-chunk masks of several sizes
    LayerCase c = mixed(AttentionPath::masked);
    c.mask_budget = 4 * budget;
    c.workspace_rows = 150;
    cases.push_back(c);
    c.schedule = Schedule::equal_split;
    c.workspace_rows = 512;
    cases.push_back(c);
  }
  // Sequences of topk − 1, topk and topk + 1 keys, decoded and prefilled.
  for (const AttentionPath path : {AttentionPath::masked, AttentionPath::sparse})
    for (const int topk : {1, 7, 64, 100}) {
      LayerCase c;
      c.path = path;
      c.topk = topk;
      for (const int seq : {topk - 1, topk, topk + 1})
        for (const int query : {1, 2, seq}) {
          if (query > seq) continue;
          c.query_lens.push_back(query);
          c.context_lens.push_back(seq - query);
        }
      cases.push_back(c);
    }
  LayerCase decodes;
  decodes.query_lens = {1, 1, 1};
  decodes.context_lens = {0, 1000, 64};
  cases.push_back(decodes);
  LayerCase nothing;
  cases.push_back(nothing);
  nothing.query_lens = {0, 0};
  nothing.context_lens = {0, 9};
  cases.push_back(nothing);
  // The scalar references carry the whole layer too.
  for (const AttentionPath path : paths) {
    LayerCase c = mixed(path);
    c.num_heads = 2;
    c.force =
        "indexer_scores:cpu_reference,select:cpu_sort,absorb_query:cpu_reference,"
        "sparse_mqa:cpu_reference,project_value:cpu_reference,up_project:cpu_reference,"
        "attend:cpu_reference";
    cases.push_back(c);
    c.force =
        "indexer_scores:cpu_baseline,absorb_query:cpu_baseline,sparse_mqa:cpu_baseline,"
        "project_value:cpu_baseline,up_project:cpu_baseline,attend:cpu_baseline";
    cases.push_back(c);
    c.force =
        "indexer_scores:cuda_rows,absorb_query:cuda_rows,sparse_mqa:cuda_rows,"
        "project_value:cuda_rows,up_project:cuda_rows,attend:cuda_rows";
    cases.push_back(c);
  }
  std::erase_if(cases, [](const LayerCase& c) {
    // The library's own products of many heads take minutes under a sanitizer.
    return !support::force_applies(c.force) || (support::own_kernels_only() && c.num_heads > 16);
  });
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Cases, Layer, ::testing::ValuesIn(layer_cases()));

// Everything that a run wrote, byte for byte.
struct Written {
  std::vector<std::int32_t> picks;
  std::vector<float> out, lse;
  bool operator==(const Written&) const = default;
};

Written written(const LayerData& data, std::int64_t first = 0, std::int64_t count = -1) {
  Written w;
  const ModelDims& dims = data.problem().dims;
  const std::int64_t end = count < 0 ? data.num_tokens() : first + count;
  for (std::int64_t token = first; token < end; ++token) {
    const auto picks = data.picks(token);
    w.picks.insert(w.picks.end(), picks.begin(), picks.end());
    for (int head = 0; head < dims.num_heads; ++head) {
      w.lse.push_back(data.lse(token, head));
      for (int i = 0; i < dims.v_head_dim; ++i)
        w.out.push_back(__bfloat162float(data.out(token, head)[i]));
    }
  }
  return w;
}

LayerCase repeatable(AttentionPath path) {
  LayerCase c;
  c.query_lens = path == AttentionPath::dense ? kShortQueries : kMixedQueries;
  c.context_lens = path == AttentionPath::dense ? kShortContexts : kMixedContexts;
  c.path = path;
  c.workspace_rows = 100;
  return c;
}

TEST(LayerRepeat, TheSameCallIsBitEqual) {
  for (const AttentionPath path :
       {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse}) {
    const Written first = written(RanLayer(repeatable(path)).data);
    for (int repeat = 0; repeat < 3; ++repeat)
      EXPECT_TRUE(written(RanLayer(repeatable(path)).data) == first) << to_string(path);
  }
}

// Another order of the requests, or each request in a batch of its own: the same bits on the sparse
// path, the same selection on every path.
TEST(LayerRepeat, PermutingAndSplittingABatch) {
  for (const AttentionPath path : {AttentionPath::sparse, AttentionPath::masked}) {
    const LayerCase c = repeatable(path);
    RanLayer whole(c);
    LayerCase reversed = c;
    std::reverse(reversed.query_lens.begin(), reversed.query_lens.end());
    std::reverse(reversed.context_lens.begin(), reversed.context_lens.end());
    for (std::size_t i = c.query_lens.size(); i-- > 0;)
      reversed.request_ids.push_back(static_cast<std::int64_t>(i));
    RanLayer other(reversed);
    std::int64_t token = 0;
    for (std::size_t i = 0; i < c.query_lens.size(); ++i) {
      SCOPED_TRACE("request " + std::to_string(i) + " " + to_string(path));
      const std::int64_t count = c.query_lens[i];
      const Written expected = written(whole.data, token, count);
      const std::int64_t mirrored = whole.data.num_tokens() - token - count;
      const Written permuted = written(other.data, mirrored, count);
      LayerCase single = c;
      single.query_lens = {c.query_lens[i]};
      single.context_lens = {c.context_lens[i]};
      single.request_ids = {static_cast<std::int64_t>(i)};
      const Written alone = written(RanLayer(single).data);
      EXPECT_EQ(permuted.picks, expected.picks);
      EXPECT_EQ(alone.picks, expected.picks);
      if (path == AttentionPath::sparse) {
        EXPECT_TRUE(permuted == expected);
        EXPECT_TRUE(alone == expected);
      }
      token += count;
    }
  }
}

TEST(LayerRepeat, ScoreBudgetDoesNotChangeTheSelection) {
  LayerCase c = repeatable(AttentionPath::sparse);
  const Written whole = written(RanLayer(c).data);
  for (const std::int64_t budget : {4, 2000, 50000}) {
    c.score_budget = budget;
    EXPECT_TRUE(written(RanLayer(c).data) == whole) << budget;
  }
}

// No padding by the caller: the first heads of a 128-head layer, run alone, give the same rows.
TEST(LayerHeads, FewHeadsEqualTheFirstOfMany) {
  for (const AttentionPath path : {AttentionPath::sparse, AttentionPath::masked}) {
    LayerCase c = repeatable(path);
    c.num_heads = 128;
    RanLayer many(c);
    for (const int heads : {1, 8, 24, 64}) {
      c.num_heads = heads;
      const Capacity capacity(limits_of(c), support::tested_dispatch());
      const BatchMetadata batch(capacity, c.query_lens, c.context_lens, RanLayer::options(c));
      LayerTensors t = many.data.tensors();
      const std::int64_t tokens = many.data.num_tokens();
      std::vector<bfloat16> out(tokens * heads * 128);
      std::vector<float> lse(tokens * heads);
      t.q = strided<const bfloat16, 3>(t.q.data_handle(), {tokens, heads, t.q.extent(2)},
                                       {t.q.stride(0), t.q.stride(1), t.q.stride(2)});
      t.kv_b_proj = strided<const bfloat16, 3>(
          t.kv_b_proj.data_handle(), {heads, t.kv_b_proj.extent(1), t.kv_b_proj.extent(2)},
          {t.kv_b_proj.stride(0), t.kv_b_proj.stride(1), t.kv_b_proj.stride(2)});
      t.out = contiguous(out.data(), tokens, heads, 128);
      t.lse = contiguous(lse.data(), heads, tokens);
      support::LayerRunner(capacity).run(batch, t);
      for (std::int64_t token = 0; token < tokens; ++token)
        for (int head = 0; head < heads; ++head) {
          // Sums over other matrix shapes differ in their last bits, bf16 rounding by one step.
          ASSERT_NEAR(t.lse(head, token), many.data.lse(token, head), 1e-3);
          for (int i = 0; i < 128; ++i) {
            const float expected = __bfloat162float(many.data.out(token, head)[i]);
            ASSERT_NEAR(__bfloat162float(t.out(token, head, i)), expected,
                        2e-2 * std::abs(expected) + 1e-3)
                << heads << ' ' << token << ' ' << head << ' ' << i;
          }
        }
    }
  }
}

// OpenMP's thread count belongs to the thread that asks: a workspace counted where it was 1 serves
// a caller with 4, and the other way round, with the same bits.
TEST(LayerThreads, TheCallersThreadCountNeedNotBeTheCapacitys) {
  const int before = omp_get_max_threads();
  for (const AttentionPath path :
       {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse}) {
    const LayerCase c = repeatable(path);
    const Written expected = written(RanLayer(c, cpu()).data);
    for (const auto& [counted, running] : {std::pair{1, 4}, std::pair{4, 1}}) {
      omp_set_num_threads(counted);
      const Capacity capacity(limits_of(c), cpu());
      const HostWorkspace workspace(capacity.workspace_bytes());
      const BatchMetadata batch(capacity, c.query_lens, c.context_lens, RanLayer::options(c));
      LayerData data(RanLayer::problem(c));
      omp_set_num_threads(running);
      run_layer(capacity, batch, data.tensors(), workspace.span());
      EXPECT_TRUE(written(data) == expected) << to_string(path) << ' ' << counted << ' ' << running;
    }
  }
  omp_set_num_threads(before);
}

// Capacity and BatchMetadata are shared, tensors and workspace are each caller's own.
TEST(LayerThreads, CallersShareCapacityAndMetadata) {
  for (const AttentionPath path : {AttentionPath::masked, AttentionPath::sparse}) {
    const LayerCase c = repeatable(path);
    const Written expected = written(RanLayer(c).data);
    const Capacity capacity(limits_of(c), support::tested_dispatch());
    const BatchMetadata batch(capacity, c.query_lens, c.context_lens, RanLayer::options(c));
    std::vector<Written> results(4);
    std::vector<std::thread> callers;
    for (Written& result : results)
      callers.emplace_back([&] {
        LayerData data(RanLayer::problem(c));
        support::LayerRunner runner(capacity);
        for (int repeat = 0; repeat < 3; ++repeat) runner.run(batch, data.tensors());
        result = written(data);
      });
    for (std::thread& caller : callers) caller.join();
    for (const Written& result : results) EXPECT_TRUE(result == expected) << to_string(path);
  }
}

TEST(LayerStages, AreReportedInPairs) {
  const LayerCase c = repeatable(AttentionPath::masked);
  const Capacity capacity(limits_of(c), support::tested_dispatch());
  const BatchMetadata batch(capacity, c.query_lens, c.context_lens, RanLayer::options(c));
  LayerData data(RanLayer::problem(c));
  std::optional<Stage> open;
  std::vector<Stage> seen;
  RunOptions options;
  options.on_stage = [&](Stage stage, bool begin) {
    if (begin) {
      EXPECT_FALSE(open.has_value());
      open = stage;
      seen.push_back(stage);
    } else {
      EXPECT_EQ(open, stage);
      open.reset();
    }
  };
  support::LayerRunner(capacity).run(batch, data.tensors(), options);
  for (const Stage stage : {Stage::write_cache, Stage::select, Stage::sparse_mqa,
                            Stage::build_masks, Stage::gather, Stage::attend, Stage::merge})
    EXPECT_THAT(seen, ::testing::Contains(stage)) << to_string(stage);
}

// Each tensor made wrong in turn: the error names it, and nothing is written.
TEST(LayerBadInput, IsNamedBeforeAnythingIsWritten) {
  const LayerCase c = repeatable(AttentionPath::masked);
  const Capacity capacity(limits_of(c), cpu());
  const BatchMetadata batch(capacity, c.query_lens, c.context_lens, RanLayer::options(c));
  LayerData data(RanLayer::problem(c));
  const HostWorkspace workspace(capacity.workspace_bytes());
  const LayerTensors good = data.tensors();
  const std::int64_t tokens = data.num_tokens();
  const auto error = [&](auto&& spoil) {
    LayerTensors t = good;
    spoil(t);
    try {
      run_layer(capacity, batch, t, workspace.span());
      return std::string();
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
  };
  EXPECT_THAT(error([&](LayerTensors& t) { t.q = contiguous(t.q.data_handle(), tokens, 7, 192); }),
              HasSubstr("q: got [" + std::to_string(tokens) + ", 7, 192], expected ["));
  EXPECT_THAT(error([&](LayerTensors& t) { t.latent = {}; }), HasSubstr("latent: got [0, 0]"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_q = {}; }), HasSubstr("index_q: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_weights = {}; }),
              HasSubstr("index_weights: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_k = {}; }), HasSubstr("index_k: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_k_scale = {}; }),
              HasSubstr("index_k_scale: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.slot_mapping = {}; }), HasSubstr("slot_mapping: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.block_tables = {}; }), HasSubstr("block_tables: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.kv_b_proj = {}; }), HasSubstr("kv_b_proj: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.picks = {}; }), HasSubstr("picks: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.out = {}; }), HasSubstr("out: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.lse = {}; }), HasSubstr("lse: got"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.latent_cache.block_size = 8; }),
              HasSubstr("latent_cache.block_size: got 8"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_cache.block_size = 8; }),
              HasSubstr("index_cache.block_size: got 8"));
  EXPECT_THAT(error([&](LayerTensors& t) {
                t.q = contiguous(static_cast<const bfloat16*>(nullptr), tokens, 8, 192);
              }),
              HasSubstr("q: got null"));
  // Columns two elements apart: twice the memory, half of the width, the same shape.
  std::vector<bfloat16> wide(2 * tokens * c.num_heads * 192);
  const std::int64_t width = 2 * c.num_heads * 192;
  EXPECT_THAT(
      error([&](LayerTensors& t) {
        t.q = strided<const bfloat16, 3>(wide.data(), {tokens, c.num_heads, 192}, {width, 384, 2});
      }),
      HasSubstr("q: got stride 2"));
  EXPECT_THAT(
      error([&](LayerTensors& t) {
        t.out = strided<bfloat16, 3>(wide.data(), {tokens, c.num_heads, 128}, {width, 384, 2});
      }),
      HasSubstr("out: got stride 2"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.latent_cache.row_stride = 576; }),
              HasSubstr("latent_cache.row_stride: got 576"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.latent_cache.data = nullptr; }),
              HasSubstr("latent_cache.data: got null"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.latent_cache.num_blocks = std::int64_t{1} << 62; }),
              HasSubstr("latent_cache.num_blocks: got 4611686018427387904"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_cache.data = nullptr; }),
              HasSubstr("index_cache.data: got null"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_cache.head_dim = 64; }),
              HasSubstr("index_cache.head_dim: got 64"));
  EXPECT_THAT(error([&](LayerTensors& t) { t.index_cache.block_stride = 8; }),
              HasSubstr("index_cache.block_stride: got 8"));
  std::vector<std::int64_t> slots(tokens, -1);
  slots[3] = data.num_blocks() * c.block_size;
  EXPECT_THAT(error([&](LayerTensors& t) {
                t.slot_mapping = contiguous(static_cast<const std::int64_t*>(slots.data()), tokens);
              }),
              HasSubstr("slot_mapping[3]: got"));
  EXPECT_THROW(
      run_layer(capacity, batch, good, workspace.span().first(capacity.workspace_bytes() - 1)),
      std::invalid_argument);
  const auto untouched = LayerData(RanLayer::problem(c)).count_wrong_cache_rows();
  EXPECT_EQ(data.count_wrong_cache_rows().latent, untouched.latent);
  EXPECT_EQ(data.count_wrong_cache_rows().index_keys, untouched.index_keys);
  EXPECT_GT(untouched.latent, 0);  // the new tokens' rows, which a run would have written
  for (std::int64_t token = 0; token < tokens; ++token) {
    ASSERT_TRUE(std::isnan(data.lse(token, 0)));
    ASSERT_EQ(data.picks(token)[0], 0x7FFFFFFF);
  }
}

}  // namespace
}  // namespace sparse_mla
