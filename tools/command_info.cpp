#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "sparse_mla/capacity.h"
#include "sparse_mla/limits.h"
#include "sparse_mla/operation.h"

#include "tools/commands.h"
#include "tools/table.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::ordered_json;

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return "unknown";
}

bool has_avx2_fma() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

void run_info(bool json) {
  const std::string model = cpu_model();
  const unsigned threads = std::thread::hardware_concurrency();
  const std::vector<OperationReport> operations =
      explain_operations(Limits{}, Dispatch::from_environment());

  if (json) {
    Json out = {{"version", SPARSE_MLA_VERSION},
                {"cpu", {{"model", model}, {"threads", threads}, {"avx2_fma", has_avx2_fma()}}},
                {"gpus", Json::array()}};
    for (const OperationReport& operation : operations) {
      Json entries = Json::array();
      for (const EntryReport& entry : operation.entries) {
        entries.push_back({{"name", entry.name},
                           {"backend", to_string(entry.backend)},
                           {"summary", entry.summary},
                           {"usable", entry.why_not.empty()},
                           {"why_not", entry.why_not},
                           {"chosen", entry.chosen}});
      }
      out["operations"].push_back({{"operation", operation.operation}, {"entries", entries}});
    }
    std::cout << out.dump(2) << '\n';
    return;
  }

  std::cout << "sparse-mla " << SPARSE_MLA_VERSION << '\n'
            << "CPU   " << model << ", " << threads << " threads, "
            << (has_avx2_fma() ? "AVX2 and FMA" : "no AVX2 and FMA") << '\n'
            << "GPUs  none (no operation of this build has a CUDA entry)\n\n"
            << "Operations, fastest entry first, for DeepSeek-V3.2's sizes (* = chosen):\n\n";
  Table table({{"operation", Table::Align::left},
               {"", Table::Align::left},
               {"entry", Table::Align::left},
               {"backend", Table::Align::left},
               {"usable", Table::Align::left},
               {"method", Table::Align::left}});
  for (const OperationReport& operation : operations) {
    bool first = true;
    for (const EntryReport& entry : operation.entries) {
      table.add_row({first ? operation.operation : "", entry.chosen ? "*" : "", entry.name,
                     to_string(entry.backend),
                     entry.why_not.empty() ? "yes" : "no: " + entry.why_not, entry.summary});
      first = false;
    }
  }
  std::cout << table;
}

}  // namespace

void add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "info", "Version, machine, and every operation's entries with why each is usable or not");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON");
  command->callback([json] { run_info(*json); });
}

}  // namespace sparse_mla::command
