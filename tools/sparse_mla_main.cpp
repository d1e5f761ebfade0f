// The sparse-mla command. One file per subcommand; here only the frame: exit code 0 and results on
// stdout, or another code and one line on stderr.
#include <algorithm>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include <CLI/CLI.hpp>

#include "sparse_mla/machine.h"

#include "tools/commands.h"

namespace {

constexpr int kBadCommandLine = 2;
constexpr int kFailed = 1;

int fail(int code, std::string text) {
  // One line, whatever the arguments hold: names of files and options come from outside.
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  std::cout.flush();
  std::cerr << "sparse-mla: " << text << '\n';
  return code;
}

// "info, plan or topk"
std::string subcommand_names(const CLI::App& app) {
  const auto subcommands = app.get_subcommands(nullptr);
  std::string names;
  for (size_t i = 0; i < subcommands.size(); ++i) {
    if (i > 0) names += i + 1 < subcommands.size() ? ", " : " or ";
    names += subcommands[i]->get_name();
  }
  return names;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace sparse_mla::command;
  try {
    CLI::App app{"DeepSeek-V3.2-style sparse attention: plans, runs and checks it", "sparse-mla"};
    app.set_version_flag("--version", sparse_mla::version());
    add_info_command(app);
    add_plan_command(app);
    add_run_command(app);
    add_topk_command(app);
    bool helped = false;
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& help) {
      app.exit(help);
      helped = true;
    } catch (const CLI::ParseError& error) {
      return fail(kBadCommandLine, error.what());
    }
    // Not by require_subcommand, whose error hides the word that was not understood.
    if (!helped && app.get_subcommands().empty()) {
      return fail(kBadCommandLine, "got no subcommand, expected " + subcommand_names(app) +
                                       " (sparse-mla --help tells more)");
    }
  } catch (const std::bad_alloc&) {
    return fail(kFailed, "out of memory");
  } catch (const std::exception& error) {
    return fail(kFailed, error.what());
  }
  if (!std::cout.flush()) return fail(kFailed, "stdout: could not write all results");
  return 0;
}
