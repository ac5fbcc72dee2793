// Plan of kv_compress and its backward on a GPU: plain data, computed on the host from a shape and a device.
//
// vector   4 neighbouring columns, of one thread
// group    the threads of a CTA that process the same entries of its windows, up to 8 entries at a time
// slab     the columns of a CTA
// key tile consecutive compressed keys, of one CTA. The grid is key tiles x slabs
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "ops/kv_compress/op.hpp"

namespace hopwell::ops::kv_compress {

struct Config {
  static constexpr int kThreads = 256;
  static constexpr int kColumns = 4;     // per thread
  static constexpr int kEntries = 8;     // of a window, that a thread keeps in registers at a time
  static constexpr int kMaxGroups = 16;  // of a CTA
  static constexpr int kCtasOfSm = 2;    // by registers: up to 128 a thread
};

// The threads of a CTA: slab vectors x keys x groups, all powers of two. The groups follow from ratio and overlap
// alone, because they decide the order of a window's sums.
struct Shape {
  int vector_bits = 0;  // log2 of the vectors of a slab
  int key_bits = 0;     // log2 of the compressed keys that a CTA processes at a time
  int groups = 1;
  int batches = 1;        // times that a group takes its entries
  int exact_entries = 0;  // entries of every thread, if each thread has the same number, the same ones for every
                          // window, and a kernel for that number exists (Form in window.hpp); otherwise 0
  std::int64_t slabs = 1;

  [[nodiscard]] HOPWELL_HOST_DEVICE int vectors() const { return 1 << vector_bits; }
  [[nodiscard]] HOPWELL_HOST_DEVICE int keys_at_once() const { return 1 << key_bits; }
};

// How the compressed keys are divided into key tiles.
struct KeyTiles {
  std::int64_t count = 0, keys = 0;  // keys: of a tile
};

struct ForwardPlan {
  Shape shape;
  KeyTiles key_tiles;
};
// may_be_exact: whether addresses and the device allow a kernel for exact_entries.
ForwardPlan make_plan(const Problem& p, bool may_be_exact);

struct BackwardPlan {
  Shape shape;
  KeyTiles key_tiles;
  std::int64_t planes_of_tile = 0;    // partial sums of d_position_bias, fp32 [ratio, w] each; the first is their sum
  std::int64_t clearing_columns = 0;  // of the grid: CTAs that write zeros where no window has a gradient
  std::size_t workspace_bytes = 0;
};
BackwardPlan make_plan(const BackwardProblem& p, bool may_be_exact);

}  // namespace hopwell::ops::kv_compress
