// Operation `sparse_mqa` on decode batches of the model's widths: every entry over bf16 and
// fp8_ds_mla rows, heads × rows per page × tokens per request, against plain fp64 loops over what
// the tests' own decoder reads. Rows that no token selects are NaN.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "sparse_mla/attention.h"

#include "tests/support/latent_rows.h"
#include "tests/support/run_entry.h"
#include "tests/support/sparse_mqa_errors.h"

namespace sparse_mla {
namespace {

using support::poisoned;
using support::run_entry;
using support::same_bits;
using support::SparseMqaErrors;

constexpr int kLora = 512, kRope = 64, kWidth = kLora + kRope;
constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1 in fp32

struct DecodeTest {
  CacheFormat format = CacheFormat::bf16;
  int heads = 16;
  int block_size = 64;
  int requests = 2, query_len = 1;  // every request has so many tokens
  int topk = 200;
  bool aligned = true;  // rows start at multiples of 16 bytes
  bool uneven = false;  // rows, their parts and queries of very different sizes

  int tokens() const { return requests * query_len; }
  SparseMqaProblem problem() const { return {heads, kLora, kRope, topk, format, tokens()}; }
};

std::ostream& operator<<(std::ostream& out, const DecodeTest& p) {
  return out << support::name_of(p.format) << ", " << p.heads << " heads, pages of " << p.block_size
             << ", " << p.requests << " x " << p.query_len << " tokens, topk " << p.topk
             << (p.aligned ? "" : ", unaligned rows") << (p.uneven ? ", of uneven sizes" : "");
}

// Every third slot is not to be read: −1 or out of range. Tokens of one request share most picks;
// every other token has a count, the third one a count of 0.
struct DecodeData {
  int topk;
  support::LatentRowFormat format;
  std::vector<std::byte> memory;
  std::vector<bfloat16> q, out;
  std::vector<float> lse, sink;
  std::vector<std::int32_t> slots, counts, lse_tokens;
  SparseMqaCall call;

  explicit DecodeData(const DecodeTest& p) : topk(p.topk) {
    std::mt19937 engine(static_cast<unsigned>(17 + p.heads + 131 * p.block_size));
    const auto value = [&](float scale) {
      return __float2bfloat16_rn(scale *
                                 static_cast<float>(static_cast<double>(engine()) * 0x1p-31 - 1.0));
    };
    format.format = p.format;
    const std::int64_t keys_each = 2 * p.topk + 7;
    call.cache.format = p.format;
    call.cache.block_size = p.block_size;
    call.cache.num_blocks = (p.requests * keys_each + p.block_size - 1) / p.block_size;
    call.cache.row_stride = format.row_bytes() + (p.aligned ? 16 : 3);
    call.cache.block_stride = call.cache.row_stride * p.block_size + (p.aligned ? 32 : 5);
    memory.assign(static_cast<std::size_t>(call.cache.num_blocks * call.cache.block_stride),
                  std::byte{0xFF});
    call.cache.data = memory.data();

    const auto total = static_cast<std::int32_t>(p.requests * keys_each);
    std::vector<std::int32_t> places(static_cast<std::size_t>(total));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), engine);
    std::vector<bool> written(static_cast<std::size_t>(call.cache.num_slots()));
    for (int r = 0; r < p.requests; ++r) {
      const auto begin = places.begin() + r * keys_each;
      std::vector<std::int32_t> keys(begin, begin + keys_each);
      for (int j = 0; j < p.query_len; ++j) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(p.topk); ++i)
          if (j == 0 || engine() % 5 == 0)
            std::swap(keys[i], keys[i + engine() % (keys.size() - i)]);
        const int token = r * p.query_len + j;
        counts.push_back(token == 2 ? 0 : token % 2 == 1 ? p.topk - p.topk / 3 : p.topk + 5);
        for (int i = 0; i < p.topk; ++i) {
          std::int32_t slot = keys[static_cast<std::size_t>(i)];
          if (engine() % 3 == 0)
            slot = engine() % 2 == 0
                       ? -1
                       : static_cast<std::int32_t>(call.cache.num_slots() + engine() % 2000);
          slots.push_back(slot);
          if (!is_read(token, i) || written[static_cast<std::size_t>(slot)]) continue;
          written[static_cast<std::size_t>(slot)] = true;
          std::vector<bfloat16> row;
          // Uneven: rows of very different sizes, some with a rope part that outweighs the rest.
          const float size = p.uneven ? std::ldexp(1.0f, -(slot % 13)) : 1;
          const float rope_size = p.uneven && slot % 5 == 0 ? 8 : size;
          for (int d = 0; d < kWidth; ++d)
            row.push_back(
                value(d < kLora ? size * static_cast<float>(1 << d / 128) / 8 : rope_size));
          support::encode_latent_row(format, row.data(), call.cache.row(slot));
        }
        lse_tokens.push_back(p.tokens() - 1 - token);
      }
    }
    for (int i = 0; i < p.tokens() * p.heads * kWidth; ++i)
      q.push_back(value(p.uneven ? std::ldexp(1.0f, i / kWidth % p.heads % 9 - 6) : 1));
    for (int h = 0; h < p.heads; ++h) sink.push_back(static_cast<float>(h % 5) - 2);
    out = poisoned<bfloat16>(std::int64_t{p.tokens()} * p.heads * kLora);
    lse = poisoned<float>(std::int64_t{p.tokens()} * p.heads);
    call.q = contiguous<const bfloat16>(q.data(), p.tokens(), p.heads, kWidth);
    call.slots = contiguous<const std::int32_t>(slots.data(), p.tokens(), p.topk);
    call.counts = counts.data();
    call.softmax_scale = 0.3f;
    call.out = contiguous(out.data(), p.tokens(), p.heads, kLora);
    call.lse = contiguous(lse.data(), p.heads, p.tokens());
    call.lse_tokens = lse_tokens.data();
    call.sink = contiguous<const float>(sink.data(), p.heads);
  }

  bool is_read(int token, int i) const {
    const std::int32_t slot = slots[static_cast<std::size_t>(token * topk + i)];
    return i < counts[static_cast<std::size_t>(token)] && slot >= 0 &&
           slot < call.cache.num_slots();
  }
  /// [576] what lies in every slot that the token reads.
  std::vector<std::vector<double>> rows_of(int token) const {
    std::vector<std::vector<double>> rows;
    for (int i = 0; i < topk; ++i) {
      if (!is_read(token, i)) continue;
      rows.emplace_back(kWidth);
      support::decode_latent_row(format,
                                 call.cache.row(slots[static_cast<std::size_t>(token * topk + i)]),
                                 rows.back().data());
    }
    return rows;
  }
};

void expect_right(const DecodeData& data, const DecodeTest& p, const SparseMqaErrors& errors,
                  int token) {
  const SparseMqaCall& call = data.call;
  const auto rows = data.rows_of(token);
  // Some six heads, others for every token; the last one always.
  const int step = p.heads / 6 + 1;
  for (int first = token % step; first < p.heads + step - 1; first += step) {
    const int h = std::min(first, p.heads - 1);
    const double got_lse = double{call.lse(h, call.lse_tokens[token])};
    if (rows.empty()) {
      ASSERT_EQ(got_lse, -HUGE_VAL) << "token " << token << " head " << h;
      for (int d = 0; d < kLora; ++d)
        ASSERT_EQ(__bfloat162float(call.out(token, h, d)), 0.0f) << "token " << token;
      continue;
    }
    std::vector<double> score;
    double magnitude = 0, rounding = 0, top = -HUGE_VAL;
    for (const auto& row : rows) {
      double dot = 0, absolute = 0, squares = 0;
      for (int d = 0; d < kWidth; ++d) {
        const double product =
            double{__bfloat162float(call.q(token, h, d))} * row[static_cast<std::size_t>(d)];
        dot += product;
        absolute += std::fabs(product);
        squares += product * product;
      }
      const double scale = double{call.softmax_scale};
      score.push_back(dot * scale);
      magnitude = std::max(magnitude, absolute * scale);
      // Independent roundings: three standard deviations of their sum stay below this.
      rounding = std::max(rounding, 2 * errors.number * std::sqrt(squares) * scale);
      top = std::max(top, score.back());
    }
    double sum = 0;
    for (double& s : score) sum += (s = std::exp(s - top));
    const double lse = top + std::log(sum);
    const double bound =
        rounding + 4 * kEpsilon *
                       (std::sqrt(kWidth) * magnitude +
                        std::sqrt(static_cast<double>(rows.size())) + 4 + std::fabs(lse));
    ASSERT_NEAR(got_lse, lse, bound) << "token " << token << " head " << h;
    const double factor = 1 / (1 + std::exp(double{call.sink(h)} - lse));
    for (std::size_t d = 0; d < kLora; ++d) {
      double value = 0, absolute = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const double term = factor * score[i] * rows[i][d] / sum;
        value += term;
        absolute += std::fabs(term);
      }
      ASSERT_NEAR(double{__bfloat162float(call.out(token, h, static_cast<int>(d)))}, value,
                  std::fabs(value) * 0x1p-8 +
                      (3 * bound + errors.weight + errors.number) * absolute + 1e-30)
          << "token " << token << " head " << h << " element " << d;
    }
  }
}

using EntryAndProblem = std::tuple<std::string, DecodeTest>;
class SparseMqaDecode : public testing::TestWithParam<EntryAndProblem> {};

TEST_P(SparseMqaDecode, AgreesWithPlainLoops) {
  const auto& [entry, p] = GetParam();
  DecodeData data(p);
  run_entry(sparse_mqa_operation(), entry, p.problem(), data.call);
  const SparseMqaErrors errors = support::sparse_mqa_errors(entry, p.format);
  // The first tokens – a count beyond topk, one within, none – and the last.
  for (int token = 0; token < std::min(p.tokens(), 3); ++token)
    expect_right(data, p, errors, token);
  expect_right(data, p, errors, p.tokens() - 1);

  const auto out = data.out;
  const auto lse = data.lse;
  data.out.assign(out.size(), bfloat16{});
  data.lse.assign(lse.size(), 0);
  run_entry(sparse_mqa_operation(), entry, p.problem(), data.call);
  EXPECT_TRUE(same_bits(out, data.out)) << "another run gives other bits";
  EXPECT_TRUE(same_bits(lse, data.lse)) << "another run gives other bits";
}

std::vector<DecodeTest> problems() {
  std::vector<DecodeTest> list;
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla}) {
    for (const int heads : {1, 8, 16, 32, 64, 128})
      for (const int block_size : {1, 2, 61, 64, 576})
        for (const int query_len : {1, 2, 3, 8})
          list.push_back({format, heads, block_size, 2, query_len, 65 + 16 * query_len});
    // From one token, whose keys all the device shares, to more tokens than it has places.
    for (const int heads : {16, 64, 128})
      for (const int requests : {1, 3, 20, 150})
        list.push_back({format, heads, 64, requests, 1, 333});
    for (const int topk : {1, 63, 64, 127, 2048}) list.push_back({format, 24, 64, 3, 1, topk});
    list.push_back({format, 128, 61, 2, 2, 200, false});
    // Batches that fill a Hopper card, where few heads share tiles among tokens: of one request
    // with shared picks, or of several without. Blocks of 64 and 48 keys and their pairs end
    // unevenly.
    list.push_back({format, 16, 64, 60, 8, 97});
    list.push_back({format, 16, 64, 480, 1, 96});
    list.push_back({format, 8, 61, 132, 8, 48});
    for (const int heads : {64, 100}) list.push_back({format, heads, 64, 70, 1, 145});
    for (const int heads : {16, 64}) list.push_back({format, heads, 64, 150, 1, 97, true, true});
  }
  return list;
}

// `./dev gpu-sanitize` leaves some out by name.
std::string name_of_test(const testing::TestParamInfo<EntryAndProblem>& test) {
  const auto& [entry, p] = test.param;
  return std::to_string(test.index) + "_" + entry + "_" + std::to_string(p.heads) + "_heads_" +
         std::to_string(p.tokens()) + "_tokens";
}

std::vector<EntryAndProblem> served_problems() {
  std::vector<EntryAndProblem> list;
  for (const DecodeTest& p : problems())
    for (const std::string& entry : support::usable_entries(sparse_mqa_operation(), p.problem()))
      // An element at a time, it would take most of the tests' time.
      if (entry != "cpu_reference" || p.heads * p.tokens() <= 32) list.emplace_back(entry, p);
  return list;
}
INSTANTIATE_TEST_SUITE_P(EveryEntry, SparseMqaDecode, testing::ValuesIn(served_problems()),
                         name_of_test);

}  // namespace
}  // namespace sparse_mla
