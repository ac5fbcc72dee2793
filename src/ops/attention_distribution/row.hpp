// attention_distribution on GPUs: the end of a row, whose sums one warp has written.
#pragma once

#include "ops/attention_distribution/params.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

// Divides a row by its sum. Each lane reads what it wrote, many values at a time.
HOPWELL_DEVICE void normalize(float* row, int size, float total) {
  constexpr int kTogether = 16;
  total = tile::sum_of_warp(total);
  HOPWELL_NO_UNROLL
  for (int first = arch::lane_index(); first < size && total != 0; first += 32 * kTogether) {
    float values[kTogether];
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) values[i] = first + 32 * i < size ? row[first + 32 * i] : 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i)
      if (first + 32 * i < size) row[first + 32 * i] = values[i] / total;
  }
}

// By the warp that has written the sums of `tiles` tiles, of which each lane has its own `total`.
HOPWELL_DEVICE void finish_row(const Params& p, float* row, int size, int tiles, float total) {
  for (int i = tiles * kTileKeys + arch::lane_index(); i < size; i += 32) row[i] = 0;
  if (p.normalize_l1) normalize(row, size, total);
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
