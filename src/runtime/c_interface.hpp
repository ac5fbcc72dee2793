// The C functions of an operator, over its C++ ones: null pointers refused, zeros turned into defaults, exceptions into
// a status and a message.
#pragma once

#include <cstddef>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"

namespace hopwell::runtime {

// In C a field of zero means its default, which in C++ the struct itself has.
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

template <class Args>
hopwell_status call(const char* operator_name, void (*function)(const Args&, Stream), const Args* args, Stream stream) {
  return guarded([&] {
    Checker(operator_name).require(args != nullptr, "args", "given", "null");
    function(with_defaults(*args), stream);
  });
}

template <class Args>
hopwell_status call(const char* operator_name, std::size_t (*workspace_bytes)(const Args&), const Args* args,
                    std::size_t* bytes) {
  return guarded([&] {
    Checker(operator_name).require(args != nullptr, "args", "given", "null");
    Checker(operator_name).require(bytes != nullptr, "bytes", "given", "null");
    *bytes = workspace_bytes(with_defaults(*args));
  });
}

}  // namespace hopwell::runtime
