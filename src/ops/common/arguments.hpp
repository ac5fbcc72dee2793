// Checks of arguments that several operators share: queries and keys, index rows, and masks.
#pragma once

#include <hopwell/operators.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

#include "runtime/check.hpp"
#include "tile/selection.hpp"
#include "tile/window.hpp"

namespace hopwell {

// Checks k_start and k_end. Dimension "s_q" is already bound.
inline Visibility check_key_ranges(Checker& check, const SelectionArgs& args) {
  const View start = check.optional_input("k_start", args.k_start, {DType::kInt32}, {"s_q"}, Layout::kAny);
  const View end = check.optional_input("k_end", args.k_end, {DType::kInt32}, {"s_q"}, Layout::kAny);
  check.together("k_start", bool(start), "k_end", bool(end));
  return {.k_start = start.as<const std::int32_t>(),
          .k_end = end.as<const std::int32_t>(),
          .k_start_stride = start ? start.stride[0] : 0,
          .k_end_stride = end ? end.stride[0] : 0};
}

// Checks the masks: q_positions, q_start and kv_stride, k_start and k_end. Dimension "s_q" is already bound.
inline Visibility check_visibility(Checker& check, const SelectionArgs& args) {
  const View positions = check.optional_input("q_positions", args.q_positions, {DType::kInt32}, {"s_q"}, Layout::kAny);
  check.rule(!(positions && args.q_start), "q_positions and q_start exclude each other");
  check.require(args.kv_stride >= 1, "kv_stride", "at least 1", args.kv_stride);
  // Keeps q_start + s within 64 bits for every s_q. No sequence is longer than 2^62 tokens.
  constexpr std::int64_t kLimit = std::int64_t{1} << 62;
  const std::int64_t q_start = args.q_start.value_or(0);
  check.require(q_start > -kLimit && q_start < kLimit, "q_start", "between -2^62 and 2^62", q_start);
  Visibility visibility = check_key_ranges(check, args);
  visibility.q_positions = positions.as<const std::int32_t>();
  visibility.q_positions_stride = positions ? positions.stride[0] : 0;
  visibility.has_q_start = args.q_start.has_value(), visibility.q_start = q_start;
  visibility.kv_stride = args.kv_stride;
  return visibility;
}

// Checks indices and masks. "s_q" and "s_kv" are already bound; binds "topk". Without indices every key is selected, in
// order.
template <class Args>
Selection check_selection(Checker& check, const Args& args) {
  const Tensor& topk_length = args.selection.topk_length;
  if (args.indices == nullptr) {
    check.rule(topk_length == nullptr, "topk_length needs indices; without them every visible key counts");
    check.bind("topk", check["s_kv"]);
    return {.visibility = check_visibility(check, args.selection),
            .s_q = check["s_q"],
            .s_kv = check["s_kv"],
            .topk = check["s_kv"]};
  }
  const bool flat = args.indices->ndim == 2;
  View indices = check.input("indices", args.indices, {DType::kInt32},
                             flat ? Shape{"s_q", "topk"} : Shape{"s_q", maybe("h_kv"), "topk"});
  if (!flat) {
    check.require(check["h_kv"] == 1, "indices", "int32 [s_q, h_kv=1, topk]",
                  "h_kv = " + std::to_string(check["h_kv"]));
    indices = indices.squeezed(1);
  }
  const View length = check.optional_input("topk_length", topk_length, {DType::kInt32}, {"s_q"}, Layout::kAny);
  return {non_null_indices(indices.as<const std::int32_t>()),
          indices.stride[0],
          length.as<const std::int32_t>(),
          length ? length.stride[0] : 0,
          check_visibility(check, args.selection),
          check["s_q"],
          check["s_kv"],
          check["topk"]};
}

// q [s_q, h_q, d_qk] and kv [s_kv, h_kv = 1, d_qk] or [s_kv, d_qk], with one dtype. The returned kv is [s_kv, d_qk].
struct QueriesAndKeys {
  View q, kv;
};
template <class Args>
QueriesAndKeys check_q_kv(Checker& check, const Args& args) {
  const View q = check.input("q", args.q, {DType::kBFloat16, DType::kFloat32}, {"s_q", "h_q", "d_qk"});
  const bool flat = args.kv != nullptr && args.kv->ndim == 2;
  View kv = check.input("kv", args.kv, {q.dtype}, flat ? Shape{"s_kv", "d_qk"} : Shape{"s_kv", maybe("h_kv"), "d_qk"});
  if (!flat) {
    check.require(check["h_kv"] == 1, "kv", "[s_kv, h_kv=1, d_qk]", "h_kv = " + std::to_string(check["h_kv"]));
    kv = kv.squeezed(1);
  }
  check.require(check["h_q"] >= 1, "q", "[s_q, h_q >= 1, d_qk]", "h_q = " + std::to_string(check["h_q"]));
  check.require(check["d_qk"] >= 1, "q", "[s_q, h_q, d_qk >= 1]", "d_qk = " + std::to_string(check["d_qk"]));
  check.require(check["s_kv"] <= INT32_MAX, "kv", "of at most 2^31 - 1 rows (indices are int32)", check["s_kv"]);
  check.finite("sm_scale", args.sm_scale);
  return {q, kv};
}

// Checks window_kv, window, w_start and w_end. "s_q", "s_kv" and "d_qk" are already bound; binds "s_w" if there is a
// window. The returned rows are [s_w, d_qk].
struct WindowKeys {
  View kv;
  Window window;
};
template <class Args>
WindowKeys check_window(Checker& check, const Args& args, DType dtype) {
  const bool flat = args.window_kv != nullptr && args.window_kv->ndim == 2;
  View kv = check.optional_input("window_kv", args.window_kv, {dtype},
                                 flat ? Shape{"s_w", "d_qk"} : Shape{"s_w", maybe("h_kv"), "d_qk"});
  check.together("window_kv", bool(kv), "window", args.window.has_value());
  const View start = check.optional_input("w_start", args.w_start, {DType::kInt32}, {"s_q"}, Layout::kAny);
  const View end = check.optional_input("w_end", args.w_end, {DType::kInt32}, {"s_q"}, Layout::kAny);
  check.together("w_start", bool(start), "w_end", bool(end));
  check.rule(kv || !start, "w_start and w_end need window_kv");
  if (!kv) return {};
  if (!flat) {
    check.require(check["h_kv"] == 1, "window_kv", "[s_w, h_kv=1, d_qk]", "h_kv = " + std::to_string(check["h_kv"]));
    kv = kv.squeezed(1);
  }
  check.require(*args.window >= 1, "window", "at least 1", *args.window);
  check.require(check["s_w"] <= INT32_MAX - check["s_kv"], "window_kv", "of at most 2^31 - 1 rows together with kv's",
                check["s_w"]);
  return {kv,
          {.size = std::min<std::int64_t>(*args.window, INT32_MAX),  // s_w is not larger
           .starts = start.as<const std::int32_t>(),
           .ends = end.as<const std::int32_t>(),
           .starts_stride = start ? start.stride[0] : 0,
           .ends_stride = end ? end.stride[0] : 0,
           .s_q = check["s_q"],
           .s_w = check["s_w"]}};
}

}  // namespace hopwell
