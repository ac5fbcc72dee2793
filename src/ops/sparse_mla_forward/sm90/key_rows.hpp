// sparse_mla_forward for Hopper: row offsets of the keys of two tensors, kv and window_kv.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "arch/platform.hpp"
#include "runtime/check.hpp"

namespace hopwell::ops::sparse_mla_forward {

// Offsets count from the tensor with the lower address, and fit in 32 bits: an address costs one multiply-add.
struct KeyRows {
  std::uintptr_t base;
  std::uint32_t unit;                      // of offsets and strides: bytes, a power of two from 16 to 1,024
  std::uint32_t kv_offset, window_offset;  // of row 0 of kv; of row -s_kv of window_kv, modulo 2^32
  std::uint32_t kv_stride, window_stride;

  /// `key`: the row of kv, or s_kv + the row of window_kv.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::uint32_t offset_of_key(bool of_window, int key) const {
    return (of_window ? window_offset : kv_offset) + std::uint32_t(key) * (of_window ? window_stride : kv_stride);
  }
};

// The offsets of aligned rows of bf16, or nothing if they do not fit: with a unit of 512 bytes they reach 2 TiB.
inline std::optional<KeyRows> key_rows_of(const View& kv, const View& window_kv) {
  constexpr std::uint64_t kLargestUnit = 1024, kLimit = 0xffffffff;
  struct Rows {
    std::uintptr_t address;
    std::int64_t stride;  // bytes

    [[nodiscard]] std::uintptr_t last(std::int64_t count) const {
      return address + static_cast<std::uintptr_t>(std::max<std::int64_t>(count - 1, 0) * stride);
    }
  };
  const auto rows_of = [](const View& v) {
    return Rows{reinterpret_cast<std::uintptr_t>(v.data), v.shape[0] > 1 ? 2 * v.stride[0] : 0};
  };
  // A tensor without rows may have any address, so the other one stands in.
  const Rows own = rows_of(kv.shape[0] > 0 ? kv : window_kv), window = rows_of(window_kv.shape[0] > 0 ? window_kv : kv);
  if (own.stride < 0 || window.stride < 0) return {};
  const std::uintptr_t base = std::min(own.address, window.address);
  const std::uint64_t kv_at = own.address - base, window_at = window.address - base;
  const auto kv_stride = static_cast<std::uint64_t>(own.stride),
             window_stride = static_cast<std::uint64_t>(window.stride);
  const std::uint64_t all = kv_at | window_at | kv_stride | window_stride | kLargestUnit, unit = all & (~all + 1);
  const std::uint64_t last = std::max(own.last(kv.shape[0]), window.last(window_kv.shape[0])) - base;
  if (std::max({last, kv_stride, window_stride}) / unit >= kLimit) return {};
  const auto in_units = [unit](std::uint64_t bytes) { return static_cast<std::uint32_t>(bytes / unit); };
  return KeyRows{
      .base = base,
      .unit = static_cast<std::uint32_t>(unit),
      .kv_offset = in_units(kv_at),
      .window_offset = in_units(window_at) - static_cast<std::uint32_t>(kv.shape[0]) * in_units(window_stride),
      .kv_stride = in_units(kv_stride),
      .window_stride = in_units(window_stride)};
}

}  // namespace hopwell::ops::sparse_mla_forward
