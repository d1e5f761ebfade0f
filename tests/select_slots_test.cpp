// Cache slots beside the picks, and hints: every selector, exactly.
#include "tests/select_cases.h"

namespace sparse_mla {
namespace {

using support::combination_name;
using support::combine;
using support::data;
using support::HintCase;
using support::kGarbage;
using support::kNan;
using support::ScoreData;
using support::SelectCase;
using support::SelectEntry;
using support::SelectRun;

/// `pages` of a case, in every layout of rows and tables.
void add_layouts(std::vector<SelectCase>& cases, const SelectCase& base) {
  const auto add = [&cases, &base](const char* name, auto change) {
    SelectCase c = base;
    c.name = name + std::string("_pages_of_") + std::to_string(base.pages.block_size);
    change(c);
    cases.push_back(c);
  };
  add("shuffled", [](SelectCase&) {});
  add("identity", [](SelectCase& c) { c.pages.identity = true; });
  add("requests", [](SelectCase& c) { c.pages.requests = 2; });
  add("too_few_columns", [](SelectCase& c) { c.pages.missing_columns = 2; });
  add("no_columns", [](SelectCase& c) { c.pages.missing_columns = c.row_len; });
  add("ranges", [](SelectCase& c) {
    c.pages.requests = 3;
    c.starts = {5, 0, 1000, 17, 2999};
    c.ends = {3001, 200, 1900, -1, 4000};
  });
  add("out_rows", [](SelectCase& c) {
    c.ragged = true;
    c.out_rows = {6, 0, 2, 9, 1};
    c.starts = {5, 0, 1000, 17, 3};
    c.pages.requests = 3;
  });
  add("short_rows", [](SelectCase& c) {
    c.k = 700;
    c.row_len = 650;
    c.ends = {650, 649, 0, 1, 60};
  });
}

std::vector<SelectCase> slots() {
  std::vector<SelectCase> cases;
  for (const std::int32_t block_size : {1, 2, 61, 64, 576})
    for (const ScoreType type : {ScoreType::f32, ScoreType::bf16}) {
      if (type == ScoreType::bf16 && block_size != 64) continue;  // the map sees no scores
      add_layouts(cases, {.name = "",
                          .rows = 5,
                          .row_len = 3001,
                          .k = 300,
                          .fill = data(ScoreData::ties),
                          .type = type,
                          .pages = {.block_size = block_size}});
    }
  for (const std::int32_t block_size : {1, 61, 64})
    cases.push_back({.name = "long_rows_pages_of_" + std::to_string(block_size),
                     .rows = 4,
                     .row_len = 131072,
                     .k = 2048,
                     .fill = data(ScoreData::normal),
                     .pages = {.block_size = block_size, .requests = 2}});
  cases.push_back({.name = "many_rows",
                   .rows = 1000,
                   .row_len = 300,
                   .k = 64,
                   .fill = data(ScoreData::relu),
                   .out_stride = 64,
                   .pages = {.block_size = 16, .requests = 250}});
  cases.push_back({.name = "more_picks_than_shared_memory_sorts",
                   .rows = 2,
                   .row_len = 9000,
                   .k = 5000,
                   .fill = data(ScoreData::ties),
                   .pages = {.block_size = 64}});
  return cases;
}

std::vector<SelectCase> hints() {
  std::vector<SelectCase> cases;
  for (const HintCase kind : support::kAllHintCases) {
    const auto add = [&cases, kind](const char* name, SelectCase c) {
      c.name = name + std::string("_") + to_string(kind);
      c.hints = kind;
      cases.push_back(c);
    };
    for (const ScoreData scores : {ScoreData::normal, ScoreData::ties, ScoreData::relu})
      for (const ScoreType type : {ScoreType::f32, ScoreType::bf16})
        add("hints", {.name = "",
                      .rows = 3,
                      .row_len = 9001,
                      .k = 700,
                      .fill = data(scores),
                      .type = type,
                      .starts = {0, 17, 8000}});
    for (const ScoreData scores : support::kAllScoreData)
      add("long_row", {.name = "", .row_len = 131072, .k = 2048, .fill = data(scores)});
    add("all_layouts", {.name = "",
                        .rows = 5,
                        .row_len = 3001,
                        .k = 300,
                        .fill = data(ScoreData::ties),
                        .ends = {3001, 20, 0, 2999, 299},
                        .out_rows = {6, 0, 2, 9, 1},
                        .stride = 3002,
                        .shift_bytes = 4,
                        .pages = {.block_size = 64, .requests = 3}});
    add("specials", {.name = "", .rows = 3, .row_len = 5000, .k = 900, .fill = support::specials});
    add("all_nan", {.name = "",
                    .rows = 2,
                    .row_len = 20000,
                    .k = 2048,
                    .fill = support::formula([](std::uint32_t) { return kNan; })});
    add("one_pick",
        {.name = "", .rows = 2, .row_len = 5000, .k = 1, .fill = data(ScoreData::ties)});
    add("short_row",
        {.name = "", .rows = 2, .row_len = 90, .k = 2048, .fill = data(ScoreData::normal)});
    add("row_less_one",
        {.name = "", .rows = 2, .row_len = 2049, .k = 2048, .fill = data(ScoreData::normal)});
    add("batch", {.name = "",
                  .rows = 140,
                  .row_len = 4096,
                  .k = 512,
                  .fill = data(ScoreData::relu),
                  .pages = {.block_size = 64, .requests = 70}});
  }
  return cases;
}

class SelectExtras : public support::SelectCases {};

TEST_P(SelectExtras, Exact) { run_and_check(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Slots, SelectExtras, testing::ValuesIn(combine(slots())),
                         combination_name);
INSTANTIATE_TEST_SUITE_P(Hints, SelectExtras, testing::ValuesIn(combine(hints())),
                         combination_name);

/// Contracts of slots and hints that are not a case's result.
class SelectExtrasContract : public testing::TestWithParam<std::string> {
 protected:
  const SelectEntry& entry() const { return support::selector(GetParam()); }
  bool on_device() const { return entry().backend == Backend::cuda; }

  static constexpr std::int64_t kRows = 3, kLen = 50;
  static constexpr int kPicks = 5;
};

SelectCase hinted_case(HintCase hints) {
  return {.name = "hinted",
          .rows = 2,
          .row_len = 40000,
          .k = 2048,
          .fill = data(ScoreData::relu),
          .pages = {.block_size = 64},
          .hints = hints};
}

TEST_P(SelectExtrasContract, HintedCallsAreRepeatable) {
  if (support::refuses(
          entry(), SelectProblem{.max_rows = 2, .max_row_len = 40000, .k = 2048, .hinted = true}))
    return;
  for (const HintCase hints : {HintCase::exact, HintCase::garbage, HintCase::indices}) {
    SelectRun run(hinted_case(hints));
    std::vector<std::int32_t> first;
    for (int launch = 0; launch < 10; ++launch) {
      run.run(entry());
      if (first.empty()) first = run.indices();
      ASSERT_EQ(run.indices(), first) << to_string(hints) << ", launch " << launch;
    }
    run.check();
  }
}

TEST_P(SelectExtrasContract, ADecodeStepTakesThePicksOfTheStepBefore) {
  if (support::refuses(
          entry(),
          SelectProblem{.max_rows = kRows, .max_row_len = 30004, .k = 512, .hinted = true}))
    return;
  // One buffer: the last step's picks in, this step's out.
  constexpr std::int64_t kSteps = 5;
  std::vector<float> scores(kRows * (30000 + kSteps));
  std::vector<std::int32_t> indices(kRows * 512, -1);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const std::int64_t len = 30000 + step;
    SelectCall call;
    call.scores = {scores.data(), ScoreType::f32, kRows, len, len, nullptr};
    call.indices = contiguous(indices.data(), kRows, 512);
    call.hints = call.indices;
    for (std::int64_t r = 0; r < kRows; ++r)
      for (std::int64_t i = 0; i < len; ++i) {
        const auto stream = static_cast<std::uint64_t>(r), key = static_cast<std::uint64_t>(i);
        scores[static_cast<std::size_t>(r * len + i)] =
            random_normal(61, stream, key) +
            0.05f * random_normal(62 + static_cast<std::uint64_t>(step), stream, key);
      }
    support::run_selector(entry(), problem_of(call, TieBreak::lowest_index, SelectOrder::by_value),
                          call);
    for (std::int64_t r = 0; r < kRows; ++r)
      ASSERT_EQ(std::vector(indices.begin() + r * 512, indices.begin() + (r + 1) * 512),
                support::select_oracle({scores.data() + r * len, static_cast<std::size_t>(len)}, 0,
                                       len, 512))
          << "step " << step << ", row " << r;
  }
}

TEST_P(SelectExtrasContract, HintsOfAnyWidth) {
  std::vector<float> scores(kRows * 6000);
  support::fill_scores(ScoreData::ties, scores, 67, 0);
  std::vector<std::int32_t> indices(kRows * 100), hints(kRows * 2 * 9000);
  for (std::size_t i = 0; i < hints.size(); ++i) hints[i] = static_cast<std::int32_t>(i % 7000);
  for (const std::int64_t width : {1, 2, 33, 9000})
    for (const std::int64_t stride : {width, width + 1, 2 * width}) {
      SelectCall call;
      call.scores = {scores.data(), ScoreType::f32, kRows, 6000, 6000, nullptr};
      call.indices = contiguous(indices.data(), kRows, 100);
      call.hints = strided<const std::int32_t>(hints.data(), std::array{kRows, width},
                                               {stride, width == 1 ? 7 : 1});
      support::run_selector(entry(),
                            problem_of(call, TieBreak::lowest_index, SelectOrder::by_value), call);
      for (std::int64_t r = 0; r < kRows; ++r)
        ASSERT_EQ(
            std::vector(indices.begin() + r * 100, indices.begin() + (r + 1) * 100),
            support::select_oracle(
                std::span(scores).subspan(static_cast<std::size_t>(r * 6000), 6000), 0, 6000, 100))
            << "width " << width << ", row " << r;
    }
}

TEST_P(SelectExtrasContract, SlotsNeedNoValuesAndReachTheLastOfTwoToTheThirtyOne) {
  std::vector<float> scores(kLen);
  for (std::size_t i = 0; i < kLen; ++i) scores[i] = static_cast<float>(i);
  std::vector<std::int32_t> indices(kPicks), slots(kPicks);
  const std::vector<std::int32_t> table{3, (1 << 21) - 1};  // blocks of 1,024 keys
  SelectCall call;
  call.scores = {scores.data(), ScoreType::f32, 1, kLen, kLen, nullptr};
  call.indices = contiguous(indices.data(), 1, kPicks);
  const auto run = [&](SelectOrder order) {
    support::run_selector(entry(), problem_of(call, TieBreak::lowest_index, order), call);
  };
  call.slot_map = {.block_tables = contiguous<const std::int32_t>(table.data(), 1, 2),
                   .block_size = 1024,
                   .num_blocks = 1 << 21,
                   .slots = contiguous(slots.data(), 1, kPicks)};
  run(SelectOrder::by_value);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{3121, 3120, 3119, 3118, 3117}));
  call.slot_map.block_tables = contiguous<const std::int32_t>(table.data() + 1, 1, 1);
  run(SelectOrder::by_index);
  constexpr std::int32_t kLastBlock = std::numeric_limits<std::int32_t>::max() - 1023;
  for (std::int32_t i = 0; i < kPicks; ++i) EXPECT_EQ(slots[i], kLastBlock + 45 + i);
  call.slot_map.num_blocks -= 1;
  run(SelectOrder::unspecified);
  EXPECT_EQ(slots, std::vector<std::int32_t>(kPicks, -1));
  // Tables by column: the stride between blocks is free.
  const std::vector<std::int32_t> by_column{9, 100, 9, 200, 9, 300};
  call.slot_map.num_blocks = 1 << 20;
  call.slot_map.block_size = 20;
  call.slot_map.block_tables =
      strided(by_column.data() + 1, std::array<std::int64_t, 2>{1, 3}, {1, 2});
  run(SelectOrder::by_value);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{6009, 6008, 6007, 6006, 6005}));
}

TEST_P(SelectExtrasContract, BadArgumentsAreRefusedBeforeAnythingIsWritten) {
  std::vector<float> scores(kRows * kLen, 1.0f);
  std::vector<std::int32_t> indices(kRows * kPicks, kGarbage), slots(kRows * kPicks * 2, kGarbage);
  const std::vector<std::int32_t> tables(kRows * 4, 0), requests(kRows, 0), hint(kRows * 8, 0);
  std::vector<std::int32_t> out_rows{0, 1, 2};
  SelectCall good;
  good.scores = {scores.data(), ScoreType::f32, kRows, kLen, kLen, nullptr};
  good.indices = contiguous(indices.data(), kRows, kPicks);
  good.slot_map = {.block_tables = contiguous<const std::int32_t>(tables.data(), kRows, 4),
                   .block_size = 16,
                   .num_blocks = 10,
                   .slots = contiguous(slots.data(), kRows, kPicks)};
  good.hints = contiguous<const std::int32_t>(hint.data(), kRows, 8);
  const SelectProblem bounds = problem_of(good);
  ASSERT_TRUE(bounds.hinted);

  const auto refused = [&](const std::string& argument, auto spoil) {
    SelectCall call = good;
    spoil(call);
    const support::GuardedWorkspace workspace(std::size_t{1} << 20);
    try {
      entry().run(bounds, call, workspace.span(), nullptr);
      ADD_FAILURE() << argument << ": accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()).rfind(argument + ": got ", 0), 0u) << error.what();
    }
    for (const auto* outputs : {&indices, &slots})
      EXPECT_EQ(std::count(outputs->begin(), outputs->end(), kGarbage), std::ssize(*outputs))
          << argument << ": wrote first";
  };
  using Call = SelectCall;
  constexpr std::array<std::int64_t, 2> kShape{kRows, kPicks};
  refused("slot_map.slots rows",
          [&](Call& c) { c.slot_map.slots = contiguous(slots.data(), kRows - 1, kPicks); });
  refused("slot_map.slots columns",
          [&](Call& c) { c.slot_map.slots = contiguous(slots.data(), kRows, kPicks + 1); });
  refused("slot_map.slots stride of the last axis", [&](Call& c) {
    c.slot_map.slots = strided(slots.data(), kShape, {2 * kPicks, 2});
  });
  refused("slot_map.block_tables", [](Call& c) {
    c.slot_map.block_tables = contiguous<const std::int32_t>(nullptr, kRows, 4);
  });
  refused("slot_map.block_tables rows", [&](Call& c) {
    c.slot_map.block_tables = contiguous<const std::int32_t>(tables.data(), kRows - 1, 4);
  });
  refused("slot_map.block_size", [](Call& c) { c.slot_map.block_size = 0; });
  refused("slot_map.block_size", [](Call& c) { c.slot_map.block_size = -64; });
  refused("slot_map.num_blocks", [](Call& c) { c.slot_map.num_blocks = -1; });
  refused("slot_map.num_blocks", [](Call& c) { c.slot_map.num_blocks = (1 << 27) + 1; });
  refused("slot_map.num_blocks",
          [](Call& c) { c.slot_map.num_blocks = std::numeric_limits<std::int64_t>::max(); });
  refused("hints", [](Call& c) { c.hints = {}; });
  refused("hints rows",
          [&](Call& c) { c.hints = contiguous<const std::int32_t>(hint.data(), kRows - 1, 8); });
  refused("hints columns",
          [&](Call& c) { c.hints = contiguous<const std::int32_t>(hint.data(), kRows, 0); });
  refused("hints stride of the last axis", [&](Call& c) {
    c.hints = strided<const std::int32_t>(hint.data(), std::array{kRows, std::int64_t{4}}, {8, 2});
  });

  // What is allowed: requests by list, no columns, no blocks, nothing at all of what is not used.
  const auto accepted = [&](auto change) {
    SelectCall call = good;
    SelectProblem problem = bounds;
    change(call, problem);
    EXPECT_NO_THROW(support::run_selector(entry(), problem, call));
  };
  accepted([&](Call& c, SelectProblem&) {
    c.slot_map.request_of_row = requests.data();
    c.slot_map.block_tables = contiguous<const std::int32_t>(tables.data(), 1, 4);
  });
  accepted([](Call& c, SelectProblem&) {
    c.slot_map.block_tables = contiguous<const std::int32_t>(nullptr, kRows, 0);
  });
  accepted([](Call& c, SelectProblem&) { c.slot_map.num_blocks = 0; });
  accepted([](Call& c, SelectProblem&) {
    c.slot_map = {};
    c.slot_map.block_size = -3;
  });
  accepted([](Call& c, SelectProblem& p) {
    c.hints = {};
    p.hinted = false;
  });
  if (on_device()) return;  // cannot look at out_rows
  std::fill(indices.begin(), indices.end(), kGarbage);
  std::fill(slots.begin(), slots.end(), kGarbage);
  indices.resize(4 * kPicks, kGarbage);
  const std::vector<std::int32_t> more_hints(4 * 8, 0);
  good.indices = contiguous(indices.data(), 4, kPicks);
  good.slot_map.slots = contiguous(slots.data(), 4, kPicks);
  good.hints = contiguous<const std::int32_t>(more_hints.data(), 4, 8);
  good.out_rows = out_rows.data();
  out_rows[1] = 3;
  refused("out_rows[1]",
          [&](Call& c) { c.slot_map.slots = contiguous(slots.data(), kRows, kPicks); });
  refused("out_rows[1]",
          [&](Call& c) { c.hints = contiguous<const std::int32_t>(more_hints.data(), kRows, 8); });
  EXPECT_NO_THROW(support::run_selector(entry(), bounds, good));
}

INSTANTIATE_TEST_SUITE_P(Entries, SelectExtrasContract,
                         testing::ValuesIn(support::selectors_serving({.hinted = true})),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace sparse_mla
