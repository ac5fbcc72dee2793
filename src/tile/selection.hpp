// Which keys a query attends: the index rows of the sparse MLA operators with everything that masks them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arch/platform.hpp"
#include "runtime/check.hpp"

namespace hopwell {

// Causal visibility of a key that stands for `kv_stride` consecutive tokens: all of them must be at or before the
// query's position. Positions are computed in 64 bits.
struct Causality {
  const std::int32_t* q_positions = nullptr;  // [s_q], or null
  std::int64_t q_positions_stride = 0;
  bool has_q_start = false;
  std::int64_t q_start = 0;
  std::int64_t kv_stride = 1;

  // Number of leading keys that query s may see, 0 .. s_kv. Also what kernels ask.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t visible_keys(std::int64_t s, std::int64_t s_kv) const {
    if (q_positions == nullptr && !has_q_start) return s_kv;
    const std::int64_t position =
        q_positions != nullptr ? std::int64_t{q_positions[s * q_positions_stride]} : q_start + s;
    const std::int64_t keys = position < 0 ? 0 : (position + 1) / kv_stride;
    return keys < s_kv ? keys : s_kv;
  }
};

struct Selection {
  const std::int32_t* indices = nullptr;  // [s_q, topk]
  std::int64_t indices_stride = 0;
  const std::int32_t* topk_length = nullptr;  // [s_q], or null: topk
  std::int64_t topk_length_stride = 0;
  Causality causality;
  std::int64_t s_q = 0, s_kv = 0, topk = 0;

  // Entries of row s that count at all: topk_length clamped to 0 .. topk.
  [[nodiscard]] std::int64_t length(std::int64_t s) const {
    if (topk_length == nullptr) return topk;
    return std::clamp<std::int64_t>(topk_length[s * topk_length_stride], 0, topk);
  }
  [[nodiscard]] const std::int32_t* row(std::int64_t s) const { return indices + s * indices_stride; }

  [[nodiscard]] bool any_valid(std::int64_t s) const {
    const auto visible = static_cast<std::uint32_t>(causality.visible_keys(s, s_kv));
    const auto valid = [visible](std::int32_t key) { return static_cast<std::uint32_t>(key) < visible; };
    return topk > 0 && std::any_of(row(s), row(s) + length(s), valid);
  }

  // Lists the valid ones among entries first .. last - 1 of row s in ascending order: their keys, and their places
  // relative to `first`. Room for last - first each; returns how many.
  std::int64_t valid_entries(std::int64_t s, std::int64_t first, std::int64_t last, std::int32_t* keys,
                             std::int32_t* places) const {
    const auto visible = static_cast<std::uint32_t>(causality.visible_keys(s, s_kv));
    const std::int64_t count = std::min(last, length(s)) - first;
    if (count <= 0) return 0;
    const std::int32_t* entries = row(s) + first;
    std::int64_t valid = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      keys[valid] = entries[i];
      places[valid] = static_cast<std::int32_t>(i);
      valid += static_cast<std::uint32_t>(entries[i]) < visible;  // negative ones are large when unsigned
    }
    return valid;
  }
};

// Checks q_positions, q_start and kv_stride. Dimensions "s_q" and "s_kv" are bound already.
template <class Args>
Causality check_causality(Checker& check, const Args& args) {
  const View positions = check.optional_input("q_positions", args.q_positions, {DType::kInt32}, {"s_q"}, Layout::kAny);
  check.rule(!(positions && args.has_q_start), "q_positions and q_start exclude each other");
  check.require(args.kv_stride >= 1, "kv_stride", "at least 1", args.kv_stride);
  // Keeps q_start + s within 64 bits for every s_q; no sequence is longer than 2^62 tokens.
  constexpr std::int64_t kLimit = std::int64_t{1} << 62;
  check.require(!args.has_q_start || (args.q_start > -kLimit && args.q_start < kLimit), "q_start",
                "between -2^62 and 2^62", args.q_start);
  return {positions.as<const std::int32_t>(), positions ? positions.stride[0] : 0, args.has_q_start, args.q_start,
          args.kv_stride};
}

// Checks indices and all that masks them. "s_q" and "s_kv" are bound already; binds "topk".
template <class Args>
Selection check_selection(Checker& check, const Args& args) {
  const bool flat = args.indices != nullptr && args.indices->ndim == 2;
  View indices =
      check.input("indices", args.indices, {DType::kInt32}, flat ? Shape{"s_q", "topk"} : Shape{"s_q", "h_kv", "topk"});
  if (!flat) {
    check.require(check["h_kv"] == 1, "indices", "int32 [s_q, h_kv=1, topk]",
                  "h_kv = " + std::to_string(check["h_kv"]));
    indices = indices.squeezed(1);
  }
  const View length = check.optional_input("topk_length", args.topk_length, {DType::kInt32}, {"s_q"}, Layout::kAny);
  return {indices.as<const std::int32_t>(),
          indices.stride[0],
          length.as<const std::int32_t>(),
          length ? length.stride[0] : 0,
          check_causality(check, args),
          check["s_q"],
          check["s_kv"],
          check["topk"]};
}

// q [s_q, h_q, d_qk] and kv [s_kv, h_kv = 1, d_qk] or [s_kv, d_qk] of one dtype; kv comes back as [s_kv, d_qk].
struct QueriesAndKeys {
  View q, kv;
};
template <class Args>
QueriesAndKeys check_q_kv(Checker& check, const Args& args) {
  const View q = check.input("q", args.q, {DType::kBFloat16, DType::kFloat32}, {"s_q", "h_q", "d_qk"});
  const bool flat = args.kv != nullptr && args.kv->ndim == 2;
  View kv = check.input("kv", args.kv, {q.dtype}, flat ? Shape{"s_kv", "d_qk"} : Shape{"s_kv", "h_kv", "d_qk"});
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

}  // namespace hopwell
