// How kv_compress and its backward share out their work on a GPU. Plain data from a shape and a device.
//
// vector   4 columns of a row, those of a thread
// group    threads that share the entries of a window; each takes up to 8 entries at a time
// slab     vectors of neighbouring columns that a CTA has
// strip    compressed keys that a CTA takes one after another in the backward
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/kv_compress/op.hpp"

namespace hopwell::ops::kv_compress {

struct Config {
  static constexpr int kThreads = 256;
  static constexpr int kColumns = 4;     // of a thread
  static constexpr int kEntries = 8;     // of a window, that a thread has in registers
  static constexpr int kMaxGroups = 16;  // of a CTA
};

// The threads of a CTA: slab vectors x rows x groups, all powers of two. It follows from d, ratio and overlap alone,
// because the order of a window's sums must not depend on anything else.
struct Shape {
  int vectors = 1;  // of a slab
  int rows = 1;     // compressed keys that a CTA takes at a time
  int groups = 1;
  int batches = 1;  // times that a group takes kEntries entries
  std::int64_t slabs = 1;
};
Shape shape_of(const Blocks& blocks, std::int64_t d);

struct BackwardPlan {
  Shape shape;
  std::int64_t strips = 1, strip_rows = 1;
  std::int64_t planes = 0;         // partial sums of d_position_bias, fp32 [ratio, w] each
  std::int64_t clearing_ctas = 0;  // that write zeros where no window has a gradient
  std::size_t workspace_bytes = 0;
};
BackwardPlan make_plan(const BackwardProblem& p);

}  // namespace hopwell::ops::kv_compress
