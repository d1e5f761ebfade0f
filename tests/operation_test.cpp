// The frame around operations: registry, forces, workspaces, log, random numbers, errors.
#include "sparse_mla/operation.h"

#include <cmath>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/capacity.h"
#include "sparse_mla/log.h"
#include "sparse_mla/random.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct ToyProblem {
  int size = 0;
};
struct ToyCall {
  std::string* ran = nullptr;
};

Operation<ToyProblem, ToyCall> toy() {
  const auto bytes = [](const ToyProblem& p) { return static_cast<std::size_t>(p.size); };
  return {
      "toy",
      {{"small_only", Backend::cuda, "fast",
        [](const ToyProblem& p) { return std::string(p.size > 8 ? "size above 8" : ""); }, bytes,
        [](const ToyProblem&, const ToyCall& call, std::span<std::byte>, Stream) {
          *call.ran = "small_only";
        }},
       {"middle", Backend::cpu, "slower",
        [](const ToyProblem& p) { return std::string(p.size > 16 ? "size above 16" : ""); }, bytes,
        [](const ToyProblem&, const ToyCall& call, std::span<std::byte>, Stream) {
          *call.ran = "middle";
        }},
       {"reference", Backend::cpu, "always", [](const ToyProblem&) { return std::string(); }, bytes,
        [](const ToyProblem&, const ToyCall& call, std::span<std::byte>, Stream) {
          *call.ran = "reference";
        }}}};
}

template <class Function>
std::string error_of(Function&& function) {
  try {
    function();
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST(Registry, TakesTheFirstEntryWithoutObjection) {
  EXPECT_STREQ(toy().choose({4}, {}).name, "small_only");
  EXPECT_STREQ(toy().choose({12}, {}).name, "middle");
  EXPECT_STREQ(toy().choose({99}, {}).name, "reference");
}

TEST(Registry, ABackendIsAFilter) {
  Dispatch cpu;
  cpu.backend = Backend::cpu;
  EXPECT_STREQ(toy().choose({4}, cpu).name, "middle");
  Dispatch cuda;
  cuda.backend = Backend::cuda;
  EXPECT_STREQ(toy().choose({4}, cuda).name, "small_only");
  EXPECT_THAT(error_of([&] { toy().choose({9}, cuda); }),
              AllOf(HasSubstr("toy"), HasSubstr("small_only: size above 8"),
                    HasSubstr("middle: belongs to backend cpu")));
}

TEST(Registry, AForceThatCannotBeMetThrowsWithTheReason) {
  Dispatch forced;
  forced.forced["toy"] = "middle";
  EXPECT_STREQ(toy().choose({4}, forced).name, "middle");
  EXPECT_EQ(error_of([&] { toy().choose({17}, forced); }),
            "force toy:middle: middle: size above 16");
  forced.forced["toy"] = "nothing";
  EXPECT_EQ(error_of([&] { toy().choose({4}, forced); }), "force toy:nothing: no such entry");
}

TEST(Registry, ExplainSaysWhyNot) {
  const OperationReport report = toy().explain({12}, {});
  ASSERT_EQ(report.entries.size(), 3u);
  EXPECT_EQ(report.entries[0].why_not, "size above 8");
  EXPECT_FALSE(report.entries[0].chosen);
  EXPECT_TRUE(report.entries[1].chosen);
  EXPECT_TRUE(report.entries[2].why_not.empty());
  EXPECT_FALSE(report.entries[2].chosen);
  Dispatch forced;
  forced.forced["toy"] = "reference";
  EXPECT_TRUE(toy().explain({12}, forced).entries[2].chosen);
  EXPECT_THAT(toy().explain({12}, forced).entries[1].why_not, HasSubstr("forced: reference"));
}

/// As toy(), but "small_only" leaves sizes below 4 to others, and "middle" those below 2.
Operation<ToyProblem, ToyCall> toy_with_preferences() {
  const auto plain = toy();
  std::vector<Entry<ToyProblem, ToyCall>> entries(plain.entries().begin(), plain.entries().end());
  entries[0].why_rather_not = [](const ToyProblem& p) {
    return std::string(p.size < 4 ? "middle is faster below 4" : "");
  };
  entries[1].why_rather_not = [](const ToyProblem& p) {
    return std::string(p.size < 2 ? "reference is faster below 2" : "");
  };
  return {"toy", std::move(entries)};
}

TEST(Registry, AnEntryMayLeaveProblemsToOthers) {
  const auto operation = toy_with_preferences();
  EXPECT_STREQ(operation.choose({4}, {}).name, "small_only");
  EXPECT_STREQ(operation.choose({3}, {}).name, "middle");
  EXPECT_STREQ(operation.choose({1}, {}).name, "reference");
  EXPECT_STREQ(operation.choose({12}, {}).name, "middle");
  EXPECT_EQ(operation.workspace_bytes({3}, {}), 3u);
  // No other of the backend can serve, or it is the one that is forced.
  Dispatch dispatch;
  dispatch.backend = Backend::cuda;
  EXPECT_STREQ(operation.choose({3}, dispatch).name, "small_only");
  EXPECT_EQ(error_of([&] { operation.choose({9}, dispatch); }),
            "operation toy: no usable entry (small_only: size above 8; middle: belongs to backend "
            "cpu; reference: belongs to backend cpu)");
  dispatch.backend.reset();
  dispatch.forced["toy"] = "small_only";
  EXPECT_STREQ(operation.choose({1}, dispatch).name, "small_only");
  EXPECT_THAT(error_of([&] { operation.choose({9}, dispatch); }), HasSubstr("size above 8"));
}

TEST(Registry, TheFirstOfTheUnwillingIsTakenWhereAllAre) {
  const auto toys = toy_with_preferences();
  std::vector<Entry<ToyProblem, ToyCall>> entries(toys.entries().begin(), toys.entries().end());
  entries[2].why_not = [](const ToyProblem&) { return std::string("broken"); };
  const Operation<ToyProblem, ToyCall> operation("toy", std::move(entries));
  EXPECT_STREQ(operation.choose({1}, {}).name, "small_only");
  const OperationReport report = operation.explain({1}, {});
  EXPECT_TRUE(report.entries[0].chosen);
  EXPECT_TRUE(report.entries[0].why_not.empty());  // nothing speaks against the one that is taken
  EXPECT_EQ(report.entries[1].why_not, "reference is faster below 2");
  EXPECT_EQ(report.entries[2].why_not, "broken");
}

TEST(Registry, ExplainSaysWhyRatherNot) {
  const auto operation = toy_with_preferences();
  const OperationReport report = operation.explain({3}, {});
  EXPECT_EQ(report.entries[0].why_not, "middle is faster below 4");
  EXPECT_TRUE(report.entries[1].chosen);
  EXPECT_TRUE(report.entries[2].why_not.empty());
  Dispatch forced;
  forced.forced["toy"] = "small_only";
  EXPECT_TRUE(operation.explain({3}, forced).entries[0].chosen);
  EXPECT_TRUE(operation.explain({3}, forced).entries[0].why_not.empty());
  EXPECT_EQ(operation.explain({3}, forced).entries[1].why_not,
            "another entry is forced: small_only");
  Dispatch cpu;
  cpu.backend = Backend::cpu;
  EXPECT_EQ(operation.explain({3}, cpu).entries[0].why_not, "belongs to backend cuda");
}

TEST(Registry, RunChecksTheWorkspaceFirst) {
  std::string ran;
  const HostWorkspace memory(12);
  toy().run({12}, {&ran}, memory.span(), {}, nullptr);
  EXPECT_EQ(ran, "middle");
  ran.clear();
  EXPECT_EQ(error_of([&] { toy().run({13}, {&ran}, memory.span(), {}, nullptr); }),
            "toy: workspace: got 12, expected at least 13 bytes for entry middle");
  EXPECT_TRUE(ran.empty());
}

TEST(Force, NamesOperationsAndEntries) {
  for (const OperationNames& names : known_operations()) {
    ASSERT_FALSE(names.entries.empty()) << names.operation;
    for (const std::string& entry : names.entries) {
      Dispatch dispatch;
      dispatch.force(names.operation + ":" + entry);
      EXPECT_EQ(dispatch.forced.at(names.operation), entry);
    }
  }
}

TEST(Force, BadTextIsNamedAndChangesNothing) {
  Dispatch dispatch;
  dispatch.force("select:cpu_sort,attend:cpu_reference");
  EXPECT_EQ(dispatch.forced.size(), 2u);
  EXPECT_THAT(error_of([&] { dispatch.force("merge:cpu,selekt:cpu_sort"); }),
              AllOf(HasSubstr("operation 'selekt'"), HasSubstr("select")));
  EXPECT_THAT(error_of([&] { dispatch.force("select:gpu_magic"); }),
              AllOf(HasSubstr("entry 'gpu_magic'"), HasSubstr("cpu_sort")));
  for (const char* text : {"select", "select:", ":cpu_sort", "select:cpu_sort,,merge:cpu"})
    EXPECT_THAT(error_of([&] { dispatch.force(text); }), HasSubstr("operation:entry")) << text;
  EXPECT_EQ(dispatch.forced.size(), 2u);
  EXPECT_EQ(dispatch.forced.count("merge"), 0u);
}

TEST(Force, EnvironmentVariable) {
  setenv("SPARSE_MLA_FORCE", "sparse_mqa:cpu_reference", 1);
  const Dispatch dispatch = Dispatch::from_environment();
  const Capacity capacity(Limits{}, dispatch);
  EXPECT_STREQ(capacity.operations().sparse_mqa.entry->name, "cpu_reference");
  setenv("SPARSE_MLA_FORCE", "nonsense", 1);
  EXPECT_EQ(error_of([] { Dispatch::from_environment(); }),
            "SPARSE_MLA_FORCE: force: got 'nonsense', expected operation:entry");
  unsetenv("SPARSE_MLA_FORCE");
  EXPECT_TRUE(Dispatch::from_environment().forced.empty());
}

TEST(Force, ABackendThatIsNotBuiltInThrowsForTheWholeLayer) {
  Dispatch cuda;
  cuda.backend = Backend::cuda;
  bool built = false;
  for (const OperationReport& report : explain_operations(Limits{}, {}))
    for (const EntryReport& entry : report.entries) built = built || entry.backend == Backend::cuda;
  if (!built) {
    EXPECT_THROW(Capacity(Limits{}, cuda), std::invalid_argument);
  }
  // explain never throws: it is for finding out.
  EXPECT_EQ(explain_operations(Limits{}, cuda).size(), known_operations().size());
}

TEST(Registry, TheScalarReferenceComesLast) {
  const auto reports = explain_operations(Limits{}, {});
  for (const OperationReport& report : reports) {
    int chosen = 0;
    for (const EntryReport& entry : report.entries) {
      chosen += entry.chosen;
      EXPECT_FALSE(entry.summary.empty()) << report.operation << ':' << entry.name;
    }
    EXPECT_EQ(chosen, 1) << report.operation;
    EXPECT_TRUE(report.entries.back().why_not.empty()) << report.operation;
  }
}

// An entry carves its scratch inside a parallel region, which no exception may leave.
TEST(Workspace, AnOddAddressIsRefusedBeforeAnyThreadStarts) {
  SparseMqaProblem problem;
  problem.num_heads = 1;
  problem.max_tokens = 1;
  const std::size_t needed = sparse_mqa_operation().workspace_bytes(problem, {});
  const HostWorkspace workspace(needed + 16);
  const std::vector<bfloat16> q(576);
  std::vector<std::byte> row(1152);
  std::vector<bfloat16> out(512);
  std::vector<float> lse(1);
  const std::int32_t slot = 0;
  SparseMqaCall call;
  call.q = contiguous(q.data(), 1, 1, 576);
  call.cache = make_latent_cache(CacheFormat::bf16, row, 1, 1, ModelDims{});
  call.slots = contiguous(&slot, 1, 1);
  call.out = contiguous(out.data(), 1, 1, 512);
  call.lse = contiguous(lse.data(), 1, 1);
  EXPECT_THAT(error_of([&] {
                sparse_mqa_operation().run(problem, call, workspace.span().subspan(16), {},
                                           nullptr);
              }),
              HasSubstr("sparse_mqa: workspace: got an address 16 bytes past"));
  EXPECT_THAT(error_of([&] {
                sparse_mqa_operation().run(problem, call, workspace.span().first(needed - 1), {},
                                           nullptr);
              }),
              HasSubstr("sparse_mqa: workspace: got " + std::to_string(needed - 1)));
}

TEST(Workspace, CountsWhatItCarves) {
  const auto take = [](WorkspaceCarver& carver) {
    auto* a = carver.take<float>("first", 3);
    auto* b = carver.take<std::int64_t>("second", 1000);
    auto* c = carver.take<char>("nothing", 0);
    return std::array<void*, 3>{a, b, c};
  };
  WorkspaceCarver counter;
  for (void* pointer : take(counter)) EXPECT_EQ(pointer, nullptr);
  const HostWorkspace memory(counter.bytes());
  std::byte* base = memory.span().data();
  WorkspaceCarver carver({base, counter.bytes()});
  const auto pointers = take(carver);
  EXPECT_EQ(carver.bytes(), counter.bytes());
  EXPECT_EQ(static_cast<std::byte*>(pointers[1]) - base, 256);
  for (void* pointer : pointers)
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pointer) % kWorkspaceAlignment, 0u);
  ASSERT_EQ(counter.buffers().size(), 3u);
  EXPECT_EQ(counter.buffers()[1].name, "second");
  EXPECT_EQ(counter.buffers()[1].bytes, 8000u);
  EXPECT_TRUE(counter.rest().empty());
  EXPECT_TRUE(carver.rest().empty());

  WorkspaceCarver small({base, 1024});
  EXPECT_THAT(error_of([&] { take(small); }), HasSubstr("for buffer second"));
  EXPECT_THAT(error_of([&] {
                WorkspaceCarver odd({base + 8, 1024});
              }),
              HasSubstr("multiple of 256"));
}

TEST(Log, GoesToTheCallbackOrNowhere) {
  std::vector<std::string> lines;
  set_log_callback([&](LogLevel, std::string_view message) { lines.emplace_back(message); });
  log(LogLevel::info, "hello");
  set_log_callback(nullptr);
  log(LogLevel::info, "unheard");
  EXPECT_THAT(lines, ElementsAre("hello"));
}

// The generator's authors publish these known answers (Random123, kat_vectors, philox4x32 10).
TEST(Random, PhiloxKnownAnswers) {
  const RandomBlock zero = random_block(0, 0, 0);
  EXPECT_THAT(zero.word, ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  const RandomBlock ones = random_block(~0ull, ~0ull, ~0ull);
  EXPECT_THAT(ones.word, ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
  const RandomBlock pi =
      random_block(0x299f31d0a4093822ull, 0x0370734413198a2eull, 0x85a308d3243f6a88ull);
  EXPECT_THAT(pi.word, ElementsAre(0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

TEST(Random, NormalsHaveTheRightMoments) {
  double sum = 0, squares = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double value = random_normal(7, 3, i);
    sum += value;
    squares += value * value;
    const float uniform = random_uniform(7, 4, i);
    ASSERT_GE(uniform, 0.0f);
    ASSERT_LT(uniform, 1.0f);
  }
  EXPECT_NEAR(sum / kCount, 0, 0.01);
  EXPECT_NEAR(squares / kCount, 1, 0.01);
}

TEST(Types, DimsOutOfRangeAreNamed) {
  ModelDims dims;
  dims.num_heads = 129;
  EXPECT_EQ(error_of([&] { validate(dims); }), "num_heads: got 129, expected 1 … 128");
  dims.num_heads = 16;
  dims.index_topk = 0;
  EXPECT_THAT(error_of([&] { validate(dims); }), HasSubstr("index_topk: got 0"));
  dims.index_topk = 1;
  dims.v_head_dim = 2147483647;  // added to P it would pass an int
  EXPECT_EQ(error_of([&] { validate(dims); }), "v_head_dim: got 2147483647, expected 1 … 16384");
  dims.v_head_dim = 128;
  dims.softmax_scale = HUGE_VALF;
  EXPECT_THAT(error_of([&] { validate(dims); }), HasSubstr("softmax_scale: got inf"));
}

}  // namespace
}  // namespace sparse_mla
