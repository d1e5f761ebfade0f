// Operation `sparse_mqa`: every entry against plain fp64 loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/attention.h"

#include "tests/support/run_entry.h"
#include "tests/support/sparse_mqa_errors.h"

namespace sparse_mla {
namespace {

using support::poisoned;
using support::run_entry;
using support::same_bits;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1 in fp32

enum class Slots {
  full,      // every slot is a row
  some,      // −1 in between
  tail,      // rows first, then −1
  nonsense,  // out-of-range numbers in between
  none,      // nothing but −1 and nonsense
};

struct SparseMqaTest {
  int heads = 1, lora = 512, rope = 64, topk = 64;
  std::int64_t tokens = 3;
  int block_size = 64;
  std::int64_t blocks = 4;
  Slots slots = Slots::full;
  bool counts = false;
  bool permuted_lse = false;
  bool aligned = false;  // every row starts at a multiple of 16 bytes
};

std::ostream& operator<<(std::ostream& out, const SparseMqaTest& p) {
  return out << p.heads << " heads, " << p.lora << '+' << p.rope << ", topk " << p.topk << ", "
             << p.tokens << " tokens, " << p.blocks << " blocks of " << p.block_size << ", slots "
             << static_cast<int>(p.slots) << (p.counts ? ", counts" : "")
             << (p.permuted_lse ? ", permuted lse" : "") << (p.aligned ? ", aligned" : "");
}

// Rows that no token selects are NaN, and so is everything around rows, tokens and heads.
struct SparseMqaData {
  SparseMqaProblem problem;
  std::vector<bfloat16> q, latent, out;
  std::vector<float> lse;
  std::vector<std::int32_t> slots, counts, lse_tokens;
  SparseMqaCall call;

  explicit SparseMqaData(const SparseMqaTest& p) {
    std::mt19937 engine(11);
    const auto value = [&] {
      return __float2bfloat16_rn(static_cast<float>(static_cast<double>(engine()) * 0x1p-31 - 1.0));
    };
    const std::int64_t width = p.lora + p.rope;
    const std::int64_t q_head = width + (p.aligned ? 8 : 1),
                       out_head = p.lora + (p.aligned ? 8 : 2);
    const std::int64_t row_stride = width + (p.aligned ? 8 : 4);
    const std::int64_t block_stride = p.block_size * row_stride + 8;
    const std::int64_t num_slots = p.blocks * p.block_size;

    q = poisoned<bfloat16>(p.tokens * p.heads * q_head);
    for (std::int64_t row = 0; row < p.tokens * p.heads; ++row)
      for (std::int64_t d = 0; d < width; ++d)
        q[static_cast<std::size_t>(row * q_head + d)] = value();
    latent = poisoned<bfloat16>(p.blocks * block_stride);
    out = poisoned<bfloat16>(p.tokens * p.heads * out_head);
    lse = poisoned<float>(p.heads * (p.tokens + 5));

    call.cache.data = reinterpret_cast<std::byte*>(latent.data());
    call.cache.num_blocks = p.blocks;
    call.cache.block_size = p.block_size;
    call.cache.block_stride = block_stride * 2;
    call.cache.row_stride = row_stride * 2;

    const std::int32_t nonsense[] = {std::numeric_limits<std::int32_t>::min(),
                                     -123456,
                                     -1,
                                     static_cast<std::int32_t>(num_slots),
                                     static_cast<std::int32_t>(num_slots) + 114514,
                                     2147480000,
                                     std::numeric_limits<std::int32_t>::max()};
    std::vector<std::int32_t> rows(static_cast<std::size_t>(num_slots));
    std::iota(rows.begin(), rows.end(), 0);
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      // Half of the rows at most: the others stay NaN.
      for (std::size_t i = 0; i < static_cast<std::size_t>(p.topk); ++i)
        std::swap(rows[i], rows[i + engine() % (rows.size() / 2 - i)]);
      const auto count = static_cast<std::int32_t>(
                             p.counts ? engine() % static_cast<unsigned>(p.topk + 9) : p.topk) -
                         (p.counts ? 4 : 0);
      counts.push_back(count);
      for (std::int32_t i = 0; i < p.topk; ++i) {
        std::int32_t slot = rows[static_cast<std::size_t>(i)];
        if (p.slots == Slots::none || (p.slots == Slots::nonsense && engine() % 3 == 0))
          slot = nonsense[engine() % 7];
        if ((p.slots == Slots::some && engine() % 2 == 0) ||
            (p.slots == Slots::tail && i > t % p.topk))
          slot = -1;
        if (i < count && slot >= 0 && slot < num_slots) fill_row(slot, width, value);
        slots.push_back(slot);
      }
      lse_tokens.push_back(static_cast<std::int32_t>((t * 7 + 3) % (p.tokens + 5)));
    }
    if ((p.tokens + 5) % 7 == 0) lse_tokens.clear();  // t · 7 would not be distinct

    call.q = strided<const bfloat16, 3>(q.data(), {p.tokens, p.heads, width},
                                        {p.heads * q_head, q_head, 1});
    call.slots = contiguous<const std::int32_t>(slots.data(), p.tokens, p.topk);
    if (p.counts) call.counts = counts.data();
    call.softmax_scale = 3.0f / std::sqrt(static_cast<float>(width));
    call.out = strided<bfloat16, 3>(out.data(), {p.tokens, p.heads, p.lora},
                                    {p.heads * out_head, out_head, 1});
    call.lse = contiguous(lse.data(), p.heads, p.tokens + 5);
    if (p.permuted_lse && !lse_tokens.empty()) call.lse_tokens = lse_tokens.data();
    problem = {p.heads, p.lora, p.rope, p.topk, CacheFormat::bf16, p.tokens};
  }

  const bfloat16* row(std::int64_t slot) const {
    return reinterpret_cast<const bfloat16*>(
        call.cache.data + slot / call.cache.block_size * call.cache.block_stride +
        slot % call.cache.block_size * call.cache.row_stride);
  }
  std::int64_t column(std::int64_t t) const {
    return call.lse_tokens == nullptr ? t : call.lse_tokens[t];
  }

 private:
  template <class Value>
  void fill_row(std::int32_t slot, std::int64_t width, Value value) {
    auto* to = const_cast<bfloat16*>(row(slot));
    if (!__hisnan(to[0])) return;  // another token's pick too
    for (std::int64_t d = 0; d < width; ++d) to[d] = value();
  }
};

using EntryAndProblem = std::tuple<std::string, SparseMqaTest>;
class SparseMqa : public testing::TestWithParam<EntryAndProblem> {};

TEST_P(SparseMqa, AgreesWithPlainLoops) {
  const auto& [entry, p] = GetParam();
  SparseMqaData data(p);
  run_entry(sparse_mqa_operation(), entry, data.problem, data.call);
  const SparseMqaCall& call = data.call;
  const int width = p.lora + p.rope;

  // Big batches: the first and the last tokens and some 60 in between.
  const std::int64_t step = p.tokens > 100 ? std::min<std::int64_t>(p.tokens / 60 | 1, 997) : 1;
  for (std::int64_t first = 0; first < p.tokens + step - 1; first += step) {
    const std::int64_t t = std::min(first, p.tokens - 1);
    std::vector<const bfloat16*> rows;
    for (int i = 0; i < p.topk; ++i) {
      const std::int32_t slot = data.slots[static_cast<std::size_t>(t * p.topk + i)];
      if (p.counts && i >= data.counts[static_cast<std::size_t>(t)]) continue;
      if (slot >= 0 && slot < p.blocks * p.block_size) rows.push_back(data.row(slot));
    }
    for (int h = 0; h < p.heads; ++h) {
      const float got_lse = call.lse(h, data.column(t));
      if (rows.empty()) {
        ASSERT_EQ(got_lse, -kInfinity) << "token " << t;
        for (int d = 0; d < p.lora; ++d)
          ASSERT_EQ(__bfloat162float(call.out(t, h, d)), 0.0f) << "token " << t;
        continue;
      }
      std::vector<double> score;
      double magnitude = 0, top = -HUGE_VAL;
      for (const bfloat16* row : rows) {
        double dot = 0, absolute = 0;
        for (int d = 0; d < width; ++d) {
          const double product =
              double{__bfloat162float(call.q(t, h, d))} * double{__bfloat162float(row[d])};
          dot += product;
          absolute += std::fabs(product);
        }
        score.push_back(dot * double{call.softmax_scale});
        magnitude = std::max(magnitude, absolute * double{call.softmax_scale});
        top = std::max(top, score.back());
      }
      double sum = 0;
      for (double& s : score) sum += (s = std::exp(s - top));
      const double lse = top + std::log(sum);
      // As in attend's test: sqrt(terms) roundings of the terms' magnitude; |values| ≤ 1.
      const double bound = 4 * kEpsilon *
                           (std::sqrt(width) * magnitude +
                            std::sqrt(static_cast<double>(rows.size())) + 4 + std::fabs(lse));
      ASSERT_NEAR(double{got_lse}, lse, bound) << "token " << t << " head " << h;
      for (int d = 0; d < p.lora; ++d) {
        double value = 0, absolute = 0;
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const double term = score[i] * double{__bfloat162float(rows[i][d])} / sum;
          value += term;
          absolute += std::fabs(term);
        }
        // Half an ulp of bf16 on top.
        ASSERT_NEAR(double{__bfloat162float(call.out(t, h, d))}, value,
                    std::fabs(value) * 0x1p-8 + 2 * bound +
                        support::sparse_mqa_errors(entry, CacheFormat::bf16).weight * absolute)
            << "token " << t << " head " << h << " element " << d;
      }
    }
  }

  // Again: the same bits.
  const auto out = data.out;
  const auto lse = data.lse;
  data.out = poisoned<bfloat16>(static_cast<std::int64_t>(out.size()));
  data.lse = poisoned<float>(static_cast<std::int64_t>(lse.size()));
  SparseMqaCall again = call;
  again.out = View3<bfloat16>(data.out.data(), call.out.mapping());
  again.lse = View2<float>(data.lse.data(), call.lse.mapping());
  run_entry(sparse_mqa_operation(), entry, data.problem, again);
  EXPECT_TRUE(same_bits(out, data.out));
  EXPECT_TRUE(same_bits(lse, data.lse));
}

std::vector<SparseMqaTest> problems() {
  std::vector<SparseMqaTest> list;
  for (const int heads : {1, 8, 16, 24, 128}) {
    SparseMqaTest p;
    p.heads = heads;
    p.slots = Slots::some;
    p.topk = 40;
    p.tokens = 2;
    list.push_back(p);
  }
  for (const Slots slots : {Slots::full, Slots::some, Slots::tail, Slots::nonsense, Slots::none})
    for (const bool counts : {false, true})
      for (const int topk : {1, 127, 128, 129, 300}) {
        SparseMqaTest p;
        p.heads = 3;
        p.lora = 24;
        p.rope = 8;
        p.topk = topk;
        p.tokens = 12;
        p.block_size = 61;
        p.blocks = 11;
        p.slots = slots;
        p.counts = counts;
        p.permuted_lse = topk % 2 == 1;
        list.push_back(p);
      }
  for (const int block_size : {1, 2, 64, 576}) {  // pages
    SparseMqaTest p;
    p.heads = 65;  // uneven head groups
    p.lora = 20;
    p.rope = 3;
    p.topk = 50;
    p.block_size = block_size;
    p.blocks = 1152 / block_size;
    p.slots = Slots::nonsense;
    list.push_back(p);
  }
  SparseMqaTest many;  // more tokens than 16 bits count
  many.lora = 8;
  many.rope = 0;
  many.topk = 3;
  many.tokens = 66000;
  many.slots = Slots::some;
  list.push_back(many);
  // Rows of 512 + 64 in batches that fill a Hopper card; with few heads, of several tokens to a
  // tile: 8, 4 or 1 on 132 SMs.
  for (const int heads : {1, 8, 16, 24, 32, 64, 128})
    for (const Slots slots : {Slots::full, Slots::some, Slots::nonsense}) {
      SparseMqaTest p;
      p.heads = heads;
      p.topk = slots == Slots::full ? 130 : 65;
      p.tokens = heads <= 8 ? 1050 : heads == 16 ? 403 : heads <= 32 ? 140 : 1800 / heads;
      p.blocks = 8;
      p.slots = slots;
      p.counts = slots != Slots::full;
      p.permuted_lse = true;
      p.aligned = true;
      list.push_back(p);
    }
  for (const int heads : {8, 16}) {  // tokens of a tile share hardly any picks
    SparseMqaTest p;
    p.heads = heads;
    p.topk = 200;
    p.tokens = 1061;  // the last tile is not full
    p.blocks = 160;
    p.slots = Slots::tail;
    p.counts = heads == 8;
    p.aligned = true;
    list.push_back(p);
  }
  return list;
}

const auto kEntries = support::usable_entries(sparse_mqa_operation());

// `./dev gpu-sanitize` leaves some out by name.
std::string name_of_test(const testing::TestParamInfo<EntryAndProblem>& test) {
  const auto& [entry, p] = test.param;
  return std::to_string(test.index) + "_" + entry + "_" + std::to_string(p.heads) + "_heads_" +
         std::to_string(p.tokens) + "_tokens";
}

std::vector<EntryAndProblem> served_problems() {
  std::vector<EntryAndProblem> list;
  for (const std::string& entry : kEntries)
    for (const SparseMqaTest& p : problems())
      // An element at a time, the largest batches would take cpu_reference minutes.
      if (support::serves(sparse_mqa_operation(), entry, {p.heads, p.lora, p.rope, p.topk}) &&
          (entry != "cpu_reference" || p.tokens * p.heads * p.topk * p.lora < 150'000'000))
        list.emplace_back(entry, p);
  return list;
}
INSTANTIATE_TEST_SUITE_P(EveryEntry, SparseMqa, testing::ValuesIn(served_problems()), name_of_test);

class SparseMqaEntry : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(EveryEntry, SparseMqaEntry, testing::ValuesIn(kEntries));

// Runs tokens `order` of `data` as a batch of their own and compares with the whole batch's bits.
void expect_same_alone(const std::string& entry, const SparseMqaTest& p, SparseMqaData& data,
                       const std::vector<std::int64_t>& order) {
  const auto tokens = static_cast<std::int64_t>(order.size());
  const int width = p.lora + p.rope;
  std::vector<bfloat16> q, out(static_cast<std::size_t>(tokens * p.heads * p.lora));
  std::vector<std::int32_t> slots;
  std::vector<float> lse(static_cast<std::size_t>(p.heads * tokens));
  for (const std::int64_t t : order) {
    for (int h = 0; h < p.heads; ++h)
      for (int d = 0; d < width; ++d) q.push_back(data.call.q(t, h, d));
    for (int i = 0; i < p.topk; ++i) slots.push_back(data.call.slots(t, i));
  }
  SparseMqaCall call = data.call;
  call.q = contiguous<const bfloat16>(q.data(), tokens, p.heads, width);
  call.slots = contiguous<const std::int32_t>(slots.data(), tokens, p.topk);
  call.out = contiguous(out.data(), tokens, p.heads, p.lora);
  call.lse = contiguous(lse.data(), p.heads, tokens);
  run_entry(sparse_mqa_operation(), entry, data.problem, call);
  for (std::int64_t i = 0; i < tokens; ++i)
    for (int h = 0; h < p.heads; ++h) {
      const std::int64_t t = order[static_cast<std::size_t>(i)];
      ASSERT_EQ(std::memcmp(&call.lse(h, i), &data.call.lse(h, t), sizeof(float)), 0)
          << "token " << t << " head " << h;
      ASSERT_EQ(std::memcmp(&call.out(i, h, 0), &data.call.out(t, h, 0),
                            static_cast<std::size_t>(p.lora) * sizeof(bfloat16)),
                0)
          << "token " << t << " head " << h;
    }
}

TEST_P(SparseMqaEntry, BatchesDoNotChangeBits) {
  SparseMqaTest p;
  p.heads = 72;
  p.lora = 64;
  p.rope = 16;
  p.topk = 200;
  p.tokens = 9;
  p.blocks = 7;
  p.slots = Slots::some;
  const bool any_width =
      support::serves(sparse_mqa_operation(), GetParam(), {p.heads, p.lora, p.rope, p.topk});
  if (!any_width) {
    p.lora = 512;
    p.rope = 64;
    p.aligned = true;
    p.tokens = 30;
  }
  SparseMqaData data(p);
  run_entry(sparse_mqa_operation(), GetParam(), data.problem, data.call);
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.tokens));
  std::iota(order.begin(), order.end(), 0);
  std::reverse(order.begin(), order.end());
  expect_same_alone(GetParam(), p, data, order);
  // Entries for batches that fill the device leave a single token to another kernel.
  if (!any_width) return;
  for (const std::int64_t t : order) expect_same_alone(GetParam(), p, data, {t});
  expect_same_alone(GetParam(), p, data, {4, 1, 7});
}

TEST_P(SparseMqaEntry, OneRowIsReturnedExactly) {
  SparseMqaTest p;
  p.heads = 16;
  p.topk = 1;
  SparseMqaData data(p);
  run_entry(sparse_mqa_operation(), GetParam(), data.problem, data.call);
  for (std::int64_t t = 0; t < p.tokens; ++t)
    for (int h = 0; h < p.heads; ++h)
      for (int d = 0; d < p.lora; ++d)
        ASSERT_EQ(__bfloat162float(data.call.out(t, h, d)),
                  __bfloat162float(data.row(data.slots[static_cast<std::size_t>(t)])[d]));
}

TEST_P(SparseMqaEntry, NoTokens) {
  SparseMqaTest p;
  p.tokens = 0;
  SparseMqaData data(p);
  EXPECT_NO_THROW(run_entry(sparse_mqa_operation(), GetParam(), data.problem, data.call));
}

TEST_P(SparseMqaEntry, NoCache) {
  SparseMqaTest p;
  SparseMqaData data(p);
  data.call.cache.num_blocks = 0;
  data.call.cache.data = nullptr;
  run_entry(sparse_mqa_operation(), GetParam(), data.problem, data.call);
  for (std::int64_t t = 0; t < p.tokens; ++t) EXPECT_EQ(data.call.lse(0, t), -kInfinity);
}

TEST_P(SparseMqaEntry, RefusesBadArgumentsBeforeWriting) {
  SparseMqaTest p;
  p.heads = 2;
  p.permuted_lse = true;
  const auto refuses = [&](const std::string& text, auto spoil) {
    SparseMqaData data(p);
    const auto out = data.out;
    const auto lse = data.lse;
    spoil(data);
    try {
      run_entry(sparse_mqa_operation(), GetParam(), data.problem, data.call);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), testing::StartsWith(text));
    }
    EXPECT_TRUE(same_bits(data.out, out));
    EXPECT_TRUE(same_bits(data.lse, lse));
  };
  refuses("q:", [](SparseMqaData& d) { d.problem.max_tokens = 2; });
  refuses("q:", [](SparseMqaData& d) { d.problem.num_heads = 3; });
  if (support::serves(sparse_mqa_operation(), GetParam(), {2, 511, 64}))
    refuses("q:", [](SparseMqaData& d) { d.problem.kv_lora_rank = 511; });
  refuses("slots:", [](SparseMqaData& d) { d.problem.topk = 63; });
  refuses("out:", [](SparseMqaData& d) { d.call.out = contiguous(d.out.data(), 3, 2, 500); });
  refuses("out:", [](SparseMqaData& d) {
    d.call.out = strided<bfloat16, 3>(d.out.data(), {3, 2, 512}, {1024, 1, 2});
  });
  const bool looks_inside = support::checks_contents(sparse_mqa_operation(), GetParam());
  if (looks_inside) refuses("lse_tokens[1]:", [](SparseMqaData& d) { d.lse_tokens[1] = 8; });
  refuses("lse:", [](SparseMqaData& d) {
    d.call.lse_tokens = nullptr;
    d.call.lse = contiguous(d.lse.data(), 2, 2);
  });
  refuses("cache.block_size:", [](SparseMqaData& d) { d.call.cache.block_size = 0; });
#ifndef NDEBUG
  if (looks_inside) refuses("slots:", [](SparseMqaData& d) { d.slots[5] = d.slots[9]; });
#endif
}

}  // namespace
}  // namespace sparse_mla
