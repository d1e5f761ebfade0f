// Operation `map_slots` on the CPU.
#include <string>

#include "kernels/common/cache_checks.h"
#include "kernels/common/request_pages.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const MapSlotsProblem& problem, const MapSlotsCall& call) {
  check_shapes(problem, call);
  for (std::int64_t row = 0; row < call.slots.extent(0); ++row) {
    const std::int64_t token = call.tokens == nullptr ? row : call.tokens[row];
    require(token >= 0 && token < call.picks.extent(0), "tokens[" + std::to_string(row) + "]",
            token, "a row of picks, below " + std::to_string(call.picks.extent(0)));
  }
}

void run(const MapSlotsProblem& problem, const MapSlotsCall& call, std::span<std::byte>, Stream) {
  check(problem, call);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < call.slots.extent(0); ++row) {
    const std::int64_t token = call.tokens == nullptr ? row : call.tokens[row];
    const std::int64_t request = call.request_of_token[token];
    const std::int64_t num_keys = call.keys_of_token[token];
    const RequestPages pages(call.block_tables, request, call.block_size, call.num_blocks);
    const std::int64_t count = call.counts == nullptr ? problem.topk : call.counts[token];
    std::int32_t slot_count = 0;
    for (int i = 0; i < problem.topk; ++i) {
      const std::int32_t pick = call.picks(token, i);
      const bool valid = i < count && pick >= 0 && pick < num_keys;
      const std::int32_t slot = valid ? pages.slot_of(pick) : -1;
      call.slots(row, i) = slot;
      if (slot >= 0) slot_count = i + 1;
    }
    if (call.slot_counts != nullptr) call.slot_counts[row] = slot_count;
  }
}

}  // namespace

std::vector<Entry<MapSlotsProblem, MapSlotsCall>> map_slots_entries() {
  return {{"cpu", Backend::cpu, "a row of picks at a time",
           [](const MapSlotsProblem&) { return std::string(); },
           [](const MapSlotsProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
