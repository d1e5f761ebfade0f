// Operations `up_project`, `absorb_query` and `project_value`: every entry against plain fp64 sums.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/attention.h"

#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::poisoned;
using support::run_entry;
using support::same_bits;

constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1 in fp32

struct ProjectionTest {
  int heads = 1, lora = 512, nope = 128, rope = 64, value = 128;
  std::vector<std::int32_t> tokens;  // rows, for up_project: their number
  std::int64_t num_tokens = 10;
  int gap = 1;  // elements; 8: every row starts on a 16-byte boundary, as in an engine
};

std::ostream& operator<<(std::ostream& out, const ProjectionTest& p) {
  return out << p.heads << " heads, " << p.lora << ", " << p.nope << '+' << p.rope << ", "
             << p.value << ", " << p.tokens.size() << " of " << p.num_tokens << " tokens, gap "
             << p.gap;
}

class Random {
 public:
  void fill(std::vector<bfloat16>& values) {
    for (auto& value : values)
      value =
          __float2bfloat16_rn(static_cast<float>(static_cast<double>(engine_()) * 0x1p-31 - 1.0));
  }

 private:
  std::mt19937 engine_{13};
};

// [rows, heads, width] with a gap behind every row; only the part that is handed out is random.
struct Tensor {
  std::vector<bfloat16> data;
  View3<bfloat16> view;

  Tensor(std::int64_t rows, std::int64_t heads, std::int64_t width, std::int64_t gap)
      : data(poisoned<bfloat16>(rows * heads * (width + gap))),
        view(strided<bfloat16, 3>(data.data(), {rows, heads, width},
                                  {heads * (width + gap), width + gap, 1})) {}
  Tensor(Tensor&&) = default;

  Tensor& randomise(Random& random) {
    std::vector<bfloat16> row(static_cast<std::size_t>(view.extent(2)));
    for (std::int64_t r = 0; r < view.extent(0); ++r)
      for (std::int64_t h = 0; h < view.extent(1); ++h) {
        random.fill(row);
        for (std::int64_t d = 0; d < view.extent(2); ++d)
          view(r, h, d) = row[static_cast<std::size_t>(d)];
      }
    return *this;
  }
  double at(std::int64_t r, std::int64_t h, std::int64_t d) const {
    return double{__bfloat162float(view(r, h, d))};
  }
};

// Σ a(i) · b(i) and what bf16 output of an fp32 sum may differ from it by.
void expect_dot(bfloat16 got, int terms, const std::function<double(int)>& a,
                const std::function<double(int)>& b, const std::string& where) {
  double sum = 0, magnitude = 0;
  for (int i = 0; i < terms; ++i) {
    sum += a(i) * b(i);
    magnitude += std::fabs(a(i) * b(i));
  }
  // Half an ulp of bf16, and sqrt(terms) roundings of fp32.
  ASSERT_NEAR(double{__bfloat162float(got)}, sum,
              std::fabs(sum) * 0x1p-8 + 4 * kEpsilon * std::sqrt(terms) * magnitude)
      << where;
}

std::string place(std::int64_t row, std::int64_t head, std::int64_t element) {
  return "row " + std::to_string(row) + " head " + std::to_string(head) + " element " +
         std::to_string(element);
}

using EntryAndProblem = std::tuple<std::string, ProjectionTest>;
class Projection : public testing::TestWithParam<EntryAndProblem> {
 protected:
  const std::string& entry() const { return std::get<0>(GetParam()); }
  const ProjectionTest& problem() const { return std::get<1>(GetParam()); }
  std::int64_t count() const { return static_cast<std::int64_t>(problem().tokens.size()); }
  // The plain sums are slow: every output element of a small problem, every n-th of a large one.
  int step() const {
    const std::int64_t work = count() * problem().heads * problem().lora * problem().lora;
    return static_cast<int>(work / (std::int64_t{1} << 24) | 1);
  }
};

TEST_P(Projection, UpProject) {
  const ProjectionTest& p = problem();
  Random random;
  // The rope part of latent rows is no input.
  std::vector<bfloat16> latent = poisoned<bfloat16>(count() * (p.lora + p.rope));
  const auto rows =
      strided<bfloat16, 2>(latent.data(), {count(), p.lora + p.rope}, {p.lora + p.rope, 1});
  Tensor values(count(), 1, p.lora, 0);
  values.randomise(random);
  for (std::int64_t r = 0; r < count(); ++r)
    for (int l = 0; l < p.lora; ++l) rows(r, l) = values.view(r, 0, l);
  Tensor weights(p.heads, p.nope + p.value, p.lora, 2 * p.gap);
  weights.randomise(random);
  Tensor kv(count(), p.heads, p.nope + p.value, 3 * p.gap);

  UpProjectCall call;
  call.latent = rows;
  call.kv_b_proj = weights.view;
  call.kv = kv.view;
  const UpProjectProblem bounds{p.heads, p.lora, p.nope + p.value, count()};
  run_entry(up_project_operation(), entry(), bounds, call);

  for (std::int64_t r = 0; r < count(); ++r)
    for (int h = 0; h < p.heads; ++h)
      for (int d = static_cast<int>(r + h) % step(); d < p.nope + p.value; d += step()) {
        expect_dot(
            kv.view(r, h, d), p.lora, [&](int l) { return values.at(r, 0, l); },
            [&](int l) { return weights.at(h, d, l); }, place(r, h, d));
        if (HasFatalFailure()) return;
      }
  const auto first = kv.data;
  run_entry(up_project_operation(), entry(), bounds, call);
  EXPECT_TRUE(same_bits(first, kv.data));
}

TEST_P(Projection, AbsorbQuery) {
  const ProjectionTest& p = problem();
  Random random;
  Tensor q(p.num_tokens, p.heads, p.nope + p.rope, p.gap),
      weights(p.heads, p.nope + p.value, p.lora, 2 * p.gap);
  q.randomise(random);
  weights.randomise(random);
  Tensor absorbed(count(), p.heads, p.lora + p.rope, 3 * p.gap);

  AbsorbQueryCall call;
  call.q = q.view;
  call.kv_b_proj = weights.view;
  call.tokens = p.tokens;
  call.absorbed = absorbed.view;
  const AbsorbQueryProblem bounds{p.heads, p.lora, p.nope, p.rope, count()};
  run_entry(absorb_query_operation(), entry(), bounds, call);

  for (std::int64_t i = 0; i < count(); ++i) {
    const std::int64_t t = p.tokens[static_cast<std::size_t>(i)];
    for (int h = 0; h < p.heads; ++h) {
      for (int l = static_cast<int>(i + h) % step(); l < p.lora; l += step()) {
        expect_dot(
            absorbed.view(i, h, l), p.nope, [&](int d) { return q.at(t, h, d); },
            [&](int d) { return weights.at(h, d, l); }, place(i, h, l));
        if (HasFatalFailure()) return;
      }
      for (int d = 0; d < p.rope; ++d)
        ASSERT_EQ(absorbed.at(i, h, p.lora + d), q.at(t, h, p.nope + d)) << place(i, h, d);
    }
  }
  const auto first = absorbed.data;
  run_entry(absorb_query_operation(), entry(), bounds, call);
  EXPECT_TRUE(same_bits(first, absorbed.data));

  // A token alone gets the bits that it gets in a batch.
  for (std::size_t i = 0; i < p.tokens.size(); i += 1 + p.tokens.size() / 4) {
    Tensor alone(1, p.heads, p.lora + p.rope, 0);
    call.tokens = {&p.tokens[i], 1};
    call.absorbed = alone.view;
    run_entry(absorb_query_operation(), entry(), bounds, call);
    for (int h = 0; h < p.heads; ++h)
      ASSERT_EQ(
          std::memcmp(&alone.view(0, h, 0), &absorbed.view(static_cast<std::int64_t>(i), h, 0),
                      static_cast<std::size_t>(p.lora + p.rope) * sizeof(bfloat16)),
          0)
          << place(static_cast<std::int64_t>(i), h, 0);
  }
}

TEST_P(Projection, ProjectValue) {
  const ProjectionTest& p = problem();
  Random random;
  Tensor latent(count(), p.heads, p.lora, p.gap),
      weights(p.heads, p.nope + p.value, p.lora, 2 * p.gap);
  latent.randomise(random);
  weights.randomise(random);
  Tensor out(p.num_tokens, p.heads, p.value, 3 * p.gap);

  ProjectValueCall call;
  call.latent_out = latent.view;
  call.kv_b_proj = weights.view;
  call.tokens = p.tokens;
  call.out = out.view;
  const ProjectValueProblem bounds{p.heads, p.lora, p.value, count()};
  run_entry(project_value_operation(), entry(), bounds, call);

  for (std::int64_t i = 0; i < count(); ++i)
    for (int h = 0; h < p.heads; ++h)
      for (int d = static_cast<int>(i + h) % step(); d < p.value; d += step()) {
        expect_dot(
            out.view(p.tokens[static_cast<std::size_t>(i)], h, d), p.lora,
            [&](int l) { return latent.at(i, h, l); },
            [&](int l) { return weights.at(h, p.nope + d, l); }, place(i, h, d));
        if (HasFatalFailure()) return;
      }
  // The other tokens are left alone.
  std::vector<bool> listed(static_cast<std::size_t>(p.num_tokens), false);
  for (const std::int32_t t : p.tokens) listed[static_cast<std::size_t>(t)] = true;
  for (std::int64_t t = 0; t < p.num_tokens; ++t)
    for (int h = 0; h < p.heads && !listed[static_cast<std::size_t>(t)]; ++h)
      for (int d = 0; d < p.value; ++d) ASSERT_TRUE(__hisnan(out.view(t, h, d)));
  const auto first = out.data;
  run_entry(project_value_operation(), entry(), bounds, call);
  EXPECT_TRUE(same_bits(first, out.data));

  for (std::size_t i = 0; i < p.tokens.size(); i += 1 + p.tokens.size() / 4) {
    Tensor alone(p.num_tokens, p.heads, p.value, 0);
    call.tokens = {&p.tokens[i], 1};
    call.latent_out = strided<const bfloat16, 3>(
        address(latent.view, static_cast<std::int64_t>(i), 0, 0), {1, p.heads, p.lora},
        {latent.view.stride(0), latent.view.stride(1), 1});
    call.out = alone.view;
    run_entry(project_value_operation(), entry(), bounds, call);
    for (int h = 0; h < p.heads; ++h)
      ASSERT_EQ(std::memcmp(&alone.view(p.tokens[i], h, 0), &out.view(p.tokens[i], h, 0),
                            static_cast<std::size_t>(p.value) * sizeof(bfloat16)),
                0)
          << place(static_cast<std::int64_t>(i), h, 0);
  }
}

std::vector<std::int32_t> every(std::int32_t count, std::int32_t stride) {
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < count; ++i) tokens.push_back(i * stride % (count * stride));
  std::reverse(tokens.begin(), tokens.end());
  return tokens;
}

std::vector<ProjectionTest> problems() {
  std::vector<ProjectionTest> list;
  for (const int heads : {1, 16}) list.push_back({heads, 512, 128, 64, 128, {7, 3}, 9});
  for (const int heads : {8, 24, 128}) list.push_back({heads, 96, 32, 16, 24, {7, 3}, 9});
  list.push_back({4, 512, 192, 64, 256, {5, 2, 0, 1, 6, 9, 4}, 10});
  list.push_back({3, 20, 10, 5, 13, every(9, 1), 9});  // no whole vectors
  list.push_back({3, 20, 10, 0, 13, every(70, 3), 210});
  list.push_back({2, 64, 32, 8, 16, every(257, 2), 514});  // several tiles
  list.push_back({5, 24, 16, 8, 8, every(600, 1), 600});
  list.push_back({1, 8, 4, 2, 4, every(66000, 1), 66000});
  list.push_back({2, 16, 8, 4, 8, {}, 0});
  list.push_back({16, 512, 128, 64, 128, {7, 3}, 9, 8});
  list.push_back({128, 96, 32, 16, 24, {7, 3, 5}, 9, 8});
  list.push_back({2, 64, 32, 8, 16, every(257, 2), 514, 8});
  list.push_back({3, 24, 16, 8, 8, every(2100, 1), 2100, 8});
  return list;
}

// The three operations have the same entries.
const auto kEntries = support::usable_entries(up_project_operation());
INSTANTIATE_TEST_SUITE_P(EveryEntry, Projection,
                         testing::Combine(testing::ValuesIn(kEntries),
                                          testing::ValuesIn(problems())));

class ProjectionEntry : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(EveryEntry, ProjectionEntry, testing::ValuesIn(kEntries));

TEST(ProjectionEntries, AreTheSame) {
  EXPECT_EQ(kEntries, support::usable_entries(absorb_query_operation()));
  EXPECT_EQ(kEntries, support::usable_entries(project_value_operation()));
}

template <class Problem, class Call>
void refuses(const Operation<Problem, Call>& operation, const std::string& entry,
             const Problem& problem, const Call& call, const Tensor& out, const std::string& text) {
  const auto before = out.data;
  try {
    run_entry(operation, entry, problem, call);
    ADD_FAILURE() << "accepted: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), testing::StartsWith(text));
  }
  EXPECT_TRUE(same_bits(before, out.data));
}

TEST_P(ProjectionEntry, RefusesBadArgumentsBeforeWriting) {
  const Tensor weights(2, 24, 16, 0), latent(3, 2, 16, 0), q(4, 2, 12, 0);
  const Tensor kv(3, 2, 24, 0), absorbed(3, 2, 20, 0), out(4, 2, 16, 0);
  const std::vector<std::int32_t> tokens{3, 0, 1}, beyond{3, 4, 1}, negative{3, 0, -1};

  UpProjectCall up;
  up.latent = strided<const bfloat16, 2>(latent.data.data(), {3, 16}, {16, 1});
  up.kv_b_proj = weights.view;
  up.kv = kv.view;
  const auto up_refuses = [&](UpProjectProblem p, const std::string& text) {
    refuses(up_project_operation(), GetParam(), p, up, kv, text);
  };
  up_refuses({1, 16, 24, 3}, "kv:");
  up_refuses({2, 16, 24, 2}, "kv:");
  up_refuses({2, 16, 23, 3}, "kv:");
  up_refuses({2, 17, 24, 3}, "latent:");
  up_refuses({2, 15, 24, 3}, "kv_b_proj:");
  up.latent = strided<const bfloat16, 2>(latent.data.data(), {3, 16}, {1, 3});
  up_refuses({2, 16, 24, 3}, "latent:");

  AbsorbQueryCall absorb{q.view, weights.view, tokens, absorbed.view};
  const auto absorb_refuses = [&](AbsorbQueryProblem p, const std::string& text) {
    refuses(absorb_query_operation(), GetParam(), p, absorb, absorbed, text);
  };
  absorb_refuses({3, 16, 8, 4, 3}, "q:");
  absorb_refuses({2, 16, 9, 4, 3}, "q:");
  absorb_refuses({2, 15, 8, 4, 3}, "kv_b_proj:");
  absorb_refuses({2, 16, 8, 4, 2}, "tokens:");
  const bool looks_inside = support::checks_contents(absorb_query_operation(), GetParam());
  absorb.tokens = beyond;
  if (looks_inside) absorb_refuses({2, 16, 8, 4, 3}, "tokens[1]:");
  absorb.tokens = {tokens.data(), 2};
  absorb_refuses({2, 16, 8, 4, 3}, "absorbed:");

  ProjectValueCall project{latent.view, weights.view, tokens, out.view};
  const auto project_refuses = [&](ProjectValueProblem p, const std::string& text) {
    refuses(project_value_operation(), GetParam(), p, project, out, text);
  };
  project_refuses({3, 16, 16, 3}, "latent_out:");
  project_refuses({2, 15, 16, 3}, "latent_out:");
  project_refuses({2, 16, 15, 3}, "out:");
  project_refuses({2, 16, 16, 2}, "tokens:");
  project.tokens = negative;
  if (looks_inside) project_refuses({2, 16, 16, 3}, "tokens[2]:");
}

}  // namespace
}  // namespace sparse_mla
