// The common part of every operator's functions. The build generates the functions from the declarations, and they call
// an Entry. The C functions reject null pointers and convert exceptions to a status and a message.
#pragma once

#include <hopwell/interrupt.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "runtime/float_mode.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::runtime {

// A number from C, where zero means the default. By its bits: -0.0f is a number, and in a mode that flushes subnormal
// numbers they compare equal to 0.
template <class T, class Default>
Default or_default(T given, const Default& value) {
  constexpr T kZero{};
  return std::memcmp(&given, &kZero, sizeof given) == 0 ? value : Default(given);
}

// An integer from C that may be absent, and that may be 0.
inline std::optional<std::int64_t> optional_from_c(const char* op, const char* name, bool has, std::int64_t value) {
  if (has) return value;
  if (value != 0) Checker(op).fail(name, std::string("0 without has_") + name, std::to_string(value));
  return std::nullopt;
}

// A switch from C, which is on by default.
inline bool switch_from_c(const char* op, const char* name, const hopwell_switch& given) {
  int value = 0;
  std::memcpy(&value, &given, sizeof value);  // C may store any integer there
  Checker(op).require(value >= HOPWELL_DEFAULT_ON && value <= HOPWELL_OFF, name, "HOPWELL_ON or HOPWELL_OFF", value);
  return value != HOPWELL_OFF;
}

// Checks that a field which several operators share, and this one does not take, has its default.
template <class T>
void refuse(const char* op, const char* name, const T& given, const T& absent) {
  Checker(op).require(given == absent, name, "absent, because this operator does not take it", "a value");
}

// Entry point of an operator: an object at namespace scope, which also registers it in operators(). `check` converts
// the arguments to a problem that all backends may rely on, or throws.
//
//     const runtime::Entry sparse_mla_forward{"sparse_mla_forward", ops::sparse_mla_forward::check};
template <class Args, class Problem>
class Entry {
 public:
  Entry(const char* name, Problem (*check)(const Args&))
      : name_(name),
        check_(check),
        out_of_memory_(HOPWELL_OUT_OF_MEMORY, std::string(name) + ": out of memory"),
        in_table_(name) {}

  void run(const Args& args, Stream stream) const {
    Problem problem;
    const Planned<Problem> planned = as_operator([&] {
      problem = check_(args);
      return plan(name_, problem, args.backend);
    });
    // Outside as_operator, because an allocator of a binding throws exceptions of its own.
    void* const workspace = workspace_of_call(name_, planned.workspace_bytes(), args.workspace, args.workspace_bytes);
    as_operator([&] { launch_planned(name_, problem, planned, workspace, stream); });
  }
  [[nodiscard]] std::size_t workspace_bytes(const Args& args) const {
    return as_operator([&] {
      Problem problem = check_(args);
      return plan(name_, problem, args.backend).workspace_bytes();
    });
  }
  [[nodiscard]] std::string explain(const Args& args) const {
    return as_operator([&] { return runtime::explain(check_(args)); });
  }

  template <class CArgs>
  hopwell_status run_from_c(const CArgs* args, Stream stream) const {
    return converted(args, [&](const Args& given) { run(given, stream); });
  }
  template <class CArgs>
  hopwell_status workspace_bytes_from_c(const CArgs* args, std::size_t* bytes) const {
    return converted(args, [&](const Args& given) {
      Checker(name_).require(bytes != nullptr, "bytes", "given", "null");
      *bytes = workspace_bytes(given);
    });
  }

 private:
  // Calls the function in the default floating-point mode. An exception of the standard library or the emulator becomes
  // an Error that names the operator. Callers catch nothing else, except the Interrupted that they asked for.
  template <class Function>
  auto as_operator(const Function& function) const {
    const DefaultFloatMode mode;
    try {
      return function();
    } catch (const Error&) {
      throw;
    } catch (const Interrupted&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw Error(out_of_memory_);  // a copy, which takes no memory
    } catch (const std::exception& error) {
      throw Error(HOPWELL_INTERNAL, std::string(name_) + ": " + error.what());
    }
  }

  // Calls the function with the arguments as C++ has them.
  template <class CArgs, class Function>
  hopwell_status converted(const CArgs* args, const Function& function) const {
    return guarded([&] {
      Checker(name_).require(args != nullptr, "args", "given", "null");
      Args given;
      from_c(name_, *args, given);
      function(given);
    });
  }

  const char* name_;
  Problem (*check_)(const Args&);
  const Error out_of_memory_;
  Operator<Problem> in_table_;
};

}  // namespace hopwell::runtime
