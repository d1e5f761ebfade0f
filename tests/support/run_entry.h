/// Runs one entry of an operation as a test wants it: forced by name, in a workspace of exactly the
/// size that the entry asks for, full of NaN. Calls hold host memory; for a CUDA entry they are
/// mirrored on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "sparse_mla/operation.h"
#include "sparse_mla/workspace.h"

#include "tests/support/device_mirror.h"
#include "tests/support/gpu.h"

namespace sparse_mla::support {

/// The backend that SPARSE_MLA_TEST_BACKEND (cpu or cuda) asks to test; nullopt: every one present.
inline std::optional<Backend> backend_under_test() {
  const char* name = std::getenv("SPARSE_MLA_TEST_BACKEND");
  if (name == nullptr || *name == '\0') return std::nullopt;
  if (std::strcmp(name, "cpu") == 0) return Backend::cpu;
  if (std::strcmp(name, "cuda") == 0) return Backend::cuda;
  throw std::invalid_argument(std::string("SPARSE_MLA_TEST_BACKEND: got '") + name +
                              "', expected cpu or cuda");
}

/// SPARSE_MLA_TEST_OWN_KERNELS is set: entries of NVIDIA's libraries are left out.
/// compute-sanitizer cannot follow their bulk copies: initcheck takes what they wrote for
/// unwritten, racecheck takes their barriers for missing.
inline bool own_kernels_only() { return std::getenv("SPARSE_MLA_TEST_OWN_KERNELS") != nullptr; }

/// Choices of the backend under test.
inline Dispatch tested_dispatch() {
  Dispatch dispatch;
  dispatch.backend = backend_under_test();
  if (own_kernels_only() && dispatch.backend == Backend::cuda)
    dispatch.force("up_project:cuda_rows,absorb_query:cuda_rows,project_value:cuda_rows");
  return dispatch;
}

/// Whether a force list names entries of the backend under test alone.
inline bool force_applies(const std::string& force) {
  const bool cuda = backend_under_test() == Backend::cuda;
  return force.find(cuda ? ":cpu_" : ":cuda_") == std::string::npos;
}

/// The names of the operation's entries that can run `problem` on this machine, of the backend
/// under test.
template <class Problem, class Call>
std::vector<std::string> usable_entries(const Operation<Problem, Call>& operation,
                                        const Problem& problem = {}) {
  const std::optional<Backend> backend = backend_under_test();
  std::vector<std::string> names;
  for (const auto& entry : operation.entries())
    if ((!backend || *backend == entry.backend) && entry.why_not(problem).empty() &&
        !(own_kernels_only() && std::string(entry.name) == "cuda_cublaslt"))
      names.emplace_back(entry.name);
  return names;
}

inline constexpr std::size_t kWorkspaceGuard = 64;

/// Runs an entry of the CPU.
template <class Problem, class Call>
void run_on_host(const Operation<Problem, Call>& operation, const Entry<Problem, Call>& entry,
                 const Problem& problem, const Call& call) {
  const std::size_t bytes = entry.workspace_bytes(problem);
  constexpr auto kPoison = std::byte{0xFF};
  std::vector<std::byte> memory(bytes + kWorkspaceAlignment + kWorkspaceGuard, kPoison);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kWorkspaceAlignment;
  const std::span<std::byte> workspace(
      memory.data() + (misaligned == 0 ? 0 : kWorkspaceAlignment - misaligned), bytes);
  operation.run(entry, problem, call, workspace, nullptr);
  for (std::size_t i = 0; i < kWorkspaceGuard; ++i)
    if (workspace.data()[bytes + i] != kPoison)
      throw std::runtime_error(operation.name() + ":" + entry.name + " wrote behind its workspace");
}

/// Runs an entry of the device on a stream of its own, over a mirror of the call's memory.
template <class Problem, class Call>
void run_on_device(const Operation<Problem, Call>& operation, const Entry<Problem, Call>& entry,
                   const Problem& problem, const Call& call, std::span<std::byte> workspace) {
  const DeviceStream stream;
  DeviceMirror mirror;
  const Call moved = mirror_call(problem, call, mirror);
  operation.run(entry, problem, moved, workspace, stream.get());
  stream.synchronize();
  mirror.download();
}

/// The same in a workspace of exactly the size that the entry asks for.
template <class Problem, class Call>
void run_on_device(const Operation<Problem, Call>& operation, const Entry<Problem, Call>& entry,
                   const Problem& problem, const Call& call) {
  const std::size_t bytes = entry.workspace_bytes(problem);
  const DeviceMemory workspace(bytes + (under_sanitizer() ? 0 : kWorkspaceGuard));
  run_on_device(operation, entry, problem, call, workspace.span().first(bytes));
  if (under_sanitizer()) return;
  std::vector<std::byte> guard(kWorkspaceGuard);
  copy_to_host(guard.data(), workspace.data() + bytes, kWorkspaceGuard);
  for (const std::byte byte : guard)
    if (byte != std::byte{0xFF})
      throw std::runtime_error(operation.name() + ":" + entry.name + " wrote behind its workspace");
}

/// Throws std::runtime_error when the entry wrote behind its workspace or beside a buffer.
template <class Problem, class Call>
void run_entry(const Operation<Problem, Call>& operation, const std::string& entry,
               const Problem& problem, const Call& call) {
  Dispatch dispatch;
  dispatch.forced[operation.name()] = entry;
  const auto& chosen = operation.choose(problem, dispatch);
  if (chosen.backend == Backend::cpu)
    run_on_host(operation, chosen, problem, call);
  else
    run_on_device(operation, chosen, problem, call);
}

/// Runs the fastest entry of the backend under test (of the CPU when every one is).
template <class Problem, class Call>
void run_fastest(const Operation<Problem, Call>& operation, const Problem& problem,
                 const Call& call) {
  Dispatch dispatch;
  dispatch.backend = backend_under_test().value_or(Backend::cpu);
  run_entry(operation, operation.choose(problem, dispatch).name, problem, call);
}

/// Whether the entry of that name can run `problem`: some are made for certain widths.
template <class Problem, class Call>
bool serves(const Operation<Problem, Call>& operation, const std::string& name,
            const std::type_identity_t<Problem>& problem) {
  for (const auto& entry : operation.entries())
    if (entry.name == name) return entry.why_not(problem).empty();
  throw std::invalid_argument("entry: got " + name + ", expected one of " + operation.name());
}

/// Whether an entry can look at a call's lists (slots, pages, counts) and refuse them: those of the
/// CPU do, a device's skip what is wrong.
template <class Problem, class Call>
bool checks_contents(const Operation<Problem, Call>& operation, const std::string& name) {
  for (const auto& entry : operation.entries())
    if (entry.name == name) return entry.backend == Backend::cpu;
  throw std::invalid_argument("entry: got " + name + ", expected one of " + operation.name());
}

/// Same bits?
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// `count` elements with every byte 0xFF: NaN as bf16 and fp32, −1 as an integer.
template <class T>
std::vector<T> poisoned(std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  if (count > 0) std::memset(static_cast<void*>(values.data()), 0xFF, values.size() * sizeof(T));
  return values;
}

}  // namespace sparse_mla::support
