#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <omp.h>

#include "sparse_mla/random.h"
#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"

#include "tests/support/gpu.h"
#include "tools/commands.h"
#include "tools/memory.h"
#include "tools/progress.h"
#include "tools/quote.h"
#include "tools/table.h"
#include "tools/whole_number.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// 32 GiB of scores: more is a typing error.
constexpr int64_t kMaxScores = int64_t{1} << 33;

struct TopkArguments {
  int64_t rows = 0;
  int64_t len = 0;
  int64_t k = 2048;
  std::string data = "normal";
  std::string algorithms = "all";
  std::string backend = "auto";
  int hint = -1;  // percent of the hints that are right; −1: no hints
  uint64_t seed = 0;
  bool json = false;
};

struct Result {
  std::string name;
  std::string backend;
  std::string why_not;  // empty = it ran, and the rest holds
  bool chosen = false;  // what the library would take of this backend
  double seconds = 0;   // median
  bool exact = false;
  bool deterministic = false;
};

float draw(const TopkArguments& arguments, int64_t row, int64_t column) {
  const float normal =
      random_normal(arguments.seed, static_cast<uint64_t>(row), static_cast<uint64_t>(column));
  if (arguments.data == "narrow") return 1 + 1e-4f * normal;
  if (arguments.data == "ties") return std::round(normal * 2) / 2;
  if (arguments.data == "relu") return std::max(0.0f, normal - 1);  // five of six are zero
  return normal;
}

// [rows, k] the selection by its definition, to compare with: the k largest, the lower index first
// among equals, in index order, then −1.
std::vector<int32_t> reference_selection(const std::vector<float>& scores,
                                         const TopkArguments& arguments) {
  std::vector<int32_t> indices(static_cast<size_t>(arguments.rows * arguments.k), -1);
#pragma omp parallel for schedule(dynamic)
  for (int64_t row = 0; row < arguments.rows; ++row) {
    const float* row_scores = scores.data() + row * arguments.len;
    const auto better = [&](int32_t a, int32_t b) {
      return row_scores[a] != row_scores[b] ? row_scores[a] > row_scores[b] : a < b;
    };
    std::vector<int32_t> order(static_cast<size_t>(arguments.len));
    std::iota(order.begin(), order.end(), 0);
    const auto end = order.begin() + std::min(arguments.len, arguments.k);
    std::nth_element(order.begin(), end, order.end(), better);
    std::sort(order.begin(), end);
    std::copy(order.begin(), end, indices.begin() + row * arguments.k);
  }
  return indices;
}

// Whether every row of `indices` holds the reference's set, then −1.
bool is_exact(std::vector<int32_t> indices, const std::vector<int32_t>& reference,
              const TopkArguments& arguments) {
  const int64_t count = std::min(arguments.len, arguments.k);
#pragma omp parallel for
  for (int64_t row = 0; row < arguments.rows; ++row) {
    const auto begin = indices.begin() + row * arguments.k;
    std::sort(begin, begin + count);
  }
  return indices == reference;
}

// [rows, k] indices of which `percent` are the row's own picks, the rest any place.
std::vector<int32_t> make_hints(const std::vector<int32_t>& reference,
                                const TopkArguments& arguments) {
  std::vector<int32_t> hints = reference;
  for (size_t i = 0; i < hints.size(); ++i) {
    const uint32_t draw = random_bits(arguments.seed, ~uint64_t{0}, i);
    if (static_cast<int>(draw % 100) >= arguments.hint)
      hints[i] = static_cast<int32_t>((draw >> 7) % static_cast<uint64_t>(arguments.len));
  }
  return hints;
}

// The selectors of the backend asked for.
std::vector<const Entry<SelectProblem, SelectCall>*> entries_of(const std::string& backend) {
  std::vector<const Entry<SelectProblem, SelectCall>*> entries;
  for (const auto& entry : select_operation().entries())
    if (backend == "auto" || backend == to_string(entry.backend)) entries.push_back(&entry);
  if (entries.empty())
    throw std::invalid_argument("--backend: got " + backend +
                                ", expected cpu or auto: this build " + "has no " + backend +
                                " selector");
  return entries;
}

std::vector<std::string> wanted_entries(const std::string& algorithms, const std::string& backend) {
  std::vector<std::string> known;
  for (const auto* entry : entries_of(backend)) known.emplace_back(entry->name);
  if (algorithms == "all") return known;
  std::vector<std::string> wanted;
  for (size_t begin = 0; begin <= algorithms.size();) {
    const size_t end = std::min(algorithms.find(',', begin), algorithms.size());
    const std::string name = algorithms.substr(begin, end - begin);
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      std::string names;
      for (const std::string& each : known) names += ", " + each;
      throw std::invalid_argument("--algorithms: got " + quote(name) + ", expected all" + names);
    }
    wanted.push_back(name);
    begin = end + 1;
  }
  return wanted;
}

// The middle one of `times`.
double median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

void run_on_host(const Entry<SelectProblem, SelectCall>& entry, const SelectProblem& problem,
                 SelectCall call, const std::vector<int32_t>& reference,
                 const TopkArguments& arguments, Result& result) {
  HostWorkspace workspace(entry.workspace_bytes(problem));
  std::vector<int32_t> indices(static_cast<size_t>(arguments.rows * arguments.k), -2);
  call.indices = contiguous(indices.data(), arguments.rows, arguments.k);
  select_operation().run(entry, problem, call, workspace.span(),
                         nullptr);  // warm-up, and the result to check
  const std::vector<int32_t> first = indices;
  result.exact = is_exact(first, reference, arguments);
  result.deterministic = true;

  // At least 3 runs, then until half a second has passed, 50 at most.
  std::vector<double> times;
  double total = 0;
  while (times.size() < 3 || (total < 0.5 && times.size() < 50)) {
    std::fill(indices.begin(), indices.end(), -2);
    const Clock::time_point start = Clock::now();
    select_operation().run(entry, problem, call, workspace.span(), nullptr);
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += times.back();
    result.deterministic = result.deterministic && indices == first;
  }
  result.seconds = median(times);
}

// A copy of `count` elements on the device.
template <class T>
support::DeviceMemory to_device(const T* host, int64_t count) {
  support::DeviceMemory memory(static_cast<size_t>(count) * sizeof(T));
  support::copy_to_device(memory.data(), host, memory.size());
  return memory;
}

// The selectors of the device: its copy of the scores and hints, made once.
class DeviceRuns {
 public:
  DeviceRuns(const SelectCall& call, int64_t k)
      : call_(call), num_indices_(call.scores.num_rows * k) {}

  void run(const Entry<SelectProblem, SelectCall>& entry, const SelectProblem& problem,
           const std::vector<int32_t>& reference, const TopkArguments& arguments, Result& result) {
    if (indices_.size() == 0) upload(arguments);
    const support::DeviceMemory workspace(entry.workspace_bytes(problem));
    std::vector<int32_t> first(static_cast<size_t>(num_indices_)), indices(first);
    const auto launch = [&] {
      select_operation().run(entry, problem, call_, workspace.span(), stream_.get());
    };
    result.deterministic = true;
    for (int i = 0; i < 3; ++i) {
      support::fill_device(indices_.data(), 0xFE, indices_.size());
      launch();
      stream_.synchronize();
      support::copy_to_host(indices.data(), indices_.data(), indices_.size());
      if (i == 0) first = indices;
      result.deterministic = result.deterministic && indices == first;
    }
    result.exact = is_exact(first, reference, arguments);

    // Launched one behind the other, so that no time passes between them.
    constexpr int kLaunches = 20;
    support::DeviceClock clock;
    std::vector<size_t> marks{clock.mark(stream_.get())};
    for (int i = 0; i < kLaunches; ++i) {
      launch();
      marks.push_back(clock.mark(stream_.get()));
    }
    stream_.synchronize();
    std::vector<double> times;
    for (size_t i = 0; i < kLaunches; ++i)
      times.push_back(clock.seconds_between(marks[i], marks[i + 1]));
    result.seconds = median(times);
  }

 private:
  void upload(const TopkArguments& arguments) {
    scores_ =
        to_device(static_cast<const float*>(call_.scores.data), arguments.rows * arguments.len);
    call_.scores.data = scores_.data();
    indices_ = support::DeviceMemory(static_cast<size_t>(num_indices_) * sizeof(int32_t));
    call_.indices =
        contiguous(reinterpret_cast<int32_t*>(indices_.data()), arguments.rows, arguments.k);
    if (call_.hints.data_handle() == nullptr) return;
    hints_ = to_device(call_.hints.data_handle(), num_indices_);
    call_.hints =
        contiguous(reinterpret_cast<const int32_t*>(hints_.data()), arguments.rows, arguments.k);
  }

  SelectCall call_;
  int64_t num_indices_;
  support::DeviceMemory scores_, indices_, hints_;
  support::DeviceStream stream_;
};

void run_topk(const TopkArguments& arguments) {
  if (arguments.rows > kMaxScores / arguments.len) {
    throw std::invalid_argument("--rows × --len: got " + std::to_string(arguments.rows) + " × " +
                                std::to_string(arguments.len) + ", expected at most " +
                                std::to_string(kMaxScores) + " scores");
  }
  if (arguments.rows > kMaxScores / arguments.k) {
    throw std::invalid_argument("--rows × --k: got " + std::to_string(arguments.rows) + " × " +
                                std::to_string(arguments.k) + ", expected at most " +
                                std::to_string(kMaxScores) + " indices");
  }
  const std::vector<std::string> wanted = wanted_entries(arguments.algorithms, arguments.backend);
  // The scores, four copies of the indices and each thread's order of a row.
  require_memory("--rows × --len × --k",
                 4.0 * static_cast<double>(arguments.rows) * static_cast<double>(arguments.len) +
                     16.0 * static_cast<double>(arguments.rows) * static_cast<double>(arguments.k) +
                     8.0 * omp_get_max_threads() * static_cast<double>(arguments.len));

  std::vector<float> scores(static_cast<size_t>(arguments.rows * arguments.len));
#pragma omp parallel for
  for (int64_t row = 0; row < arguments.rows; ++row) {
    for (int64_t column = 0; column < arguments.len; ++column) {
      scores[static_cast<size_t>(row * arguments.len + column)] = draw(arguments, row, column);
    }
  }
  const std::vector<int32_t> reference = reference_selection(scores, arguments);
  SelectCall call;
  call.scores = {.data = scores.data(),
                 .type = ScoreType::f32,
                 .num_rows = arguments.rows,
                 .row_len = arguments.len,
                 .row_stride = arguments.len};
  std::vector<int32_t> hints;
  if (arguments.hint >= 0) {
    hints = make_hints(reference, arguments);
    call.hints = contiguous<const int32_t>(hints.data(), arguments.rows, arguments.k);
  }
  const SelectProblem problem = {.max_rows = arguments.rows,
                                 .max_row_len = arguments.len,
                                 .k = static_cast<int>(arguments.k),
                                 .hinted = arguments.hint >= 0};

  std::vector<Result> results;
  {
    Progress progress("measured", "algorithms", static_cast<int64_t>(wanted.size()));
    std::unique_ptr<DeviceRuns> device;  // made for the first selector that can use it
    for (const auto* entry : entries_of(arguments.backend)) {
      if (std::find(wanted.begin(), wanted.end(), entry->name) == wanted.end()) continue;
      Result result;
      result.name = entry->name;
      result.backend = to_string(entry->backend);
      result.why_not = entry->why_not(problem);
      if (result.why_not.empty()) {
        Dispatch dispatch = Dispatch::from_environment();
        dispatch.backend = entry->backend;
        for (const EntryReport& line : select_operation().explain(problem, dispatch).entries)
          if (line.name == result.name) result.chosen = line.chosen;
        if (entry->backend == Backend::cpu) {
          run_on_host(*entry, problem, call, reference, arguments, result);
        } else {
          if (!device) device = std::make_unique<DeviceRuns>(call, arguments.k);
          device->run(*entry, problem, reference, arguments, result);
        }
      }
      results.push_back(std::move(result));
      progress.update(static_cast<int64_t>(results.size()));
    }
  }

  const double bytes = 4.0 * static_cast<double>(arguments.rows * arguments.len);
  if (arguments.json) {
    Json algorithms = Json::array();
    for (const Result& result : results) {
      Json line = {{"name", result.name},
                   {"backend", result.backend},
                   {"usable", result.why_not.empty()},
                   {"why_not", result.why_not},
                   {"chosen", result.chosen}};
      if (result.why_not.empty()) {
        line["milliseconds"] = 1e3 * result.seconds;
        line["gb_per_s"] = 1e-9 * bytes / result.seconds;
        line["exact"] = result.exact;
        line["deterministic"] = result.deterministic;
      }
      algorithms.push_back(std::move(line));
    }
    const Json out = {{"rows", arguments.rows}, {"len", arguments.len},
                      {"k", arguments.k},       {"data", arguments.data},
                      {"seed", arguments.seed}, {"algorithms", algorithms}};
    std::cout << out.dump(2) << '\n';
    return;
  }
  std::cout << format_count(arguments.rows) << " rows of " << format_count(arguments.len)
            << " fp32 scores (" << arguments.data << "), k " << format_count(arguments.k)
            << ", lower index wins\n\n";
  Table table({{"algorithm", Table::Align::left},
               {"backend", Table::Align::left},
               {"chosen", Table::Align::left},
               {"time, ms"},
               {"read, GB/s"},
               {"exact", Table::Align::left},
               {"deterministic", Table::Align::left},
               {"not usable because", Table::Align::left}});
  for (const Result& result : results) {
    if (!result.why_not.empty()) {
      table.add_row({result.name, result.backend, "-", "-", "-", "-", "-", result.why_not});
      continue;
    }
    table.add_row({result.name, result.backend, result.chosen ? "yes" : "",
                   format_number(1e3 * result.seconds, 3),
                   format_number(1e-9 * bytes / result.seconds, 2), result.exact ? "yes" : "NO",
                   result.deterministic ? "yes" : "NO", ""});
  }
  std::cout << table;
}

}  // namespace

void add_topk_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "topk", "Every top-k algorithm on one problem: time, bandwidth, exact or not, stable or not");
  const auto arguments = std::make_shared<TopkArguments>();
  const int64_t max_int32 = std::numeric_limits<int32_t>::max();
  command->add_option("--rows", arguments->rows, "Rows of scores")
      ->required()
      ->check(CLI::Range(int64_t{1}, kMaxScores));
  command->add_option("--len", arguments->len, "Scores of a row")
      ->required()
      ->check(CLI::Range(int64_t{1}, max_int32));
  command->add_option("--k", arguments->k, "Entries to select of each row")
      ->check(CLI::Range(int64_t{1}, max_int32))
      ->capture_default_str();
  command
      ->add_option("--data", arguments->data,
                   "normal; narrow: 1 + 1e-4 · normal; ties: a grid of 0.5; relu: most are zero")
      ->check(CLI::IsMember({"normal", "narrow", "ties", "relu"}))
      ->capture_default_str();
  command->add_option("--algorithms", arguments->algorithms, "all, or names joined by ','")
      ->capture_default_str();
  command->add_option("--backend", arguments->backend, "auto: all that this build has; cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--hint", arguments->hint,
                   "Give hints, so many percent of them right, as a step before would")
      ->check(CLI::Range(0, 100));
  command->add_option("--seed", arguments->seed, "Of the random scores")
      ->check(whole_number<uint64_t>())
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON");
  command->callback([arguments] { run_topk(*arguments); });
}

}  // namespace sparse_mla::command
