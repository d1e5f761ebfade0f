#include "tests/support/picks.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "tests/support/random_streams.h"

namespace sparse_mla::support {
namespace {

constexpr std::uint32_t kKeep = 3435973836u;  // 0.8 · 2^32

/// A set of positions [0, size) as bits.
class PositionSet {
 public:
  explicit PositionSet(std::int64_t size) : words_(static_cast<std::size_t>((size + 63) / 64)) {}
  bool has(std::int64_t position) const { return (word(position) >> (position % 64)) & 1; }
  /// False if it was there already.
  bool insert(std::int64_t position) {
    if (has(position)) return false;
    words_[static_cast<std::size_t>(position / 64)] |= std::uint64_t{1} << (position % 64);
    return true;
  }
  void write_ascending(std::span<std::int32_t> picks) const {
    std::size_t count = 0;
    for (std::size_t w = 0; w < words_.size(); ++w) {
      for (std::uint64_t rest = words_[w]; rest != 0; rest &= rest - 1) {
        picks[count++] = static_cast<std::int32_t>(w * 64) + std::countr_zero(rest);
      }
    }
    std::fill(picks.begin() + static_cast<std::ptrdiff_t>(count), picks.end(), -1);
  }

 private:
  std::uint64_t word(std::int64_t position) const {
    return words_[static_cast<std::size_t>(position / 64)];
  }
  std::vector<std::uint64_t> words_;
};

/// Everything that the token sees, where that fits; returns false where it does not.
bool pick_all(std::int64_t position, std::span<std::int32_t> picks) {
  const auto topk = static_cast<std::int64_t>(picks.size());
  if (position + 1 > topk) return false;
  for (std::int64_t i = 0; i < topk; ++i) {
    picks[static_cast<std::size_t>(i)] = i <= position ? static_cast<std::int32_t>(i) : -1;
  }
  return true;
}

}  // namespace

void random_picks(std::uint64_t seed, std::int64_t request_id, std::int64_t position,
                  std::span<std::int32_t> picks) {
  if (pick_all(position, picks)) return;
  RandomSequence random(seed, stream_of(RandomStream::random_picks, request_id),
                        static_cast<std::uint64_t>(position));
  PositionSet set(position + 1);
  set.insert(position);
  // Floyd's sampling of topk - 1 positions before the token's own: exactly one draw each.
  const auto wanted = static_cast<std::int64_t>(picks.size()) - 1;
  for (std::int64_t last = position - wanted; last < position; ++last) {
    if (!set.insert(random.below(last + 1))) set.insert(last);
  }
  set.write_ascending(picks);
}

void clustered_picks(std::uint64_t seed, std::int64_t request_id, std::int64_t position,
                     std::span<const std::int32_t> before, std::span<std::int32_t> picks) {
  if (pick_all(position, picks)) return;
  RandomSequence random(seed, stream_of(RandomStream::clustered_picks, request_id),
                        static_cast<std::uint64_t>(position));
  std::vector<std::int32_t> kept;
  for (const std::int32_t pick : before) {
    if (pick >= 0 && random.bits() < kKeep) kept.push_back(pick);
  }
  // The token itself needs a place even when all were kept.
  const auto wanted = static_cast<std::int64_t>(picks.size());
  if (static_cast<std::int64_t>(kept.size()) == wanted) {
    kept[static_cast<std::size_t>(random.below(wanted))] = static_cast<std::int32_t>(position);
  }
  PositionSet set(position + 1);
  std::int64_t count = set.insert(position) ? 1 : 0;
  for (const std::int32_t pick : kept) count += set.insert(pick) ? 1 : 0;
  while (count < wanted) count += set.insert(random.below(position + 1)) ? 1 : 0;
  set.write_ascending(picks);
}

}  // namespace sparse_mla::support
