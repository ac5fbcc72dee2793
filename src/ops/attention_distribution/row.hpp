// attention_distribution on GPUs: the end of a row, whose sums one warp has written.
#pragma once

#include "ops/attention_distribution/params.hpp"
#include "tile/gpu/normalize.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

// What a warp writes of a row: a work tile's places of it.
struct RowPart {
  float* sums;  // of the entries
  int size;     // of what there is from there on; more than the entries where these end earlier
  int before;   // places before, of keys that the query does not see

  HOPWELL_DEVICE RowPart(const Params& p, const WorkTile& work, const Entries& entries)
      : sums(p.attn + work.query * p.attn_stride + entries.first),
        size(work.first + work.size - entries.first),
        before(entries.first - work.first) {}
};

// By the warp that has written the sums of `tiles` tiles, of which each lane has its own `total`.
HOPWELL_DEVICE void finish_row(const Params& p, const RowPart& row, int tiles, float total) {
  for (int i = arch::lane_index() - row.before; i < 0; i += 32) row.sums[i] = 0;
  for (int i = tiles * kTileKeys + arch::lane_index(); i < row.size; i += 32) row.sums[i] = 0;
  if (p.normalize_l1) tile::normalize(row.sums, row.sums, row.size, total);
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
