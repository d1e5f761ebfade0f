// Selection on a card whose blocks have less shared memory than the one at hand: pretended.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda/device.h"
#include "sparse_mla/error.h"

#include "tests/select_cases.h"

namespace sparse_mla {
namespace {

using cuda::PretendedSharedMemory;
using support::SelectCase;
using support::SelectEntry;
using support::SelectRun;
using testing::HasSubstr;

constexpr int kKiB = 1024;

SelectCase few_long_rows() {
  return {.name = "few_long_rows",
          .rows = 2,
          .row_len = 779425,
          .k = 2048,
          .fill = support::data(support::ScoreData::normal)};
}

std::vector<SelectCase> cases() {
  const auto fill = support::data(support::ScoreData::ties);
  return {few_long_rows(),
          {.name = "many_short_rows", .rows = 300, .row_len = 8192, .k = 2048, .fill = fill},
          {.name = "large_k", .rows = 3, .row_len = 32768, .k = 4096, .fill = fill},
          {.name = "very_large_k", .rows = 2, .row_len = 20000, .k = 6000, .fill = fill},
          {.name = "bf16",
           .rows = 5,
           .row_len = 40001,
           .k = 512,
           .fill = fill,
           .type = ScoreType::bf16}};
}

/// The library's own selectors. Those of other libraries see to their shared memory themselves.
bool is_own(const SelectEntry& entry) {
  const std::string_view name = entry.name;
  return entry.backend == Backend::cuda && name.find("cub_") == std::string_view::npos &&
         name.find("thrust") == std::string_view::npos;
}

class CudaSharedMemory : public testing::TestWithParam<int> {};

// A launch that asks for more than the pretended limit throws.
TEST_P(CudaSharedMemory, R26SelectorsKeepWithinTheLimitOrSayThatTheyCannot) {
  const PretendedSharedMemory pretended(GetParam() * kKiB);
  for (const SelectCase& c : cases()) {
    SelectRun run(c);
    for (const SelectOrder order : {SelectOrder::by_index, SelectOrder::by_value}) {
      SCOPED_TRACE(testing::Message() << c << " order=" << testing::PrintToString(order));
      const SelectProblem problem = problem_of(run.call(), TieBreak::lowest_index, order);
      Dispatch dispatch;
      dispatch.backend = Backend::cuda;
      const SelectEntry& chosen = select_operation().choose(problem, dispatch);
      EXPECT_TRUE(is_own(chosen)) << chosen.name;
      for (const SelectEntry& entry : select_operation().entries()) {
        if (!is_own(entry) || !entry.why_not(problem).empty()) continue;
        SCOPED_TRACE(entry.name);
        run.run(entry, order);
        run.check(order);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(KiB, CudaSharedMemory, testing::Values(48, 99));

TEST(CudaSharedMemoryLimit, R26WhatIsMissingIsNamedBeforeAndAtALaunch) {
  SelectRun run(few_long_rows());
  const SelectProblem problem = problem_of(run.call());
  const SelectEntry& cluster = support::selector("cuda_cluster");
  if (support::refuses(cluster, problem)) return;  // no clusters here
  const PretendedSharedMemory pretended(48 * kKiB);
  const std::string text = " bytes of shared memory per block, the device gives 49152";
  EXPECT_THAT(cluster.why_not(problem), HasSubstr(text));
  try {
    run.run(cluster);
    FAIL() << "expected CudaError";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("cluster_kernel"), HasSubstr(text)));
  }
}

TEST(CudaSharedMemoryLimit, ThePretenceEnds) {
  const int bytes = cuda::current_device().max_shared_bytes;
  {
    const PretendedSharedMemory pretended(48 * kKiB);
    EXPECT_EQ(cuda::current_device().max_shared_bytes, 48 * kKiB);
  }
  EXPECT_EQ(cuda::current_device().max_shared_bytes, bytes);
  const PretendedSharedMemory more(bytes + kKiB);
  EXPECT_EQ(cuda::current_device().max_shared_bytes, bytes) << "more than there is";
}

}  // namespace
}  // namespace sparse_mla
