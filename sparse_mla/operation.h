/// One registry per operation and no second dispatch.
///
/// An operation (select, attend, sparse_mqa, …) owns an ordered list of entries, fastest first, the
/// scalar reference last. `choose` takes the first entry that has nothing against the problem;
/// where no order is right for all problems, entries say which they had rather leave to others. A
/// backend is a filter on that list; a force names one entry and, if it cannot be met, throws with
/// the entry's reason. (oneDNN's implementation lists and simdjson's implementation selection work
/// this way.)
///
/// A Problem holds what is fixed when a CUDA graph is captured: bounds, widths, types. A Call holds
/// one launch's views. Entries choose by Problem alone.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sparse_mla/error.h"
#include "sparse_mla/types.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla {

/// Throws std::invalid_argument when `workspace` is too small or not aligned for `needed` bytes.
void require_workspace(std::string_view operation, std::string_view entry,
                       std::span<const std::byte> workspace, std::size_t needed);

/// How entries are chosen. A plain value, safe to copy and share.
struct Dispatch {
  /// nullopt: any backend. One operation's memory has to lie where the backend that is taken can
  /// read it: name the backend, unless the call is a Capacity's, which settles on one.
  std::optional<Backend> backend = {};
  std::map<std::string, std::string> forced = {};  ///< operation → entry name

  /// Adds "op:name[,op:name…]". Throws std::invalid_argument for text that does not parse, for an
  /// unknown operation and for an operation without such an entry.
  Dispatch& force(std::string_view text);

  /// The process default: what the environment variable SPARSE_MLA_FORCE forces, else nothing.
  static Dispatch from_environment();
};

/// One entry as `explain` sees it.
struct EntryReport {
  std::string name;
  Backend backend = Backend::cpu;
  std::string summary;  ///< one line: the method
  std::string why_not;  ///< empty = usable for the problem and not worse than another
  bool chosen = false;
};

struct OperationReport {
  std::string operation;
  std::vector<EntryReport> entries;  ///< in order of preference
};

template <class Problem, class Call>
struct Entry {
  const char* name;
  Backend backend;
  const char* summary;
  /// Why this entry cannot serve the problem on this machine; empty = it can.
  std::string (*why_not)(const Problem& problem);
  /// Scratch for the worst call within the problem's bounds. On the CPU also for every thread that
  /// OpenMP would start for the calling thread.
  std::size_t (*workspace_bytes)(const Problem& problem);
  /// Launches only: no allocation of device memory, no synchronisation. A CPU entry starts as many
  /// threads as `workspace` has scratch for: OpenMP's limit may have changed since it was counted.
  void (*run)(const Problem& problem, const Call& call, std::span<std::byte> workspace,
              Stream stream);
  /// Optional: why a problem that this entry can serve is better left to another one; empty = it is
  /// not. Such an entry is chosen where it is forced or no other can serve.
  std::string (*why_rather_not)(const Problem& problem) = nullptr;
};

/// Immutable after construction; safe to use from several threads.
template <class Problem, class Call>
class Operation {
 public:
  using EntryType = Entry<Problem, Call>;

  Operation(std::string name, std::vector<EntryType> entries)
      : name_(std::move(name)), entries_(std::move(entries)) {}

  const std::string& name() const { return name_; }
  std::span<const EntryType> entries() const { return entries_; }

  /// Throws std::invalid_argument when a force or the backend filter cannot be met.
  const EntryType& choose(const Problem& problem, const Dispatch& dispatch) const {
    const auto forced = dispatch.forced.find(name_);
    std::string reasons;
    const EntryType* unwilling = nullptr;
    for (const EntryType& entry : entries_) {
      if (forced != dispatch.forced.end() && forced->second != entry.name) continue;
      const std::string reason = objection(entry, problem, dispatch);
      if (!reason.empty())
        reasons += std::string(reasons.empty() ? "" : "; ") + entry.name + ": " + reason;
      else if (forced != dispatch.forced.end() || preference(entry, problem).empty())
        return entry;
      else if (unwilling == nullptr)
        unwilling = &entry;
    }
    if (unwilling != nullptr) return *unwilling;
    if (reasons.empty()) reasons = "no such entry";
    throw std::invalid_argument(forced != dispatch.forced.end()
                                    ? "force " + name_ + ":" + forced->second + ": " + reasons
                                    : "operation " + name_ + ": no usable entry (" + reasons + ")");
  }

  OperationReport explain(const Problem& problem, const Dispatch& dispatch) const {
    OperationReport report{name_, {}};
    const auto forced = dispatch.forced.find(name_);
    const EntryType* chosen = nullptr;
    try {
      chosen = &choose(problem, dispatch);
    } catch (const std::invalid_argument&) {  // the lines below say why
    }
    for (const EntryType& entry : entries_) {
      EntryReport line{entry.name, entry.backend, entry.summary,
                       objection(entry, problem, dispatch), &entry == chosen};
      if (line.why_not.empty() && forced != dispatch.forced.end() && forced->second != entry.name)
        line.why_not = "another entry is forced: " + forced->second;
      if (line.why_not.empty() && !line.chosen) line.why_not = preference(entry, problem);
      report.entries.push_back(std::move(line));
    }
    return report;
  }

  /// Scratch of the entry that `choose` takes.
  std::size_t workspace_bytes(const Problem& problem, const Dispatch& dispatch) const {
    return choose(problem, dispatch).workspace_bytes(problem);
  }

  /// choose + run; `workspace` must hold workspace_bytes(problem, dispatch).
  void run(const Problem& problem, const Call& call, std::span<std::byte> workspace,
           const Dispatch& dispatch, Stream stream) const {
    run(choose(problem, dispatch), problem, call, workspace, stream);
  }

  void run(const EntryType& entry, const Problem& problem, const Call& call,
           std::span<std::byte> workspace, Stream stream) const {
    require_workspace(name_, entry.name, workspace, entry.workspace_bytes(problem));
    entry.run(problem, call, workspace, stream);
  }

 private:
  static std::string objection(const EntryType& entry, const Problem& problem,
                               const Dispatch& dispatch) {
    if (dispatch.backend && *dispatch.backend != entry.backend)
      return "belongs to backend " + to_string(entry.backend);
    return entry.why_not(problem);
  }
  static std::string preference(const EntryType& entry, const Problem& problem) {
    return entry.why_rather_not == nullptr ? "" : entry.why_rather_not(problem);
  }

  std::string name_;
  std::vector<EntryType> entries_;
};

/// Every operation's name with its entries' names, in pipeline order.
struct OperationNames {
  std::string operation;
  std::vector<std::string> entries;
};
std::vector<OperationNames> known_operations();

}  // namespace sparse_mla
