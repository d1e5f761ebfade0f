/// Runs one entry of an operation as a test wants it: forced by name, in a workspace of exactly the
/// size that the entry asks for, full of NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "sparse_mla/operation.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla::support {

/// The names of the operation's entries that can run `problem` on this machine.
template <class Problem, class Call>
std::vector<std::string> usable_entries(const Operation<Problem, Call>& operation,
                                        const Problem& problem = {}) {
  std::vector<std::string> names;
  for (const auto& entry : operation.entries())
    if (entry.backend == Backend::cpu && entry.why_not(problem).empty())
      names.emplace_back(entry.name);
  return names;
}

/// Throws std::runtime_error when the entry wrote behind its workspace.
template <class Problem, class Call>
void run_entry(const Operation<Problem, Call>& operation, const std::string& entry,
               const Problem& problem, const Call& call) {
  Dispatch dispatch;
  dispatch.forced[operation.name()] = entry;
  const auto& chosen = operation.choose(problem, dispatch);
  const std::size_t bytes = chosen.workspace_bytes(problem);
  constexpr std::size_t kGuard = 64;
  constexpr auto kPoison = std::byte{0xFF};
  std::vector<std::byte> memory(bytes + kWorkspaceAlignment + kGuard, kPoison);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kWorkspaceAlignment;
  const std::span<std::byte> workspace(
      memory.data() + (misaligned == 0 ? 0 : kWorkspaceAlignment - misaligned), bytes);
  operation.run(chosen, problem, call, workspace, nullptr);
  for (std::size_t i = 0; i < kGuard; ++i)
    if (workspace.data()[bytes + i] != kPoison)
      throw std::runtime_error(operation.name() + ":" + entry + " wrote behind its workspace");
}

/// Same bits?
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// `count` elements with every byte 0xFF: NaN as bf16 and fp32, −1 as an integer.
template <class T>
std::vector<T> poisoned(std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  if (count > 0) std::memset(static_cast<void*>(values.data()), 0xFF, values.size() * sizeof(T));
  return values;
}

}  // namespace sparse_mla::support
