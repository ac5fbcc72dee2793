// Plan of kv_compress and its backward on a GPU: plain data, computed on the host from a shape and a device.
//
// vector   the 4 columns of a row that a thread has
// group    threads that have the same entries of a window; each processes up to 8 entries at a time
// slab     vectors of neighbouring columns that a CTA has
// key tile consecutive compressed keys of a CTA
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/kv_compress/op.hpp"

namespace hopwell::ops::kv_compress {

struct Config {
  static constexpr int kThreads = 256;
  static constexpr int kColumns = 4;     // of a thread
  static constexpr int kEntries = 8;     // of a window, that a thread has in registers at a time
  static constexpr int kMaxGroups = 16;  // of a CTA
  static constexpr int kCtasOfSm = 2;    // their copies in flight are enough
};

// The threads of a CTA: slab vectors x rows x groups, all powers of two. It follows from d, ratio and overlap alone,
// because the order of a window's sums must not depend on anything else. most_vectors: of a slab.
struct Shape {
  int vector_bits = 0;  // log2 of the vectors of a slab
  int row_bits = 0;     // log2 of the compressed keys that a CTA takes at a time
  int groups = 1;
  int batches = 1;  // times that a group takes its entries
  std::int64_t slabs = 1;

  [[nodiscard]] HOPWELL_HOST_DEVICE int vectors() const { return 1 << vector_bits; }
  [[nodiscard]] HOPWELL_HOST_DEVICE int rows() const { return 1 << row_bits; }
};
Shape shape_of(const Blocks& blocks, std::int64_t d, int most_vectors = Config::kThreads);

// How the compressed keys are divided into key tiles, of which every slab has all.
struct KeyTiles {
  std::int64_t count = 0, rows = 0;
};

struct ForwardPlan {
  Shape shape;
  KeyTiles key_tiles;
};
ForwardPlan make_plan(const Problem& p);

struct BackwardPlan {
  Shape shape;
  KeyTiles key_tiles;
  std::int64_t planes = 0;         // partial sums of d_position_bias, fp32 [ratio, w] each
  std::int64_t clearing_ctas = 0;  // that write zeros where no window has a gradient
  std::size_t workspace_bytes = 0;
};
BackwardPlan make_plan(const BackwardProblem& p);

}  // namespace hopwell::ops::kv_compress
