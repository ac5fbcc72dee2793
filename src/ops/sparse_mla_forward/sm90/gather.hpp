// Shared by the kernels for Hopper: work tiles, the order of a query's additions, and the producer warpgroup (here
// `gather`), which uses cp.async and, with BoxParams, tensor copies.
//
// A head has the same bits in both kernels, so that ranks may split the heads in any way. Both add
//   a score     16 columns at a time, in the panel order of score_panel
//   O           16 keys at a time, tile by tile in one accumulator; a product with swapped operands has the same bits
//   a sum       of a tile: Σ over keys 16 w + 8 j + 2 c + b: over j, then b, then w in pairs, for each c. These are
//               added tile by tile, even and odd tiles separately; at the end over c in pairs, then even and odd
// and update a head's row_max after the same tiles.
#pragma once

#include <bit>
#include <type_traits>
#include <utility>

#include "arch/sm90/mbarrier.hpp"
#include "arch/sm90/tma.hpp"
#include "ops/common/merge_rows.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "ops/sparse_mla_forward/sm90/key_rows.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/score_tile.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

constexpr int kKeys = 64, kStages = 2;  // keys of a tile; tiles of a step, which are the stages of the ring

// Parameters with query groups: for the kernel for groups, to which a group is one query with the heads of all members,
// and for the kernel for ungrouped queries.
struct GroupedParams : Params {
  tile::MergedRows merged;      // selects this kernel's queries
  const uint8_t* member_masks;  // member masks of the merged rows' keys
  int members;                  // members of a group
  int heads_of_member;          // heads of one member; h_q is the number of heads of all members
  uint32_t member_fraction;     // 2^16 / heads_of_member, rounded up: see member_of
};

// Parameters of the kernel that copies Q, and tiles of 64 consecutive keys, by tensor copies. All rows are aligned.
struct BoxParams : WindowParams {
  arch::TensorMap heads;                 // boxes of 64 columns of 64 heads of a query
  arch::TensorMap out_rows;              // boxes of 64 columns of 16 heads of a query
  arch::TensorMap window_rows, kv_rows;  // boxes of 64 columns of 64 rows; of kv only without indices
  KeyRows keys;
};

// Query that owns row `row` of a group tile. Padding rows belong to the last query.
HOPWELL_DEVICE int member_of(const GroupedParams& p, int row) {
  const int member = int(uint32_t(row) * p.member_fraction >> 16);
  return member < p.members ? member : p.members - 1;
}

// The head whose sink applies to a head of a tile.
HOPWELL_DEVICE int head_with_sink(const Params&, int head) { return head; }
HOPWELL_DEVICE int head_with_sink(const GroupedParams& p, int head) { return head % p.heads_of_member; }

// Iterates over this CTA's work tiles (first, first + stride, …) and skips the tiles of the other kernel. Called by
// whole warps. Both functions return a number >= work_tiles when there are no more.
struct AllTiles {
  HOPWELL_DEVICE uint32_t first(const Params&, uint32_t number, uint32_t) { return number; }
  HOPWELL_DEVICE uint32_t next(const Params&, uint32_t number, uint32_t stride) { return number + stride; }
};
// With skipped tiles, looks up 31 at a time: under the gather's traffic a memory access takes as long as a tile.
struct OwnTiles {
  static constexpr int kTilesPerLookup = 31;
  // One bit per tile that was looked up, from the current tile on; the next bit marks the first tile that was not.
  uint32_t own = 0;
  // Keys of the tile with this lane's number, if rows are merged; and the lane of the current tile.
  int keys = 0, place = 0;

  HOPWELL_DEVICE uint32_t first(const GroupedParams& p, uint32_t number, uint32_t stride) {
    while (number < p.work_tiles) {
      const uint32_t mine = number + uint32_t(arch::lane_index()) * stride;
      keys = mine < p.work_tiles ? p.merged.keys_of(int(mine)) : 0;
      const bool is_own = mine < p.work_tiles && (keys > 0) == p.merged.wants_merged;
      own = arch::ballot(arch::lane_index() == kTilesPerLookup || is_own);
      place = 0;
      number += to_lowest(own) * stride;
      if (own != 1) break;
    }
    return number;
  }
  HOPWELL_DEVICE uint32_t next(const GroupedParams& p, uint32_t number, uint32_t stride) {
    number += to_lowest(own & ~1u) * stride;
    return own == 1 ? first(p, number, stride) : number;
  }
  /// Number of keys of the current tile.
  HOPWELL_DEVICE int keys_of_tile() const { return arch::shuffle(keys, place); }

 private:
  HOPWELL_DEVICE uint32_t to_lowest(uint32_t bits) {
    const int skipped = tile::lowest_bit(bits);
    own = bits >> skipped, place += skipped;
    return uint32_t(skipped);
  }
};
template <class KernelParams>
using TilesOfCta = std::conditional_t<std::is_same_v<KernelParams, GroupedParams>, OwnTiles, AllTiles>;

// A query and a tile of its heads. At least one step, so that every tile produces a result.
template <class KernelParams>
struct WorkTile {
  int query, first_head, steps;
  decltype(entries_of(std::declval<KernelParams>(), 0)) entries;
};

template <class KernelParams>
HOPWELL_DEVICE WorkTile<KernelParams> work_tile_of(const KernelParams& p, uint32_t number, int heads,
                                                   int keys_of_step) {
  const int query = int(number / uint32_t(p.head_tiles));
  const auto entries = entries_of(p, query);
  const int steps = (entries.length + keys_of_step - 1) / keys_of_step;
  return {query, int(number % uint32_t(p.head_tiles)) * heads, steps > 0 ? steps : 1, entries};
}

// Panels of a tile, 64 columns each, that are copied, multiplied and released together.
struct PanelGroup {
  int first, count;
};

#if HOPWELL_HAS_SM90A

// Offset of the row of entry i, which has the key number `key`, or tile::kNoRow if the entry is not valid. In 16-byte
// chunks from the first row: tile::can_gather guarantees that this fits in 32 bits, so that an address costs one
// multiply-add. For unaligned rows, the offset is in rows. With window keys it is the key number, because any distance
// may lie between the rows of two tensors; with BoxParams the offset of KeyRows.
template <bool kAligned>
HOPWELL_DEVICE uint32_t row_of_entry(const Params& p, const tile::Entries& entries, int, int key) {
  return entries.counts(key) ? uint32_t(key) * (kAligned ? uint32_t(p.kv_stride_s / 8) : 1) : tile::kNoRow;
}
template <bool kAligned>
HOPWELL_DEVICE uint32_t row_of_entry(const WindowParams&, const tile::WindowEntries& entries, int i, int key) {
  return entries.counts(i, key) ? uint32_t(key) : tile::kNoRow;
}
template <bool kAligned>
HOPWELL_DEVICE uint32_t row_of_entry(const BoxParams& p, const tile::WindowEntries& entries, int i, int key) {
  return entries.counts(i, key) ? p.keys.offset_of_key(key >= p.selection.s_kv, key) : tile::kNoRow;
}
// Source of a lane's chunk of a row. The source of an invalid row must not be read.
template <bool kAligned>
HOPWELL_DEVICE const bf16* source_of(const Params& p, uint32_t row, bool valid, uint32_t chunk) {
  return kAligned ? p.kv + uint64_t{row + chunk} * 8 : p.kv + (valid ? int64_t{row} * p.kv_stride_s : 0) + chunk * 8;
}
template <bool kAligned>
HOPWELL_DEVICE const bf16* source_of(const WindowParams& p, uint32_t row, bool, uint32_t chunk) {
  return row_of(p, int(row)) + chunk * 8;
}
template <bool kAligned>
HOPWELL_DEVICE const bf16* source_of(const BoxParams& p, uint32_t row, bool, uint32_t chunk) {
  return reinterpret_cast<const bf16*>(p.keys.base + chunk * 16 + uint64_t{row} * p.keys.unit);
}

// Member mask of the key of entry i; for groups.
template <class Storage>
HOPWELL_DEVICE uint8_t member_mask_of(const typename Storage::KernelParams& p,
                                      const WorkTile<typename Storage::KernelParams>& work, int i) {
  if constexpr (Storage::kOfGroups)
    return i < work.entries.length ? p.member_masks[work.entries.row - p.selection.indices + i] : uint8_t{0};
  else
    return 0;
}
// One bit per lane: set if the member with this lane's index has that lane's key. `member_mask`: of the lane's own key.
HOPWELL_DEVICE uint32_t keys_of_member(const GroupedParams& p, uint8_t member_mask) {
  uint32_t keys = 0;
  HOPWELL_NO_UNROLL
  for (int member = 0; member < p.members; ++member) {
    const uint32_t held = arch::ballot(member_mask >> member & 1);
    keys = arch::lane_index() == member ? held : keys;
  }
  return keys;
}

// Valid keys among the lanes' keys, one bit per lane. For groups: keys of the member with this lane's index.
template <class Storage>
HOPWELL_DEVICE uint32_t keys_that_count(const typename Storage::KernelParams& p, uint32_t row, uint8_t member_mask) {
  if constexpr (Storage::kOfGroups)
    return keys_of_member(p, member_mask);
  else
    return arch::ballot(row != tile::kNoRow);
}

// Publishes which of a warp's rows of a stage are valid, before their first copies. `tiles`: remaining tiles of the
// query.
template <class Storage>
HOPWELL_DEVICE void store_valid(const typename Storage::KernelParams& p, Storage& s, int stage, int part_of_rows,
                                uint32_t valid, int tiles) {
  const int lane = arch::lane_index();
  if constexpr (Storage::kOfGroups) {
    if (lane < p.members) s.valid[stage][lane][part_of_rows] = uint16_t(valid);
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(tile::ring_stage(s.key_ring, stage).full(0));
  } else if (lane == 0) {
    s.valid[stage][part_of_rows] = Storage::kStagesOfWarp == 1 ? valid : valid & 0xffff;
    s.tiles[stage][part_of_rows] = tiles;
    arch::mbarrier_arrive(tile::ring_stage(s.key_ring, stage).full(0));
  }
}

// Sources of a lane's copies for 4 · kQuads rows: a 16-byte chunk, lane % 8, of every panel of rows 4 i + lane / 8.
template <int kQuads>
struct RowSources {
  const bf16* source[kQuads];
  bool valid[kQuads];
};

// Starts the copies of a lane's chunk for some panels. `place`: its address in panel 0.
template <bool kAligned, bool kPanelByPanel>
HOPWELL_DEVICE void copy_chunks(uint32_t place, uint32_t panel_bytes, const bf16* source, bool valid,
                                PanelGroup panels) {
  const int together = kPanelByPanel ? 1 : panels.count;
  HOPWELL_NO_UNROLL
  for (int panel = panels.first; panel < panels.first + panels.count; panel += together)
    tile::copy_chunk<kAligned>(place + uint32_t(panel) * panel_bytes, panel_bytes, source + panel * tile::kPanelColumns,
                               valid, together);
}
// Starts the copies of some panels. `to`: address of the first row in panel 0; its row number is a multiple of 8.
template <bool kAligned, bool kPanelByPanel, int kQuads>
HOPWELL_DEVICE void copy_panels(uint32_t to, uint32_t panel_bytes, const RowSources<kQuads>& rows, PanelGroup panels) {
  const uint32_t lane = uint32_t(arch::lane_index());
  const uint32_t place = to + tile::swizzled(lane / 8, lane % 8);
  HOPWELL_UNROLL
  for (uint32_t i = 0; i < kQuads; ++i)
    copy_chunks<kAligned, kPanelByPanel>(tile::four_rows_on(place, i), panel_bytes, rows.source[i], rows.valid[i],
                                         panels);
}

// Computes the sources for rows of keys. A lane holds the offset of its key's row, lane `first` of the first row
// of quad 0.
template <bool kAligned, int kQuads, class KernelParams>
HOPWELL_DEVICE void find_keys(RowSources<kQuads>& rows, const KernelParams& p, uint32_t row_of_lane, int first) {
  const uint32_t lane = uint32_t(arch::lane_index()), chunk = lane % 8;
  HOPWELL_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    const uint32_t row = arch::shuffle(row_of_lane, first + 4 * i + int(lane / 8));
    rows.valid[i] = row != tile::kNoRow;
    rows.source[i] = source_of<kAligned>(p, row, rows.valid[i], chunk);
  }
}
// Starts the copies of some panels of a warp's rows of a stage. If not all sources fit in `rows` (panel by panel),
// computes the sources here, kQuads quads at a time.
template <bool kAligned, int kRows, int kQuads, class KernelParams>
HOPWELL_DEVICE void copy_rows(const KernelParams& p, uint32_t to, RowSources<kQuads>& rows, uint32_t row_of_lane,
                              int first, PanelGroup panels) {
  constexpr bool kPanelByPanel = !kAligned && kQuads < kRows / 4;
  HOPWELL_NO_UNROLL
  for (int quad = 0; quad < kRows / 4; quad += kQuads) {
    if (kPanelByPanel) find_keys<kAligned>(rows, p, row_of_lane, first + 4 * quad);
    copy_panels<kAligned, kPanelByPanel>(to + uint32_t(quad) * 512, tile::kPanelBytes, rows, panels);
  }
}
// Starts the copies of a query's heads when the previous heads are no longer needed. `head`: this lane's first head.
// `q`: this lane's chunk of head 0. `to`: as for copy_panels.
template <bool kAligned, bool kPanelByPanel, class Storage>
HOPWELL_DEVICE void copy_heads(const Params& p, Storage& s, uint32_t to, const bf16* q, int head,
                               uint32_t empty_parity) {
  const uint32_t lane = uint32_t(arch::lane_index());
  if constexpr (requires { s.q_empty; }) arch::mbarrier_wait(s.q_empty, empty_parity);
  // Not unrolled, since it runs once per query: unrolled, the compiler recomputes the sources of all rows in every
  // step.
  HOPWELL_NO_UNROLL
  for (uint32_t row = lane / 8; row < Storage::kHeads / (2 * Storage::kStagesOfWarp); row += 4, head += 4) {
    const bool valid = head < p.h_q;
    copy_chunks<kAligned, kPanelByPanel>(to + tile::swizzled(row, lane % 8), Storage::kHeads * 128,
                                         q + (valid ? head : 0) * p.q_stride_h, valid, {0, Storage::kDqk / 64});
  }
}

// The same by tensor copies, executed by one thread. `full`: barrier that counts the bytes.
template <class Storage>
HOPWELL_DEVICE void copy_heads_as_boxes(const BoxParams& p, Storage& s, int query, int first_head,
                                        uint32_t empty_parity, arch::mbarrier& full) {
  arch::mbarrier_wait(s.q_empty, empty_parity);
  arch::mbarrier_expect_tx(full, sizeof(s.q[0]));
  HOPWELL_NO_UNROLL
  for (int panel = 0; panel < Storage::kDqk / 64; ++panel)
    arch::tma_load<3>(arch::shared_address(s.q[0]) + uint32_t(panel) * tile::kPanelBytes, p.heads,
                      {panel * tile::kPanelColumns, first_head, query}, full);
}

// The 64 consecutive rows of one tensor that are entries first_entry … first_entry + 63 of a query, if they are such
// rows. All of them are valid: a box must not bring a key that the query does not see, because it may be NaN.
struct Box {
  const arch::TensorMap* rows;
  int first;
  bool exists;
};
template <class Entries>
HOPWELL_DEVICE Box box_of(const Params&, const Entries&, int) {
  return {nullptr, 0, false};
}
HOPWELL_DEVICE Box box_of(const BoxParams& p, const tile::WindowEntries& entries, int first_entry) {
  const int of_window = int(entries.window.count), end = first_entry + kKeys;
  const bool is_window = end <= of_window;
  const bool is_dense = !p.selection.has_indices && first_entry >= of_window && end <= entries.length;
  return {is_window ? &p.window_rows : &p.kv_rows,
          first_entry + (is_window ? int(entries.window.first) - p.selection.s_kv
                                   : int(entries.selected.visible.first) - of_window),
          is_window || is_dense};
}
// Copies panels of such a tile by tensor copies, executed by one thread.
HOPWELL_DEVICE void copy_box(uint32_t to, const Box& box, PanelGroup panels, arch::mbarrier& full) {
  arch::mbarrier_expect_tx(full, uint32_t(panels.count) * tile::kPanelBytes);
  HOPWELL_NO_UNROLL
  for (int panel = panels.first; panel < panels.first + panels.count; ++panel)
    arch::tma_load<2>(to + uint32_t(panel) * tile::kPanelBytes, *box.rows, {panel * tile::kPanelColumns, box.first},
                      full);
}

// The producer. A warp copies 16 rows of both stages (kStagesOfWarp 2), or 32 rows of one stage. Its lanes hold the
// keys of its tiles of a step. A CTA processes one query, whose tiles alternate between the stages, or two queries with
// one stage each. Q is copied after the first part of the first tile, so a warp that waits for a later part also has Q.
// With one stage per query, the space of that first part is free when the last scores are complete, and so is the space
// of Q; otherwise it is free earlier. With boxes, tensor copies bring Q and the tiles of consecutive keys: each warp
// starts one panel group of a tile, and the last warp also Q, before any panel. All threads still wait and arrive, so
// that every tile needs the same arrivals. The producer waits for panel groups in the order of their release, so copies
// never overtake. The code is short, because all roles share one instruction cache.
template <bool kAligned, class Storage>
HOPWELL_DEVICE void gather(const typename Storage::KernelParams& p, Storage& s, int warp) {
  constexpr int kStagesOfWarp = Storage::kStagesOfWarp, kWarps = 2 * kStagesOfWarp;  // of a stage
  constexpr int kRows = kKeys / kWarps, kHeadRows = Storage::kHeads / kWarps;
  // Unaligned rows are copied through registers; the sources of all rows of a one-stage warp would not fit.
  constexpr int kQuads = kAligned ? kRows / 4 : 4;
  constexpr bool kPanelByPanel = !kAligned && kQuads < kRows / 4;
  constexpr bool kBoxes = std::is_same_v<typename Storage::KernelParams, BoxParams>;
  // Whether tile B may be missing in a query's last step, and `work` is still that query.
  constexpr bool kMayMiss = [] {
    if constexpr (kBoxes)
      return Storage::kSkipsTileB;
    else
      return false;
  }();
  const int lane = arch::lane_index(), part_of_rows = warp % kWarps, first_stage = warp / kWarps;
  const int at_once = Storage::queries_at_once(p), self = at_once == 1 ? 0 : first_stage;
  const int keys_of_step = kStages * kKeys / at_once;
  const int entry = (first_stage - self + lane / kRows) * kKeys + part_of_rows * kRows + lane % kRows;
  const uint32_t stride = uint32_t(at_once * arch::grid_size());
  TilesOfCta<typename Storage::KernelParams> tiles;
  uint32_t number = tiles.first(p, uint32_t(arch::block_index() + self * arch::grid_size()), stride);
  if (number >= p.work_tiles) return;
  uint32_t empty_parity = 1, q_empty_parity = 1;  // of the phases that release the next copies' space
  auto work = work_tile_of(p, number, Storage::kHeads, keys_of_step);
  int key = work.entries.at(entry);
  constexpr bool kSkips = std::is_same_v<typename Storage::KernelParams, GroupedParams>;
  uint32_t own = 0;  // the next work tile, if tiles are skipped
  const auto following = [&] { return kSkips ? own : number + stride; };
  uint8_t member_mask = member_mask_of<Storage>(p, work, entry);  // of this key
  HOPWELL_NO_UNROLL
  for (; number < p.work_tiles; number = following()) {
    if constexpr (kSkips) own = tiles.next(p, number, stride);
    const int first_head = work.first_head + part_of_rows * kHeadRows + lane / 8;
    const bf16* const q = p.q + work.query * p.q_stride_s + lane % 8 * 8;
    [[maybe_unused]] const int query = work.query, work_head = work.first_head;  // `work` may soon be the next one
    bool first = first_stage == self;
    int next = entry;
    HOPWELL_NO_UNROLL
    for (int left = work.steps; left > 0; --left, empty_parity ^= 1) {
      const uint32_t row = row_of_entry<kAligned>(p, work.entries, next, key);
      const uint32_t valid = keys_that_count<Storage>(p, row, member_mask);
      const int first_entry = next - entry;  // of this step
      const int keys_left = work.entries.length - first_entry;
      const int tiles_left = !kMayMiss       ? left * (kStages / at_once)
                             : keys_left > 0 ? (keys_left + kKeys - 1) / kKeys
                                             : 1;
      next += keys_of_step;
      if (!kBoxes && left == 1 && following() < p.work_tiles) {
        work = work_tile_of(p, following(), Storage::kHeads, keys_of_step);
        next = entry;
      }
      key = work.entries.at(next);  // in flight during the waits
      member_mask = member_mask_of<Storage>(p, work, next);
      HOPWELL_NO_UNROLL
      for (int n = 0; n < kStagesOfWarp; ++n) {
        const int stage = first_stage + n;
        // Whether this thread starts copy `i`. Starting all of them takes one warp several hundred clocks.
        [[maybe_unused]] const auto starts = [&](int i) { return part_of_rows == i && lane == 0; };
        const Box box = box_of(p, work.entries, first_entry + kKeys * n);
        // The math warpgroups skip a missing tile, but not in the first step.
        [[maybe_unused]] const bool is_missing = kMayMiss && first_entry > 0 && n >= tiles_left;
        RowSources<kQuads> rows;
        if (!kPanelByPanel && !box.exists && !is_missing) find_keys<kAligned>(rows, p, row, kRows * n);
        const auto slot = tile::ring_stage(s.key_ring, stage, empty_parity ^ 1);
        const uint32_t tile_address = arch::shared_address(s.keys[stage]);
        const uint32_t to = tile_address + uint32_t(part_of_rows) * kRows * 128;
        HOPWELL_UNROLL
        for (int part = 0; part < Storage::kParts; ++part) {
          if constexpr (kBoxes) {
            if (part == 0 && first) {  // Q first, because its space is free before any panel is
              first = false;
              if (starts(kWarps - 1)) copy_heads_as_boxes(p, s, query, work_head, q_empty_parity, slot.full(1));
            }
          }
          HOPWELL_UNROLL
          for (int i = Storage::first_group(part); i < Storage::first_group(part + 1); ++i) {
            slot.wait_empty(i);
            if (i == 0)
              store_valid(p, s, stage, part_of_rows, kStagesOfWarp == 1 ? valid : valid >> kRows * n, tiles_left);
            if constexpr (kBoxes) {
              if (box.exists || is_missing) {
                if (box.exists && starts(i)) copy_box(tile_address, box, Storage::panels(i), slot.full(part));
                continue;
              }
            }
            copy_rows<kAligned, kRows>(p, to, rows, row, kRows * n, Storage::panels(i));
          }
          tile::arrive_after_copies<kAligned>(slot.full(part));
          if (kBoxes || part > 0 || !first) continue;
          first = false;
          copy_heads<kAligned, kPanelByPanel>(
              p, s, arch::shared_address(s.q[self]) + uint32_t(part_of_rows) * kHeadRows * 128, q, first_head,
              q_empty_parity);
        }
      }
      if constexpr (kBoxes) {
        // After the copies, because reading the lists of the next query may take long.
        if (left == 1 && following() < p.work_tiles) {
          work = work_tile_of(p, following(), Storage::kHeads, keys_of_step);
          next = entry;
          key = work.entries.at(next);
        }
      }
    }
    q_empty_parity ^= 1;
  }
  arch::cp_async_wait_all();
}

template <class Storage>
HOPWELL_DEVICE void gather(const typename Storage::KernelParams& p, Storage& s) {
  if constexpr (std::is_same_v<typename Storage::KernelParams, BoxParams>)
    gather<true>(p, s, arch::warp_index() % 4);
  else
    p.aligned ? gather<true>(p, s, arch::warp_index() % 4) : gather<false>(p, s, arch::warp_index() % 4);
}

#endif

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
