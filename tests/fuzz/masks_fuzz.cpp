// Bytes → members → mask layouts whose parts follow each other without gap or overlap, at any
// length; and reading a row bit by bit agrees with the funnel shift at every offset.
#include <cstdint>
#include <vector>

#include <fuzzer/FuzzedDataProvider.h>

#include "sparse_mla/masks.h"

#include "tests/fuzz/expect.h"

namespace {

using namespace sparse_mla;
using fuzz::expect;

void check_layout(const std::vector<ChunkMember>& members, MaskScope scope, MaskTile tile) {
  const MaskLayout layout = plan_masks(members, scope, tile);
  expect(layout.members.size() == members.size(), "one record per member");
  expect(layout.budget_words == mask_budget_words(members, scope), "budget_words");
  std::int64_t words = 0, ids = 0, counts = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const MaskMember& mask = layout.members[i];
    const std::int64_t query_tiles =
        (std::int64_t{members[i].query_len} + tile.queries - 1) / tile.queries;
    expect(mask.word_offset == words && mask.tile_offset == ids && mask.tile_count_offset == counts,
           "members follow each other");
    expect(std::int64_t{mask.row_words} * 32 >= std::int64_t{mask.num_keys} + 32,
           "a row holds its keys and a pad word");
    words += std::int64_t{members[i].query_len} * mask.row_words;
    ids += query_tiles * mask.max_tiles;
    counts += query_tiles;
    const std::int64_t end = std::int64_t{mask.first_key} + mask.num_keys;
    expect(mask.num_keys == 0 || std::int64_t{mask.first_tile + mask.max_tiles} * tile.keys >= end,
           "the lists have room for every tile");
  }
  expect(
      words == layout.num_words && ids == layout.num_tile_ids && counts == layout.num_tile_counts,
      "totals");
}

void check_reading(FuzzedDataProvider& input) {
  MaskMember member;
  member.first_key = input.ConsumeIntegralInRange(0, 1000);
  member.num_keys = input.ConsumeIntegralInRange(0, 300);
  member.row_words = (member.num_keys + 31) / 32 + 1;
  std::vector<std::uint32_t> row(member.row_words, 0);
  for (int bit = 0; bit < member.num_keys; ++bit)
    row[bit / 32] |= std::uint32_t{input.ConsumeBool()} << (bit % 32);
  for (int key = 0; key < member.num_keys; ++key) {
    const int end = input.ConsumeIntegralInRange(0, member.num_keys);
    const std::uint32_t word =
        mask_word(row.data(), member, member.first_key + key, member.first_key + end);
    for (int bit = 0; bit < 32; ++bit) {
      const int at = key + bit;
      const bool set = at < end && ((row[at / 32] >> (at % 32)) & 1) != 0;
      expect(((word >> bit) & 1) == (set ? 1u : 0u), "a bit is read where it lies");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  const MaskTile tile{input.ConsumeIntegralInRange(1, 300),
                      32 * input.ConsumeIntegralInRange(1, 40)};
  check_reading(input);
  std::vector<ChunkMember> members;
  while (input.remaining_bytes() > 0 && members.size() < 64) {
    ChunkMember member;
    const int bits = input.ConsumeIntegralInRange(0, 30);
    member.query_len = input.ConsumeIntegralInRange(0, (1 << bits) - 1);
    member.context_len = input.ConsumeIntegralInRange(0, 2147483647 - member.query_len);
    member.first_key = input.ConsumeIntegralInRange(0, member.context_len);
    member.num_keys = input.ConsumeIntegralInRange(0, member.context_len - member.first_key);
    if (input.ConsumeBool())
      member.first_key = member.context_len, member.num_keys = member.query_len;
    members.push_back(member);
  }
  check_layout(members, MaskScope::per_chunk, tile);
  check_layout(members, MaskScope::global, tile);
  return 0;
}
