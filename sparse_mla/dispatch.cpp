#include <algorithm>
#include <cstdlib>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/masks.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/rotary.h"
#include "sparse_mla/select.h"

namespace sparse_mla {
namespace {

template <class Problem, class Call>
OperationNames names_of(const Operation<Problem, Call>& operation) {
  OperationNames names{operation.name(), {}};
  for (const auto& entry : operation.entries()) names.entries.emplace_back(entry.name);
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

void require_workspace(std::string_view operation, std::string_view entry,
                       std::span<const std::byte> workspace, std::size_t needed) {
  if (workspace.size() < needed)
    throw_invalid(std::string(operation) + ": workspace", std::to_string(workspace.size()),
                  "at least " + std::to_string(needed) + " bytes for entry " + std::string(entry));
  // Here, since the entries carve it inside parallel regions, which no exception may leave.
  const std::size_t odd = reinterpret_cast<std::uintptr_t>(workspace.data()) % kWorkspaceAlignment;
  if (needed > 0 && odd != 0)
    throw_invalid(std::string(operation) + ": workspace",
                  "an address " + std::to_string(odd) + " bytes past a multiple",
                  "a multiple of " + std::to_string(kWorkspaceAlignment) + " for entry " +
                      std::string(entry));
}

std::vector<OperationNames> known_operations() {
  return {names_of(rotary_operation()),         names_of(hadamard_operation()),
          names_of(write_cache_operation()),    names_of(select_from_indexer_operation()),
          names_of(indexer_scores_operation()), names_of(select_operation()),
          names_of(map_slots_operation()),      names_of(absorb_query_operation()),
          names_of(sparse_mqa_operation()),     names_of(project_value_operation()),
          names_of(build_masks_operation()),    names_of(gather_operation()),
          names_of(up_project_operation()),     names_of(attend_operation()),
          names_of(init_partial_operation()),   names_of(merge_operation())};
}

Dispatch& Dispatch::force(std::string_view text) {
  const std::vector<OperationNames> known = known_operations();
  std::map<std::string, std::string> parsed;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const std::string item(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
    const std::size_t colon = item.find(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == item.size())
      throw_invalid("force", "'" + item + "'", "operation:entry");
    const std::string operation = item.substr(0, colon), entry = item.substr(colon + 1);
    const auto found = std::find_if(known.begin(), known.end(), [&](const OperationNames& names) {
      return names.operation == operation;
    });
    if (found == known.end()) {
      std::vector<std::string> names;
      for (const OperationNames& each : known) names.push_back(each.operation);
      throw_invalid("force", "operation '" + operation + "'", "one of " + joined(names));
    }
    if (std::find(found->entries.begin(), found->entries.end(), entry) == found->entries.end())
      throw_invalid("force", "entry '" + entry + "' of operation '" + operation + "'",
                    "one of " + joined(found->entries));
    parsed[operation] = entry;
  }
  for (auto& [operation, entry] : parsed) forced[operation] = entry;
  return *this;
}

Dispatch Dispatch::from_environment() {
  Dispatch dispatch;
  const char* text = std::getenv("SPARSE_MLA_FORCE");
  if (text == nullptr) return dispatch;
  try {
    dispatch.force(text);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("SPARSE_MLA_FORCE: ") + error.what());
  }
  return dispatch;
}

}  // namespace sparse_mla
