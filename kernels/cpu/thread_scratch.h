/// One thread's share of an operation's workspace, and how many threads it is enough for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include <omp.h>

#include "sparse_mla/workspace.h"

namespace sparse_mla::cpu {

/// Scratch is a struct of named pointers with
///   Scratch(WorkspaceCarver& carver, const Problem& problem)
/// that takes each of them from the carver: the same code counts and carves.
template <class Scratch, class Problem>
std::size_t scratch_bytes_per_thread(const Problem& problem) {
  WorkspaceCarver counter;
  Scratch(counter, problem);
  return counter.bytes();
}

template <class Scratch, class Problem>
std::size_t scratch_bytes(const Problem& problem) {
  return scratch_bytes_per_thread<Scratch>(problem) *
         static_cast<std::size_t>(std::max(omp_get_max_threads(), 1));
}

/// Threads to start for `items` pieces of work.
template <class Scratch, class Problem>
int scratch_threads(const Problem& problem, std::span<std::byte> workspace, std::int64_t items) {
  const auto fit =
      static_cast<std::int64_t>(workspace.size() / scratch_bytes_per_thread<Scratch>(problem));
  return static_cast<int>(
      std::clamp<std::int64_t>(std::min(fit, items), 1, std::max(omp_get_max_threads(), 1)));
}

/// The calling thread's scratch inside a parallel region.
template <class Scratch, class Problem>
Scratch thread_scratch(const Problem& problem, std::span<std::byte> workspace) {
  const std::size_t bytes = scratch_bytes_per_thread<Scratch>(problem);
  WorkspaceCarver carver(
      workspace.subspan(static_cast<std::size_t>(omp_get_thread_num()) * bytes, bytes));
  return Scratch(carver, problem);
}

}  // namespace sparse_mla::cpu
