// The kernels of sparse_mla_decode for Hopper: the producers, which fill tiles with rows of bf16 (key_tiles.hpp).
//
// Codes go from global memory to registers, are decoded and stored to panels. A load of a warp reads 256 codes of two
// rows, so that it touches few lines of the cache. A lane has 16 codes of every second row of its warp, in panel lane / 8
// of a part: chunks 2 · (lane % 4) and 2 · (lane % 4) + 1. Eight neighbouring lanes store to eight different chunks of two
// rows: no bank conflicts. Rows of bf16, and the bf16 part of rows of codes, go to the panels by cp.async.
//
// Codes of a part are loaded in one burst. No load stands between codes that are decoded, because ptxas gives loads that
// are issued together one scoreboard, so each use of a loaded register waits for every load before it.
//
//     registers for one part    left of tile ▒▒▒│loads of right, next list ··│right ▒▒▒│loads of left ··│
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

// A producer's place among the producers. What follows from it is computed where it is needed, to save registers.
struct Producer {
  static HOPWELL_DEVICE int index() {
    int index = arch::thread_index();
    arch::pin_registers(index);
    return index;
  }
  static HOPWELL_DEVICE int thread() { return index() % 128; }  // of its warpgroup
  template <class Tile>
  static HOPWELL_DEVICE int group() {
    return Tile::kProducingGroups == 1 ? 0 : index() / 128 % 2;
  }
  // First of the warp's 16 rows of a tile. Without warp_index(), which a whole warp must call.
  static HOPWELL_DEVICE int first_row() { return thread() / 32 * 16; }
};

// The addresses of a tile's rows in a list.
template <class Tile>
struct RowsOfTile {
  const KeyTiles<Tile>& s;
  int first, last;  // numbers in the two lists: of the tile's first row, and of the last row of its list

  [[nodiscard]] HOPWELL_DEVICE int number(int row) const { return first + row < last ? first + row : last; }
  [[nodiscard]] HOPWELL_DEVICE const unsigned char* data(int row) const { return s.rows[number(row)]; }
  [[nodiscard]] HOPWELL_DEVICE const unsigned char* second(int row) const { return s.second[number(row)]; }
};

// Lists the rows of a split's valid entries in order, kListed entries at a time, and cuts the list into tiles. Entries
// and pages of the next lists are loaded ahead. Every warpgroup finds all valid entries and keeps the rows of its tiles.
template <class Tile>
struct TilesOfSplit {
  using Row = typename Tile::Row;
  const SplitParams& p;
  KeyTiles<Tile>& s;
  uint32_t next = 0;            // first entry of the next list
  int entry, page;              // this thread's entry of the next list, and its page
  int after;                    // its entry of the list after it
  int first_of_one = 0;         // with one warpgroup: see first()
  int list_begin = 0;           // of the list with the tile's rows: 0 or kListed
  int tiles_before = 0;         // in earlier lists
  bool is_last_before = false;  // whether the tile before the present one was the split's last

  // All threads of the warpgroup call it.
  HOPWELL_DEVICE TilesOfSplit(const SplitParams& params, KeyTiles<Tile>& tiles) : p(params), s(tiles) {
    const Entries of_split(p, Work(p, 1));
    if (Producer::thread() == 0) s.entries[group()] = of_split;
    if (Producer::thread() < 4) counts_of_list(0)[Producer::thread()] = 0;
    entry = of_split.entry(uint32_t(Producer::thread())), page = of_split.page(entry);
    after = of_split.entry(uint32_t(Tile::kListed + Producer::thread()));
    synchronise();
  }
  static HOPWELL_DEVICE int group() { return Producer::group<Tile>(); }
  HOPWELL_DEVICE const Entries& entries() const { return s.entries[group()]; }
  // Valid entries that each warp has found for the list that ends before entry `end`. Two lists have different places,
  // because a warp may read the counts of the earlier one while another warp writes.
  HOPWELL_DEVICE int (&counts_of_list(uint32_t end))[4] { return s.counts[group()][end / Tile::kListed % 2]; }
  // Rows of the list.
  [[nodiscard]] HOPWELL_DEVICE int listed() const {
    const int (&counts)[4] = s.counts[group()][next / Tile::kListed % 2];
    return counts[0] + counts[1] + (counts[2] + counts[3]);
  }
  // Row of the list with which the tile begins.
  [[nodiscard]] HOPWELL_DEVICE int first() const {
    return Tile::kProducingGroups == 1 ? first_of_one : group() * Tile::kKeys;
  }

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
  [[nodiscard]] HOPWELL_DEVICE int number() const { return tiles_before + first() / Tile::kKeys; }
  [[nodiscard]] HOPWELL_DEVICE int valid_keys() const {
    const int left = listed() - first();
    return left < Tile::kKeys ? left : Tile::kKeys;
  }
  [[nodiscard]] HOPWELL_DEVICE RowsOfTile<Tile> rows() const {
    return {s, list_begin + first(), list_begin + listed() - 1};
  }

 private:
  static HOPWELL_DEVICE void synchronise() {
    if (group() == 0)
      arch::barrier_sync(kListBarrier, 128);
    else
      arch::barrier_sync(kListBarrier + 1, 128);
  }

  HOPWELL_DEVICE void list() {
    const int warp = Producer::thread() / 32, lane = arch::lane_index();
    const int slot = entries().slot(entry, page);
    const uint32_t valid = arch::ballot(slot >= 0);
    tiles_before += (listed() + Tile::kKeys - 1) / Tile::kKeys;
    next += Tile::kListed;
    if (lane == 0) counts_of_list(next)[warp] = std::popcount(valid);
    synchronise();
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
    entry = after, page = entries().page(entry);
    after = entries().entry(next + uint32_t(Tile::kListed + Producer::thread()));
    synchronise();
  }
};

// Publishes a tile's number of keys, when its first group is empty and before its first part is committed; and whether it
// is the last tile, when the second group is empty and before the second part is committed.
template <class Tile>
HOPWELL_DEVICE void publish_keys(KeyTiles<Tile>& s, int stage, int valid_keys) {
  if (Producer::thread() == 0) s.valid_keys[stage] = valid_keys;
}
template <class Tile>
HOPWELL_DEVICE void publish_end(KeyTiles<Tile>& s, int stage, bool is_last) {
  if (Producer::thread() == 0) s.is_last[stage] = is_last;
}
// Tells the other roles whether the split has keys. The first tile is the first warpgroup's. Executed before the first
// commit.
template <class Tile>
HOPWELL_DEVICE void publish_has_keys(KeyTiles<Tile>& s, bool has_keys) {
  if (Producer::thread() == 0 && Producer::group<Tile>() == 0) s.has_keys = has_keys;
}

// ---- rows of codes --------------------------------------------------------------------------------------------------

// Where a lane's codes of one part of a tile are: 16 of each of eight rows, and of rows with RoPE in codes 16 of two more.
template <class Tile>
struct LanePlace {
  using Row = typename Tile::Row;
  static constexpr int kRows = 8;
  static constexpr int kRopeRows = Row::kHasRope && !Row::kRopeIsPlain ? 2 : 0;
  int lane, first_row;

  HOPWELL_DEVICE LanePlace() : lane(Producer::index() % 32), first_row(Producer::first_row()) {}
  [[nodiscard]] HOPWELL_DEVICE int chunk() const { return lane % 4; }  // of 16 codes in the panel
  [[nodiscard]] HOPWELL_DEVICE int panel(int part) const { return part * Tile::kPanelsOfGroup + lane / 8; }
  // Row of the tile.
  [[nodiscard]] HOPWELL_DEVICE int row(int i) const { return first_row + lane / 4 % 2 + 2 * i; }
  [[nodiscard]] HOPWELL_DEVICE int rope_row(int i) const { return first_row + lane / 4 + 8 * i; }
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
    const int row = place.first_row + place.lane / kWords % 16;
    word = *reinterpret_cast<const uint32_t*>(Place::scales(rows, row) + 4 * (part * kWords + place.lane % kWords));
  }
  // Converts scales of fp32 to factors. Returns whether all of them are exact.
  HOPWELL_DEVICE bool convert() {
    if constexpr (!kIsFp32) return true;
    const auto factor = tile::ScaledCodes::factor_of(arch::bit_cast<float>(word));
    word = factor.pair;
    return arch::ballot(!factor.exact) == 0;
  }
  // The factor of the lane's codes of row i. The whole warp calls it.
  [[nodiscard]] HOPWELL_DEVICE tile::ScaledCodes::Factor factor(const Place& place, int i) const {
    const int at = place.codes_at(0) / Row::kFormat.tile * kBytesOfScale;  // of the scale in the part
    const uint32_t of_row = arch::shuffle(word, (place.row(i) - place.first_row) * kWords + at / 4);
    if constexpr (kIsFp32)
      return {of_row, true};
    else
      return tile::ScaledCodes::factor_of_ue8m0(of_row >> at % 4 * 8 & 0xff);
  }
};
// Rows without scales.
template <class Tile>
struct NoScales {
  HOPWELL_DEVICE void load(const RowsOfTile<Tile>&, const LanePlace<Tile>&, int) {}
  HOPWELL_DEVICE bool convert() { return true; }
  [[nodiscard]] HOPWELL_DEVICE tile::ScaledCodes::Factor factor(const LanePlace<Tile>&, int) const {
    return tile::ScaledCodes::factor_of(1);
  }
};

// A lane's codes of one part of a tile on their way.
template <class Tile>
struct LaneCodes {
  using Row = typename Tile::Row;
  using Place = LanePlace<Tile>;
  arch::Words4 codes[Place::kRows];
  arch::Words4 rope[Place::kRopeRows > 0 ? Place::kRopeRows : 1];
  std::conditional_t<Row::kHasScales, WarpScales<Tile>, NoScales<Tile>> scales;

  // Starts the loads.
  HOPWELL_DEVICE void load(const RowsOfTile<Tile>& rows, int part) {
    const Place place;
    scales.load(rows, place, part);
    HOPWELL_UNROLL
    for (int i = 0; i < Place::kRows; ++i)
      codes[i] = arch::load_streaming(rows.data(place.row(i)) + place.codes_at(part));
    if constexpr (Place::kRopeRows > 0) {
      if (part == 0) return;
      HOPWELL_UNROLL
      for (int i = 0; i < Place::kRopeRows; ++i)
        rope[i] = arch::load_streaming(rows.data(place.rope_row(i)) + 512 + 16 * place.chunk());
    }
  }

  // Decodes the codes and stores them to the panels at address `panels`. Returns false if a factor of the lane's codes is
  // not exact or a code is NaN; then decode_exactly() follows. The whole warp calls it.
  HOPWELL_DEVICE bool decode(uint32_t panels, int part) {
    const Place place;
    bool exact = scales.convert();
    tile::ScaledCodes decoder(true);
    const uint32_t to =
        panels + uint32_t(place.panel(part)) * tile::kPanelBytes + tile::swizzled(place.row(0), 2 * place.chunk());
    HOPWELL_UNROLL
    for (int i = 0; i < Place::kRows; ++i) {
      const auto factor = scales.factor(place, i);
      if (!place.has_codes(part)) continue;
      exact = exact && factor.exact;
      store(codes[i], factor.pair, (to ^ uint32_t(2 * i % 8 * 16)) + uint32_t(2 * i * 128), decoder);
    }
    if constexpr (Place::kRopeRows > 0) {
      if (part == 1) {
        const uint32_t at = panels + 8 * tile::kPanelBytes + tile::swizzled(place.rope_row(0), 2 * place.chunk());
        HOPWELL_UNROLL
        for (int i = 0; i < Place::kRopeRows; ++i)
          store(rope[i], scales.factor(place, i).pair, at + uint32_t(8 * i * 128), decoder);
      }
    }
    return !place.has_codes(part) || (exact && decoder.is_right());
  }

 private:
  // Decodes 16 codes to two chunks, at `to` and at to ^ 16.
  static HOPWELL_DEVICE void store(const arch::Words4& from, uint32_t factor, uint32_t to, tile::ScaledCodes& decoder) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      arch::Words4 chunk;
      HOPWELL_UNROLL
      for (int j = 0; j < 2; ++j) decoder.decode(from.w[2 * half + j], factor, &chunk.w[2 * j]);
      arch::store_shared_v4(to ^ uint32_t(16 * half), chunk);
    }
  }
};

// Decodes a lane's codes of one part of a tile as the operator defines them, for NaN codes and any scales. Reads them
// again. Few registers: the codes rotate through them.
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

// Copies the panel of bf16 of this warp's rows of codes.
template <class Tile>
HOPWELL_DEVICE void copy_plain_panel(const RowsOfTile<Tile>& rows, uint32_t panels) {
  const LanePlace<Tile> place;
  const int chunk = place.lane % 8, first = place.first_row + place.lane / 8;
  const uint32_t to = panels + uint32_t(Tile::kPlainPanel) * tile::kPanelBytes + tile::swizzled(first, chunk);
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i)
    arch::cp_async(tile::four_rows_on(to, uint32_t(i)),
                   rows.data(first + 4 * i) + Tile::Row::kFormat.plain_at + 16 * chunk);
}

// kHoldsTile: whether a lane has registers for both parts of a tile.
template <bool kHoldsTile, class Tile>
HOPWELL_DEVICE void produce_from_codes(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  if (!more) {
    if (tiles.group() == 0) tile::ring_stage(s.ring, 0).commit(0);
    return;
  }
  LaneCodes<Tile> codes[kHoldsTile ? 2 : 1];
  LaneCodes<Tile>&left = codes[0], &right = codes[kHoldsTile ? 1 : 0];
  left.load(tiles.rows(), 0);
  if constexpr (kHoldsTile) right.load(tiles.rows(), 1);
  HOPWELL_NO_UNROLL
  for (;;) {
    const tile::RingSlot slot(s.ring, tiles.number());
    const int stage = slot.stage();
    const uint32_t to = arch::shared_address(panels[stage]);
    const RowsOfTile<Tile> rows = tiles.rows();
    slot.wait_empty(0);
    publish_keys(s, stage, tiles.valid_keys());
    if (!left.decode(to, 0)) decode_exactly(rows, panels[stage], 0);
    arch::fence_proxy_async();
    slot.commit(0);
    if constexpr (Tile::kPlainPanel == 8) {
      slot.wait_empty(Tile::kRopeGroup);
      copy_plain_panel(rows, to);
    }
    more = tiles.advance();
    if constexpr (!kHoldsTile) right.load(rows, 1);
    if constexpr (kHoldsTile) {
      if (more) left.load(tiles.rows(), 0);
    }
    slot.wait_empty(1);
    if constexpr (Tile::kPlainPanel == 7) copy_plain_panel(rows, to);
    if constexpr (Tile::kGroups > Tile::kRopeGroup && Tile::kPlainPanel < 0) slot.wait_empty(Tile::kRopeGroup);
    publish_end(s, stage, tiles.is_last_before);
    if (!right.decode(to, 1)) decode_exactly(rows, panels[stage], 1);
    if constexpr (Tile::kPlainPanel >= 0) arch::cp_async_wait_all();
    arch::fence_proxy_async();
    slot.commit(1);
    if (!more) return;
    if constexpr (kHoldsTile)
      right.load(tiles.rows(), 1);
    else
      left.load(tiles.rows(), 0);
  }
}

// ---- rows of bf16 ---------------------------------------------------------------------------------------------------

template <class Tile>
HOPWELL_DEVICE void produce_from_plain(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  constexpr int kRows = 4;  // of a lane
  const int lane = arch::lane_index(), first_row = Producer::first_row() + lane / 8;
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
    publish_keys(s, stage, tiles.valid_keys());
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
      if (panel % Tile::kPanelsOfGroup == 0 && panel > 0) slot.wait_empty(panel / Tile::kPanelsOfGroup);
      HOPWELL_UNROLL
      for (int i = 0; i < kRows; ++i)
        arch::cp_async(tile::four_rows_on(to, uint32_t(i)) + uint32_t(panel) * tile::kPanelBytes,
                       panel == 8 ? second[i] : rows[i] + 128 * panel);
      if (n != Tile::kPanelsOfGroup - 1 && n != Tile::kPanels - 1) continue;
      const int part = n < Tile::kPanelsOfGroup ? 0 : 1;
      if (part == 1) publish_end(s, stage, tiles.is_last_before);
      slot.commit(part);
      tile::arrive_after_copies<true>(slot.full(part));
    }
  }
  arch::cp_async_wait_all();
}

template <bool kHoldsTile, class Tile>
HOPWELL_DEVICE void produce(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  if constexpr (Tile::kCopiesRows)
    produce_from_plain(p, s, panels);
  else
    produce_from_codes<kHoldsTile>(p, s, panels);
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
