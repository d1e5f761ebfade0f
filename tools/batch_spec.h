#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/request_lengths.h"

namespace sparse_mla::command {

/// The most requests that one spec may describe. Engines run thousands at most; a count beyond
/// this is a typing error that would otherwise exhaust the memory.
inline constexpr int64_t kMaxSpecRequests = int64_t{1} << 20;

/// Reads a batch specification, the notation of engine benchmarks:
///
///   spec   := item ( "_" item )*
///   item   := [count] "q" length [ "s" length ]
///   length := digits [ "k" ]                        (k = × 1024)
///
/// q is the number of new tokens of each request, s its whole sequence (new and cached tokens),
/// so s ≥ q; without s nothing is cached. `q513s60513_31q513s529` is one request with 60,000 cached
/// tokens and 31 with 16; `8q1s32k` is eight decodes. `q0` and `q0s100` are members without new
/// tokens, which engines pad their batches with. Lengths and s fit an int32.
///
/// Throws std::invalid_argument that names the item, the character (counted from 1 over the whole
/// spec), what was got and what was expected.
std::vector<RequestLengths> parse_batch_spec(std::string_view spec);

/// The canonical spec of a batch: equal neighbours joined under one count, no count of 1, no `s`
/// without context, `k` wherever a length is a multiple of 1024. parse_batch_spec(to_spec(b)) == b.
/// Throws std::invalid_argument for what no spec can say: an empty batch, more than
/// kMaxSpecRequests requests, negative lengths, sequences beyond an int32.
std::string to_spec(std::span<const RequestLengths> batch);

}  // namespace sparse_mla::command
