// The C++ and C functions of every operator, generated from its name and its check. The C functions call the C++
// functions: they reject null pointers, replace zeros by defaults, and convert exceptions to a status and a message.
#pragma once

#include <hopwell/interrupt.hpp>

#include <cstddef>
#include <exception>
#include <new>
#include <string>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "runtime/float_mode.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::runtime {

// In C a zero field means the default. In C++ the struct itself has the defaults.
template <class Args>
Args with_defaults(Args args) {
  constexpr Args kDefaults{};
  if constexpr (requires { args.d_v; }) default_if_zero(args.d_v, kDefaults.d_v);
  if constexpr (requires { args.kv_stride; }) default_if_zero(args.kv_stride, kDefaults.kv_stride);
  if constexpr (requires { args.alpha; }) default_if_zero(args.alpha, kDefaults.alpha);
  if constexpr (requires { args.d_loss; }) default_if_zero(args.d_loss, kDefaults.d_loss);
  if constexpr (requires { args.weight_global_value; })
    default_if_zero(args.weight_global_value, kDefaults.weight_global_value);
  if constexpr (requires { args.global_value; }) default_if_zero(args.global_value, kDefaults.global_value);
  return args;
}

// Entry point of an operator: an object at namespace scope, which also registers it in operators(). `check` converts
// the arguments to a problem that all backends may rely on, or throws.
//
//     const runtime::Entry entry{"sparse_mla_forward", check};
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

  hopwell_status run_from_c(const Args* args, Stream stream) const {
    return from_c(args, [&](const Args& given) { run(given, stream); });
  }
  hopwell_status workspace_bytes_from_c(const Args* args, std::size_t* bytes) const {
    return from_c(args, [&](const Args& given) {
      Checker(name_).require(bytes != nullptr, "bytes", "given", "null");
      *bytes = workspace_bytes(given);
    });
  }

 private:
  // Calls the function in the default floating-point mode. An exception of the standard library or the emulator becomes an
  // Error that names the operator. Callers catch nothing else, except the Interrupted that they asked for.
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

  template <class Function>
  hopwell_status from_c(const Args* args, const Function& function) const {
    return guarded([&] {
      Checker(name_).require(args != nullptr, "args", "given", "null");
      function(with_defaults(*args));
    });
  }

  const char* name_;
  Problem (*check_)(const Args&);
  const Error out_of_memory_;
  Operator<Problem> in_table_;
};

}  // namespace hopwell::runtime
