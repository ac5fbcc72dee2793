// What the kernels for Hopper share: work tiles, and the gathering warpgroup, by cp.async.
#pragma once

#include "arch/sm90/mbarrier.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

constexpr int kKeys = 64, kStages = 2;  // of a tile; tiles of a step, which are the stages of the ring

// A query and a tile of its heads. At least one step, so that there always is a result.
struct WorkTile {
  int query, first_head, steps;
  tile::Entries entries;
};

HOPWELL_DEVICE WorkTile work_tile_of(const Params& p, uint32_t number, int heads) {
  const int query = int(number / uint32_t(p.head_tiles));
  const tile::Entries entries = tile::entries_of(p.selection, query);
  const int steps = (entries.length + kStages * kKeys - 1) / (kStages * kKeys);
  return {query, int(number % uint32_t(p.head_tiles)) * heads, steps > 0 ? steps : 1, entries};
}

// Panels of a tile, 64 columns each, that are copied, multiplied and freed together.
struct PanelGroup {
  int first, count;
};

#if HOPWELL_HAS_SM90A

// What a lane copies of 4 · kQuads rows: a chunk of 16 bytes, lane % 8, of every panel of rows 4 i + lane / 8.
template <int kQuads>
struct RowSources {
  const bf16* source[kQuads];
  bool valid[kQuads];
};

// Starts the copies of some panels. `to`: the first row's place in panel 0.
template <bool kAligned, int kQuads>
HOPWELL_DEVICE void copy_panels(uint32_t to, uint32_t panel_bytes, const RowSources<kQuads>& rows, PanelGroup panels) {
  const uint32_t lane = uint32_t(arch::lane_index());
  HOPWELL_UNROLL
  for (uint32_t i = 0; i < kQuads; ++i) {
    const uint32_t row = to / 128 + 4 * i + lane / 8;
    tile::copy_chunk<kAligned>(tile::swizzled(row, lane % 8) + uint32_t(panels.first) * panel_bytes, panel_bytes,
                               rows.source[i] + panels.first * tile::kPanelColumns, rows.valid[i], panels.count);
  }
}

// A warp serves a quarter of the rows of Q and of every tile, 16. Its lanes hold the keys of both tiles of a step. Q
// follows the first part of the first tile, whose place is free before Q's; whoever has what was copied after it has Q.
// Groups are waited for as they are freed, so copies never overtake. The code is short, since all roles share one
// instruction cache.
template <bool kAligned, class Storage>
HOPWELL_DEVICE void gather(const Params& p, Storage& s, int warp) {
  constexpr int kRows = kKeys / 4, kHeadRows = Storage::kHeads / 4;
  const int lane = arch::lane_index(), entry = lane / kRows * kKeys + warp * kRows + lane % kRows;
  uint32_t empty_parity = 1, q_empty_parity = 1;  // of the phases that free what is copied to next
  WorkTile work = work_tile_of(p, uint32_t(arch::block_index()), Storage::kHeads);
  int key = work.entries.at(entry);
  HOPWELL_NO_UNROLL
  for (uint32_t number = uint32_t(arch::block_index()); number < p.work_tiles; number += uint32_t(arch::grid_size())) {
    const int first_head = work.first_head + warp * kHeadRows + lane / 8;
    const bf16* const q = p.q + work.query * p.q_stride_s + lane % 8 * 8;
    bool first = true;
    int next = entry;
    HOPWELL_NO_UNROLL
    for (int left = work.steps; left > 0; --left, empty_parity ^= 1) {
      const KeyRange visible = work.entries.visible;
      const int mine = key;
      const uint32_t valid = arch::ballot(visible.has(mine));
      next += kStages * kKeys;
      if (left == 1 && number + uint32_t(arch::grid_size()) < p.work_tiles) {
        work = work_tile_of(p, number + uint32_t(arch::grid_size()), Storage::kHeads);
        next = entry;
      }
      key = work.entries.at(next);  // under the waits
      HOPWELL_NO_UNROLL
      for (int stage = 0; stage < kStages; ++stage) {
        RowSources<kRows / 4> rows;
        HOPWELL_UNROLL
        for (int i = 0; i < kRows / 4; ++i) {
          const int row = arch::shuffle(mine, kRows * stage + 4 * i + lane / 8);
          rows.valid[i] = visible.has(row);
          rows.source[i] = p.kv + (rows.valid[i] ? row : 0) * p.kv_stride + lane % 8 * 8;
        }
        const auto slot = tile::ring_stage(s.key_ring, stage, empty_parity ^ 1);
        const uint32_t to = arch::shared_address(s.keys[stage]) + uint32_t(warp) * kRows * 128;
        HOPWELL_UNROLL
        for (int part = 0; part < Storage::kParts; ++part) {
          HOPWELL_UNROLL
          for (int i = Storage::first_group(part); i < Storage::first_group(part + 1); ++i) {
            slot.wait_empty(i);
            if (i == 0 && lane == 0) {
              s.valid[stage][warp] = valid >> kRows * stage & 0xffff;
              if constexpr (requires { s.steps; }) s.steps[stage][warp] = left;
              arch::mbarrier_arrive(slot.full(0));
            }
            copy_panels<kAligned>(to, tile::kPanelBytes, rows, Storage::panels(stage, i));
          }
          tile::arrive_after_copies<kAligned>(slot.full(part));
          if (part > 0 || !first) continue;
          first = false;
          RowSources<kHeadRows / 4> heads;
          HOPWELL_UNROLL
          for (int n = 0; n < kHeadRows / 4; ++n) {
            heads.valid[n] = first_head + 4 * n < p.h_q;
            heads.source[n] = q + (heads.valid[n] ? first_head + 4 * n : 0) * p.q_stride_h;
          }
          arch::mbarrier_wait(s.q_empty, q_empty_parity);
          copy_panels<kAligned>(arch::shared_address(s.q) + uint32_t(warp) * kHeadRows * 128, Storage::kHeads * 128,
                                heads, {0, Storage::kDqk / 64});
        }
      }
    }
    q_empty_parity ^= 1;
  }
  arch::cp_async_wait_all();
}

template <class Storage>
HOPWELL_DEVICE void gather(const Params& p, Storage& s) {
  p.aligned ? gather<true>(p, s, arch::warp_index() % 4) : gather<false>(p, s, arch::warp_index() % 4);
}

#endif

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
