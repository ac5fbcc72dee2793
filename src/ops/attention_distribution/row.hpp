// attention_distribution on GPUs: completes a row whose sums one warp has written.
#pragma once

#include "ops/attention_distribution/params.hpp"
#include "tile/gpu/normalize.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

// Address of the sums of a work tile's entries.
HOPWELL_DEVICE float* sums_of(const Params& p, const WorkTile& work, const Entries& entries) {
  return p.attn + work.query * p.attn_stride + entries.place(work.first);
}

// Executed by the warp that has written the sums; each lane has its own `total`. Slots without an entry are set to
// zero.
HOPWELL_DEVICE void complete_row(const Params& p, const WorkTile& work, const Entries& entries, float total) {
  float* const sums = sums_of(p, work, entries);
  const int before = entries.place(work.first) - work.first;
  for (int i = arch::lane_index() - before; i < 0; i += 32) sums[i] = 0;
  for (int i = entries.length + arch::lane_index(); i < work.size - before; i += 32) sums[i] = 0;
  if (p.normalize_l1) tile::normalize(sums, sums, entries.length, total);
}

// The same for a row that the warp has written in the order of keys. The row's sum adds in the order of entries.
HOPWELL_DEVICE void normalize_ordered_row(const Params& p, const WorkTile& work) {
  if (!p.normalize_l1) return;
  arch::syncwarp();
  float* const row = p.attn + work.query * p.attn_stride;
  float total = 0;
  for (int i = arch::lane_index(); i < p.selection.topk; i += kTileKeys)
    total += row[i] + (i + 32 < p.selection.topk ? row[i + 32] : 0);
  tile::normalize(row, row, p.selection.topk, total);
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
