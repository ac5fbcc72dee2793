// Divides a row by its sum, on the CPU. An all-zero row stays zero.
#pragma once

#include <cstdint>
#include <numeric>

namespace hopwell::cpu {

// `to` may be `from`.
inline void normalize_row(const float* from, std::int64_t count, float* to) {
  const double sum = std::accumulate(from, from + count, 0.0), total = sum == 0 ? 1 : sum;
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<double>(from[i]) / total);
}

}  // namespace hopwell::cpu
