// Run-time values as template arguments.
#pragma once

namespace hopwell::runtime {

/// Calls function.operator()<c>() for the constant c that equals `value`, and for the last one if none does:
///
///     with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() { runtime::launch(kName, kernel<kDqk>, …); });
template <auto kFirst, auto... kOthers, class Value, class Function>
auto with_constant(Value value, const Function& function) {
  if constexpr (sizeof...(kOthers) == 0) {
    return function.template operator()<kFirst>();
  } else {
    if (value == kFirst) return function.template operator()<kFirst>();
    return with_constant<kOthers...>(value, function);
  }
}

}  // namespace hopwell::runtime
