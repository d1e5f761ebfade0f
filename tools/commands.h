#pragma once

#include <CLI/CLI.hpp>

namespace sparse_mla::command {

// Each adds one subcommand to `app`, with a callback that runs it: results on stdout, errors as
// exceptions.
void add_info_command(CLI::App& app);
void add_plan_command(CLI::App& app);
void add_run_command(CLI::App& app);
void add_topk_command(CLI::App& app);

}  // namespace sparse_mla::command
