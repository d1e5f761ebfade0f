#include "tests/support/checked_tokens.h"

#include <algorithm>
#include <array>
#include <set>

#include "tests/support/random_streams.h"

namespace sparse_mla::support {

std::string to_string(RequestKind kind) {
  switch (kind) {
    case RequestKind::decode:
      return "decode";
    case RequestKind::prefill_with_context:
      return "prefill with context";
    case RequestKind::prefill:
      return "prefill";
  }
  return "?";
}

std::vector<CheckedToken> sample_tokens(const LayerProblem& problem, int decode_threshold,
                                        std::int64_t count) {
  struct Request {
    std::int64_t begin = 0, end = 0;
    RequestKind kind = RequestKind::prefill;
  };
  std::vector<Request> requests;
  std::int64_t tokens = 0;
  for (std::size_t r = 0; r < problem.query_lens.size(); ++r) {
    const std::int32_t query_len = problem.query_lens[r];
    const RequestKind kind = query_len <= decode_threshold ? RequestKind::decode
                             : problem.context_lens[r] > 0 ? RequestKind::prefill_with_context
                                                           : RequestKind::prefill;
    requests.push_back({tokens, tokens + query_len, kind});
    tokens += query_len;
  }

  std::set<std::int64_t> chosen;
  if (count >= tokens) {
    for (std::int64_t token = 0; token < tokens; ++token) chosen.insert(chosen.end(), token);
  } else {
    chosen = {0, tokens - 1};
    for (const RequestKind kind :
         {RequestKind::decode, RequestKind::prefill_with_context, RequestKind::prefill}) {
      const auto wanted = [&](const Request& r) { return r.kind == kind && r.begin < r.end; };
      const auto first = std::find_if(requests.begin(), requests.end(), wanted);
      const auto last = std::find_if(requests.rbegin(), requests.rend(), wanted);
      if (first == requests.end()) continue;
      chosen.insert({first->begin, first->end - 1, last->begin, last->end - 1});
    }
    RandomSequence random(problem.seed, stream_of(RandomStream::checked_tokens, 0), 0);
    while (static_cast<std::int64_t>(chosen.size()) < count) chosen.insert(random.below(tokens));
  }

  std::vector<CheckedToken> checked;
  std::size_t r = 0;
  for (const std::int64_t token : chosen) {
    while (token >= requests[r].end) ++r;
    checked.push_back({token, static_cast<std::int64_t>(r),
                       problem.context_lens[r] + token - requests[r].begin, requests[r].kind});
  }
  return checked;
}

}  // namespace sparse_mla::support
