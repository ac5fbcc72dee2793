// mla_cache_append: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include <optional>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/mla_cache.hpp"

namespace hopwell {
struct MlaCacheAppendArgs;
}  // namespace hopwell

namespace hopwell::ops::mla_cache_append {

// An integer array [n] of either width.
struct Integers {
  const void* data = nullptr;
  std::int64_t stride = 0;
  bool wide = false;  // int64

  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i * stride]
                : static_cast<const std::int32_t*>(data)[i * stride];
  }
};

// RoPE of `columns` columns from `first` on.
struct Rotation {
  View cos_sin;  // fp32 or bf16 [max_positions, columns]
  Integers positions;
  std::int64_t first = 0, columns = 0;
  bool interleaved = true;
};

struct Problem {
  View kv, k_rope;  // like each other: [n, kv columns], and [n, the other columns] or absent
  mla_cache::Blocks cache;
  std::optional<mla_cache::Format> format;  // absent: rows of `row_type`
  DType row_type = DType::kOther;
  Integers slots;
  std::optional<Rotation> rotation;
  bool pow2 = true;
  int least_exponent = 0;           // of scales that are powers of two
  const float* kv_scale = nullptr;  // on the device, or null:
  float kv_scale_value = 1;
  std::int64_t n = 0, d = 0;
  runtime::Device device;
};

Problem check(const MlaCacheAppendArgs& args);

}  // namespace hopwell::ops::mla_cache_append
