#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "sparse_mla/capacity.h"
#include "sparse_mla/limits.h"
#include "sparse_mla/machine.h"
#include "sparse_mla/operation.h"

#include "tools/commands.h"
#include "tools/limits_report.h"
#include "tools/table.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::ordered_json;

void run_info(bool json) {
  const CpuInfo cpu = cpu_info();
  const GpuReport gpus = gpu_report();
  const std::vector<OperationReport> operations =
      explain_operations(Limits{}, Dispatch::from_environment());

  if (json) {
    Json gpu_list = Json::array();
    for (const GpuInfo& gpu : gpus.gpus)
      gpu_list.push_back({{"name", gpu.name},
                          {"compute_capability", gpu.compute_capability},
                          {"sms", gpu.num_sms},
                          {"memory_bytes", gpu.memory_bytes}});
    Json out = {
        {"version", version()},
        {"cpu", {{"model", cpu.name}, {"threads", cpu.num_threads}, {"avx2_fma", cpu.avx2_fma}}},
        {"gpus", gpu_list},
        {"why_no_gpu", gpus.why_none}};
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

  std::cout << "sparse-mla " << version() << '\n'
            << "CPU   " << cpu.name << ", " << cpu.num_threads << " threads, "
            << (cpu.avx2_fma ? "AVX2 and FMA" : "no AVX2 and FMA") << '\n';
  if (gpus.gpus.empty()) std::cout << "GPUs  none (" << gpus.why_none << ")\n";
  for (const GpuInfo& gpu : gpus.gpus)
    std::cout << "GPU   " << gpu.name << ", compute capability " << gpu.compute_capability / 10
              << '.' << gpu.compute_capability % 10 << ", " << gpu.num_sms << " SMs, "
              << format_number(static_cast<double>(gpu.memory_bytes) / (1 << 30), 0) << " GiB\n";
  std::cout << "\nOperations, fastest entry first, for DeepSeek-V3.2's sizes (* = chosen):\n\n";
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
      "info",
      "Version, machine, and every operation's entries with why each is usable or not; with "
      "--limits what an engine's limits cost");
  const auto json = std::make_shared<bool>(false);
  const auto limits = std::make_shared<LimitsReport>();
  command->add_flag("--json", *json, "Print JSON");
  limits->add_options(*command);
  command->callback([json, limits] {
    if (limits->wanted()) {
      limits->print(*json);
    } else {
      run_info(*json);
    }
  });
}

}  // namespace sparse_mla::command
