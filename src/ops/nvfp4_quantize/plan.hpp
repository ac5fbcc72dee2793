// Plan of nvfp4_quantize on GPUs: the kernels that run for a problem.
#pragma once

#include <cstdint>

#include "ops/nvfp4_quantize/op.hpp"
#include "ops/nvfp4_quantize/row_items.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::nvfp4_quantize {

struct QuantizeConfig {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kMaxPartials = 1024;  // most CTAs of nvfp4_quantize_amax
  static constexpr int kPairGrid = 5;        // CTAs a multiprocessor if a thread quantizes pairs of blocks
};

struct OnePassConfig {
  static constexpr int kThreads = 896, kWarps = kThreads / 32;
  static constexpr int kSlots = 4;              // a warp's items in shared memory
  static constexpr int kItems = kSlots + 1;     // most items of a warp: one more in registers
  static constexpr int kItemNumbers = 32 * 32;  // two blocks a lane
  static constexpr int kPieces = 4;             // pieces of 16 bytes that a lane copies of an item
  static constexpr int kItemBytes = 2 * kItemNumbers;
  static constexpr std::size_t kSharedBytes = 231552;
};

inline bool needs_amax(const QuantizeProblem& p) { return !p.has_global && p.rows * p.k != 0; }

// The matrix as items of `blocks` blocks, with the padding of blocked scales.
inline RowItems items_of(const QuantizeProblem& p, int blocks) {
  const std::int64_t all = p.k / hopwell::nvfp4::kBlock;
  if (!p.scales.blocked) return row_items(p.rows, all / blocks);
  return row_items(tile::ceil_div(p.rows, 128) * 128, tile::ceil_div(all, 4) * 4 / blocks);
}

// True if a thread quantizes two blocks at a time: all pairs are aligned, and all multiprocessors have enough of them.
inline bool takes_pairs(const QuantizeProblem& p) {
  const bool scales_aligned = reinterpret_cast<std::uintptr_t>(p.scales.data) % 2 == 0 &&
                              (p.scales.blocked || p.rows == 1 || p.scales.row_stride % 2 == 0);
  const RowItems pairs = items_of(p, 2);
  return needs_amax(p) && size_of(p.x.dtype) == 2 && p.k % (2 * hopwell::nvfp4::kBlock) == 0 && scales_aligned &&
         tile::rows_aligned(p.x, 1) && tile::rows_aligned(p.codes, 1) && pairs.are_few() &&
         pairs.count() >= std::int64_t{QuantizeConfig::kPairGrid} * QuantizeConfig::kThreads * p.device.sms;
}

// True if one kernel reads x once: pairs, rows without gaps, and all of x fits on the multiprocessors. Its CTAs wait
// for each other. On the emulator they are a cluster, which has at most 16 CTAs.
inline bool takes_one_pass(const QuantizeProblem& p) {
  using Config = OnePassConfig;
  const auto no_gaps = [&](std::int64_t stride, std::int64_t row) { return p.rows == 1 || stride == row; };
  const bool together = p.device.concurrent_ctas || p.device.sms <= 16;
  return takes_pairs(p) && together && p.device.shared_bytes >= Config::kSharedBytes && !p.scales.blocked &&
         no_gaps(p.x.stride[0], p.k) && no_gaps(p.codes.stride[0], p.k / 2) &&
         no_gaps(p.scales.row_stride, p.k / hopwell::nvfp4::kBlock) && p.rows * p.k % Config::kItemNumbers == 0 &&
         p.rows * p.k / Config::kItemNumbers <= std::int64_t{Config::kItems} * Config::kWarps * p.device.sms;
}

struct QuantizePlan {
  bool amax = false;      // the largest |x| is computed from x
  bool pairs = false;     // a thread quantizes two blocks at a time
  bool one_pass = false;  // one kernel finds the largest |x| and quantizes
  std::size_t workspace_bytes = 0;
};

// Each warp of the one-pass kernel has at least one item.
static_assert(QuantizeConfig::kPairGrid * QuantizeConfig::kThreads / 32 >= OnePassConfig::kWarps);

}  // namespace hopwell::ops::nvfp4_quantize
