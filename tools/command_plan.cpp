#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "sparse_mla/planner.h"

#include "tools/batch_input.h"
#include "tools/commands.h"
#include "tools/plan_svg.h"
#include "tools/progress.h"
#include "tools/quote.h"
#include "tools/table.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::ordered_json;

// A plan takes ~100 bytes per chunk; a batch that needs more than this many is a typing error.
constexpr int64_t kMaxChunks = int64_t{1} << 24;
// Ranks of one context. Far beyond any machine; a plan has an entry per member and rank.
constexpr int32_t kMaxWorld = 256;
// Members of all equal-split passes of a batch that is drawn.
constexpr int64_t kMaxDrawnMembers = int64_t{1} << 26;

struct PlanArguments {
  BatchInput input;
  int32_t workspace = 65536;  // rows
  int32_t block_size = 64;
  int32_t alignment = 0;  // 0 = default_alignment()
  int32_t world = 0;      // 0 = no --dcp
  int32_t interleave = 1;
  std::optional<std::string> svg;
  bool json = false;

  bool dcp() const { return world > 0; }
  ContextSharding sharding() const {
    return dcp() ? ContextSharding{world, interleave} : ContextSharding{};
  }
};

PlannerOptions planner_options(const PlanArguments& arguments) {
  const ContextSharding sharding = arguments.sharding();
  int64_t alignment = arguments.alignment;
  if (alignment == 0) {
    alignment = default_alignment(arguments.block_size, sharding);
    if (alignment > arguments.workspace && arguments.dcp()) {
      throw std::invalid_argument(
          "alignment: got lcm(--block, --interleave · --dcp) = " + std::to_string(alignment) +
          ", expected at most the workspace's " + std::to_string(arguments.workspace) + " rows");
    }
  }
  return {.row_budget = arguments.workspace,
          .alignment = static_cast<int32_t>(alignment),
          .sharding = sharding};
}

// One batch's lengths in the planner's form, with both schedules' counts.
struct PlannedBatch {
  int64_t number = 0;                 // in the input, from 0
  std::vector<int32_t> query_lens;    // [requests]
  std::vector<int32_t> context_lens;  // [requests]
  ContextPlan packed;
  int64_t equal_split_passes = 0;

  int64_t packed_chunks() const { return static_cast<int64_t>(packed.chunks.size()); }
};

PlannedBatch plan_batch(int64_t number, const std::vector<RequestLengths>& batch,
                        const PlannerOptions& options) {
  PlannedBatch planned;
  planned.number = number;
  int64_t context_rows = 0;  // on each rank
  for (const RequestLengths& request : batch) {
    planned.query_lens.push_back(request.query_len);
    planned.context_lens.push_back(request.context_len);
    context_rows += options.sharding.padded_rows(request.context_len);
  }
  // A chunk that is closed early still takes more than row_budget − alignment rows.
  const int32_t world = options.sharding.world;
  const int64_t filled = std::max(1, options.row_budget / world - options.alignment / world + 1);
  if (context_rows / filled > kMaxChunks) {
    throw std::invalid_argument("batch " + std::to_string(number) + ": got " +
                                std::to_string(context_rows) + " rows of context, expected fewer " +
                                "than " + std::to_string(kMaxChunks) + " chunks of the workspace");
  }
  planned.packed = plan_context_chunks(planned.query_lens, planned.context_lens, options);
  planned.equal_split_passes = equal_split_passes(planned.context_lens, options);
  return planned;
}

Json chunk_json(const ContextPlan& plan, size_t index, bool dcp) {
  const ContextChunk& chunk = plan.chunks[index];
  Json json = {{"request_begin", chunk.request_begin},
               {"request_end", chunk.request_end},
               {"token_begin", chunk.token_begin},
               {"token_end", chunk.token_end},
               {"num_rows", chunk.num_rows},
               {"starts", plan.starts(index)},
               {"seq_lens", plan.seq_lens(index)},
               {"cu_seq_lens", plan.cu_seq_lens(index)},
               {"cu_query_lens", plan.cu_query_lens(index)},
               {"max_query_len", chunk.max_query_len},
               {"max_seq_len", chunk.max_seq_len},
               {"is_continuation", chunk.is_continuation},
               {"continuation_token_end", chunk.continuation_token_end}};
  if (dcp) {
    json["local_starts"] = plan.local_starts(index);
    json["local_seq_lens"] = plan.local_seq_lens(index);
    json["cu_local_seq_lens"] = plan.cu_local_seq_lens(index);
    // One list per member, with an entry per rank.
    const auto rank_seq_lens = plan.rank_seq_lens(index);
    const auto world = static_cast<size_t>(plan.sharding.world);
    json["rank_seq_lens"] = Json::array();
    for (size_t i = 0; i < rank_seq_lens.size(); i += world) {
      json["rank_seq_lens"].push_back(rank_seq_lens.subspan(i, world));
    }
  }
  return json;
}

// Rows that every rank sets aside for each request's context, over all chunks.
std::vector<int64_t> local_totals(const PlannedBatch& batch) {
  std::vector<int64_t> totals(batch.context_lens.size(), 0);
  for (size_t i = 0; i < batch.packed.chunks.size(); ++i) {
    auto request = static_cast<size_t>(batch.packed.chunks[i].request_begin);
    for (const int32_t rows : batch.packed.local_seq_lens(i)) totals[request++] += rows;
  }
  return totals;
}

// "3" or "3-17": the range [begin, end), which is not empty.
std::string format_range(int64_t begin, int64_t end) {
  if (end - begin == 1) return format_count(begin);
  return format_count(begin) + "-" + format_count(end - 1);
}

// "1,024" or "72-128": the rows of a chunk that the ranks really hold, from the fewest to the most.
std::string held_rows(const ContextPlan& plan, size_t index) {
  std::vector<int64_t> of_rank(static_cast<size_t>(plan.sharding.world), 0);
  const auto rank_seq_lens = plan.rank_seq_lens(index);
  for (size_t i = 0; i < rank_seq_lens.size(); ++i) of_rank[i % of_rank.size()] += rank_seq_lens[i];
  const auto [fewest, most] = std::minmax_element(of_rank.begin(), of_rank.end());
  return format_range(*fewest, *most + 1);
}

void print_chunks(const ContextPlan& plan, int32_t workspace, bool dcp) {
  if (plan.empty()) return;
  std::vector<Table::Column> columns = {{"chunk"},
                                        {"requests"},
                                        {"tokens"},
                                        {"rows"},
                                        {"workspace, %"},
                                        {"longest query, tokens"},
                                        {"longest context, rows"}};
  if (dcp) {
    columns.push_back({"rows a rank"});
    columns.push_back({"without padding"});
  }
  columns.push_back({"continues", Table::Align::left});
  Table table(std::move(columns));
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const ContextChunk& chunk = plan.chunks[i];
    std::string continues;
    if (chunk.is_continuation) {
      continues = "request " + format_count(chunk.request_begin) + " from row " +
                  format_count(plan.starts(i)[0]);
      if (dcp) continues += " (a rank's " + format_count(plan.local_starts(i)[0]) + ")";
    }
    std::vector<std::string> cells = {format_count(static_cast<int64_t>(i)),
                                      format_range(chunk.request_begin, chunk.request_end),
                                      chunk.token_begin == chunk.token_end
                                          ? "none"
                                          : format_range(chunk.token_begin, chunk.token_end),
                                      format_count(chunk.num_rows),
                                      format_number(100.0 * chunk.num_rows / workspace, 1),
                                      format_count(chunk.max_query_len),
                                      format_count(chunk.max_seq_len)};
    if (dcp) {
      cells.push_back(format_count(plan.local_rows(i)));
      cells.push_back(held_rows(plan, i));
    }
    cells.push_back(continues);
    table.add_row(std::move(cells));
  }
  std::cout << table << '\n';
}

std::string counted(int64_t count, const std::string& singular, const std::string& plural) {
  return format_count(count) + " " + (count == 1 ? singular : plural);
}

// The first bars of one schedule.
PlanPanel draw(std::string name, std::string bar, std::string bars, const ContextPlan& plan) {
  PlanPanel panel = {std::move(name),
                     std::move(bar),
                     std::move(bars),
                     static_cast<int64_t>(plan.chunks.size()),
                     {}};
  for (size_t i = 0; i < std::min(plan.chunks.size(), kMaxPlanBars); ++i) {
    const auto starts = plan.starts(i);
    const auto seq_lens = plan.seq_lens(i);
    PlanBar& segments = panel.bars.emplace_back();
    for (size_t member = 0; member < starts.size(); ++member) {
      if (seq_lens[member] == 0) continue;
      segments.push_back({plan.chunks[i].request_begin + static_cast<int64_t>(member),
                          starts[member], seq_lens[member]});
    }
  }
  return panel;
}

void write_svg(const PlanArguments& arguments, const PlannedBatch& batch, int64_t num_batches,
               const PlannerOptions& options) {
  if (batch.equal_split_passes * static_cast<int64_t>(batch.query_lens.size()) > kMaxDrawnMembers) {
    throw std::invalid_argument("--svg: got " + std::to_string(batch.query_lens.size()) +
                                " requests in " + std::to_string(batch.equal_split_passes) +
                                " equal-split passes, expected a batch small enough to draw");
  }
  PlanDrawing drawing;
  drawing.title = "Context schedule: packed against equal split";
  drawing.subtitle = arguments.input.is_trace()
                         ? "batch " + format_count(batch.number) + " of " +
                               format_count(num_batches) + " of " +
                               format_count(arguments.input.batch_tokens()) + " tokens"
                         : arguments.input.name();
  if (arguments.dcp()) {
    drawing.subtitle = "dcp " + format_count(arguments.world) + ", interleave " +
                       format_count(arguments.interleave) + " · " + drawing.subtitle;
  }
  drawing.subtitle = "alignment " + format_count(options.alignment) + " · " + drawing.subtitle;
  drawing.workspace_rows = options.row_budget;
  drawing.context_lens.assign(batch.context_lens.begin(), batch.context_lens.end());
  drawing.panels.push_back(draw("Packed", "chunk", "chunks", batch.packed));
  drawing.panels.push_back(draw("Equal split", "pass", "passes",
                                plan_equal_split(batch.query_lens, batch.context_lens, options)));
  std::ofstream file(*arguments.svg, std::ios::binary);
  file << render_plan_svg(drawing);
  if (!file.flush()) {
    throw std::invalid_argument("--svg: got " + quote(*arguments.svg, 200) +
                                ", expected a file that can be written");
  }
}

void run_plan(PlanArguments& arguments) {
  arguments.input.open();
  const PlannerOptions options = planner_options(arguments);

  int64_t num_batches = 0;
  int64_t packed_chunks = 0;
  int64_t passes = 0;
  int64_t context_rows = 0;
  int64_t new_tokens = 0;
  PlannedBatch shown;  // a spec's batch; of a trace, the one that packing helps most
  {
    Progress progress("planning", "batches", 0);
    std::vector<RequestLengths> batch;
    while (arguments.input.next(batch)) {
      PlannedBatch planned = plan_batch(num_batches, batch, options);
      packed_chunks += planned.packed_chunks();
      passes += planned.equal_split_passes;
      for (const RequestLengths& request : batch) {
        context_rows += request.context_len;
        new_tokens += request.query_len;
      }
      if (num_batches == 0 || planned.equal_split_passes - planned.packed_chunks() >
                                  shown.equal_split_passes - shown.packed_chunks()) {
        shown = std::move(planned);
      }
      progress.update(++num_batches);
    }
  }
  if (arguments.svg) write_svg(arguments, shown, num_batches, options);

  if (arguments.json) {
    Json json = {{"batches", num_batches},          {"packed_chunks", packed_chunks},
                 {"equal_split_passes", passes},    {"requests", arguments.input.num_requests()},
                 {"new_tokens", new_tokens},        {"context_rows", context_rows},
                 {"workspace", options.row_budget}, {"alignment", options.alignment}};
    if (arguments.dcp()) {
      json["dcp"] = arguments.world;
      json["interleave"] = arguments.interleave;
    }
    if (arguments.input.is_trace()) {
      json["batch_tokens"] = arguments.input.batch_tokens();
    } else {
      Json chunks = Json::array();
      for (size_t i = 0; i < shown.packed.chunks.size(); ++i) {
        chunks.push_back(chunk_json(shown.packed, i, arguments.dcp()));
      }
      json["chunks"] = std::move(chunks);
      Json ranges = Json::array();
      for (const TokenRange& range : shown.packed.init_token_ranges) {
        ranges.push_back({range.begin, range.end});
      }
      json["running_rows"] = shown.packed.running_rows;
      json["context_free_token_ranges"] = std::move(ranges);
      if (arguments.dcp()) json["local_totals"] = local_totals(shown);
    }
    std::cout << json.dump(2) << '\n';
    return;
  }

  if (!arguments.input.is_trace()) {
    print_chunks(shown.packed, arguments.workspace, arguments.dcp());
  }

  std::cout << counted(arguments.input.num_requests(), "request", "requests") << ", "
            << counted(new_tokens, "new token", "new tokens") << ", "
            << counted(context_rows, "row", "rows") << " of context";
  if (arguments.input.is_trace()) {
    std::cout << " in " << counted(num_batches, "batch", "batches") << " of "
              << format_count(arguments.input.batch_tokens()) << " tokens";
  }
  std::cout << "; workspace " << format_count(options.row_budget) << " rows, alignment "
            << format_count(options.alignment);
  if (arguments.dcp()) {
    std::cout << "; dcp " << format_count(arguments.world) << ", interleave "
              << format_count(arguments.interleave) << ": at most "
              << counted(options.row_budget / arguments.world, "row", "rows") << " a rank";
  }
  std::cout << '\n'
            << "packed: " << counted(packed_chunks, "chunk", "chunks")
            << "   equal split: " << counted(passes, "pass", "passes");
  if (packed_chunks > 0) {
    std::cout << "   ("
              << format_number(static_cast<double>(passes) / static_cast<double>(packed_chunks), 1)
              << "x)";
  }
  std::cout << '\n';
}

}  // namespace

void add_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "plan", "Pack the cached context of batches into workspace chunks, against the equal split");
  const auto arguments = std::make_shared<PlanArguments>();
  arguments->input.add_options(*command);
  const CLI::Range positive(1, std::numeric_limits<int32_t>::max());
  command->add_option("--workspace", arguments->workspace, "Rows of the context workspace")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--block", arguments->block_size, "Rows of a cache page")
      ->check(positive)
      ->capture_default_str();
  command
      ->add_option("--alignment", arguments->alignment,
                   "Chunks cut requests at multiples of this [rows of a page; with --dcp the least "
                   "common multiple of that and interleave x ranks]")
      ->check(positive);
  CLI::Option* dcp =
      command->add_option("--dcp", arguments->world, "Ranks that the context is sharded over");
  dcp->check(CLI::Range(1, kMaxWorld));
  command
      ->add_option("--interleave", arguments->interleave,
                   "Consecutive rows of one rank under --dcp")
      ->check(positive)
      ->needs(dcp)
      ->capture_default_str();
  command->add_option("--svg", arguments->svg,
                      "Draw both schedules into this file (of a trace: the batch that packing "
                      "helps most)");
  command->add_flag("--json", arguments->json, "Print JSON");
  command->callback([arguments] { run_plan(*arguments); });
}

}  // namespace sparse_mla::command
