// The backend table: which implementations of an operator exist, which of them support a problem, and which one runs
// it.
//
// A backend is a file in the operator's folder. It enters the table by defining one object at namespace scope:
//
//     const runtime::Registration<Problem> cpu{{.name = "cpu", .supports = supports, .launch = launch}};
//
// Nothing else is needed: a missing backend is a missing file. The order of preference is that in `known_backends()`.
#pragma once

#include <hopwell/error.hpp>
#include <hopwell/hopwell.hpp>

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/device.hpp"

namespace hopwell::runtime {

// Whether a backend supports a problem, and the reason if not: "h_q must be a multiple of 8".
struct Support {
  bool ok = true;
  std::string reason;
  static Support no(std::string why) { return {false, std::move(why)}; }
};

// `Problem` is the operator's checked arguments as plain data. `problem.device` is the device on which the backend
// runs; it is the thread's current device. Functions may rely on everything that the operator's check() guarantees.
template <class Problem>
struct Backend {
  const char* name;
  Support (*supports)(const Problem& problem) = [](const Problem&) { return Support{}; };
  std::size_t (*workspace_bytes)(const Problem& problem) = [](const Problem&) -> std::size_t { return 0; };
  void (*launch)(const Problem& problem, Stream stream);
};

template <class Problem>
std::vector<Backend<Problem>>& table() {
  static std::vector<Backend<Problem>> backends;
  return backends;
}

std::set<std::string>& built_backends();  // names of all backends registered, for any operator

// Operators by name, each with the function that lists the backend names in its table.
std::map<std::string, std::set<std::string> (*)(), std::less<>>& operators();

// An operator is registered by an object at namespace scope: `const runtime::Operator<Problem>
// entry{"sparse_mla_forward"};`
template <class Problem>
struct Operator {
  explicit Operator(const char* name) {
    operators()[name] = [] {
      std::set<std::string> names;
      for (const Backend<Problem>& backend : table<Problem>()) names.insert(backend.name);
      return names;
    };
  }
};

template <class Problem>
struct Registration {
  explicit Registration(const Backend<Problem>& backend) {
    table<Problem>().push_back(backend);
    built_backends().insert(backend.name);
  }
};

// A backend name that the library knows. The table is in order of preference.
struct KnownBackend {
  const char* name;
  const char* needs;   // "a Hopper GPU (compute capability 9.0)"
  bool host;           // runs on host tensors
  int min_capability;  // of a CUDA device, 0 for the host
  int max_capability;
  bool automatic;  // may be chosen without being requested by name
};
const std::vector<KnownBackend>& known_backends();

// "" if the machine and the device of the tensors meet the backend's needs, else the reason: "no such device".
std::string missing_on_device(const KnownBackend& known, const DLDevice& device);
std::string missing_on_machine(const KnownBackend& known);
const KnownBackend& known_backend(std::string_view operator_name,
                                  std::string_view name);  // throws an Error that lists the known names
// The device on which an available backend runs, for tensors at `location`.
Device device_of(const KnownBackend& known, const DLDevice& location);

// For each backend, in order of preference: ok if it supports the problem, else the reason.
template <class Problem>
std::vector<std::pair<const KnownBackend*, Support>> survey(Problem problem) {
  std::vector<std::pair<const KnownBackend*, Support>> rows;
  for (const KnownBackend& known : known_backends()) {
    const auto& backends = table<Problem>();
    auto at = backends.begin();
    while (at != backends.end() && std::string_view(at->name) != known.name) ++at;
    if (const std::string why = missing_on_device(known, problem.device.location); !why.empty())
      rows.emplace_back(&known, Support::no(why));
    else if (at == backends.end())
      rows.emplace_back(&known, Support::no("no kernel for this operator"));
    else
      problem.device = device_of(known, problem.device.location), rows.emplace_back(&known, at->supports(problem));
  }
  return rows;
}

// Whether an available backend supports the problem of another operator. For operators that are composed of others.
template <class Problem>
Support support_on(std::string_view backend_name, const Problem& problem) {
  for (const Backend<Problem>& backend : table<Problem>())
    if (backend.name == backend_name) return backend.supports(problem);
  return Support::no("no kernel");
}

[[noreturn]] void fail_unsupported(std::string_view operator_name, const std::string& reasons);
std::string explain_rows(const std::vector<std::pair<const KnownBackend*, Support>>& rows);

// The backend that runs the problem: the requested one, or the best; sets problem.device. Throws HOPWELL_UNSUPPORTED
// with the reasons if there is no such backend. The reasons are collected only in that case.
template <class Problem>
const Backend<Problem>& choose(std::string_view operator_name, Problem& problem, const char* requested) {
  if (requested != nullptr) static_cast<void>(known_backend(operator_name, requested));
  const auto wanted = [&](const KnownBackend& known) {
    return requested != nullptr ? std::string_view(requested) == known.name : known.automatic;
  };
  // Host tensors do not query the driver for devices, because after such a query a process cannot use CUDA in its
  // forks.
  const bool on_host = problem.device.location.device_type == kDLCPU;
  for (const KnownBackend& known : known_backends()) {
    if (!wanted(known) || known.host != on_host) continue;
    for (const Backend<Problem>& backend : table<Problem>()) {
      if (std::string_view(backend.name) != known.name) continue;
      if (!missing_on_device(known, problem.device.location).empty()) continue;
      problem.device = device_of(known, problem.device.location);
      if (backend.supports(problem).ok) return backend;
    }
  }
  std::string reasons;
  for (const auto& [known, support] : survey(problem))
    if (wanted(*known)) reasons += std::string(reasons.empty() ? "" : "; ") + known->name + ": " + support.reason;
  fail_unsupported(operator_name, reasons);
}

void check_workspace(std::string_view operator_name, std::size_t needed, const void* workspace, std::size_t given);

// Runs the problem, which contains `device`, `workspace` and `workspace_bytes`, on the requested or the best backend.
// The thread's current device is the same afterwards.
template <class Problem>
void run(std::string_view operator_name, Problem problem, const char* requested, Stream stream) {
  const DeviceGuard guard(problem.device.location);
  const Backend<Problem>& backend = choose(operator_name, problem, requested);
  check_workspace(operator_name, backend.workspace_bytes(problem), problem.workspace, problem.workspace_bytes);
  check_stream(operator_name, problem.device.location, stream);
  backend.launch(problem, stream);
}

template <class Problem>
std::size_t workspace_bytes(std::string_view operator_name, Problem problem, const char* requested) {
  const DeviceGuard guard(problem.device.location);
  return choose(operator_name, problem, requested).workspace_bytes(problem);
}

template <class Problem>
std::string explain(const Problem& problem) {
  const DeviceGuard guard(problem.device.location);
  return explain_rows(survey(problem));
}

// Implements a C function: runs `function` and converts an exception to a status and this thread's
// hopwell_last_error().
hopwell_status guard(void (*function)(void* context), void* context) noexcept;
template <class Function>
hopwell_status guarded(Function function) noexcept {
  return guard([](void* context) { (*static_cast<Function*>(context))(); }, &function);
}

}  // namespace hopwell::runtime
