// The kernels of sparse_mla_decode for Hopper: the producers, which fill tiles with rows of bf16 (key_tiles.hpp).
//
// Codes go from global memory to registers, are decoded and stored to panels. A load of a warp reads 256 codes of each
// of two rows, so that it touches few lines of the cache. A lane has 16 codes of every second row of its warp, in panel
// lane / 8 of a part: chunks 2 · (lane % 4) and 2 · (lane % 4) + 1. Eight neighbouring threads store to eight different
// chunks of two rows: no bank conflicts. Rows of bf16, and the bf16 part of rows of codes, go to the panels by
// cp.async.
//
// Codes of a part are loaded in one burst. No load stands between codes that are decoded, because ptxas gives loads
// that are issued together one scoreboard, so each use of a loaded register waits for every load before it.
//
//     registers for one part    left of tile ▒▒▒│next list, loads of right ··│right ▒▒▒│loads of left ··│
//     for both parts            left of tile ▒▒▒│next list, loads of left    │right ▒▒▒│loads of right  │
//
// Rows past the last key of a tile repeat that key. Their scores are masked, so they add 0 times values that the query
// has selected.
#pragma once

#include <bit>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"
#include "tile/gpu/e4m3.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

// ---- which rows -----------------------------------------------------------------------------------------------------

// A producer's place among the producers. Values that depend on it are computed where they are needed, to save
// registers.
struct Producer {
  static HOPWELL_DEVICE uint32_t index() {
    auto index = uint32_t(arch::thread_index());
    arch::pin_registers(index);
    return index;
  }
  static HOPWELL_DEVICE int thread() { return int(index() % 128); }  // of its warpgroup
  template <class Tile>
  static HOPWELL_DEVICE int group() {
    return Tile::kProducingGroups == 1 ? 0 : int(index() / 128 % 2);
  }
};

// Number in the list of the first row of this warpgroup's tile. One producer warpgroup takes both tiles of a list:
// first_of_one is 0, then 64. Of two warpgroups each takes one tile, and first_of_one does not matter.
template <class Tile>
HOPWELL_DEVICE int first_of_list(int first_of_one) {
  return Tile::kProducingGroups == 1 ? first_of_one : Producer::group<Tile>() * Tile::kKeys;
}

// The addresses of a tile's rows. Row numbers run through both list buffers: 0 to 127 are in the first, 128 to 255 in
// the second.
template <class Tile>
struct RowsOfTile {
  const KeyTiles<Tile>* s;
  int first_of_one;  // see first_of_list()
  int last;          // row of the list, counted through both list buffers

  [[nodiscard]] HOPWELL_DEVICE int number(int row) const {
    const int n = (last & Tile::kListed) + first_of_list<Tile>(first_of_one) + row;
    return n < last ? n : last;
  }
  [[nodiscard]] HOPWELL_DEVICE const unsigned char* data(int row) const { return s->rows[number(row)]; }
  [[nodiscard]] HOPWELL_DEVICE const unsigned char* second(int row) const { return s->second[number(row)]; }
};

// Lists the rows of a split's valid entries in order, kListed entries at a time, and cuts the list into tiles. Entries
// of the next list are loaded ahead. Every warpgroup finds all valid entries and keeps the rows of its tiles.
template <class Tile>
struct TilesOfSplit {
  using Row = typename Tile::Row;
  const SplitParams& p;
  KeyTiles<Tile>& s;
  uint32_t next = 0;            // first entry of the next list
  int entry;                    // this thread's entry of the next list
  int first_of_one = 0;         // see first_of_list()
  int list_begin = 0;           // of the list with the tile's rows: 0 or kListed
  bool is_last_before = false;  // whether the tile before the present one was the split's last

  // All threads of the warpgroup call it.
  HOPWELL_DEVICE TilesOfSplit(const SplitParams& params, KeyTiles<Tile>& tiles) : p(params), s(tiles) {
    const Entries of_split(p, Work(p, 1));
    if (Producer::thread() == 0) s.entries[group()] = of_split, s.tiles_before[group()] = 0;
    if (Producer::thread() < 4) counts_of_list(0)[Producer::thread()] = 0;
    entry = of_split.entry(uint32_t(Producer::thread()));
    synchronise();
  }
  static HOPWELL_DEVICE int group() { return Producer::group<Tile>(); }
  HOPWELL_DEVICE const Entries& entries() const { return s.entries[group()]; }
  // Valid entries that each warp has found for the list that ends before entry `end`. Two lists have separate
  // counts, because a warp may read the counts of the earlier one while another warp writes.
  HOPWELL_DEVICE int (&counts_of_list(uint32_t end) const)[4] { return s.counts[group()][end / Tile::kListed % 2]; }
  // Rows of the list that ends before entry `end`; of the present list.
  [[nodiscard]] HOPWELL_DEVICE int rows_of_list(uint32_t end) const {
    const int (&counts)[4] = counts_of_list(end);
    return counts[0] + counts[1] + (counts[2] + counts[3]);
  }
  [[nodiscard]] HOPWELL_DEVICE int listed() const { return rows_of_list(next); }
  [[nodiscard]] HOPWELL_DEVICE int first() const { return first_of_list<Tile>(first_of_one); }

  // Goes to the warpgroup's next tile. Returns whether there is one. All threads of the warpgroup call it.
  HOPWELL_DEVICE bool advance() {
    is_last_before = first() + Tile::kKeys >= listed();
    if (Tile::kProducingGroups == 1 && !is_last_before) {
      first_of_one += Tile::kKeys;
      return true;
    }
    while (next < uint32_t(entries().count)) {
      list();
      first_of_one = 0;
      is_last_before = is_last_before && listed() == 0;
      if (first() < listed()) return true;
    }
    return false;
  }
  // Of the tile: its number in the split, its keys and its rows.
  [[nodiscard]] HOPWELL_DEVICE int number() const { return s.tiles_before[group()] + first() / Tile::kKeys; }
  [[nodiscard]] HOPWELL_DEVICE int valid_keys() const {
    const int left = listed() - first();
    return left < Tile::kKeys ? left : Tile::kKeys;
  }
  [[nodiscard]] HOPWELL_DEVICE RowsOfTile<Tile> rows() const { return {&s, first_of_one, list_begin + listed() - 1}; }

 private:
  static HOPWELL_DEVICE void synchronise() {
    if (group() == 0)
      arch::barrier_sync(kListBarrier, 128);
    else
      arch::barrier_sync(kListBarrier + 1, 128);
  }

  HOPWELL_DEVICE void list() {
    const int warp = Producer::thread() / 32, lane = arch::lane_index();
    const int slot = entries().slot(entry, entries().page(entry));
    const uint32_t valid = arch::ballot(slot >= 0);
    next += Tile::kListed;
    if (lane == 0) counts_of_list(next)[warp] = std::popcount(valid);
    synchronise();
    if (Producer::thread() == 0)
      s.tiles_before[group()] += (rows_of_list(next - Tile::kListed) + Tile::kKeys - 1) / Tile::kKeys;
    int before = std::popcount(valid & ((1U << lane) - 1));
    HOPWELL_UNROLL
    for (int w = 0; w < 4; ++w) before += w < warp ? counts_of_list(next)[w] : 0;
    if (Tile::kLists == 2 && group() * Tile::kKeys < listed()) list_begin ^= Tile::kListed;
    const bool is_own = Tile::kProducingGroups == 1 || before / Tile::kKeys == group();
    if (slot >= 0 && is_own) {
      const RowAddress<Row> address(p, entries().cache, slot);
      s.rows[list_begin + before] = address.data;
      if constexpr (RowAddress<Row>::kHasSecond) s.second[list_begin + before] = address.second;
    }
    entry = entries().entry(next + uint32_t(Producer::thread()));
    synchronise();
  }
};

// publish_keys() writes a tile's number of keys: after its first group is empty, before its first part is committed.
// publish_end() writes whether the tile in `stage` is the split's last: after its second group is empty, before its
// second part is committed. By then `tiles` is one tile further.
template <class Tile>
HOPWELL_DEVICE void publish_keys(const TilesOfSplit<Tile>& tiles, int stage) {
  if (Producer::thread() == 0) tiles.s.valid_keys[stage] = tiles.valid_keys();
}
template <class Tile>
HOPWELL_DEVICE void publish_end(const TilesOfSplit<Tile>& tiles, int stage) {
  if (Producer::thread() == 0) tiles.s.is_last[stage] = tiles.is_last_before;
}
// Tells the other roles whether the split has keys. The first tile is the first warpgroup's. Executed before the first
// commit.
template <class Tile>
HOPWELL_DEVICE void publish_has_keys(KeyTiles<Tile>& s, bool has_keys) {
  if (Producer::thread() == 0 && Producer::group<Tile>() == 0) s.has_keys = has_keys;
}

// ---- rows of codes --------------------------------------------------------------------------------------------------

// A lane's codes of one part of a tile: 16 of each of eight rows. If RoPE is stored as codes, there are also 16 RoPE
// codes of each of two rows.
template <class Tile>
struct LanePlace {
  using Row = typename Tile::Row;
  static constexpr int kRows = 8;
  static constexpr int kRopeRows = Row::kHasRope && !Row::kRopeIsPlain ? 2 : 0;
  uint32_t index = Producer::index();

  [[nodiscard]] HOPWELL_DEVICE int lane() const { return int(index % 32); }
  // Of the warp's 16 rows of a tile.
  [[nodiscard]] HOPWELL_DEVICE int first_row() const { return int(index % 128 / 32 * 16); }
  [[nodiscard]] HOPWELL_DEVICE int chunk() const { return lane() % 4; }  // of 16 codes in the panel
  [[nodiscard]] HOPWELL_DEVICE int panel(int part) const { return part * Tile::kPanelsOfGroup + lane() / 8; }
  // Row of the tile.
  [[nodiscard]] HOPWELL_DEVICE int row(int i) const { return first_row() + lane() / 4 % 2 + 2 * i; }
  [[nodiscard]] HOPWELL_DEVICE int rope_row(int i) const { return first_row() + lane() / 4 + 8 * i; }
  // Whether the lane's panel has codes.
  [[nodiscard]] HOPWELL_DEVICE bool has_codes(int part) const { return Tile::kPlainPanel != 7 || panel(part) != 7; }
  // Offset of the lane's codes in a row.
  [[nodiscard]] HOPWELL_DEVICE int codes_at(int part) const { return panel(part) * 64 + chunk() * 16; }
  static HOPWELL_DEVICE const unsigned char* scales(const RowsOfTile<Tile>& rows, int row) {
    return Row::kScalesLieElsewhere ? rows.second(row) : rows.data(row) + Row::kFormat.scales;
  }
};

// The scales of a warp's 16 rows for one part of a tile. A lane loads a word: one scale, or four of ue8m0.
template <class Tile>
struct WarpScales {
  using Row = typename Tile::Row;
  using Place = LanePlace<Tile>;
  static constexpr bool kIsFp32 = Row::kFormat.scale == mla_cache::Scale::fp32;
  static constexpr int kBytesOfScale = kIsFp32 ? 4 : 1;
  static constexpr int kWords = 256 / Row::kFormat.tile * kBytesOfScale / 4;  // of a row in a part
  uint32_t word;

  HOPWELL_DEVICE void load(const RowsOfTile<Tile>& rows, const Place& place, int part) {
    const int row = place.first_row() + place.lane() / kWords % 16;
    word = *reinterpret_cast<const uint32_t*>(Place::scales(rows, row) + 4 * (part * kWords + place.lane() % kWords));
  }
  // Converts scales of fp32 to factors. Returns whether the factors of all of the warp's codes are exact.
  HOPWELL_DEVICE bool convert([[maybe_unused]] int part) {
    bool exact = true;
    if constexpr (kIsFp32) {
      const auto factor = tile::ScaledCodes::factor_of(arch::bit_cast<float>(word));
      word = factor.pair, exact = factor.exact;
    } else {
      if (Tile::kPlainPanel == 7 && part == 1) word = (word & 0xffffff) | 127u << 24;  // the last panel has no scale
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) exact = exact && tile::ScaledCodes::factor_of_ue8m0(word >> 8 * i & 0xff).exact;
    }
    return arch::ballot(!exact) == 0;
  }
  // The factor of the lane's codes of row i. The whole warp calls it.
  [[nodiscard]] HOPWELL_DEVICE uint32_t factor(const Place& place, int i) const {
    const int at = place.codes_at(0) / Row::kFormat.tile * kBytesOfScale;  // of the scale in the part
    const uint32_t of_row = arch::shuffle(word, (place.row(i) - place.first_row()) * kWords + at / 4);
    return kIsFp32 ? of_row : tile::ScaledCodes::factor_of_ue8m0(of_row >> at % 4 * 8 & 0xff).pair;
  }
};
// Rows without scales.
template <class Tile>
struct NoScales {
  HOPWELL_DEVICE void load(const RowsOfTile<Tile>&, const LanePlace<Tile>&, int) {}
  HOPWELL_DEVICE bool convert(int) { return true; }
  [[nodiscard]] HOPWELL_DEVICE uint32_t factor(const LanePlace<Tile>&, int) const {
    return tile::ScaledCodes::factor_of(1).pair;
  }
};

// A lane's codes of one part of a tile, while they are loaded.
template <class Tile>
struct LaneCodes {
  using Row = typename Tile::Row;
  using Place = LanePlace<Tile>;
  arch::Words4 codes[Place::kRows];
  std::conditional_t<Row::kHasScales, WarpScales<Tile>, NoScales<Tile>> scales;

  // Starts the loads.
  HOPWELL_DEVICE void load(const RowsOfTile<Tile>& rows, int part) {
    const Place place;
    scales.load(rows, place, part);
    HOPWELL_UNROLL
    for (int i = 0; i < Place::kRows; ++i)
      codes[i] =
          place.has_codes(part) ? arch::load_streaming(rows.data(place.row(i)) + place.codes_at(part)) : arch::Words4{};
  }

  // Decodes the codes and stores them to the panels at address `panels`. Returns false if a factor is not exact or
  // the lane has a NaN code; then decode_exactly() follows. The whole warp calls it.
  HOPWELL_DEVICE bool decode(const RowsOfTile<Tile>& rows, uint32_t panels, int part) {
    const Place place;
    tile::ScaledCodes decoder(scales.convert(part));
    const uint32_t to =
        panels + uint32_t(place.panel(part)) * tile::kPanelBytes + tile::swizzled(place.row(0), 2 * place.chunk());
    HOPWELL_UNROLL
    for (int i = 0; i < Place::kRows; ++i) {
      const uint32_t factor = scales.factor(place, i);
      store(codes[i], factor, (to ^ uint32_t(2 * i % 8 * 16)) + uint32_t(2 * i * 128), place.has_codes(part), decoder);
    }
    if constexpr (Place::kRopeRows > 0) {
      if (part == 1) decode_rope(rows, panels, decoder);
    }
    return !place.has_codes(part) || decoder.is_right();
  }

 private:
  // RoPE in codes, which are loaded when the registers of the others are free.
  HOPWELL_DEVICE void decode_rope(const RowsOfTile<Tile>& rows, uint32_t panels, tile::ScaledCodes& decoder) const {
    const Place place;
    arch::Words4 rope[Place::kRopeRows > 0 ? Place::kRopeRows : 1];
    HOPWELL_UNROLL
    for (int i = 0; i < Place::kRopeRows; ++i)
      rope[i] = arch::load_streaming(rows.data(place.rope_row(i)) + 512 + 16 * place.chunk());
    const uint32_t to = panels + 8 * tile::kPanelBytes + tile::swizzled(place.rope_row(0), 2 * place.chunk());
    HOPWELL_UNROLL
    for (int i = 0; i < Place::kRopeRows; ++i)
      store(rope[i], scales.factor(place, i), to + uint32_t(8 * i * 128), true, decoder);
  }
  // Decodes 16 codes to two chunks, at `to` and at to ^ 16. A lane without codes stores nothing.
  static HOPWELL_DEVICE void store(const arch::Words4& from, uint32_t factor, uint32_t to, bool has_codes,
                                   tile::ScaledCodes& decoder) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      arch::Words4 chunk;
      HOPWELL_UNROLL
      for (int j = 0; j < 2; ++j) decoder.decode(from.w[2 * half + j], factor, &chunk.w[2 * j]);
      if (has_codes) arch::store_shared_v4(to ^ uint32_t(16 * half), chunk);
    }
  }
};

// Decodes a lane's codes of one part of a tile as the operator defines them, for NaN codes and any scales. Reads them
// again, a few at a time, because registers are scarce.
template <class Tile>
HOPWELL_DEVICE void decode_exactly(const RowsOfTile<Tile>& rows, unsigned char* panels, int part) {
  using Row = typename Tile::Row;
  using Place = LanePlace<Tile>;
  const Place place;
  const int count = Place::kRows + (part == 1 ? Place::kRopeRows : 0);
  HOPWELL_NO_UNROLL
  for (int n = 0; n < count; ++n) {
    const bool is_rope = n >= Place::kRows;
    const int row = is_rope ? place.rope_row(n - Place::kRows) : place.row(n);
    const int panel = is_rope ? 8 : place.panel(part);
    const float scale = Row::scale_among(Place::scales(rows, row), panel, Row::kScales > 1 ? place.chunk() / 2 : 0);
    auto codes = arch::load_vector<arch::Words4>(rows.data(row) + 64 * panel + 16 * place.chunk());
    HOPWELL_NO_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = codes.w[0];
      HOPWELL_UNROLL
      for (int j = 0; j < 3; ++j) codes.w[j] = codes.w[j + 1];
      float x[4];
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) x[j] = tile::e4m3_to_float(word >> 8 * j & 0xff) * scale;
      const uint32_t at = tile::swizzled(row, 2 * place.chunk() + i / 2) + uint32_t(i % 2 * 8);
      *reinterpret_cast<arch::Words2*>(panels + uint32_t(panel) * tile::kPanelBytes + at) = {
          arch::pack_bf16(x[0], x[1]), arch::pack_bf16(x[2], x[3])};
    }
  }
}

// Copies the panel of bf16 of this warp's rows of codes, if there is one. It belongs to the second part of the tile,
// and is complete when that is committed. RoPE has been read when the first group is empty, which the caller has waited
// for.
template <class Tile, class Slot>
HOPWELL_DEVICE void copy_plain_panel(const RowsOfTile<Tile>& rows, KeyPanels<Tile>& panels, const Slot& slot) {
  if constexpr (Tile::kPlainPanel >= 0) {
    const LanePlace<Tile> place;
    const int chunk = place.lane() % 8, first = place.first_row() + place.lane() / 8;
    const uint32_t to = arch::shared_address(panels[slot.stage()]) + uint32_t(Tile::kPlainPanel) * tile::kPanelBytes +
                        tile::swizzled(first, chunk);
    if constexpr (Tile::kPlainPanel < 8) slot.wait_empty(1);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)
      arch::cp_async(tile::four_rows_on(to, uint32_t(i)),
                     rows.data(first + 4 * i) + Tile::Row::kFormat.plain_at + 16 * chunk);
  }
}

// Finds the warpgroup's first tile. Returns whether there is one.
template <class Tile>
HOPWELL_DEVICE bool begin_codes(TilesOfSplit<Tile>& tiles) {
  const bool more = tiles.advance();
  publish_has_keys(tiles.s, more);
  if (!more && tiles.group() == 0) tile::ring_stage(tiles.s.ring, 0).commit(0);
  return more;
}

// Waits until a part's groups are empty, decodes it and commits it. `tiles` is at the tile for the first part, and one
// further for the second.
template <class Tile, class Slot>
HOPWELL_DEVICE void decode_part(const TilesOfSplit<Tile>& tiles, KeyPanels<Tile>& panels, const Slot& slot,
                                const RowsOfTile<Tile>& rows, LaneCodes<Tile>& codes, int part) {
  const int stage = slot.stage();
  const uint32_t to = arch::shared_address(panels[stage]);
  slot.wait_empty(part);
  if (part == 0) publish_keys(tiles, stage);
  if (part == 1) publish_end(tiles, stage);
  if (!codes.decode(rows, to, part)) decode_exactly(rows, panels[stage], part);
  if constexpr (Tile::kPlainPanel >= 0) {
    if (part == 1) arch::cp_async_wait_all();
  }
  arch::fence_proxy_async();
  slot.commit(part);
}

// A lane has registers for one part of a tile. Both parts have the same code, because a longer one misses the
// instruction cache.
template <class Tile>
HOPWELL_DEVICE void produce_parts(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = begin_codes(tiles);
  if (!more) return;
  LaneCodes<Tile> codes;
  RowsOfTile<Tile> rows = tiles.rows();
  codes.load(rows, 0);
  int number = tiles.number(), part = 0;
  HOPWELL_NO_UNROLL
  for (;;) {
    const tile::RingSlot slot(s.ring, number);
    decode_part(tiles, panels, slot, rows, codes, part);
    if (part == 0) {
      more = tiles.advance();
      copy_plain_panel(rows, panels, slot);
    } else if (more) {
      rows = tiles.rows(), number = tiles.number();
    } else {
      return;
    }
    part ^= 1;
    codes.load(rows, part);
  }
}

// A lane has registers for both parts of a tile.
template <class Tile>
HOPWELL_DEVICE void produce_tiles(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = begin_codes(tiles);
  if (!more) return;
  LaneCodes<Tile> left, right;
  left.load(tiles.rows(), 0);
  right.load(tiles.rows(), 1);
  HOPWELL_NO_UNROLL
  while (more) {
    const tile::RingSlot slot(s.ring, tiles.number());
    const RowsOfTile<Tile> rows = tiles.rows();
    decode_part(tiles, panels, slot, rows, left, 0);
    more = tiles.advance();
    if (more) left.load(tiles.rows(), 0);
    copy_plain_panel(rows, panels, slot);
    decode_part(tiles, panels, slot, rows, right, 1);
    if (more) right.load(tiles.rows(), 1);
  }
}

// ---- rows of bf16 ---------------------------------------------------------------------------------------------------

template <class Tile>
HOPWELL_DEVICE void produce_from_plain(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  constexpr int kRows = 4;  // of a lane
  const int lane = arch::lane_index(), first_row = LanePlace<Tile>().first_row() + lane / 8;
  if (!more && tiles.group() == 0) {
    tile::ring_stage(s.ring, 0).commit(0);
    tile::arrive_after_copies<true>(tile::ring_stage(s.ring, 0).full(0));
  }
  HOPWELL_NO_UNROLL
  while (more) {
    const tile::RingSlot slot(s.ring, tiles.number());
    const int stage = slot.stage();
    const uint32_t to = arch::shared_address(panels[stage]) + tile::swizzled(first_row, lane % 8);
    slot.wait_empty(0);
    publish_keys(tiles, stage);
    const unsigned char *rows[kRows], *second[kRows];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i] = tiles.rows().data(first_row + 4 * i) + 16 * (lane % 8);
      second[i] = rows[i] + 2 * kDv;
      if constexpr (Tile::Row::kMayHaveRopeCache)
        if (p.rope_cache.data) second[i] = tiles.rows().second(first_row + 4 * i) + 16 * (lane % 8);
    }
    more = tiles.advance();
    HOPWELL_NO_UNROLL
    for (int n = 0; n < Tile::kPanels; ++n) {
      const int panel = tile::score_panel<Tile::kDqk>(n);
      if (panel == Tile::kPanelsOfGroup) slot.wait_empty(1);
      HOPWELL_UNROLL
      for (int i = 0; i < kRows; ++i)
        arch::cp_async(tile::four_rows_on(to, uint32_t(i)) + uint32_t(panel) * tile::kPanelBytes,
                       panel == 8 ? second[i] : rows[i] + 128 * panel);
      if (n != Tile::kPanelsOfGroup - 1 && n != Tile::kPanels - 1) continue;
      const int part = n < Tile::kPanelsOfGroup ? 0 : 1;
      if (part == 1) publish_end(tiles, stage);
      slot.commit(part);
      tile::arrive_after_copies<true>(slot.full(part));
    }
  }
  arch::cp_async_wait_all();
}

// kHoldsTile: whether a lane has registers for the codes of a whole tile.
template <bool kHoldsTile, class Tile>
HOPWELL_DEVICE void produce(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  if constexpr (Tile::kCopiesRows)
    produce_from_plain(p, s, panels);
  else if constexpr (kHoldsTile)
    produce_tiles(p, s, panels);
  else
    produce_parts(p, s, panels);
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
