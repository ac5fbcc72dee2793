// The backend table: which implementations of an operator exist, which of them support a problem, and which one runs
// it.
//
// A backend is a file in the operator's folder. It enters the table by defining one object at namespace scope:
//
//     const runtime::Registration cpu{"cpu", launch};                          launch(problem, stream)
//     const runtime::Registration backend{runtime::kBackend, plan, launch};    launch(problem, plan, workspace, stream)
//
// plan(problem) returns the backend's plan, or the reason why the backend does not support the problem. A call plans
// once. Nothing else is needed: a missing backend is a missing file. The order of preference is that in
// `known_backends()`.
#pragma once

#include <hopwell/error.hpp>
#include <hopwell/library.hpp>

#include <any>
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/device.hpp"

namespace hopwell::runtime {

// The reason why a backend does not support a problem: "needs bfloat16 q and kv", "slower than sm80 for n <= 8".
struct Unsupported {
  std::string reason;
};

// The plan of a backend for a problem, or the reason. A plan is plain data. Its member `workspace_bytes`, if it has
// one, is the size of the workspace.
template <class Plan>
using PlanOr = std::variant<Plan, Unsupported>;
struct NoPlan {};  // the plan of a backend that decides nothing before its launch

// A plan whose type only its backend knows.
struct ErasedPlan {
  std::any plan;
  std::size_t workspace_bytes = 0;
};

// `Problem` is the operator's checked arguments as plain data. `problem.device` is the device on which the backend
// runs; it is the thread's current device. Functions may rely on everything that the operator's check() guarantees.
template <class Problem>
class Backend {
 public:
  const char* const name;
  [[nodiscard]] virtual PlanOr<ErasedPlan> plan(const Problem& problem) const = 0;
  virtual void launch(const Problem& problem, const ErasedPlan& plan, void* workspace, Stream stream) const = 0;

 protected:
  explicit Backend(const char* its_name);
  ~Backend() = default;
};

template <class Problem>
std::vector<const Backend<Problem>*>& table() {
  static std::vector<const Backend<Problem>*> backends;
  return backends;
}

template <class Problem>
const Backend<Problem>* find_backend(std::string_view name) {
  for (const Backend<Problem>* backend : table<Problem>())
    if (name == backend->name) return backend;
  return nullptr;
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
      for (const Backend<Problem>* backend : table<Problem>()) names.insert(backend->name);
      return names;
    };
  }
};

template <class Problem>
Backend<Problem>::Backend(const char* its_name) : name(its_name) {
  table<Problem>().push_back(this);
  built_backends().insert(name);
}

// `plan` and `launch` of a backend. The two functions share the type of the plan.
template <class Problem, class Plan>
class Registration final : public Backend<Problem> {
 public:
  using PlanFunction = PlanOr<Plan> (*)(const Problem& problem);
  using LaunchFunction = void (*)(const Problem& problem, const Plan& plan, void* workspace, Stream stream);

  Registration(const char* name, PlanFunction plan, LaunchFunction launch)
      : Backend<Problem>(name), plan_(plan), launch_(launch) {}

  [[nodiscard]] PlanOr<ErasedPlan> plan(const Problem& problem) const override {
    PlanOr<Plan> planned = plan_(problem);
    if (auto* unsupported = std::get_if<Unsupported>(&planned)) return std::move(*unsupported);
    const Plan& plan = std::get<Plan>(planned);
    std::size_t bytes = 0;
    if constexpr (requires { plan.workspace_bytes; }) bytes = plan.workspace_bytes;
    return ErasedPlan{plan, bytes};
  }
  void launch(const Problem& problem, const ErasedPlan& plan, void* workspace, Stream stream) const override {
    launch_(problem, *std::any_cast<Plan>(&plan.plan), workspace, stream);
  }

 private:
  PlanFunction plan_;
  LaunchFunction launch_;
};

// A backend without a plan. `plan`, if there is one, only returns the reason why the backend does not support a
// problem.
template <class Problem>
class Registration<Problem, NoPlan> final : public Backend<Problem> {
 public:
  using PlanFunction = PlanOr<NoPlan> (*)(const Problem& problem);
  using LaunchFunction = void (*)(const Problem& problem, Stream stream);

  Registration(const char* name, LaunchFunction launch) : Registration(name, nullptr, launch) {}
  Registration(const char* name, PlanFunction plan, LaunchFunction launch)
      : Backend<Problem>(name), plan_(plan), launch_(launch) {}

  [[nodiscard]] PlanOr<ErasedPlan> plan(const Problem& problem) const override {
    PlanOr<NoPlan> planned = plan_ == nullptr ? NoPlan{} : plan_(problem);
    if (auto* unsupported = std::get_if<Unsupported>(&planned)) return std::move(*unsupported);
    return ErasedPlan{};
  }
  void launch(const Problem& problem, const ErasedPlan& /*plan*/, void* /*workspace*/, Stream stream) const override {
    launch_(problem, stream);
  }

 private:
  PlanFunction plan_;
  LaunchFunction launch_;
};

template <class Problem>
Registration(const char*, void (*)(const Problem&, Stream)) -> Registration<Problem, NoPlan>;
template <class Problem>
Registration(const char*, PlanOr<NoPlan> (*)(const Problem&), void (*)(const Problem&, Stream))
    -> Registration<Problem, NoPlan>;
template <class Problem, class Plan>
Registration(const char*, PlanOr<Plan> (*)(const Problem&), void (*)(const Problem&, const Plan&, void*, Stream))
    -> Registration<Problem, Plan>;

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

// A backend and the reason why it does not support a problem; "" if it does.
using Survey = std::vector<std::pair<const KnownBackend*, std::string>>;

// The outcome of all backends, in order of preference.
template <class Problem>
Survey survey(Problem problem) {
  Survey rows;
  for (const KnownBackend& known : known_backends()) {
    std::string reason = missing_on_device(known, problem.device.location);
    const Backend<Problem>* const backend = find_backend<Problem>(known.name);
    if (reason.empty() && backend == nullptr) reason = "no kernel for this operator";
    if (reason.empty()) {
      problem.device = device_of(known, problem.device.location);
      auto planned = backend->plan(problem);
      if (auto* unsupported = std::get_if<Unsupported>(&planned)) reason = std::move(unsupported->reason);
    }
    rows.emplace_back(&known, std::move(reason));
  }
  return rows;
}

// A problem's plan, and the backend that made it and launches it.
template <class Problem>
class Planned {
 public:
  Planned(const Backend<Problem>& backend, ErasedPlan plan) : backend_(&backend), plan_(std::move(plan)) {}
  [[nodiscard]] std::size_t workspace_bytes() const { return plan_.workspace_bytes; }
  // `problem` is the planned one, or differs from it in fields on which the plan does not depend, such as addresses.
  void launch(const Problem& problem, void* workspace, Stream stream) const {
    backend_->launch(problem, plan_, workspace, stream);
  }

 private:
  const Backend<Problem>* backend_;
  ErasedPlan plan_;
};

// The plan of an available backend. For operators that are composed of others: they plan the inner problem in their
// own plan.
template <class Problem>
PlanOr<Planned<Problem>> plan_on(std::string_view backend_name, const Problem& problem) {
  const Backend<Problem>* const backend = find_backend<Problem>(backend_name);
  if (backend == nullptr) return Unsupported{"no kernel"};
  auto planned = backend->plan(problem);
  if (auto* unsupported = std::get_if<Unsupported>(&planned)) return std::move(*unsupported);
  return Planned<Problem>(*backend, std::get<ErasedPlan>(std::move(planned)));
}

[[noreturn]] void fail_unsupported(std::string_view operator_name, const std::string& reasons);
std::string explain_rows(const Survey& rows);

// Plans the problem on the requested backend, or on the best; sets problem.device. Throws HOPWELL_UNSUPPORTED with the
// reasons if there is no such backend. The reasons are collected only in that case.
template <class Problem>
Planned<Problem> plan(std::string_view operator_name, Problem& problem, const char* requested) {
  const DeviceGuard guard(problem.device.location);
  if (requested != nullptr) static_cast<void>(known_backend(operator_name, requested));
  const auto wanted = [&](const KnownBackend& known) {
    return requested != nullptr ? std::string_view(requested) == known.name : known.automatic;
  };
  // Host tensors do not query the driver for devices, because after such a query a process cannot use CUDA in its
  // forks.
  const bool on_host = problem.device.location.device_type == kDLCPU;
  for (const KnownBackend& known : known_backends()) {
    if (!wanted(known) || known.host != on_host) continue;
    const Backend<Problem>* const backend = find_backend<Problem>(known.name);
    if (backend == nullptr || !missing_on_device(known, problem.device.location).empty()) continue;
    problem.device = device_of(known, problem.device.location);
    auto planned = backend->plan(problem);
    if (auto* plan = std::get_if<ErasedPlan>(&planned)) return {*backend, std::move(*plan)};
  }
  std::string reasons;
  for (const auto& [known, reason] : survey(problem))
    if (wanted(*known)) reasons += std::string(reasons.empty() ? "" : "; ") + known->name + ": " + reason;
  fail_unsupported(operator_name, reasons);
}

// Launches a planned problem. The thread's current device is the same afterwards.
template <class Problem>
void launch_planned(std::string_view operator_name, const Problem& problem, const Planned<Problem>& planned,
                    void* workspace, Stream stream) {
  const DeviceGuard guard(problem.device.location);
  check_stream(operator_name, problem.device.location, stream);
  planned.launch(problem, workspace, stream);
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
