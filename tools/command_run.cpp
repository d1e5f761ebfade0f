#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tests/support/dump.h"
#include "tools/batch_input.h"
#include "tools/commands.h"
#include "tools/layer_replay.h"
#include "tools/limits_report.h"
#include "tools/model_config.h"
#include "tools/progress.h"
#include "tools/table.h"
#include "tools/whole_number.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::ordered_json;

struct RunArguments {
  BatchInput input;
  std::optional<std::int64_t> max_batches;
  std::string model = "deepseek-v3.2";
  std::optional<int> heads, topk;
  std::string backend = "auto", path = "auto", schedule = "packed", cache = "bf16";
  std::string selection = "indexer";
  std::int32_t workspace = 0;  // rows, 0 = from the batches
  std::int32_t block_size = 64;
  std::int32_t alignment = 0;               // 0 = block_size
  std::optional<std::int64_t> mask_budget;  // bytes
  std::int32_t decode_threshold = 1;
  std::string check;  // "", "sample" or "all"
  std::optional<std::string> dump;
  std::uint64_t seed = 1;
  bool compare_paths = false;
  bool json = false;
};

using Batches = std::vector<std::vector<RequestLengths>>;

Batches read_batches(RunArguments& arguments) {
  arguments.input.open();
  if (arguments.max_batches && !arguments.input.is_trace())
    throw std::invalid_argument("--max-batches: got it with --spec, expected --trace");
  Batches batches;
  std::vector<RequestLengths> batch;
  while ((!arguments.max_batches ||
          static_cast<std::int64_t>(batches.size()) < *arguments.max_batches) &&
         arguments.input.next(batch))
    batches.push_back(batch);
  if (arguments.dump && batches.size() > 1)
    throw std::invalid_argument("--dump: got " + std::to_string(batches.size()) +
                                " batches, expected one (--spec, or --max-batches 1)");
  return batches;
}

Limits limits_of(const RunArguments& arguments, const Batches& batches) {
  const ModelConfig model = load_model_config(arguments.model);
  Limits limits;
  limits.dims = model_dims(model, arguments.heads);
  limits.dims.index_topk = arguments.topk.value_or(model.index_topk);
  limits.cache_format = parse_cache_format(arguments.cache);
  limits.block_size = arguments.block_size;
  limits.chunk_alignment = arguments.alignment;
  limits.workspace_rows = arguments.workspace;
  limits.decode_threshold = arguments.decode_threshold;
  if (arguments.mask_budget) limits.mask_budget_bytes = *arguments.mask_budget;
  limits.max_num_tokens = limits.max_num_seqs = limits.max_model_len = 1;
  for (const auto& batch : batches) {
    std::int32_t tokens = 0;
    for (const RequestLengths& request : batch) {
      tokens += request.query_len;
      limits.max_model_len =
          std::max(limits.max_model_len, request.query_len + request.context_len);
    }
    limits.max_num_tokens = std::max(limits.max_num_tokens, tokens);
    limits.max_num_seqs = std::max(limits.max_num_seqs, static_cast<std::int32_t>(batch.size()));
  }
  return limits;
}

Dispatch dispatch_of(const std::string& backend) {
  Dispatch dispatch = Dispatch::from_environment();
  if (backend == "auto") return dispatch;
  dispatch.backend = backend == "cuda" ? Backend::cuda : Backend::cpu;
  const auto reports = explain_operations(Limits{}, Dispatch{});
  for (const OperationReport& report : reports)
    for (const EntryReport& entry : report.entries)
      if (entry.backend == *dispatch.backend) return dispatch;
  throw std::invalid_argument("--backend: got " + backend +
                              ", expected cpu or auto: no operation of this build has a " +
                              backend + " entry");
}

BatchOptions options_of(const RunArguments& arguments) {
  BatchOptions options;
  const std::map<std::string, AttentionPath> paths = {{"auto", AttentionPath::automatic},
                                                      {"dense", AttentionPath::dense},
                                                      {"masked", AttentionPath::masked},
                                                      {"sparse", AttentionPath::sparse}};
  options.path = paths.at(arguments.path);
  options.schedule = arguments.schedule == "packed" ? Schedule::packed : Schedule::equal_split;
  return options;
}

support::SelectionKind selection_of(const std::string& selection) {
  if (selection == "random") return support::SelectionKind::random;
  if (selection == "clustered") return support::SelectionKind::clustered;
  return support::SelectionKind::indexer;
}

// The path that all batches took, or "mixed".
std::string common_path(const std::vector<BatchResult>& results) {
  std::string common;
  for (const BatchResult& result : results) {
    const std::string path = to_string(result.path);
    if (result.path == AttentionPath::none && results.size() > 1) continue;
    if (common.empty()) common = path;
    if (common != path) return "mixed";
  }
  return common.empty() ? "none" : common;
}

/// Batches of one prefill path.
struct PathClass {
  std::int64_t batches = 0;
  double seconds = 0;
  /// With each path forced that can serve all of them, where paths are compared.
  std::map<AttentionPath, double> seconds_of_path;
};

std::map<AttentionPath, PathClass> classes_by_path(const std::vector<BatchResult>& results) {
  std::map<AttentionPath, PathClass> classes;
  for (const BatchResult& result : results) {
    if (result.path == AttentionPath::none) continue;
    PathClass& of_path = classes[result.path];
    if (of_path.batches++ == 0) {
      of_path.seconds_of_path = result.seconds_of_path;
    } else {
      std::map<AttentionPath, double> sums;  // of paths that served every batch so far
      for (const auto& [path, seconds] : result.seconds_of_path)
        if (const auto found = of_path.seconds_of_path.find(path);
            found != of_path.seconds_of_path.end())
          sums[path] = found->second + seconds;
      of_path.seconds_of_path = std::move(sums);
    }
    of_path.seconds += result.seconds;
  }
  return classes;
}

double best_seconds(const std::map<AttentionPath, double>& seconds_of_path) {
  double best = std::numeric_limits<double>::infinity();
  for (const auto& [path, seconds] : seconds_of_path) best = std::min(best, seconds);
  return best;
}

void print_paths(const RunArguments& arguments, const std::vector<BatchResult>& results) {
  const auto ms = [](double seconds) { return format_number(seconds * 1e3, 1); };
  std::vector<Table::Column> columns{
      {"prefill path", Table::Align::left}, {"batches"}, {"time, ms"}};
  if (arguments.compare_paths)
    for (const char* title : {"dense, ms", "masked, ms", "sparse, ms", "of the best path"})
      columns.push_back({title});
  Table table(columns);
  for (const auto& [path, of_path] : classes_by_path(results)) {
    std::vector<std::string> row{to_string(path), format_count(of_path.batches),
                                 ms(of_path.seconds)};
    if (arguments.compare_paths) {
      for (const AttentionPath other :
           {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse}) {
        const auto found = of_path.seconds_of_path.find(other);
        row.push_back(found == of_path.seconds_of_path.end() ? "-" : ms(found->second));
      }
      row.push_back(format_number(of_path.seconds / best_seconds(of_path.seconds_of_path), 2));
    }
    table.add_row(row);
  }
  std::cout << '\n' << table;
}

void print_json(const RunArguments& arguments, const LayerReplay& replay,
                const std::vector<BatchResult>& results, const CheckResult& check) {
  const bool checked = !arguments.check.empty();
  double seconds = 0;
  std::int64_t chunks = 0, tokens = 0;
  Json batches = Json::array();
  for (const BatchResult& result : results) {
    seconds += result.seconds;
    chunks += result.chunks;
    tokens += result.num_tokens;
    batches.push_back({{"requests", result.requests.size()},
                       {"tokens", result.num_tokens},
                       {"decode_tokens", result.num_decode_tokens},
                       {"path", to_string(result.path)},
                       {"why", result.why_path},
                       {"chunks", result.chunks},
                       {"masks", result.mask_scope ? Json(to_string(*result.mask_scope)) : Json()},
                       {"ms", result.seconds * 1e3}});
  }
  Json json = {{"path", common_path(results)}};
  if (checked) {
    json["rel_error"] = check.errors.rel_error();
    json["max_rel_error"] = check.errors.max_rel_error();
    json["lse_error"] = check.errors.lse_error();
    if (check.quantised()) json["rel_error_unquantised"] = check.unquantised.rel_error();
    json["selection_exact"] = check.selection_checked() ? Json(check.selection.exact()) : Json();
    json["score_error"] = check.selection_checked() ? Json(check.selection.score_error()) : Json();
    json["checked_tokens"] = check.tokens;
    json["passed"] = check.fault().empty();
  }
  json["backend"] = to_string(replay.capacity().backend());
  json["heads"] = replay.capacity().limits().dims.num_heads;
  json["topk"] = replay.capacity().limits().dims.index_topk;
  json["schedule"] = arguments.schedule;
  json["cache"] = arguments.cache;
  json["selection"] = arguments.selection;
  json["workspace_rows"] = replay.capacity().workspace_rows();
  json["alignment"] = replay.capacity().chunk_alignment();
  json["workspace_bytes"] = replay.capacity().workspace_bytes();
  json["tokens"] = tokens;
  json["chunks"] = chunks;
  json["ms"] = seconds * 1e3;
  Json stages = Json::object();
  for (const auto& [stage, time] : replay.stage_seconds()) stages[to_string(stage)] = time * 1e3;
  json["stages_ms"] = std::move(stages);
  Json paths = Json::object();
  for (const auto& [path, of_path] : classes_by_path(results)) {
    Json& entry =
        paths[to_string(path)] = {{"batches", of_path.batches}, {"ms", of_path.seconds * 1e3}};
    for (const auto& [other, own] : of_path.seconds_of_path)
      entry["ms_of_path"][to_string(other)] = own * 1e3;
  }
  json["paths"] = std::move(paths);
  json["batches"] = std::move(batches);
  std::cout << json.dump(2) << '\n';
}

std::string requests_text(const std::vector<RequestLengths>& requests) {
  std::int64_t context = 0, longest = 0;
  for (const RequestLengths& request : requests) {
    context += request.context_len;
    longest = std::max<std::int64_t>(longest, request.context_len);
  }
  return format_count(context) + " (longest " + format_count(longest) + ")";
}

void print_people(const RunArguments& arguments, const LayerReplay& replay,
                  const std::vector<BatchResult>& results, const CheckResult& check) {
  const Capacity& capacity = replay.capacity();
  std::cout << "model " << arguments.model << ", " << capacity.limits().dims.num_heads
            << " heads, topk " << format_count(capacity.limits().dims.index_topk) << ", cache "
            << arguments.cache << ", backend " << to_string(capacity.backend()) << ", workspace "
            << format_count(capacity.workspace_rows()) << " rows, schedule " << arguments.schedule
            << "\n\n";

  Table batches({{"batch"},
                 {"requests"},
                 {"new tokens"},
                 {"of decodes"},
                 {"context, rows", Table::Align::right},
                 {"prefill path", Table::Align::left},
                 {"chunks"},
                 {"time, ms"}});
  constexpr std::size_t kShown = 20;
  double seconds = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const BatchResult& result = results[i];
    seconds += result.seconds;
    if (i >= kShown) continue;
    batches.add_row({format_count(static_cast<std::int64_t>(i)),
                     format_count(static_cast<std::int64_t>(result.requests.size())),
                     format_count(result.num_tokens), format_count(result.num_decode_tokens),
                     requests_text(result.requests), to_string(result.path),
                     format_count(result.chunks), format_number(result.seconds * 1e3, 1)});
  }
  std::cout << batches;
  if (results.size() > kShown)
    std::cout << "… and " << format_count(static_cast<std::int64_t>(results.size() - kShown))
              << " more\n";

  std::map<std::string, std::int64_t> reasons;
  for (const BatchResult& result : results)
    if (result.path != AttentionPath::none)
      ++reasons[to_string(result.path) +
                (results.size() == 1 || arguments.path != "auto" ? ": " + result.why_path : "")];
  if (!reasons.empty()) std::cout << '\n';
  for (const auto& [reason, count] : reasons) {
    std::cout << "path " << reason;
    if (results.size() > 1) std::cout << " (" << format_count(count) << " batches)";
    std::cout << '\n';
  }
  if (results.size() > 1 || arguments.compare_paths) print_paths(arguments, results);

  std::cout << '\n';
  Table stages({{"stage", Table::Align::left}, {"time, ms"}, {"share, %"}});
  for (const auto& [stage, time] : replay.stage_seconds())
    stages.add_row(
        {to_string(stage), format_number(time * 1e3, 1), format_number(100 * time / seconds, 1)});
  stages.add_row({"all", format_number(seconds * 1e3, 1), format_number(100, 1)});
  std::cout << stages;

  if (arguments.check.empty()) return;
  std::cout << "\nchecked " << format_count(check.tokens) << " tokens against the fp64 reference: "
            << (check.fault().empty() ? "passed" : "FAILED") << '\n';
  Table errors({{"measure", Table::Align::left}, {"got"}, {"bound"}});
  const auto scientific = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2e", value);
    return std::string(text);
  };
  errors.add_row({"rel_error, whole tensor", scientific(check.errors.rel_error()),
                  scientific(support::kBf16RelError)});
  errors.add_row({"max_rel_error, worst (token, head)", scientific(check.errors.max_rel_error()),
                  scientific(support::kBf16MaxRelError)});
  errors.add_row({"lse, worst", scientific(check.errors.lse_error()),
                  scientific(support::max_lse_error(check.cache_format))});
  if (check.quantised())
    errors.add_row({"rel_error_unquantised, against a bf16 cache",
                    scientific(check.unquantised.rel_error()),
                    scientific(support::max_quantisation_error(check.cache_format))});
  if (check.selection_checked()) {
    errors.add_row({"selections that are not the exact top-k",
                    format_count(check.selection.wrong_rows()), "0"});
    errors.add_row({"indexer scores, part of their bound",
                    scientific(check.selection.score_error()), scientific(1)});
  }
  std::cout << errors;
}

void run(RunArguments& arguments) {
  const Batches batches = read_batches(arguments);
  LayerReplay replay(limits_of(arguments, batches), dispatch_of(arguments.backend),
                     options_of(arguments), selection_of(arguments.selection), arguments.seed,
                     arguments.compare_paths);
  std::vector<BatchResult> results;
  CheckResult check;
  {
    Progress progress("replaying", "batches", static_cast<std::int64_t>(batches.size()));
    for (const auto& batch : batches) {
      results.push_back(replay.run(batch));
      if (!arguments.check.empty()) replay.check(arguments.check == "all", check);
      progress.update(static_cast<std::int64_t>(results.size()));
    }
  }
  if (arguments.dump && !results.empty())
    support::write_dump(*arguments.dump, replay.data(),
                        replay.checked_tokens(arguments.check == "all"),
                        to_string(results.back().path));
  if (arguments.json)
    print_json(arguments, replay, results, check);
  else
    print_people(arguments, replay, results, check);
  if (!arguments.check.empty() && !check.fault().empty())
    throw std::runtime_error("check failed: " + check.fault());
}

}  // namespace

void add_run_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("run", "Run the layer on seeded data; with --check against fp64");
  const auto a = std::make_shared<RunArguments>();
  a->input.add_options(*command);
  const CLI::Range positive(1, std::numeric_limits<std::int32_t>::max());
  command->add_option("--max-batches", a->max_batches, "Only the first batches of the trace")
      ->check(whole_number<std::int64_t>())
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()));
  command
      ->add_option("--model", a->model,
                   "deepseek-v3.2, glm-5, or the path of a Hugging Face config.json")
      ->capture_default_str();
  command->add_option("--heads", a->heads, "Query heads on this rank [the model's]")
      ->check(CLI::Range(1, 128));
  command->add_option("--topk", a->topk, "Keys that a token attends [the model's index_topk]")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--backend", a->backend, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--path", a->path, "Of prefill requests: auto, dense, masked or sparse")
      ->check(CLI::IsMember({"auto", "dense", "masked", "sparse"}))
      ->capture_default_str();
  command->add_option("--schedule", a->schedule, "Of the cached context: packed or equal-split")
      ->check(CLI::IsMember({"packed", "equal-split"}))
      ->capture_default_str();
  command->add_option("--cache", a->cache, "Format of the latent cache: bf16, fp8_ds_mla or fp8")
      ->check(CLI::IsMember({"bf16", "fp8_ds_mla", "fp8"}))
      ->capture_default_str();
  command->add_option("--selection", a->selection, "indexer, random or clustered")
      ->check(CLI::IsMember({"indexer", "random", "clustered"}))
      ->capture_default_str();
  command->add_option("--workspace", a->workspace, "Cap of the context workspace, rows")
      ->check(positive);
  command->add_option("--block", a->block_size, "Rows of a cache page")
      ->check(positive)
      ->capture_default_str();
  command
      ->add_option("--alignment", a->alignment,
                   "Chunks cut requests at multiples of this [rows of a page]")
      ->check(positive);
  command->add_option("--mask-budget", a->mask_budget, "Mask words, bytes [128 MiB]")
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  command
      ->add_option("--decode-threshold", a->decode_threshold,
                   "Requests with at most so many new tokens are decodes")
      ->check(CLI::Range(0, std::numeric_limits<std::int32_t>::max()))
      ->capture_default_str();
  command
      ->add_flag("--check{sample}", a->check,
                 "Compare a sample of tokens (--check=all: every token) with the fp64 reference")
      ->check(CLI::IsMember({"sample", "all"}));
  command->add_option(
      "--dump", a->dump,
      "Write the checked tokens' inputs and outputs as .npy files into this folder");
  command->add_option("--seed", a->seed, "Of the data")
      ->check(whole_number<std::uint64_t>())
      ->capture_default_str();
  command->add_flag("--compare-paths", a->compare_paths,
                    "Time every batch with each path forced, too");
  command->add_flag("--json", a->json, "Print JSON");
  command->callback([a] { run(*a); });
}

}  // namespace sparse_mla::command
