/// What every CPU selector shares: checking a call, addressing its rows, running them in parallel
/// and finishing each (order, padding, values, slots). An algorithm only picks a row's indices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

#include <omp.h>

#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"
#include "topk/ordered_key.h"
#include "topk/select_checks.h"

namespace sparse_mla::topk {

/// The candidates of one row: `len` elements from `data` on.
struct RowScores {
  const std::byte* data = nullptr;
  std::int64_t len = 0;
  ScoreType type = ScoreType::f32;

  std::uint32_t bits(std::int64_t i) const {
    return type == ScoreType::f32 ? Float32::bits(data, i) : BFloat16::bits(data, i);
  }
};

/// Elements from `scores.data` to row r. 64-bit throughout.
std::int64_t row_offset(const ScoreRows& scores, std::int64_t r);

/// Row r's candidates: [starts[r], ends[r]) cut to [0, row_len).
RowScores row_scores(const SelectCall& call, std::int64_t r);

/// The row of the outputs that belongs to row r.
std::int64_t output_row(const SelectCall& call, std::int64_t r);

/// Throws std::invalid_argument for a call that breaks select.h's contract, in its shapes or in
/// what its arrays hold.
void validate(const SelectProblem& problem, const SelectCall& call);

/// Threads that work on the problem, and hence sets of scratch: never more than rows.
int num_threads(const SelectProblem& problem);

/// Whether a call is worth a team of threads: below some 64 K scores (20 to 60 µs of selection)
/// waking one costs as much as it saves, and far more where the cores are busy with other work.
constexpr bool worth_a_team(std::int64_t num_rows, std::int64_t row_len) {
  return num_rows > 1 && num_rows * row_len >= (std::int64_t{1} << 16);
}

/// Puts row r's picks, the first min(k, row.len) of its `indices`, into the order asked for
/// (`ascending`: they are by index already), pads them to k, and writes their scores and slots
/// where the call wants them. `ranks` [min(k, row.len)] is scratch, used by SelectOrder::by_value
/// alone.
void finish_row(const SelectProblem& problem, const SelectCall& call, std::int64_t r,
                const RowScores& row, bool ascending, std::uint64_t* ranks);

/// Scratch for finish_row, one set per thread; null where the order needs none.
std::uint64_t* carve_ranks(const SelectProblem& problem, int threads, WorkspaceCarver& carver);

/// An Algorithm has
///   Scratch                                      pointers into the workspace
///   static Scratch carve(problem, threads, carver)   all threads' scratch
///   Scratch::of_thread(t)                        the t-th thread's
///   static constexpr bool kAscending             whether picks come out by index
///   static void select_row(row, k, scratch, picks)   picks[0, k) ← the k best of row.len > k
template <class Algorithm>
std::size_t workspace_bytes(const SelectProblem& problem, int threads) {
  WorkspaceCarver counter;
  Algorithm::carve(problem, threads, counter);
  carve_ranks(problem, threads, counter);
  return counter.bytes();
}

template <class Algorithm>
std::size_t workspace_bytes(const SelectProblem& problem) {
  validate(problem);
  return workspace_bytes<Algorithm>(problem, num_threads(problem));
}

template <class Algorithm>
void select_rows(const SelectProblem& problem, const SelectCall& call,
                 std::span<std::byte> workspace, Stream) {
  validate(problem, call);
  const std::int64_t num_rows = call.scores.num_rows;
  if (num_rows == 0) return;
  // OpenMP's limit may have grown since the workspace was counted.
  int threads = num_threads(problem);
  while (threads > 1 && workspace_bytes<Algorithm>(problem, threads) > workspace.size()) --threads;
  const bool team = worth_a_team(num_rows, call.scores.row_len);
  WorkspaceCarver carver(workspace);
  const auto scratch = Algorithm::carve(problem, threads, carver);
  std::uint64_t* const ranks = carve_ranks(problem, threads, carver);

#pragma omp parallel for schedule(dynamic) num_threads(threads) if (team)
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const int thread = omp_get_thread_num();
    const RowScores row = row_scores(call, r);
    std::int32_t* const picks = address(call.indices, output_row(call, r), 0);
    const bool all = row.len <= problem.k;
    if (all)
      std::iota(picks, picks + row.len, 0);
    else
      Algorithm::select_row(row, problem.k, scratch.of_thread(thread), picks);
    finish_row(problem, call, r, row, all || Algorithm::kAscending,
               ranks ? ranks + std::int64_t{thread} * problem.k : nullptr);
  }
}

}  // namespace sparse_mla::topk
