#include "topk/select_checks.h"

#include <limits>
#include <string>

#include "sparse_mla/error.h"

namespace sparse_mla::topk {
namespace {

std::string describe(ScoreType type) { return type == ScoreType::f32 ? "fp32" : "bf16"; }

template <class T>
void validate_output(const View2<T>& view, const std::string& name, std::int64_t num_rows, int k) {
  require(view.data_handle() != nullptr, name, "null", "a [num_rows, k] view");
  require(view.extent(0) >= num_rows, name + " rows", view.extent(0),
          "at least num_rows = " + std::to_string(num_rows));
  require(view.extent(1) == k, name + " columns", view.extent(1), "k = " + std::to_string(k));
  require(k == 1 || view.stride(1) == 1, name + " stride of the last axis", view.stride(1), "1");
}

}  // namespace

void validate(const SelectProblem& problem) {
  require(problem.k >= 1, "k", problem.k, "at least 1");
  require(problem.max_rows >= 0, "max_rows", problem.max_rows, "at least 0");
  require(problem.max_row_len >= 0, "max_row_len", problem.max_row_len, "at least 0");
  require(problem.max_row_len <= std::numeric_limits<std::int32_t>::max(), "max_row_len",
          problem.max_row_len, "at most 2147483647, as indices are 32-bit");
}

void validate_shapes(const SelectProblem& problem, const SelectCall& call) {
  validate(problem);
  const ScoreRows& scores = call.scores;
  require(scores.type == problem.score_type, "scores.type", describe(scores.type),
          describe(problem.score_type) + ", as the problem says");
  require(scores.num_rows >= 0, "scores.num_rows", scores.num_rows, "at least 0");
  require(scores.row_len >= 0, "scores.row_len", scores.row_len, "at least 0");
  require(scores.num_rows <= problem.max_rows, "scores.num_rows", scores.num_rows,
          "at most max_rows = " + std::to_string(problem.max_rows));
  if (scores.num_rows == 0) return;
  require(scores.data != nullptr || scores.row_len == 0, "scores.data", "null", "a pointer");
  validate_output(call.indices, "indices", scores.num_rows, problem.k);
  if (call.values.data_handle()) validate_output(call.values, "values", scores.num_rows, problem.k);
}

}  // namespace sparse_mla::topk
