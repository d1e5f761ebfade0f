// Operation `attend`: every entry against plain fp64 loops.
#include <algorithm>
#include <bit>
#include <cmath>
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

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1 in fp32

struct Member {
  int query_len = 0, context_len = 0, first_key = 0, num_keys = 0;
};

enum class Pattern {
  random,        // half of the bits
  sparse,        // one bit in forty
  checkerboard,  // alternate tiles empty
  odd_rows,      // even rows see nothing
  rows_apart,    // every third 64 rows and every fifth of the others see nothing
  empty,         // nothing is selected
};

struct AttendTest {
  int heads = 1, nope = 128, rope = 64, value = 128;
  AttendMode mode = AttendMode::dense;
  std::vector<Member> members;
  int merge_row_end = 0;
  MaskScope scope = MaskScope::per_chunk;
  Pattern pattern = Pattern::random;
  MaskTile tile;
  bool fortran_out = false;  // out with its rows innermost
  bool aligned = false;      // every row of q, k and v at a 16-byte boundary
  bool two_terms = false;    // AttendProblem::two_term_weights
};

std::ostream& operator<<(std::ostream& out, const AttendTest& p) {
  out << to_string(p.mode) << ' ' << p.heads << " heads, " << p.nope << '+' << p.rope << ", "
      << p.value << ", merge below " << p.merge_row_end;
  if (p.mode == AttendMode::masked)
    out << ", " << to_string(p.scope) << " pattern " << static_cast<int>(p.pattern) << " tile "
        << p.tile.queries << 'x' << p.tile.keys;
  if (p.aligned) out << ", aligned";
  if (p.two_terms) out << ", two-term weights";
  out << ", members (queries, context, first key, keys):";
  for (const Member& m : p.members)
    out << " (" << m.query_len << ", " << m.context_len << ", " << m.first_key << ", " << m.num_keys
        << ')';
  return out;
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float uniform() { return static_cast<float>(static_cast<double>(engine_()) * 0x1p-31 - 1.0); }
  bfloat16 bf16() { return __float2bfloat16_rn(uniform()); }
  unsigned below(unsigned bound) { return engine_() % bound; }

 private:
  std::mt19937 engine_;
};

// A call with all memory around what it may touch set to NaN.
struct AttendData {
  AttendProblem problem;
  std::vector<ChunkMember> members;
  std::vector<bfloat16> q, k_nope, k_pe, v;
  std::vector<float> out, lse, out_before, lse_before;
  std::vector<MaskMember> mask_members;
  std::vector<std::uint32_t> words;
  std::vector<std::int32_t> tile_counts, tile_ids;
  std::vector<bool> written;  // running rows that some member owns
  AttendCall call;

  explicit AttendData(const AttendTest& p) {
    Random random(7);
    std::int64_t tokens = 2, rows = 3, packed = 1;
    for (const Member& m : p.members) {
      ChunkMember member;
      member.query_start = static_cast<std::int32_t>(tokens);
      member.query_len = m.query_len;
      member.packed_token = static_cast<std::int32_t>(packed);
      member.context_len = m.context_len;
      member.first_key = m.first_key;
      member.num_keys = m.num_keys;
      member.key_row = static_cast<std::int32_t>(rows);
      members.push_back(member);
      tokens += m.query_len + 1;
      packed += m.query_len;
      rows += m.num_keys + 2;  // rows of nobody, NaN
    }
    ++packed;
    const int qk = p.nope + p.rope, heads = p.heads;
    // Row strides larger than rows; heads of k_nope and v strided apart, as in one kv tensor.
    const std::int64_t q_head = qk + 8, kn_head = p.nope + (p.aligned ? 8 : 3),
                       v_head = p.value + (p.aligned ? 16 : 5),
                       pe_row = p.rope + (p.aligned ? 8 : 1);
    q = poisoned<bfloat16>(tokens * heads * q_head);
    k_nope = poisoned<bfloat16>(rows * heads * kn_head);
    k_pe = poisoned<bfloat16>(rows * pe_row);
    v = poisoned<bfloat16>(rows * heads * v_head);
    for (const ChunkMember& m : members) {
      for (std::int64_t t = m.query_start; t < m.query_start + m.query_len; ++t)
        for (int h = 0; h < heads; ++h)
          for (int d = 0; d < qk; ++d) q[(t * heads + h) * q_head + d] = random.bf16();
      for (std::int64_t r = m.key_row; r < m.key_row + m.num_keys; ++r) {
        for (int d = 0; d < p.rope; ++d) k_pe[r * pe_row + d] = random.bf16();
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < p.nope; ++d) k_nope[(r * heads + h) * kn_head + d] = random.bf16();
          for (int d = 0; d < p.value; ++d) v[(r * heads + h) * v_head + d] = random.bf16();
        }
      }
    }
    call.q = strided<const bfloat16, 3>(q.data(), {tokens, heads, qk}, {heads * q_head, q_head, 1});
    call.k_nope = strided<const bfloat16, 3>(k_nope.data(), {rows, heads, p.nope},
                                             {heads * kn_head, kn_head, 1});
    call.k_pe = strided<const bfloat16, 2>(k_pe.data(), {rows, p.rope}, {pe_row, 1});
    call.v =
        strided<const bfloat16, 3>(v.data(), {rows, heads, p.value}, {heads * v_head, v_head, 1});
    call.members = members;
    call.softmax_scale = 0.5f / std::sqrt(static_cast<float>(qk)) * 4;

    // The running partial: some rows without keys so far, with NaN where nothing may be read.
    out = poisoned<float>(packed * heads * p.value);
    lse = poisoned<float>(heads * packed);
    written.assign(static_cast<std::size_t>(packed), false);
    if (p.fortran_out) {
      call.running.out =
          strided<float, 3>(out.data(), {packed, heads, p.value}, {1, packed * p.value, packed});
      call.running.lse = strided<float, 2>(lse.data(), {heads, packed}, {1, heads});
    } else {
      call.running.out = contiguous(out.data(), packed, heads, p.value);
      call.running.lse = contiguous(lse.data(), heads, packed);
    }
    for (const ChunkMember& m : members)
      for (std::int64_t row = m.packed_token; row < m.packed_token + m.query_len; ++row) {
        written[static_cast<std::size_t>(row)] = true;
        if (row >= p.merge_row_end) continue;
        for (int h = 0; h < heads; ++h) {
          const bool empty = random.below(5) == 0;
          call.running.lse(h, row) = empty ? -kInfinity : 3 * random.uniform();
          for (int d = 0; d < p.value; ++d)
            call.running.out(row, h, d) = empty ? 0.0f : d % 5 == 0 ? -0.0f : random.uniform();
        }
      }
    call.merge_row_end = p.merge_row_end;
    if (p.mode == AttendMode::masked) build_mask(p, random);

    problem = {heads, p.nope, p.rope, p.value, p.mode, tokens, rows, p.two_terms};
    out_before = out;
    lse_before = lse;
  }

  bool seen(const AttendTest& p, std::size_t m, std::int64_t j, std::int64_t key) const {
    if (p.mode == AttendMode::dense) return true;
    if (p.mode == AttendMode::causal) return key <= members[m].context_len + j;
    const MaskMember& mask = mask_members[m];
    const std::int64_t bit = key - mask.first_key;
    return (words[static_cast<std::size_t>(mask.word_offset + j * mask.row_words + bit / 32)] >>
                (bit % 32) &
            1u) != 0;
  }

  void restore() {
    out = out_before;
    lse = lse_before;
  }

 private:
  void build_mask(const AttendTest& p, Random& random) {
    for (const ChunkMember& m : members) {
      MaskMember mask;
      mask.first_key = p.scope == MaskScope::global ? 0 : m.first_key;
      // A global mask goes on behind the chunk: those bits belong to the next one.
      mask.num_keys =
          m.first_key + m.num_keys - mask.first_key + (p.scope == MaskScope::global ? 77 : 0);
      mask.row_words = (mask.num_keys + 31) / 32 + 1;
      mask.word_offset = static_cast<std::int64_t>(words.size()) + 1;
      mask.first_tile = mask.first_key / p.tile.keys;
      mask.max_tiles =
          (mask.first_key + mask.num_keys + p.tile.keys - 1) / p.tile.keys - mask.first_tile;
      mask.tile_offset = static_cast<std::int64_t>(tile_ids.size()) + 2;
      mask.tile_count_offset = static_cast<std::int64_t>(tile_counts.size()) + 1;
      const int query_tiles = (m.query_len + p.tile.queries - 1) / p.tile.queries;
      words.resize(
          static_cast<std::size_t>(mask.word_offset + std::int64_t{m.query_len} * mask.row_words));
      tile_ids.resize(
          static_cast<std::size_t>(mask.tile_offset + std::int64_t{query_tiles} * mask.max_tiles),
          -77);
      tile_counts.resize(static_cast<std::size_t>(mask.tile_count_offset + query_tiles), -77);
      for (int qt = 0; qt < query_tiles; ++qt) {
        std::vector<bool> used(static_cast<std::size_t>(mask.max_tiles), false);
        const int end = std::min((qt + 1) * p.tile.queries, m.query_len);
        for (int j = qt * p.tile.queries; j < end; ++j)
          for (std::int64_t bit = 0; bit < mask.num_keys; ++bit) {
            const auto tile = static_cast<int>((mask.first_key + bit) / p.tile.keys);
            if (!choose(p.pattern, random, qt, tile, j)) continue;
            words[static_cast<std::size_t>(mask.word_offset + std::int64_t{j} * mask.row_words +
                                           bit / 32)] |= std::uint32_t{1} << (bit % 32);
            used[static_cast<std::size_t>(tile - mask.first_tile)] = true;
          }
        std::int32_t count = 0;
        for (std::int32_t t = 0; t < mask.max_tiles; ++t)
          if (used[static_cast<std::size_t>(t)])
            tile_ids[static_cast<std::size_t>(mask.tile_offset + std::int64_t{qt} * mask.max_tiles +
                                              count++)] = mask.first_tile + t;
        tile_counts[static_cast<std::size_t>(mask.tile_count_offset + qt)] = count;
      }
      mask_members.push_back(mask);
    }
    call.mask = {p.tile, mask_members, words.data(), tile_counts.data(), tile_ids.data()};
  }

  static bool choose(Pattern pattern, Random& random, int query_tile, int key_tile, int j) {
    switch (pattern) {
      case Pattern::random:
        return random.below(2) == 0;
      case Pattern::sparse:
        return random.below(40) == 0;
      case Pattern::checkerboard:
        return (query_tile + key_tile) % 2 == 0 && random.below(2) == 0;
      case Pattern::odd_rows:
        return j % 2 == 1 && random.below(3) == 0;
      case Pattern::rows_apart:
        return j / 64 % 3 != 1 && j % 5 != 2 && random.below(2) == 0;
      case Pattern::empty:
        return false;
    }
    return false;
  }
};

bool same_value(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// An error of the output where the entry rounds the softmax weights to bf16 for the product with
// the values (|v| ≤ 1): half an ulp each.
// Two terms leave the square of that.
double weight_rounding(const std::string& entry, bool two_terms) {
  if (entry != "cuda_mma" && entry != "sm90_wgmma") return 0;
  return two_terms ? 0x1p-16 : 0x1p-8;
}

using EntryAndProblem = std::tuple<std::string, AttendTest>;
class Attend : public testing::TestWithParam<EntryAndProblem> {};

TEST_P(Attend, AgreesWithPlainLoops) {
  const auto& [entry, p] = GetParam();
  AttendData data(p);
  run_entry(attend_operation(), entry, data.problem, data.call);
  const AttendCall& call = data.call;
  const int qk = p.nope + p.rope;

  const View3<const float> out_before(data.out_before.data(), call.running.out.mapping());
  const View2<const float> lse_before(data.lse_before.data(), call.running.lse.mapping());
  for (std::size_t m = 0; m < p.members.size(); ++m) {
    const ChunkMember& member = data.members[m];
    for (int j = 0; j < member.query_len; ++j) {
      const std::int64_t row = member.packed_token + j;
      for (int h = 0; h < p.heads; ++h) {
        std::vector<double> score, sum_v(static_cast<std::size_t>(p.value), 0.0);
        std::vector<std::int64_t> key_rows;
        double magnitude = 0, top = -HUGE_VAL;
        for (std::int64_t i = 0; i < member.num_keys; ++i) {
          if (!data.seen(p, m, j, member.first_key + i)) continue;
          double dot = 0, absolute = 0;
          for (int d = 0; d < qk; ++d) {
            const std::int64_t r = member.key_row + i;
            const double product = double{__bfloat162float(call.q(member.query_start + j, h, d))} *
                                   double{__bfloat162float(d < p.nope ? call.k_nope(r, h, d)
                                                                      : call.k_pe(r, d - p.nope))};
            dot += product;
            absolute += std::fabs(product);
          }
          key_rows.push_back(member.key_row + i);
          score.push_back(dot * double{call.softmax_scale});
          magnitude = std::max(magnitude, absolute * double{call.softmax_scale});
          top = std::max(top, score.back());
        }
        double sum = 0;
        for (std::size_t i = 0; i < score.size(); ++i) {
          const double weight = std::exp(score[i] - top);
          sum += weight;
          for (int d = 0; d < p.value; ++d)
            sum_v[static_cast<std::size_t>(d)] +=
                weight * double{__bfloat162float(call.v(key_rows[i], h, d))};
        }
        double lse = score.empty() ? -HUGE_VAL : top + std::log(sum);
        for (double& value : sum_v) value = score.empty() ? 0.0 : value / sum;

        const float got_lse = call.running.lse(h, row);
        const bool merged = row < p.merge_row_end;
        if (score.empty()) {
          // Nothing seen: empty where written, untouched where merged.
          ASSERT_TRUE(same_value(got_lse, merged ? lse_before(h, row) : -kInfinity))
              << "row " << row;
          for (int d = 0; d < p.value; ++d)
            ASSERT_TRUE(
                same_value(call.running.out(row, h, d), merged ? out_before(row, h, d) : 0.0f))
                << "row " << row << " head " << h << " element " << d;
          continue;
        }
        if (merged && lse_before(h, row) != -kInfinity) {
          const double before = double{lse_before(h, row)};
          const double joint =
              std::max(before, lse) + std::log1p(std::exp(-std::fabs(before - lse)));
          for (int d = 0; d < p.value; ++d) {
            double& value = sum_v[static_cast<std::size_t>(d)];
            value = std::exp(before - joint) * double{out_before(row, h, d)} +
                    std::exp(lse - joint) * value;
          }
          lse = joint;
        }
        // fp32 sums of n terms err by about sqrt(n) roundings of the terms' magnitude; an error of
        // a score changes every weight by as much. |v| ≤ 1, |out before| ≤ 1.
        const double bound = 4 * kEpsilon *
                             (std::sqrt(qk) * magnitude +
                              std::sqrt(static_cast<double>(score.size())) + 4 + std::fabs(lse));
        ASSERT_NEAR(double{got_lse}, lse, bound) << "row " << row << " head " << h;
        for (int d = 0; d < p.value; ++d)
          ASSERT_NEAR(double{call.running.out(row, h, d)}, sum_v[static_cast<std::size_t>(d)],
                      2 * bound + weight_rounding(entry, p.two_terms))
              << "row " << row << " head " << h << " element " << d;
      }
    }
  }

  // Rows of nobody keep their bits.
  for (std::size_t row = 0; row < data.written.size(); ++row) {
    if (data.written[row]) continue;
    for (int h = 0; h < p.heads; ++h) {
      EXPECT_TRUE(std::isnan(call.running.lse(h, static_cast<std::int64_t>(row))));
      for (int d = 0; d < p.value; ++d)
        EXPECT_TRUE(std::isnan(call.running.out(static_cast<std::int64_t>(row), h, d)));
    }
  }

  // Again: the same bits.
  const auto out = data.out, lse = data.lse;
  data.restore();
  run_entry(attend_operation(), entry, data.problem, data.call);
  EXPECT_TRUE(same_bits(out, data.out));
  EXPECT_TRUE(same_bits(lse, data.lse));
}

std::vector<AttendTest> problems() {
  std::vector<AttendTest> list;
  const auto add = [&](const AttendTest& p) { list.push_back(p); };
  const AttendMode all_modes[] = {AttendMode::dense, AttendMode::causal, AttendMode::masked};

  // Head counts and both models' widths; members without keys or without queries.
  for (const int heads : {1, 8, 16, 24, 128})
    for (const AttendMode mode : all_modes) {
      AttendTest p;
      p.heads = heads;
      p.mode = mode;
      p.members = {{3, 40, 0, 40}, {0, 10, 0, 10}, {2, 0, 0, 0}, {5, 33, 7, 29}};
      p.merge_row_end = 4;
      add(p);
      p.nope = 192;
      p.value = 256;
      p.fortran_out = true;
      p.merge_row_end = 0;
      add(p);
    }
  // Long members: several query tiles, groups and key blocks; boundaries in the middle of a tile.
  for (const AttendMode mode : all_modes) {
    AttendTest p;
    p.mode = mode;
    p.heads = 2;
    p.members = {{333, 300, 129, 504}, {65, 600, 0, 300}, {1, 1000, 3, 700}};
    p.merge_row_end = 200;
    add(p);
    p.members = {{64, 256, 0, 256}, {128, 0, 0, 128}};
    p.merge_row_end = 1 << 20;
    add(p);
    // Odd widths.
    p.nope = 20;
    p.rope = 10;
    p.value = 13;
    p.members = {{70, 90, 1, 155}};
    add(p);
    p.rope = 0;
    add(p);
  }
  // Rows that can be copied 16 bytes at a time; few rows before so many keys that the keys may be
  // shared out; boundaries, tails and masks as they come.
  for (const bool glm5 : {false, true})
    for (const AttendMode mode : all_modes) {
      AttendTest p;
      if (glm5) p.nope = 192, p.value = 256;
      p.aligned = true;
      p.mode = mode;
      p.heads = 9;
      p.scope = MaskScope::global;
      p.members = {
          {3, 40, 0, 40}, {0, 10, 0, 10}, {2, 0, 0, 0}, {5, 33, 7, 29}, {150, 120, 64, 206}};
      p.merge_row_end = 20;
      add(p);
      p.two_terms = true;
      add(p);
      p.two_terms = false;
      p.heads = 2;
      p.members = {{13, 2300, 3, 2310}, {2, 7, 0, 7}, {33, 1500, 0, 1533}};
      add(p);
      p.two_terms = true;
      add(p);
      p.two_terms = false;
      p.pattern = Pattern::sparse;
      p.scope = MaskScope::per_chunk;
      p.fortran_out = true;
      add(p);
      p.two_terms = true;
      add(p);
      p.two_terms = false;
    }
  for (const MaskScope scope : {MaskScope::per_chunk, MaskScope::global})
    for (const int first : {0, 1, 33, 127, 129, 300})
      for (const int keys : {1, 100, 290}) {
        AttendTest p;
        p.aligned = first % 2 == 0;
        p.heads = 2;
        p.mode = AttendMode::masked;
        p.scope = scope;
        p.pattern = keys == 290 ? Pattern::sparse : Pattern::random;
        p.members = {{5, 700, first, keys}, {70, 700, first, keys}};
        p.merge_row_end = 30;
        add(p);
      }
  for (const Pattern pattern :
       {Pattern::checkerboard, Pattern::sparse, Pattern::odd_rows, Pattern::empty})
    for (const MaskTile tile :
         {MaskTile{}, MaskTile{16, 32}, MaskTile{2, 64}, MaskTile{100, 96}, MaskTile{200, 512}}) {
      AttendTest p;
      p.aligned = true;
      p.mode = AttendMode::masked;
      p.pattern = pattern;
      p.tile = tile;
      p.scope = tile.queries == 16 ? MaskScope::per_chunk : MaskScope::global;
      p.members = {{150, 900, 200, 700}, {7, 100, 0, 100}};
      p.merge_row_end = 70;
      add(p);
    }
  // Tiles of 128 rows × 128 keys: every tail of keys, every tail of rows, and rows that see nothing
  // at each place of a tile.
  for (const AttendMode mode : all_modes) {
    AttendTest p;
    p.aligned = true;
    p.mode = mode;
    p.merge_row_end = 100;
    for (int tail = 1; tail <= 128; ++tail)
      p.members.push_back({1 + tail % 3, 300, tail % 7, tail % 2 * 128 + tail});
    add(p);
    p.members.clear();
    for (int tail = 1; tail <= 128; ++tail)
      p.members.push_back({tail % 4 == 0 ? 128 + tail : tail, 20, 3, 30});
    add(p);
    // Keys in pieces.
    p.members = {{270, 1500, 100, 1669}, {129, 0, 0, 129}};
    add(p);
  }
  for (const MaskTile tile : {MaskTile{}, MaskTile{128, 128}, MaskTile{16, 64}})
    for (const int context : {0, 1500}) {
      AttendTest p;
      p.aligned = true;
      p.mode = AttendMode::masked;
      p.pattern = Pattern::rows_apart;
      p.tile = tile;
      p.members = {{400, context, 0, context + 400}, {64, 200, 0, 200}};
      p.merge_row_end = 150;
      add(p);
    }
  // Causal: the suffix, whole sequences, and keys that only late rows or no row can see.
  for (const Member m : {Member{130, 0, 0, 130}, Member{130, 77, 77, 130}, Member{100, 70, 0, 170},
                         Member{100, 70, 90, 60}, Member{20, 5, 200, 50}, Member{1, 0, 0, 1}}) {
    AttendTest p;
    p.heads = 3;
    p.mode = AttendMode::causal;
    p.members = {m, m};
    p.merge_row_end = 50;
    add(p);
  }
  // Masks: chunks that start and end at any bit.
  for (const MaskScope scope : {MaskScope::per_chunk, MaskScope::global})
    for (const int first : {0, 1, 31, 32, 33, 63, 127, 128, 129, 255, 256, 300})
      for (const int keys : {1, 31, 100, 128, 290}) {
        AttendTest p;
        p.nope = 16;
        p.rope = 8;
        p.value = 16;
        p.heads = 2;
        p.mode = AttendMode::masked;
        p.scope = scope;
        p.pattern = keys == 290 ? Pattern::sparse : Pattern::random;
        p.members = {{5, 700, first, keys}, {70, 700, first, keys}};
        p.merge_row_end = 30;
        add(p);
      }
  for (const Pattern pattern :
       {Pattern::random, Pattern::sparse, Pattern::checkerboard, Pattern::odd_rows, Pattern::empty})
    for (const MaskTile tile :
         {MaskTile{}, MaskTile{16, 32}, MaskTile{100, 96}, MaskTile{200, 512}})
      for (const MaskScope scope : {MaskScope::per_chunk, MaskScope::global}) {
        AttendTest p;
        p.nope = 16;
        p.rope = 8;
        p.value = 24;
        p.heads = 2;
        p.mode = AttendMode::masked;
        p.pattern = pattern;
        p.tile = tile;
        p.scope = scope;
        p.members = {{150, 900, 200, 700}, {7, 100, 0, 100}};
        p.merge_row_end = 70;
        add(p);
      }
  return list;
}

/// What entries are asked for; bounds of tokens and rows aside.
AttendProblem kind_of(const AttendTest& p) {
  return {p.heads, p.nope, p.rope, p.value, p.mode, 0, 0, p.two_terms};
}

// Every entry with every problem that it serves.
std::vector<EntryAndProblem> entries_and_problems() {
  std::vector<EntryAndProblem> list;
  for (const std::string& entry : support::usable_entries(attend_operation()))
    for (const AttendTest& p : problems())
      if (support::serves(attend_operation(), entry, kind_of(p))) list.emplace_back(entry, p);
  return list;
}

INSTANTIATE_TEST_SUITE_P(EveryEntry, Attend, testing::ValuesIn(entries_and_problems()));

class AttendEntry : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(EveryEntry, AttendEntry,
                         testing::ValuesIn(support::usable_entries(attend_operation())));

TEST_P(AttendEntry, WhatItCannotServeIsRefusedBeforeAnythingIsWritten) {
  for (const bool two_terms : {false, true})
    for (const int value : {128, 256}) {
      AttendTest p;
      p.nope = value == 128 ? 128 : 192;
      p.value = value;
      p.two_terms = two_terms;
      p.members = {{3, 40, 0, 40}};
      if (support::serves(attend_operation(), GetParam(), kind_of(p))) continue;
      AttendData data(p);
      EXPECT_THROW(run_entry(attend_operation(), GetParam(), data.problem, data.call),
                   std::invalid_argument);
      EXPECT_EQ(
          std::memcmp(data.out.data(), data.out_before.data(), data.out.size() * sizeof(float)), 0);
    }
}

TEST_P(AttendEntry, LogitsOfAnySizeStayFinite) {
  for (const bool aligned : {false, true}) {
    AttendTest p;
    p.aligned = aligned;
    p.members = {{3, 400, 0, 400}};
    AttendData data(p);
    data.call.softmax_scale = 1e4f;  // logits in the tens of thousands
    run_entry(attend_operation(), GetParam(), data.problem, data.call);
    for (int j = 0; j < 3; ++j) {
      EXPECT_TRUE(std::isfinite(data.call.running.lse(0, data.members[0].packed_token + j)));
      // A mean of |v| ≤ 1 whose weights are rounded to bf16, half an ulp each, and their sum is
      // not.
      for (int d = 0; d < p.value; ++d)
        EXPECT_LE(std::fabs(data.call.running.out(data.members[0].packed_token + j, 0, d)), 1.002f);
    }
  }
}

TEST_P(AttendEntry, FaultsOfARowStayInTheRow) {
  for (const bool aligned : {false, true}) {
    AttendTest p;
    p.aligned = aligned;
    p.heads = 2;
    p.members = {{70, 300, 0, 300}};
    AttendData data(p);
    const int bad = 66;
    data.q[static_cast<std::size_t>((data.members[0].query_start + bad) * 2 * (192 + 8))] =
        __float2bfloat16_rn(std::numeric_limits<float>::quiet_NaN());
    run_entry(attend_operation(), GetParam(), data.problem, data.call);
    for (int j = 0; j < 70; ++j)
      for (int h = 0; h < 2; ++h) {
        const std::int64_t row = data.members[0].packed_token + j;
        const bool faulty = j == bad && h == 0;
        EXPECT_EQ(std::isnan(data.call.running.lse(h, row)), faulty) << j;
        EXPECT_EQ(std::isnan(data.call.running.out(row, h, 5)), faulty) << j;
      }
  }
}

TEST_P(AttendEntry, NothingToDo) {
  AttendTest p;
  AttendData data(p);
  EXPECT_NO_THROW(run_entry(attend_operation(), GetParam(), data.problem, data.call));
  p.members = {{0, 5, 0, 5}, {0, 0, 0, 0}};
  AttendData empty(p);
  EXPECT_NO_THROW(run_entry(attend_operation(), GetParam(), empty.problem, empty.call));
}

TEST_P(AttendEntry, RefusesBadArgumentsBeforeWriting) {
  AttendTest p;
  p.heads = 2;
  p.mode = AttendMode::masked;
  p.members = {{5, 40, 3, 30}};
  const auto refuses = [&](const std::string& text, auto spoil) {
    AttendData data(p);
    spoil(data);
    if (!support::serves(attend_operation(), GetParam(), data.problem))
      return;  // it is refused before the entry sees it
    try {
      run_entry(attend_operation(), GetParam(), data.problem, data.call);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), testing::StartsWith(text));
      EXPECT_THAT(error.what(), testing::HasSubstr("expected"));
    }
    EXPECT_TRUE(same_bits(data.out, data.out_before));
    EXPECT_TRUE(same_bits(data.lse, data.lse_before));
  };
  refuses("q:", [](AttendData& d) { d.problem.num_heads = 1; });
  refuses("q:", [](AttendData& d) { d.problem.qk_rope_head_dim = 63; });
  refuses("v:", [](AttendData& d) { d.problem.v_head_dim = 127; });
  refuses("q:", [](AttendData& d) {
    d.call.q = strided<const bfloat16, 3>(d.q.data(), {3, 2, 192}, {2, 1, 6});
  });
  refuses("mask.members:", [](AttendData& d) { d.call.mask.members = {}; });
  refuses("mask:", [](AttendData& d) { d.call.mask.words = nullptr; });
  if (!support::checks_contents(attend_operation(), GetParam())) {
    // A device attends nothing for a member whose rows are not there.
    const auto skips = [&](auto spoil) {
      AttendData data(p);
      spoil(data.members[0]);
      run_entry(attend_operation(), GetParam(), data.problem, data.call);
      EXPECT_TRUE(same_bits(data.out, data.out_before));
      EXPECT_TRUE(same_bits(data.lse, data.lse_before));
    };
    skips([](ChunkMember& member) { member.query_start = 1 << 30; });
    skips([](ChunkMember& member) { member.query_len = -1; });
    skips([](ChunkMember& member) { member.key_row += 9; });
    skips([](ChunkMember& member) { member.packed_token = 3; });
    return;
  }
  refuses("members[0].query_start:", [](AttendData& d) { d.members[0].query_start = 1 << 30; });
  refuses("members[0].query_len:", [](AttendData& d) { d.members[0].query_len = -1; });
  refuses("members[0].key_row:", [](AttendData& d) { d.members[0].key_row += 9; });
  refuses("members[0].packed_token:", [](AttendData& d) { d.members[0].packed_token = 3; });
  refuses("members:", [](AttendData& d) { d.problem.max_query_tokens = 4; });
  refuses("members:", [](AttendData& d) { d.problem.max_key_rows = 29; });
  refuses("mask.members[0]:", [](AttendData& d) { d.mask_members[0].num_keys -= 1; });
}

}  // namespace
}  // namespace sparse_mla
