// What a layer call may ask for beyond the plain run: attention sinks, fp8 results, counts per
// token, rows of drafts, picks shared between layers, cached prefixes without indexer keys.
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/layer.h"
#include "sparse_mla/random.h"
#include "sparse_mla/workspace.h"

#include "tests/support/checked_tokens.h"
#include "tests/support/compare.h"
#include "tests/support/layer_batch.h"
#include "tests/support/layer_runner.h"
#include "tests/support/number_formats.h"
#include "tests/support/problem.h"
#include "tests/support/reference.h"
#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::batch_of;
using support::LayerData;
using support::poisoned;
using support::SelectionKind;
using support::short_batch;
using support::TokenAttention;
using ::testing::HasSubstr;
using Batch = support::LayerBatch;
using Lens = std::vector<std::int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();

const AttentionPath kPaths[] = {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse};

void run(const Capacity& capacity, const BatchMetadata& batch, const LayerTensors& tensors) {
  support::LayerRunner(capacity).run(batch, tensors);
}

// Runs the batch on `data`, whose tensors `change` may replace.
template <class Change>
void run(const Batch& b, LayerData& data, Change&& change) {
  BatchOptions options = b.options();
  LayerTensors tensors = data.tensors();
  change(tensors, options);
  const Capacity capacity(b.limits(), b.dispatch());
  const BatchMetadata batch(capacity, b.query_lens, b.context_lens, options);
  if (b.path != AttentionPath::automatic && batch.num_prefill_tokens() > 0) {
    EXPECT_EQ(batch.prefill_path(), b.path);
  }
  run(capacity, batch, tensors);
}
void run(const Batch& b, LayerData& data) {
  run(b, data, [](LayerTensors&, BatchOptions&) {});
}

std::vector<support::CheckedToken> every_token(const Batch& b) {
  auto tokens = support::sample_tokens(b.problem(), b.decode_threshold, support::kAllTokens);
  for (auto& token : tokens)
    token.all_visible =
        b.path == AttentionPath::dense && token.kind != support::RequestKind::decode;
  return tokens;
}

View1<const float> view_of(const std::vector<float>& values) {
  return contiguous(values.data(), values.size());
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

// ---- attention sink

// Between them: no sink, one that takes everything, some about as large as the log-sum-exp, some
// that underflow in either direction.
const std::vector<float> kSinks{-kInf, kInf, 0.0f, 3.0f, -5.0f, 90.0f, -200.0f, 5.0f};

class Sink : public ::testing::TestWithParam<Batch> {};

TEST_P(Sink, ScalesTheOutputOnceAndLeavesLseAlone) {
  const Batch& b = GetParam();
  LayerData plain(b.problem()), data(b.problem());
  if (b.selection != SelectionKind::indexer) {
    // Tokens without any key, decoded and prefilled.
    for (LayerData* each : {&plain, &data})
      for (const std::int64_t token : {0, 3, 50})
        for (int i = 0; i < b.topk; ++i) each->tensors().picks(token, i) = -1;
  }
  run(b, plain);
  run(b, data, [](LayerTensors& t, BatchOptions&) { t.sink = view_of(kSinks); });

  const auto tokens = every_token(b);
  auto references = support::reference_attention(data, tokens);
  std::int64_t empty = 0;
  for (auto& reference : references) {
    empty += reference.lse[0] == -HUGE_VAL;
    support::apply_sinks(kSinks, reference);
  }
  EXPECT_EQ(empty, b.selection == SelectionKind::indexer ? 0 : 3);
  const auto errors = support::measure_errors(data, tokens, references);
  EXPECT_TRUE(errors.within_bf16()) << errors;
  for (std::int64_t token = 0; token < data.num_tokens(); ++token)
    for (int head = 0; head < b.num_heads; ++head) {
      ASSERT_EQ(data.lse(token, head), plain.lse(token, head));
      for (int i = 0; i < 128; ++i) {
        if (kSinks[head] == -kInf) {
          ASSERT_EQ(std::memcmp(data.out(token, head) + i, plain.out(token, head) + i, 2), 0);
        }
        if (kSinks[head] == kInf) {
          ASSERT_EQ(__bfloat162float(data.out(token, head)[i]), 0.0f);
        }
      }
    }
}

std::vector<Batch> sink_batches() {
  std::vector<Batch> batches;
  for (const AttentionPath path : kPaths) {
    for (const std::int32_t rows : {67, 2048}) {
      Batch b = batch_of(path);
      b.workspace_rows = rows;
      batches.push_back(b);
    }
    Batch b = batch_of(path);
    b.force = "sparse_mqa:cpu_reference,project_value:cpu_reference,attend:cpu_reference";
    batches.push_back(b);
    b.force = "sparse_mqa:cuda_rows,project_value:cuda_rows,attend:cuda_rows";
    batches.push_back(b);
    if (path == AttentionPath::dense) continue;
    b.force = "sparse_mqa:cpu_baseline";
    b.selection = SelectionKind::random;
    batches.push_back(b);
  }
  std::erase_if(batches, [](const Batch& b) { return !support::force_applies(b.force); });
  return batches;
}
INSTANTIATE_TEST_SUITE_P(Paths, Sink, ::testing::ValuesIn(sink_batches()));

TEST(SinkInMerge, AgreesWithFp64) {
  const std::vector<float> lses{-kInf, -40.0f, -1.5f, 0.0f, 7.25f, 60.0f};
  for (const float lse : lses)
    for (const float sink : {-kInf, -90.0f, -3.0f, 0.0f, 7.25f, 90.0f, 1e30f, kInf}) {
      float in = 2.5f, in_lse = lse, out = -1, out_lse = -1;
      if (lse == -kInf) in = std::numeric_limits<float>::quiet_NaN();
      MergeCall call;
      call.b = {contiguous<const float>(&in, 1, 1, 1), contiguous<const float>(&in_lse, 1, 1)};
      call.out_f32 = contiguous(&out, 1, 1, 1);
      call.lse = contiguous(&out_lse, 1, 1);
      call.sink = contiguous<const float>(&sink, 1);
      support::run_fastest(merge_operation(), {1, 1, 1}, call);
      EXPECT_EQ(out_lse, lse);
      if (lse == -kInf) {
        EXPECT_EQ(out, 0.0f) << sink;
        continue;
      }
      const double expected = 2.5 / (1 + std::exp(double{sink} - lse));
      EXPECT_NEAR(out, expected, 1e-6 * expected + 1e-38) << sink << ' ' << lse;
    }
}

TEST(SinkInMerge, ANanLseStaysVisible) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), in = 1, sink = 0;
  float out = 0, out_lse = 0;
  MergeCall call;
  call.b = {contiguous<const float>(&in, 1, 1, 1), contiguous<const float>(&nan, 1, 1)};
  call.out_f32 = contiguous(&out, 1, 1, 1);
  call.lse = contiguous(&out_lse, 1, 1);
  call.sink = contiguous<const float>(&sink, 1);
  support::run_fastest(merge_operation(), {1, 1, 1}, call);
  EXPECT_TRUE(std::isnan(out));
  EXPECT_TRUE(std::isnan(out_lse));
}

// ---- fp8 results

class Fp8Output : public ::testing::TestWithParam<AttentionPath> {};

TEST_P(Fp8Output, IsWithinHalfAStepOfTheReference) {
  Batch b = batch_of(GetParam());
  b.output = OutputType::fp8;
  LayerData data(b.problem());
  const std::int64_t tokens = data.num_tokens(), heads = b.num_heads, width = 128;
  for (const float scale : {0.05f, 0.0005f}) {
    auto out = poisoned<fp8_e4m3>(tokens * heads * width);
    run(b, data, [&](LayerTensors& t, BatchOptions&) {
      t.out = {};
      t.out_fp8 = contiguous(out.data(), tokens, heads, width);
      t.out_scale = scale;
      t.sink = view_of(kSinks);
    });
    std::int64_t saturated = 0;
    const auto checked = every_token(b);
    auto references = support::reference_attention(data, checked);
    for (std::size_t i = 0; i < checked.size(); ++i) {
      support::apply_sinks(kSinks, references[i]);
      for (std::int64_t head = 0; head < heads; ++head) {
        const double* expected = references[i].out.data() + head * width;
        const double norm = std::sqrt(std::inner_product(expected, expected + width, expected, 0.));
        for (std::int64_t d = 0; d < width; ++d) {
          const auto bits = std::bit_cast<std::uint8_t>(
              out[static_cast<std::size_t>((checked[i].token * heads + head) * width + d)]);
          const double got = support::decode_e4m3(bits) * scale, most = 448.0 * scale;
          saturated += std::fabs(got) == most;
          // Half a step of e4m3 (2^-4 of the value, 2^-10 near 0) and the bf16 arithmetic's error.
          const double bound = std::max(std::fabs(expected[d]) * 0x1p-4, 0x1p-10 * scale) +
                               support::kBf16MaxRelError * norm;
          ASSERT_NEAR(got, std::clamp(expected[d], -most, most), bound)
              << "token " << checked[i].token << " head " << head << " element " << d;
        }
      }
    }
    if (scale < 0.001f) {
      EXPECT_GT(saturated, 100);  // and none of them NaN
    } else {
      EXPECT_EQ(saturated, 0);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Paths, Fp8Output, ::testing::ValuesIn(kPaths),
                         [](const auto& path) { return to_string(path.param); });

// Not quantise(bf16(merge)): rounding twice would change some elements.
TEST(Fp8Merge, QuantisesTheFp32Result) {
  constexpr std::int64_t kRows = 50, kHeads = 4, kWidth = 64;
  constexpr float kScale = 0.05f;
  std::vector<float> a(kRows * kHeads * kWidth), b(a.size()), lse_a(kHeads * kRows),
      lse_b(lse_a.size()), exact(a.size()), lse(lse_a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = random_normal(1, 0, i);
    b[i] = random_normal(1, 1, i);
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    lse_a[i] = random_normal(1, 2, i);
    lse_b[i] = random_normal(1, 3, i);
  }
  b[5] = 1e9f, b[6] = -1e9f, b[7] = 448.0f * kScale, b[8] = -0.0f, a[8] = -0.0f;
  b[9] = kInf;
  const std::vector<float> sinks{-kInf, 0.5f, kInf, -2.0f};
  MergeCall call;
  call.a = {contiguous<const float>(a.data(), kRows, kHeads, kWidth),
            contiguous<const float>(lse_a.data(), kHeads, kRows)};
  call.b = {contiguous<const float>(b.data(), kRows, kHeads, kWidth),
            contiguous<const float>(lse_b.data(), kHeads, kRows)};
  call.lse = contiguous(lse.data(), kHeads, kRows);
  call.sink = view_of(sinks);
  call.out_f32 = contiguous(exact.data(), kRows, kHeads, kWidth);
  support::run_fastest(merge_operation(), {kHeads, kWidth, kRows}, call);
  auto out = poisoned<fp8_e4m3>(kRows * kHeads * kWidth);
  call.out_f32 = {};
  call.out_fp8 = contiguous(out.data(), kRows, kHeads, kWidth);
  call.out_scale = kScale;
  support::run_fastest(merge_operation(), {kHeads, kWidth, kRows, OutputType::fp8}, call);
  std::int64_t twice_differs = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const std::uint8_t expected = support::encode_e4m3(exact[i] / kScale);
    ASSERT_EQ(std::bit_cast<std::uint8_t>(out[i]), expected) << exact[i];
    const auto rounded = static_cast<float>(support::decode_bf16(support::encode_bf16(exact[i])));
    twice_differs += support::encode_e4m3(rounded / kScale) != expected;
  }
  EXPECT_GT(twice_differs, 5);
  EXPECT_EQ(std::bit_cast<std::uint8_t>(out[5]), 0x7E);  // 448, not NaN
  EXPECT_EQ(std::bit_cast<std::uint8_t>(out[6]), 0xFE);
  EXPECT_EQ(std::bit_cast<std::uint8_t>(out[8]), 0x80);  // −0 is kept
  EXPECT_EQ(std::bit_cast<std::uint8_t>(out[9]), 0x7E);
}

// 1.0625 stands halfway between e4m3's 1 and 1.125: a hair above it is lost on the way to bf16.
TEST(Fp8ProjectValue, QuantisesTheFp32Result) {
  const auto bf16 = [](float value) { return __float2bfloat16_rn(value); };
  const std::vector<bfloat16> latent{bf16(1.0625f), bf16(0x1p-12f)};
  const std::vector<bfloat16> weights{bf16(9.0f),  bf16(9.0f),  // W_UK, unused
                                      bf16(1.0f),  bf16(1.0f),  // W_UV
                                      bf16(1.0f),  bf16(0.0f),  // the tie itself
                                      bf16(-1e6f), bf16(0.0f)};
  const std::int32_t token = 2;
  for (const std::string& entry : support::usable_entries(project_value_operation())) {
    auto out = poisoned<fp8_e4m3>(4 * 3);
    ProjectValueCall call;
    call.latent_out = contiguous(latent.data(), 1, 1, 2);
    call.kv_b_proj = contiguous(weights.data(), 1, 4, 2);
    call.tokens = {&token, 1};
    call.out_fp8 = contiguous(out.data(), 4, 1, 3);
    call.out_scale = 0.5f;
    support::run_entry(project_value_operation(), entry, {1, 2, 3, 1, OutputType::fp8}, call);
    EXPECT_EQ(support::decode_e4m3(std::bit_cast<std::uint8_t>(out[6])), 2 * 1.125) << entry;
    EXPECT_EQ(support::decode_e4m3(std::bit_cast<std::uint8_t>(out[7])), 2 * 1.0) << entry;
    EXPECT_EQ(support::decode_e4m3(std::bit_cast<std::uint8_t>(out[8])), -448.0) << entry;
    for (const std::size_t other : {0, 5, 9})
      EXPECT_EQ(std::bit_cast<std::uint8_t>(out[other]), 0xFF) << entry;
    for (const float scale : {0.0f, -1.0f, kInf, std::numeric_limits<float>::quiet_NaN()}) {
      call.out_scale = scale;
      EXPECT_THAT(error_of([&] {
                    support::run_entry(project_value_operation(), entry,
                                       {1, 2, 3, 1, OutputType::fp8}, call);
                  }),
                  HasSubstr("out_scale: got"));
    }
  }
}

TEST(Fp8Output, TheWrongTensorIsNamed) {
  for (const OutputType type : {OutputType::bf16, OutputType::fp8}) {
    Batch b;
    b.output = type;
    LayerData data(b.problem());
    std::vector<fp8_e4m3> out(static_cast<std::size_t>(data.num_tokens() * b.num_heads * 128));
    const auto error = [&](auto&& spoil) {
      return error_of([&] {
        run(b, data, [&](LayerTensors& t, BatchOptions&) {
          if (type == OutputType::fp8) {
            t.out = {};
            t.out_fp8 = contiguous(out.data(), data.num_tokens(), b.num_heads, 128);
          }
          spoil(t);
        });
      });
    };
    if (type == OutputType::bf16) {
      EXPECT_THAT(error([&](LayerTensors& t) {
                    t.out_fp8 = contiguous(out.data(), data.num_tokens(), b.num_heads, 128);
                  }),
                  HasSubstr("out_fp8: got an fp8 tensor"));
      continue;
    }
    EXPECT_THAT(error([&](LayerTensors& t) { t.out_fp8 = {}; }), HasSubstr("out_fp8: got [0,"));
    EXPECT_THAT(error([&](LayerTensors& t) { t.out = data.tensors().out; }),
                HasSubstr("out: got a bf16 tensor"));
    EXPECT_THAT(error([&](LayerTensors& t) { t.out_scale = 0; }), HasSubstr("out_scale: got 0"));
  }
  Limits limits;
  limits.output = OutputType::f32;
  EXPECT_THAT(error_of([&] { Capacity{limits}; }), HasSubstr("output: got fp32"));
}

TEST(LayerSink, WrongShapeIsNamed) {
  const Batch b;
  LayerData data(b.problem());
  const std::vector<float> seven(7);
  EXPECT_THAT(error_of([&] {
                run(b, data, [&](LayerTensors& t, BatchOptions&) { t.sink = view_of(seven); });
              }),
              HasSubstr("sink: got [7], expected [8]"));
}

// ---- picks that are handed in

// Random picks with entries that are no key of the token strewn in anywhere.
void spoil_picks(const Batch& b, LayerData& data) {
  View2<std::int32_t> picks = data.tensors().picks;
  for (std::int64_t token = 0; token < data.num_tokens(); ++token) {
    const auto position = static_cast<std::int32_t>(data.place(token).position);
    const std::int32_t invalid[] = {
        -1,     position + 1, position + 40, std::numeric_limits<std::int32_t>::min(),
        114514, 1919810,      -123456,       std::numeric_limits<std::int32_t>::max()};
    for (int i = 0; i < b.topk; ++i) {
      const std::uint32_t draw = random_bits(b.seed, 77, token * b.topk + i);
      // Every eleventh token has no valid pick at all.
      if (draw % 3 == 0 || token % 11 == 5) picks(token, i) = invalid[draw / 3 % 8];
    }
  }
}

TEST(InvalidPicks, AreSkippedAlikeOnMaskedAndSparse) {
  Batch b;
  b.selection = SelectionKind::random;
  std::optional<LayerData> first;
  for (const AttentionPath path : {AttentionPath::masked, AttentionPath::sparse}) {
    b.path = path;
    LayerData data(b.problem());
    spoil_picks(b, data);
    run(b, data);
    const auto tokens = every_token(b);
    const auto references = support::reference_attention(data, tokens);
    const auto errors = support::measure_errors(data, tokens, references);
    EXPECT_TRUE(errors.within_bf16()) << to_string(path) << ": " << errors;
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i].token % 11 == 5) {
        ASSERT_EQ(data.lse(tokens[i].token, 3), -kInf);
      }
    if (first) {
      for (std::int64_t token = 0; token < data.num_tokens(); ++token)
        ASSERT_THAT(data.picks(token), ::testing::ElementsAreArray(first->picks(token)));
    }
    first.emplace(std::move(data));
  }
}

// Counts below 0, above topk and everything between; what stands at or past a count is a valid key
// that must not be used.
std::vector<std::int32_t> random_counts(std::int64_t tokens, int topk) {
  std::vector<std::int32_t> counts;
  for (std::int64_t token = 0; token < tokens; ++token)
    counts.push_back(static_cast<std::int32_t>(random_bits(9, 0, token) % (topk + 6)) - 2);
  return counts;
}

TEST(CountedPicks, OnlyThoseBeforeTheCountAreUsed) {
  for (const AttentionPath path :
       {AttentionPath::masked, AttentionPath::sparse, AttentionPath::automatic})
    for (const bool short_sequences : {false, true}) {
      Batch b = short_sequences ? short_batch() : Batch{};
      b.path = path;
      b.selection = SelectionKind::random;
      LayerData data(b.problem());
      const auto counts = random_counts(data.num_tokens(), b.topk);
      run(b, data, [&](LayerTensors& t, BatchOptions& options) {
        options.counted_picks = true;
        t.pick_counts = contiguous(counts.data(), counts.size());
      });
      support::ErrorMeasure errors;
      std::int64_t empty = 0;
      for (const auto& token : every_token(b)) {
        const std::size_t count = static_cast<std::size_t>(
            std::clamp(counts[static_cast<std::size_t>(token.token)], 0, b.topk));
        const std::vector<TokenAttention> reference{
            support::reference_attention(data, token.token, data.picks(token.token).first(count))};
        empty += reference[0].lse[0] == -HUGE_VAL;
        support::add_errors(errors, data, {&token, 1}, reference);
      }
      EXPECT_TRUE(errors.within_bf16()) << b << ": " << errors;
      EXPECT_GT(empty, 0);
    }
}

TEST(CountedPicks, AreRefusedWhereTheyWouldBeIgnored) {
  Batch b = short_batch();
  LayerData data(b.problem());
  const auto counts = random_counts(data.num_tokens(), b.topk);
  const auto error = [&](AttentionPath path, bool select, bool option, bool tensor) {
    b.path = path;
    return error_of([&] {
      run(b, data, [&](LayerTensors& t, BatchOptions& options) {
        options.select = select;
        options.counted_picks = option;
        if (tensor) t.pick_counts = contiguous(counts.data(), counts.size());
      });
    });
  };
  const AttentionPath any = AttentionPath::automatic;
  EXPECT_THAT(error(AttentionPath::dense, false, true, true),
              HasSubstr("path: got dense with counted_picks, expected masked or sparse"));
  EXPECT_THAT(error(any, true, true, true), HasSubstr("counted_picks: got true with select"));
  EXPECT_THAT(error(any, false, true, false), HasSubstr("pick_counts: got [0]"));
  EXPECT_THAT(error(any, false, false, true), HasSubstr("pick_counts: got counts, expected none"));
}

// Where the valid slots of a row end, so that attention looks no further.
TEST(CountedPicks, MapSlotsFindsTheLastValidSlot) {
  const Lens picks{-1, 3,  -1, 5, -1, 9,    // 9 is no key of the token
                   0,  1,  2,  3, 4,  5,    // count 4
                   -1, -1, -1, 7, 70, -1};  // nothing
  const Lens requests{0, 0, 0}, keys{8, 8, 7}, counts{6, 4, 9}, pages{2, 0};
  Lens slots(18, 99), slot_counts(3, 99);
  MapSlotsCall call;
  call.picks = contiguous(picks.data(), 3, 6);
  call.request_of_token = requests.data();
  call.keys_of_token = keys.data();
  call.counts = counts.data();
  call.block_tables = contiguous(pages.data(), 1, 2);
  call.num_blocks = 3;
  call.block_size = 4;
  call.slots = contiguous(slots.data(), 3, 6);
  call.slot_counts = slot_counts.data();
  for (const std::string& entry : support::usable_entries(map_slots_operation())) {
    support::run_entry(map_slots_operation(), entry, {3, 6}, call);
    EXPECT_EQ(slots, (Lens{-1, 11, -1, 1, -1, -1,  //
                           8, 9, 10, 11, -1, -1,   //
                           -1, -1, -1, -1, -1, -1}))
        << entry;
    EXPECT_EQ(slot_counts, (Lens{4, 4, 0})) << entry;
  }
}

// Four layers: full, shared, shared, full. The shared ones attend the picks of the last full layer
// and have no indexer of their own.
TEST(SharedPicks, AreThoseOfTheLastFullLayer) {
  for (const AttentionPath path : {AttentionPath::masked, AttentionPath::sparse}) {
    Batch b;
    b.path = path;
    std::vector<std::int32_t> buffer(static_cast<std::size_t>(
        std::accumulate(b.query_lens.begin(), b.query_lens.end(), 0) * b.topk));
    std::vector<std::int32_t> first_picks;
    for (int layer = 0; layer < 4; ++layer) {
      SCOPED_TRACE(to_string(path) + " layer " + std::to_string(layer));
      const bool full = layer == 0 || layer == 3;
      b.seed = 10 + static_cast<std::uint64_t>(layer);
      LayerData data(b.problem());
      const auto picks = contiguous(buffer.data(), data.num_tokens(), b.topk);
      const auto before = buffer;
      run(b, data, [&](LayerTensors& t, BatchOptions& options) {
        t.picks = picks;
        options.select = full;
        if (full) return;
        t.index_q = {};
        t.index_weights = {};
        t.index_k = {};
        t.index_k_scale = {};
        t.index_cache = {};
        t.index_cache.head_dim = 7;  // not looked at
        t.index_cache.num_blocks = 1;
      });
      if (full) {
        EXPECT_NE(buffer, before);
      } else {
        EXPECT_EQ(buffer, before);
      }
      if (layer == 0) first_picks = buffer;
      if (layer == 2) {
        EXPECT_EQ(buffer, first_picks);
      }
      if (layer == 3) {
        EXPECT_NE(buffer, first_picks);
      }

      support::ErrorMeasure errors;
      for (const auto& token : every_token(b)) {
        const std::vector<TokenAttention> reference{support::reference_attention(
            data, token.token, {address(picks, token.token, 0), static_cast<std::size_t>(b.topk)})};
        support::add_errors(errors, data, {&token, 1}, reference);
      }
      EXPECT_TRUE(errors.within_bf16()) << errors;
      const auto wrong = data.count_wrong_cache_rows();
      EXPECT_EQ(wrong.latent, 0);
      // A layer without an indexer writes no indexer key: every new token's slot is as it was.
      EXPECT_EQ(wrong.index_keys, full ? 0 : data.num_tokens());
    }
  }
}

TEST(SharedPicks, ALayerThatSelectsNeedsItsIndexer) {
  const Batch b;
  LayerData data(b.problem());
  EXPECT_THAT(
      error_of([&] { run(b, data, [](LayerTensors& t, BatchOptions&) { t.index_k = {}; }); }),
      HasSubstr("index_k: got [0, 0]"));
}

// ---- cached prefixes without indexer keys

TEST(MissingIndexKeys, AreRefusedWhereASelectionIsScored) {
  Batch b;
  b.topk = 100;
  b.query_lens = {1, 37, 0, 5, 4};
  b.context_lens = {300, 200, 400, 95, 96};  // seq_len 301, 237, 400, 100, 100
  const Capacity capacity(b.limits(), {});
  const auto error = [&](const Lens& keys, BatchOptions options = {}) {
    return error_of([&] { BatchMetadata(capacity, b.query_lens, b.context_lens, options, keys); });
  };
  EXPECT_EQ(error({}), "no error");
  EXPECT_EQ(error({300, 200, 400, 95, 96}), "no error");
  EXPECT_THAT(error({300, 199, 400, 95, 96}),
              ::testing::StartsWith("index_key_lens[1]: got 199, expected context_len (200): "
                                    "request 1 has more than topk (100) keys to score"));
  EXPECT_THAT(error({0, 200, 400, 95, 96}), HasSubstr("index_key_lens[0]: got 0, expected"));
  // Nothing is scored: no new tokens, seq_len ≤ topk, picks handed in, dense attention.
  EXPECT_EQ(error({300, 200, 0, 0, 0}), "no error");
  BatchOptions handed_in;
  handed_in.select = false;
  EXPECT_EQ(error({0, 0, 0, 0, 0}, handed_in), "no error");
  b.query_lens = {1, 37, 5};
  b.context_lens = {300, 60, 95};
  BatchOptions dense;
  dense.path = AttentionPath::dense;
  EXPECT_EQ(error({300, 0, 0}, dense), "no error");
  EXPECT_THAT(error({299, 0, 0}, dense), HasSubstr("request 0"));  // a decode's selection
  // Lists that cannot be.
  EXPECT_THAT(error({300, 0}), HasSubstr("index_key_lens: got 2"));
  EXPECT_THAT(error({300, -1, 95}), HasSubstr("index_key_lens[1]: got -1"));
  EXPECT_THAT(error({300, 61, 95}), HasSubstr("index_key_lens[1]: got 61"));
}

// ---- rows of drafts

// Row j of a request with next_n new tokens sees keys 0 … ctx − next_n + j, and is bit for bit what
// the same token gives as a request of its own.
TEST(Drafts, AreTheirRowsAsRequestsOfTheirOwn) {
  constexpr std::int32_t kSeqLen = 100;
  for (const int requests : {1, 3})
    for (std::int32_t next_n = 1; next_n <= 8; ++next_n) {
      SCOPED_TRACE(std::to_string(requests) + " requests, next_n " + std::to_string(next_n));
      Batch b;
      b.topk = 30;
      b.decode_threshold = next_n;
      b.query_lens.assign(requests, next_n);
      b.context_lens.assign(requests, kSeqLen - next_n);
      LayerData drafts(b.problem());
      run(b, drafts);
      const auto errors = support::measure_errors(
          drafts, every_token(b), support::reference_attention(drafts, every_token(b)));
      EXPECT_TRUE(errors.within_bf16()) << errors;

      Batch rows = b;
      rows.decode_threshold = 1;
      rows.query_lens.assign(requests * next_n, 1);
      rows.context_lens.clear();
      for (int r = 0; r < requests; ++r)
        for (int j = 0; j < next_n; ++j) {
          rows.context_lens.push_back(kSeqLen - next_n + j);
          rows.request_ids.push_back(r);
        }
      LayerData single(rows.problem());
      run(rows, single);
      const Capacity capacity(b.limits(), {});
      const BatchMetadata batch(capacity, b.query_lens, b.context_lens);
      EXPECT_EQ(batch.num_decode_tokens(), requests * next_n);
      const auto keys = batch.sections().keys_of_token.at(batch.arena().data());
      for (std::int64_t token = 0; token < drafts.num_tokens(); ++token) {
        EXPECT_EQ(keys[token], kSeqLen - next_n + token % next_n + 1);
        ASSERT_THAT(drafts.picks(token), ::testing::ElementsAreArray(single.picks(token)));
        for (int head = 0; head < b.num_heads; ++head) {
          ASSERT_EQ(drafts.lse(token, head), single.lse(token, head));
          ASSERT_EQ(std::memcmp(drafts.out(token, head), single.out(token, head), 2 * 128), 0);
        }
      }
    }
}

TEST(Drafts, MixedVerifyLengthsAndATrailingEmptyRequest) {
  // Query starts 0, 1, 3, 6: uniform decoding would take the first request alone.
  Batch b;
  b.query_lens = {1, 2, 3};
  b.context_lens = {200, 300, 97};
  for (const std::int32_t threshold : {0, 1, 2, 3}) {
    b.decode_threshold = threshold;
    const Capacity capacity(b.limits(), {});
    const BatchMetadata batch(capacity, b.query_lens, b.context_lens);
    EXPECT_EQ(batch.num_decode_tokens(), (std::vector{0, 1, 3, 6})[threshold]);
    EXPECT_EQ(batch.num_prefill_tokens(), (std::vector{6, 5, 3, 0})[threshold]);
    LayerData data(b.problem());
    run(b, data);
    const auto errors = support::measure_errors(data, every_token(b),
                                                support::reference_attention(data, every_token(b)));
    EXPECT_TRUE(errors.within_bf16()) << threshold << ": " << errors;
  }
  // Six requests of 110 rows and one without any.
  b.query_lens = {110, 110, 110, 110, 110, 110, 0};
  b.context_lens = {0, 1, 2, 3, 4, 5, 600};
  b.decode_threshold = 110;
  const Capacity capacity(b.limits(), {});
  const BatchMetadata batch(capacity, b.query_lens, b.context_lens);
  EXPECT_EQ(batch.num_decode_tokens(), 660);
  EXPECT_EQ(batch.prefill_path(), AttentionPath::none);
}

// The rows of a padded batch of drafts: no end is negative, rows without keys select nothing.
TEST(Drafts, RowEndsOfAPaddedBatch) {
  EXPECT_EQ(draft_row_ends(Lens{10, 7, 12, 0}, 2), (Lens{9, 10, 6, 7, 11, 12, 0, 0}));
  EXPECT_EQ(draft_row_ends(Lens{2, 6}, 4), (Lens{0, 0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(draft_row_ends(Lens{100, 200}, 2), (Lens{99, 100, 199, 200}));
  EXPECT_EQ(draft_row_ends(Lens{}, 3), Lens{});
  EXPECT_THAT(error_of([] { draft_row_ends(Lens{5, -1}, 2); }), HasSubstr("seq_lens[1]: got -1"));
  EXPECT_THAT(error_of([] { draft_row_ends(Lens{5}, 0); }), HasSubstr("next_n: got 0"));

  const std::vector<float> scores(8 * 12, 1.0f);
  for (const auto& [seq_lens, next_n, k] :
       {std::tuple{Lens{10, 7, 12, 0}, 2, 512}, std::tuple{Lens{2, 6}, 4, 512},
        std::tuple{Lens{10, 7, 12, 0}, 2, 3}}) {
    const Lens ends = draft_row_ends(seq_lens, next_n);
    for (const std::string& entry : support::usable_entries(select_operation())) {
      Lens indices(8 * static_cast<std::size_t>(k), 99);
      SelectCall call;
      call.scores.data = scores.data();
      call.scores.num_rows = 8;
      call.scores.row_len = call.scores.row_stride = 12;
      call.ends = ends.data();
      call.indices = contiguous(indices.data(), 8, k);
      support::run_entry(select_operation(), entry,
                         problem_of(call, TieBreak::lowest_index, SelectOrder::by_index), call);
      for (int row = 0; row < 8; ++row)
        for (int i = 0; i < k; ++i)
          ASSERT_EQ(call.indices(row, i), i < ends[static_cast<std::size_t>(row)] ? i : -1)
              << entry << " row " << row;
    }
  }
}

}  // namespace
}  // namespace sparse_mla
