// The backend table: which implementations of an operator exist, which can run a problem, and which one does.
//
// A backend is a file in the operator's folder. It enters the table by defining one object at namespace scope:
//
//     const runtime::Registration<Problem> cpu{{.name = "cpu", .supports = supports, .launch = launch}};
//
// and that is all: a missing backend is a missing file. The order of preference is that of `known_backends()`.
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

// Whether a backend runs a problem; if not, why: "h_q must be a multiple of 8".
struct Support {
  bool ok = true;
  std::string reason;
  static Support no(std::string why) { return {false, std::move(why)}; }
};

// `Problem` is the operator's checked arguments as plain data, and in `problem.device` what the backend runs on, which is
// the thread's current device. Functions may rely on everything that the operator's check() ensures.
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

// Operators by name, each with what lists the names in its table.
std::map<std::string, std::set<std::string> (*)(), std::less<>>& operators();

// An operator enters by an object at namespace scope: `const runtime::Operator<Problem> entry{"sparse_mla_forward"};`
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

// A backend the library knows of, in order of preference.
struct KnownBackend {
  const char* name;
  const char* needs;   // "a Hopper GPU (compute capability 9.0)"
  bool host;           // runs on host tensors
  int min_capability;  // of a CUDA device, 0 for the host
  int max_capability;
  bool automatic;  // may be chosen without being named
};
const std::vector<KnownBackend>& known_backends();

// "" if the machine and the device of the tensors have what the backend needs, else why not: "no such device".
std::string missing_on_device(const KnownBackend& known, const DLDevice& device);
std::string missing_on_machine(const KnownBackend& known);
const KnownBackend& known_backend(std::string_view operator_name,
                                  std::string_view name);  // throws naming the good ones
// What a backend that is not missing runs on, for tensors at `location`.
Device device_of(const KnownBackend& known, const DLDevice& location);

// Why each backend would or would not run the problem, in order of preference; ok for those that would.
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

// Whether a backend, which is not missing, runs the problem of another operator: for operators that are made of others.
template <class Problem>
Support support_on(std::string_view backend_name, const Problem& problem) {
  for (const Backend<Problem>& backend : table<Problem>())
    if (backend.name == backend_name) return backend.supports(problem);
  return Support::no("no kernel");
}

[[noreturn]] void fail_unsupported(std::string_view operator_name, const std::string& reasons);
std::string explain_rows(const std::vector<std::pair<const KnownBackend*, Support>>& rows);

// The backend that runs the problem: the one asked for, or the best; problem.device becomes what it runs on. Throws
// HOPWELL_UNSUPPORTED with the reasons if there is none; they are gathered only then.
template <class Problem>
const Backend<Problem>& choose(std::string_view operator_name, Problem& problem, const char* requested) {
  if (requested != nullptr) static_cast<void>(known_backend(operator_name, requested));
  const auto wanted = [&](const KnownBackend& known) {
    return requested != nullptr ? std::string_view(requested) == known.name : known.automatic;
  };
  // Host tensors do not make the driver be asked for devices: a process that has done so can't use CUDA in its forks.
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

// Runs the problem, which carries `device`, `workspace` and `workspace_bytes`, on the backend asked for or the best
// one. Whatever device is current then, it is the same afterwards.
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

// The C ABI's side of a call: runs `function`, and turns what it throws into a status and this thread's
// hopwell_last_error().
hopwell_status guard(void (*function)(void* context), void* context) noexcept;
template <class Function>
hopwell_status guarded(Function function) noexcept {
  return guard([](void* context) { (*static_cast<Function*>(context))(); }, &function);
}
// Fields of a C argument struct for which zero means another default.
template <class T>
void default_if_zero(T& field, T value) {
  if (field == T{} && !__builtin_signbit(static_cast<double>(field))) field = value;
}

}  // namespace hopwell::runtime
