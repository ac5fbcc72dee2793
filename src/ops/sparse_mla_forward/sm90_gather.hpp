// What the kernels for Hopper share: their parameters, the pieces of work, and the gathering warpgroup, by cp.async.
#pragma once

#include "arch/sm90/mbarrier.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/softmax.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

using arch::bf16;

constexpr int kKeys = 64, kStages = 2;  // of a tile; tiles of a step, each with a place of its own

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                                                                  // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* attn_sink;                                                              // [h_q], or null
  bf16* out;                                                                           // [s_q, h_q, 512]
  float *max_logits, *lse;                                                             // [s_q, h_q], or null
  int64_t q_stride_s, q_stride_h, kv_stride, sink_stride, out_stride_s, out_stride_h;  // elements
  int64_t max_stride_s, max_stride_h, lse_stride_s, lse_stride_h;
  uint32_t pieces;  // of work: queries × blocks of heads
  int h_q, head_blocks;
  bool aligned;      // rows of q and kv, to 16 bytes
  bool out_aligned;  // rows of out, to 16 bytes
  float scale_log2;  // sm_scale · log2(e)
};

// A piece of work: a query's block of heads. At least one step, so that there always is a result.
struct Piece {
  int query, first_head, steps;
  tile::Entries entries;
};

HOPWELL_DEVICE Piece piece_of(const Params& p, uint32_t number, int heads) {
  const int query = int(number / uint32_t(p.head_blocks));
  const tile::Entries entries = tile::entries_of(p.selection, query);
  const int steps = (entries.length + kStages * kKeys - 1) / (kStages * kKeys);
  return {query, int(number % uint32_t(p.head_blocks)) * heads, steps > 0 ? steps : 1, entries};
}

// Panels of a tile, 64 columns each, that are copied, multiplied and freed together.
struct Group {
  int first, count;
};

HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier);
}

#if HOPWELL_HAS_SM90A

// What a lane copies of 4 · kQuads rows: a chunk of 16 bytes, lane % 8, of every panel of rows 4 i + lane / 8.
template <int kQuads>
struct Rows {
  const bf16* source[kQuads];
  bool valid[kQuads];
};

// Starts the copies of `count` panels, `first` and up. `to`: the first row's place in panel 0.
template <bool kAligned, int kQuads>
HOPWELL_DEVICE void copy_panels(uint32_t to, uint32_t panel_bytes, const Rows<kQuads>& rows, int first, int count) {
  const uint32_t lane = uint32_t(arch::lane_index());
  HOPWELL_UNROLL
  for (uint32_t i = 0; i < kQuads; ++i) {
    const uint32_t row = to / 128 + 4 * i + lane / 8;
    const uint32_t target = row * 128 + ((lane ^ row) % 8 << 4) + uint32_t(first) * panel_bytes;
    const bf16* const source = rows.source[i] + first * 64;
    HOPWELL_UNROLL
    for (int panel = 0; panel < count; ++panel) {
      if constexpr (kAligned) {
        arch::cp_async(target + uint32_t(panel) * panel_bytes, source + panel * 64, rows.valid[i] ? 16 : 0);
      } else {
        arch::Words4 words{};
        HOPWELL_UNROLL
        for (int n = 0; n < 4; ++n)
          if (rows.valid[i])
            words.w[n] = source[panel * 64 + 2 * n].bits | uint32_t{source[panel * 64 + 2 * n + 1].bits} << 16;
        arch::store_shared_v4(target + uint32_t(panel) * panel_bytes, words);
      }
    }
  }
}

// Lets a barrier know when all that this thread has copied so far has come.
template <bool kAligned>
HOPWELL_DEVICE void announce(arch::mbarrier& full) {
  if constexpr (kAligned) {
    arch::cp_async_mbarrier_arrive_noinc(full);
  } else {
    arch::fence_proxy_async();
    arch::mbarrier_arrive(full);
  }
}

// One warp serves a quarter of the rows of Q and of every tile, 16. Its lanes hold the keys of both tiles of a step. Q follows the
// first part of the first tile, whose place is free before Q's; whoever has what was copied after it has Q. Groups are waited for
// as they are freed, so copies never overtake. The code is short, since all roles share one instruction cache.
//
// The copies themselves arrive on the barriers, and who reads by wgmma fences after its wait: copies write by the generic proxy,
// wgmma reads by the async one. Waiting for them here, to fence here, would hold up the others.
template <bool kAligned, class Storage>
HOPWELL_DEVICE void gather(const Params& p, Storage& s, int warp) {
  constexpr int kRows = kKeys / 4, kHeadRows = Storage::kHeads / 4;
  const int lane = arch::lane_index(), entry = lane / kRows * kKeys + warp * kRows + lane % kRows;
  uint32_t parity = 1, q_parity = 1;
  Piece piece = piece_of(p, uint32_t(arch::block_index()), Storage::kHeads);
  int key = piece.entries.at(entry);
  HOPWELL_NO_UNROLL
  for (uint32_t number = uint32_t(arch::block_index()); number < p.pieces; number += uint32_t(arch::grid_size())) {
    const int first_head = piece.first_head + warp * kHeadRows + lane / 8;
    const bf16* const q = p.q + piece.query * p.q_stride_s + lane % 8 * 8;
    bool first = true;
    int next = entry;
    HOPWELL_NO_UNROLL
    for (int left = piece.steps; left > 0; --left, parity ^= 1) {
      const unsigned visible = piece.entries.visible;
      const int mine = key;
      const uint32_t valid = arch::ballot(unsigned(mine) < visible);
      next += kStages * kKeys;
      if (left == 1 && number + uint32_t(arch::grid_size()) < p.pieces) {
        piece = piece_of(p, number + uint32_t(arch::grid_size()), Storage::kHeads);
        next = entry;
      }
      key = piece.entries.at(next);  // under the waits
      HOPWELL_NO_UNROLL
      for (int stage = 0; stage < kStages; ++stage) {
        Rows<kRows / 4> rows;
        HOPWELL_UNROLL
        for (int i = 0; i < kRows / 4; ++i) {
          const int row = arch::shuffle(mine, kRows * stage + 4 * i + lane / 8);
          rows.valid[i] = unsigned(row) < visible;
          rows.source[i] = p.kv + (rows.valid[i] ? row : 0) * p.kv_stride + lane % 8 * 8;
        }
        const uint32_t to = arch::shared_address(s.keys[stage]) + uint32_t(warp) * kRows * 128;
        HOPWELL_UNROLL
        for (int part = 0; part < Storage::kParts; ++part) {
          HOPWELL_UNROLL
          for (int i = Storage::first_group(part); i < Storage::first_group(part + 1); ++i) {
            arch::mbarrier_wait(s.keys_empty[stage][i], parity);
            if (i == 0 && lane == 0) {
              s.valid[stage][warp] = valid >> kRows * stage & 0xffff;
              arch::mbarrier_arrive(s.keys_full[stage][0]);
            }
            copy_panels<kAligned>(to, tile::kPanelBytes, rows, Storage::group(stage, i).first,
                                  Storage::group(stage, i).count);
          }
          announce<kAligned>(s.keys_full[stage][part]);
          if (part > 0 || !first) continue;
          first = false;
          Rows<kHeadRows / 4> heads;
          HOPWELL_UNROLL
          for (int n = 0; n < kHeadRows / 4; ++n) {
            heads.valid[n] = first_head + 4 * n < p.h_q;
            heads.source[n] = q + (heads.valid[n] ? first_head + 4 * n : 0) * p.q_stride_h;
          }
          arch::mbarrier_wait(s.q_empty, q_parity);
          copy_panels<kAligned>(arch::shared_address(s.q) + uint32_t(warp) * kHeadRows * 128, Storage::kHeads * 128,
                                heads, 0, Storage::kDqk / 64);
        }
      }
    }
    q_parity ^= 1;
  }
  arch::cp_async_wait_all();
}

template <class Storage>
HOPWELL_DEVICE void gather(const Params& p, Storage& s) {
  p.aligned ? gather<true>(p, s, arch::warp_index() % 4) : gather<false>(p, s, arch::warp_index() % 4);
}

#endif

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
