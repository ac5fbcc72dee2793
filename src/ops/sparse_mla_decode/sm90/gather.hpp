// The kernels of sparse_mla_decode for Hopper: the gather warpgroup. It finds the rows of a split's valid entries and
// gives them to the dequant warps, tile by tile.
//
//     rows of codes   a bulk copy of each row to the stage, unmodified
//     rows of bf16    the rows' addresses
//
// Invalid entries are skipped: a tile has the next 64 valid ones. Each warp reads all entries, 64 at a time, and keeps
// its own 16 rows of each tile. If 64 entries begin a tile and all are valid, lanes i and i + 16 get row i by a
// shuffle. Otherwise valid slots go through a ring in shared memory. After a first invalid entry tiles seldom begin
// with 64 entries again, so most go through the ring.
//
//     gather   find tile n + 1, fetch its rows to L2 │ wait until the stage is free │ copy │ find tile n + 2 …
//
// With three stages copies begin early enough, and rows are not fetched to L2 first.
#pragma once

#include <bit>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/bulk_copy.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

template <class Tile>
struct Gather {
  using Row = typename Tile::Row;
  static constexpr int kRows = Tile::kKeys / Tile::kGatherWarps;  // of this warp in a tile
  static constexpr uint32_t kAll = 0xffffffff;
  const SplitParams& p;
  KeyTiles<Tile>& s;
  int warp = arch::thread_index() / 32 % Tile::kGatherWarps;
  uint32_t next = 0, end = 0;  // entries of s.entries: the next one, and the end of the split
  int entry[2];                // entries next + lane and next + 32 + lane
  // Of the 64 entries before `next`: this lane's slots, and which entries are valid. At the end of the split none is.
  int slot[2];
  uint32_t valid[2];
  int listed = 0, taken = 0;  // how many slots of the split have been put into the ring, and taken from it
  const unsigned char *data, *second;

  HOPWELL_DEVICE Gather(const SplitParams& params, KeyTiles<Tile>& tiles) : p(params), s(tiles) {}

  HOPWELL_DEVICE void load_entries() {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) entry[i] = s.entries.entry(next + uint32_t(arch::lane_index() + 32 * i));
  }
  [[nodiscard]] HOPWELL_DEVICE bool has_slots() const { return (valid[0] | valid[1]) != 0; }
  // Goes to the next 64 entries that have a valid one among them.
  HOPWELL_DEVICE void find_slots() {
    valid[0] = valid[1] = 0;
    HOPWELL_NO_UNROLL
    while (!has_slots() && next < end) {
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) slot[i] = s.entries.slots.of(entry[i]);
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) valid[i] = arch::ballot(slot[i] >= 0);
      next += Tile::kKeys;
      load_entries();
    }
  }
  // Appends the warp's rows of the 64 entries to the ring.
  HOPWELL_DEVICE void list_slots() {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int at = listed + std::popcount(valid[i] & ((1U << arch::lane_index()) - 1));
      if (slot[i] >= 0 && at % Tile::kKeys / kRows == warp) s.slots[warp][ring_at(at)] = slot[i];
      listed += std::popcount(valid[i]);
    }
  }
  static HOPWELL_DEVICE int ring_at(int number) { return number / Tile::kKeys % 2 * kRows + number % kRows; }

  // Begins split `split` of the CTA. In each cache only the first split waits for entries: the next ones follow it.
  HOPWELL_DEVICE void begin_split(const Work& work, int split) {
    if (split == 0 || work.split + split == p.splits_of_keys) {
      arch::barrier_sync(kGatherBarrier, Tile::kGatherThreads);  // kept: others may read the first cache's entries
      if (arch::thread_index() % Tile::kGatherThreads == 0) s.entries = Entries(p, work, split);
      arch::barrier_sync(kGatherBarrier, Tile::kGatherThreads);
      next = 0;
      load_entries();
    }
    const int64_t last = next + p.keys_per_split, count = s.entries.count;
    end = uint32_t(last < count ? last : count);
    listed = taken = 0;
    find_slots();
  }
  // Finds the next tile and the addresses of its rows. Lanes i and i + 16 have row i of the warp's 16.
  HOPWELL_DEVICE TileInfo find_tile() {
    const int row = kRows * warp + arch::lane_index() % kRows;  // of the tile
    int keys, slot_of_row;
    if (listed == taken && (valid[0] & valid[1]) == kAll) {
      keys = Tile::kKeys;
      slot_of_row = arch::shuffle(warp < Tile::kGatherWarps / 2 ? slot[0] : slot[1], row % 32);
      find_slots();
    } else {
      HOPWELL_NO_UNROLL
      while (listed - taken < Tile::kKeys && has_slots()) {
        list_slots();
        find_slots();
      }
      keys = listed - taken < Tile::kKeys ? listed - taken : Tile::kKeys;
      arch::syncwarp();
      slot_of_row = row < keys ? s.slots[warp][ring_at(taken + row)] : 0;
      arch::syncwarp();
      taken += keys;
    }
    const RowAddress<Row> address(p, s.entries, slot_of_row);
    data = address.data, second = address.second;
    if constexpr (Tile::kStages == 2) fetch_to_l2(row < keys);  // else copies are early enough
    return {int16_t(keys), int16_t(listed == taken && !has_slots())};
  }
  // Rows need not begin at a line of 128 bytes, so a row's last line may be missed.
  HOPWELL_DEVICE void fetch_to_l2(bool valid_row) const {
    constexpr int kLines = (Row::kDataBytes + 127) / 128, kLanes = 32 / kRows;
    int bytes = Row::kDataBytes;
    if constexpr (Row::kMayHaveRopeCache)
      if (p.rope_cache.data) bytes = 2 * kDv;
    HOPWELL_UNROLL
    for (int i = 0; i < kLines; i += kLanes) {
      const int line = i + arch::lane_index() / kRows;
      if (valid_row && 128 * line < bytes) arch::prefetch_l2(data + 128 * line);
    }
  }
  // Gives the tile to the dequant warps.
  HOPWELL_DEVICE void send(KeyPanels<Tile>& panels, int stage, TileInfo info) const {
    const int lane = arch::lane_index(), row = kRows * warp + lane;
    const bool has_row = lane < kRows && row < info.keys;
    arch::mbarrier& gathered = s.gathered[stage];
    if (warp == 0 && lane == 0) s.gathered_info[stage] = info;
    if constexpr (Tile::kCopiesRows) {
      if (has_row) {
        s.rows[stage].data[row] = data;
        if constexpr (RowAddress<Row>::kHasSecond) s.rows[stage].second[row] = second;
      }
      tile::arrive_warp(gathered);
    } else {
      constexpr uint32_t kBytes = Row::kDataBytes, kSecond = Row::kSecondBytes;
      constexpr bool kBulk = !Tile::kThreadsCopyScales;
      const int left = info.keys - kRows * warp, own = left < 0 ? 0 : left < kRows ? left : kRows;
      // Copies may complete before this: the phase ends only after lane 0 has arrived.
      if (lane == 0) arch::mbarrier_arrive_expect_tx(gathered, uint32_t(own) * (kBytes + (kBulk ? kSecond : 0)));
      const uint32_t to = arch::shared_address(panels[stage]) + uint32_t(Tile::kRawAt + row * Row::kPitch);
      if (has_row) {
        arch::bulk_load(to, data, kBytes, gathered);
        if constexpr (kSecond > 0 && kBulk) arch::bulk_load(to + kBytes, second, kSecond, gathered);
        if constexpr (!kBulk) arch::cp_async<kSecond>(to + kBytes, second);
      }
      if constexpr (!kBulk) tile::arrive_after_copies<true>(gathered);
    }
  }
};

template <class Tile>
HOPWELL_DEVICE void gather(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  Gather<Tile> rows(p, s);
  int tile = 0;
  HOPWELL_NO_UNROLL
  for (int split = 0; split < Work(p).splits; ++split) {
    rows.begin_split(Work(p), split);
    bool is_last = false;
    HOPWELL_NO_UNROLL
    for (; !is_last; ++tile) {
      const TileInfo info = rows.find_tile();
      const tile::RingSlot slot(s.ring, tile);
      // The readers have read part 1, which rows of codes replace, and the dequant warps the stage's rows and
      // gathered_info.
      slot.wait_empty(1);
      rows.send(panels, slot.stage(), info);
      is_last = info.is_last != 0;
    }
  }
  if constexpr (Tile::kThreadsCopyScales) arch::cp_async_wait_all();
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
