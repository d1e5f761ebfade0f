// The estimate behind the choice between the masked and the sparse path.
#include "sparse_mla/path_choice.h"

#include <iterator>

#include "kernels/common/path_table.h"

namespace sparse_mla {
namespace {

ChunkMember suffix(std::int32_t query_len, std::int32_t context_len) {
  ChunkMember member{};
  member.query_len = query_len;
  member.context_len = context_len;
  return member;
}

PathCosts costs_of(PathMachine machine, int heads, std::vector<ChunkMember> members) {
  ModelDims dims;
  dims.num_heads = heads;
  return estimate_path_costs(machine, dims, members);
}

double ratio(PathMachine machine, int heads, const ChunkMember& member) {
  const PathCosts costs = costs_of(machine, heads, {member});
  return costs.masked_cost / costs.sparse_cost;
}

/// Keys that the query tokens of a request see and select, by counting.
void count_pairs(const ChunkMember& member, std::int64_t topk, double& seen, double& selected) {
  seen = selected = 0;
  for (std::int64_t i = 0; i < member.query_len; ++i) {
    const std::int64_t keys = member.context_len + i + 1;
    seen += static_cast<double>(keys);
    selected += static_cast<double>(std::min(keys, topk));
  }
}

TEST(PathCosts, OfAPointOfTheTableAreItsEntry) {
  std::size_t entry = 0;
  for (const int heads : kPathHeads)
    for (const int query_len : kPathQueryLens)
      for (const int seq_len : kPathSeqLens) {
        const PathCost& cost = kPathCosts[entry++];
        const ChunkMember member = suffix(query_len, seq_len - query_len);
        double seen, selected;
        count_pairs(member, ModelDims{}.index_topk, seen, selected);
        const PathCosts costs = costs_of(PathMachine::hopper, heads, {member});
        EXPECT_NEAR(costs.masked_cost, heads * seen * cost.masked, 1e-9 * costs.masked_cost);
        EXPECT_NEAR(costs.sparse_cost, heads * selected * cost.sparse, 1e-9 * costs.sparse_cost);
      }
  EXPECT_EQ(entry, std::size(kPathCosts));
}

TEST(PathCosts, BetweenPointsLieBetweenThem) {
  const int heads = (kPathHeads[0] + kPathHeads[1]) / 2;
  const int query_len = (kPathQueryLens[0] + kPathQueryLens[1]) / 2;
  const int seq_len = (kPathSeqLens[0] + kPathSeqLens[1]) / 2;
  float least = kPathCosts[0].masked, greatest = least;
  for (std::size_t h = 0; h < 2; ++h)
    for (std::size_t q = 0; q < 2; ++q)
      for (std::size_t s = 0; s < 2; ++s) {
        const std::size_t row = h * std::size(kPathQueryLens) + q;
        const float cost = kPathCosts[row * std::size(kPathSeqLens) + s].masked;
        least = std::min(least, cost);
        greatest = std::max(greatest, cost);
      }
  const ChunkMember member = suffix(query_len, seq_len - query_len);
  double seen, selected;
  count_pairs(member, ModelDims{}.index_topk, seen, selected);
  const double cost = costs_of(PathMachine::hopper, heads, {member}).masked_cost / (heads * seen);
  EXPECT_GE(cost, least);
  EXPECT_LE(cost, greatest);
}

TEST(PathCosts, BeyondTheTableAreThoseOfItsEnd) {
  const int last_seq = kPathSeqLens[std::size(kPathSeqLens) - 1];
  const ChunkMember end = suffix(kPathQueryLens[0], last_seq - kPathQueryLens[0]),
                    beyond = suffix(kPathQueryLens[0], 4 * last_seq);
  const auto per_pair = [](const ChunkMember& member) {
    double seen, selected;
    count_pairs(member, ModelDims{}.index_topk, seen, selected);
    return costs_of(PathMachine::hopper, kPathHeads[0], {member}).masked_cost / seen;
  };
  EXPECT_NEAR(per_pair(beyond), per_pair(end), 1e-9 * per_pair(end));
}

class EveryMachine : public testing::TestWithParam<PathMachine> {};

TEST_P(EveryMachine, LongQueriesOverShortContextsAreMaskedAndShortOnesOverLongContextsSparse) {
  for (const int heads : {1, 8, 16, 32, 64, 128}) {
    EXPECT_LT(ratio(GetParam(), heads, suffix(4000, 1000)), 1) << heads;
    EXPECT_GT(ratio(GetParam(), heads, suffix(16, 60000)), 1) << heads;
  }
}

TEST_P(EveryMachine, CostsOfABatchAreTheSumOfItsRequests) {
  const ChunkMember a = suffix(700, 9000), b = suffix(33, 0), empty = suffix(0, 500);
  const PathCosts of_a = costs_of(GetParam(), 16, {a}), of_b = costs_of(GetParam(), 16, {b}),
                  of_both = costs_of(GetParam(), 16, {a, b});
  EXPECT_NEAR(of_both.masked_cost, of_a.masked_cost + of_b.masked_cost, 1e-9 * of_both.masked_cost);
  EXPECT_NEAR(of_both.sparse_cost, of_a.sparse_cost + of_b.sparse_cost, 1e-9 * of_both.sparse_cost);
  EXPECT_TRUE(std::isfinite(costs_of(GetParam(), 16, {empty}).masked_cost));
}

INSTANTIATE_TEST_SUITE_P(Machines, EveryMachine,
                         testing::Values(PathMachine::cpu, PathMachine::gpu, PathMachine::hopper));

}  // namespace
}  // namespace sparse_mla
