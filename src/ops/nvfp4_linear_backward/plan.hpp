// Plan of nvfp4_linear_backward on a GPU: plain data, computed on the host from a shape and a device.
//
// tile    rows of d_x × columns of K whose sums a CTA has in registers
// stage   rows of weights that are copied at a time
// chunk   consecutive stages whose products have a sum of their own; the sums of the chunks are added in order
#pragma once

#include <cstddef>

#include "ops/nvfp4_linear_backward/op.hpp"

namespace hopwell::ops::nvfp4_linear_backward {

struct Config {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kColumns = 32 * kWarps;        // of K: 32 a warp
  static constexpr int kStageRows = 64, kStages = 4;  // of weights
  static constexpr int kMaxChunks = 16, kMinChunkRows = 256;
  static constexpr int kSumThreads = 256;
};

struct Plan {
  int blocks = 0;  // blocks of 16 rows of d_x in a tile
  int row_tiles = 0, column_tiles = 0;
  int chunk = 0, chunks = 0;  // rows of weights of a chunk, a multiple of kStageRows; both depend on N alone
  bool splits = false;        // each chunk of a tile has a CTA; another kernel adds the chunks' sums
  std::int64_t ctas = 0;
  std::size_t workspace_bytes = 0;  // of sums: fp32 [chunks, n, K]
};

Plan make_plan(const Problem& p);

}  // namespace hopwell::ops::nvfp4_linear_backward
