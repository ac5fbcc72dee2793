// The kernels of sparse_mla_decode for Hopper: the producers, which fill tiles with rows of bf16 (key_tiles.hpp).
//
// Codes go from global memory to registers, are decoded and stored to panels. A lane has 16 codes of one row in every
// panel, or of two rows: rows lane / 4 and lane / 4 + 8 of its warp, chunks 2 · (lane % 4) and 2 · (lane % 4) + 1. Eight
// neighbouring threads store to eight different chunks of a panel's rows: no bank conflicts. Rows of bf16, and the bf16
// part of rows of codes, go to the panels by cp.async.
//
// When a warp has decoded a tile, it loads its codes of the next tile into the same registers. It does not load between
// codes that it decodes: ptxas gives all of these loads one scoreboard, so each use of a loaded register waits for every
// load before it.
//
// Rows past the last key of a tile repeat that key. Their scores are masked, so they add 0 times values that the query
// has selected.
#pragma once

#include <bit>

#include "arch/sm80/async_copy.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"
#include "tile/gpu/e4m3.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

// ---- which rows -----------------------------------------------------------------------------------------------------

// Lists the rows of a split's valid entries in order, kListed entries at a time, and cuts the list into tiles. Entries
// and pages of the next lists are loaded ahead.
template <class Tile>
struct TilesOfSplit {
  using Row = typename Tile::Row;
  const SplitParams& p;
  KeyTiles<Tile>& s;
  uint32_t next = 0;         // first entry of the next list
  int entry, page;           // this thread's entry of the next list, and its page
  int after;                 // its entry of the list after it
  int first = -Tile::kKeys;  // row of the list with which the tile begins

  // All threads of the producer call it.
  HOPWELL_DEVICE TilesOfSplit(const SplitParams& params, KeyTiles<Tile>& tiles) : p(params), s(tiles) {
    const Entries entries(p, Work(p, 1));
    if (thread() == 0) s.entries = entries;
    if (thread() < kWarps) s.counts[thread()] = 0;
    entry = entries.entry(number_of_list()), page = entries.page(entry);
    after = entries.entry(Tile::kListed + number_of_list());
    arch::barrier_sync(kListBarrier, Tile::kProducers);
  }
  static HOPWELL_DEVICE int thread() { return arch::thread_index() % Tile::kProducers; }

  // kListed threads list an entry each. Others load the same entries.
  HOPWELL_DEVICE void list() {
    const int warp = arch::warp_index() % Tile::kProducingWarps, lane = arch::lane_index();
    const int slot = s.entries.slot(entry, page);
    const uint32_t valid = arch::ballot(slot >= 0);
    arch::barrier_sync(kListBarrier, Tile::kProducers);  // all have read the list before
    if (warp < kWarps && lane == 0) s.counts[warp] = std::popcount(valid);
    arch::barrier_sync(kListBarrier, Tile::kProducers);
    int before = std::popcount(valid & ((1U << lane) - 1));
    HOPWELL_UNROLL
    for (int w = 0; w < kWarps; ++w) before += w < warp ? s.counts[w] : 0;
    if (warp < kWarps && slot >= 0) {
      const RowAddress<Row> address(p, s.entries.keys->cache, slot);
      s.rows[before] = address.data;
      if constexpr (RowAddress<Row>::kHasSecond) s.second[before] = address.second;
    }
    first = 0, next += Tile::kListed;
    entry = after, page = s.entries.page(entry);
    after = s.entries.entry(next + Tile::kListed + number_of_list());
    arch::barrier_sync(kListBarrier, Tile::kProducers);
  }

  // Goes to the next tile. Returns whether there is one. All threads of the producer call it.
  HOPWELL_DEVICE bool advance() {
    first += Tile::kKeys;
    while (first >= listed() && next < uint32_t(s.entries.count)) list();
    return first < listed();
  }
  [[nodiscard]] HOPWELL_DEVICE int valid_keys() const {
    const int left = listed() - first;
    return left < Tile::kKeys ? left : Tile::kKeys;
  }
  // Number in the list of row `row` of the tile.
  [[nodiscard]] HOPWELL_DEVICE int number(int row) const {
    const int last = listed() - 1;
    return first + row < last ? first + row : last;
  }

 private:
  static constexpr int kWarps = Tile::kListed / 32;  // that list entries
  static HOPWELL_DEVICE uint32_t number_of_list() { return uint32_t(thread() % Tile::kListed); }
  // Rows in the list.
  [[nodiscard]] HOPWELL_DEVICE int listed() const {
    int sum = 0;
    HOPWELL_UNROLL
    for (const int count : s.counts) sum += count;
    return sum;
  }
};

// Publishes a tile's number of keys, when its first group is empty and before its first part is committed; and whether it
// is the last tile, when the second group is empty and before the second part is committed.
template <class Tile>
HOPWELL_DEVICE void publish_keys(KeyTiles<Tile>& s, int stage, int valid_keys) {
  if (TilesOfSplit<Tile>::thread() == 0) s.valid_keys[stage] = valid_keys;
}
template <class Tile>
HOPWELL_DEVICE void publish_end(KeyTiles<Tile>& s, int stage, bool is_last) {
  if (TilesOfSplit<Tile>::thread() == 0) s.is_last[stage] = is_last;
}
// Tells the other roles whether the split has keys. Executed before the first commit.
template <class Tile>
HOPWELL_DEVICE void publish_has_keys(KeyTiles<Tile>& s, bool has_keys) {
  if (TilesOfSplit<Tile>::thread() == 0) s.has_keys = has_keys;
}

// ---- rows of codes --------------------------------------------------------------------------------------------------

// A lane's rows of a tile. Their addresses are in shared memory to save registers.
template <class Tile>
struct LaneRows {
  using Row = typename Tile::Row;
  static constexpr int kRowsOfWarp = Tile::kKeys / Tile::kProducingWarps, kCount = kRowsOfWarp / 8;

  // Of the tile: the first row of the warp, and row i of the lane. Without warp_index(), which a whole warp must call.
  static HOPWELL_DEVICE int first() { return TilesOfSplit<Tile>::thread() / 32 * kRowsOfWarp; }
  static HOPWELL_DEVICE int number(int i) { return first() + arch::lane_index() / 4 + 8 * i; }

  // Keeps the addresses for the same warp, which reads them after it has synchronised.
  static HOPWELL_DEVICE void find(const TilesOfSplit<Tile>& tiles) {
    if (arch::lane_index() % 4 != 0) return;
    HOPWELL_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int listed = tiles.number(number(i));
      tiles.s.row_of_tile[number(i)] = tiles.s.rows[listed];
      if constexpr (Row::kScalesLieElsewhere) tiles.s.scales_of_tile[number(i)] = tiles.s.second[listed];
    }
  }
  // The lane's codes of panel 0.
  static HOPWELL_DEVICE const unsigned char* codes(const KeyTiles<Tile>& s, int i) {
    return s.row_of_tile[number(i)] + arch::lane_index() % 4 * 16;
  }
  static HOPWELL_DEVICE const unsigned char* scales(const KeyTiles<Tile>& s, int i) {
    return Row::kScalesLieElsewhere ? s.scales_of_tile[number(i)] : s.row_of_tile[number(i)] + Row::kScalesAt;
  }
};

// Scales of a row, unmodified.
template <class Tile>
struct RowScales {
  using Row = typename Tile::Row;
  static constexpr int kBytes = !Row::kHasScales ? 0 : Row::kScalesLieElsewhere ? Row::kSecondBytes : 16;
  uint32_t words[kBytes > 0 ? kBytes / 4 : 1];

  HOPWELL_DEVICE void load([[maybe_unused]] const unsigned char* from) {
    if constexpr (kBytes == 16) {
      const arch::Words4 v = arch::load_streaming(from);
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) words[i] = v.w[i];
    } else if constexpr (kBytes == 8) {
      const auto v = arch::load_vector<arch::Words2>(from);
      words[0] = v.w[0], words[1] = v.w[1];
    }
  }
};

// Factors of a lane's codes of a row. A word has one factor, or four panels' scales as ue8m0.
template <class Tile>
struct RowFactors {
  using Row = typename Tile::Row;
  static constexpr bool kIsFp32 = Row::kFormat.scale == mla_cache::Scale::fp32;
  static constexpr int kWords = !Row::kHasScales ? 1 : kIsFp32 ? Row::kFormat.tiles() : 2;
  uint32_t words[kWords];

  // Returns whether all factors are exact.
  HOPWELL_DEVICE bool compute(const RowScales<Tile>& scales) {
    using tile::ScaledCodes;
    bool exact = true;
    if constexpr (kIsFp32) {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords; ++i) {
        const auto factor = ScaledCodes::factor_of(arch::bit_cast<float>(scales.words[i]));
        words[i] = factor.pair, exact = exact && factor.exact;
      }
    } else if constexpr (Row::kHasScales) {
      const bool upper = arch::lane_index() % 4 >= 2;  // of tiles of 32 codes, the lane has every second scale
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        if constexpr (Row::kFormat.tile == 64)
          words[i] = scales.words[i];
        else
          words[i] = arch::permute_bytes<0x6420>(scales.words[2 * i] >> (upper ? 8 : 0),
                                                 scales.words[2 * i + 1] >> (upper ? 8 : 0));
      }
      HOPWELL_UNROLL
      for (int panel = 0; 64 * panel < Row::kFormat.codes; ++panel)
        exact = exact && ScaledCodes::factor_of_ue8m0(byte_of(panel)).exact;
    }
    return exact;
  }
  [[nodiscard]] HOPWELL_DEVICE uint32_t byte_of(int panel) const { return words[panel / 4] >> panel % 4 * 8 & 0xff; }
  /// The factor of the codes in a panel.
  [[nodiscard]] HOPWELL_DEVICE uint32_t of(int panel) const {
    if constexpr (!Row::kHasScales)
      return tile::ScaledCodes::factor_of(1).pair;
    else if constexpr (kIsFp32)
      return words[panel * 64 / Row::kFormat.tile];
    else
      return tile::ScaledCodes::factor_of_ue8m0(byte_of(panel)).pair;
  }
};

// Panels of a part of a tile, as positions of score_panel.
template <class Tile>
struct PartOfTile {
  int begin, end;
  HOPWELL_DEVICE explicit PartOfTile(int part)
      : begin(part == 0 ? 0 : Tile::kPanelsOfGroup), end(part == 0 ? Tile::kPanelsOfGroup : Tile::kPanels) {}
};

// Codes of a lane on their way, 16 of each row for each panel of codes, and the scales of its rows.
template <class Tile>
struct LaneCodes {
  using Rows = LaneRows<Tile>;
  static constexpr int kPanels = Tile::kPanels - (Tile::kPlainPanel >= 0 ? 1 : 0);
  static_assert(Tile::kPlainPanel < 0 || Tile::kPlainPanel == kPanels);
  arch::Words4 codes[Rows::kCount][kPanels];
  RowScales<Tile> scales[Rows::kCount];

  // Finds the rows of a tile and starts their loads.
  HOPWELL_DEVICE void load(const TilesOfSplit<Tile>& tiles) {
    Rows::find(tiles);
    arch::syncwarp();  // later addresses are kept after a commit, which synchronises too
    HOPWELL_UNROLL
    for (int i = 0; i < Rows::kCount; ++i) scales[i].load(Rows::scales(tiles.s, i));
    HOPWELL_UNROLL
    for (int i = 0; i < Rows::kCount; ++i) {
      const unsigned char* const of_row = Rows::codes(tiles.s, i);
      HOPWELL_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) codes[i][panel] = arch::load_streaming(of_row + 64 * panel);
    }
  }
  // Decodes the codes of a panel of row i and stores them. `to`: address of the lane's first chunk in panel 0 and row 0.
  // The second chunk is at ^ 16.
  HOPWELL_DEVICE void store(const RowFactors<Tile>& factors, uint32_t to, int i, int panel,
                            tile::ScaledCodes& decoder) const {
    const uint32_t factor = factors.of(panel), offset = uint32_t(panel) * tile::kPanelBytes + uint32_t(i) * 8 * 128;
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      arch::Words4 chunk;
      HOPWELL_UNROLL
      for (int j = 0; j < 2; ++j) decoder.decode(codes[i][panel].w[2 * half + j], factor, &chunk.w[2 * j]);
      arch::store_shared_v4((to ^ uint32_t(16 * half)) + offset, chunk);
    }
  }
};

// Decodes a lane's codes of one part of a tile as the operator defines them, for NaN codes and any scales. Reads them
// again. Few registers: the codes rotate through them.
template <class Tile>
HOPWELL_DEVICE void decode_exactly(const KeyTiles<Tile>& s, KeyPanels<Tile>& panels, int stage, int part) {
  using Row = typename Tile::Row;
  using Rows = LaneRows<Tile>;
  const PartOfTile<Tile> of_part(part);
  const int quarter = arch::lane_index() % 4;
  HOPWELL_NO_UNROLL
  for (int n = of_part.begin * Rows::kCount; n < of_part.end * Rows::kCount; ++n) {
    const int panel = tile::score_panel<Tile::kDqk>(n / Rows::kCount), row = n % Rows::kCount;
    if (panel == Tile::kPlainPanel) continue;
    const float scale = Row::scale_among(Rows::scales(s, row), panel, Row::kScales > 1 ? quarter / 2 : 0);
    auto codes = arch::load_vector<arch::Words4>(Rows::codes(s, row) + 64 * panel);
    HOPWELL_NO_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = codes.w[0];
      HOPWELL_UNROLL
      for (int j = 0; j < 3; ++j) codes.w[j] = codes.w[j + 1];
      float x[4];
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) x[j] = tile::e4m3_to_float(word >> 8 * j & 0xff) * scale;
      const uint32_t at = tile::swizzled(Rows::number(row), 2 * quarter + i / 2) + uint32_t(i % 2 * 8);
      *reinterpret_cast<arch::Words2*>(panels[stage] + uint32_t(panel) * tile::kPanelBytes + at) = {
          arch::pack_bf16(x[0], x[1]), arch::pack_bf16(x[2], x[3])};
    }
  }
}

// Copies the panel of bf16 of this warp's rows of codes.
template <class Tile>
HOPWELL_DEVICE void copy_plain_panel(const KeyTiles<Tile>& s, const KeyPanels<Tile>& panels, int stage) {
  const int chunk = arch::lane_index() % 8, first = LaneRows<Tile>::first() + arch::lane_index() / 8;
  const uint32_t panel = arch::shared_address(panels[stage]) + uint32_t(Tile::kPlainPanel) * tile::kPanelBytes;
  HOPWELL_UNROLL
  for (int row = first; row < first + LaneRows<Tile>::kRowsOfWarp; row += 4)
    arch::cp_async(panel + tile::swizzled(row, chunk), s.row_of_tile[row] + Tile::Row::kFormat.plain_at + 16 * chunk);
}

template <class Tile>
HOPWELL_DEVICE void produce_from_codes(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  if (!more) return tile::ring_stage(s.ring, 0).commit(0);
  LaneCodes<Tile> codes;
  codes.load(tiles);
  if constexpr (Tile::kPlainPanel == 8) copy_plain_panel(s, panels, 0);
  HOPWELL_NO_UNROLL
  for (int tile = 0;; ++tile) {
    const tile::RingSlot slot(s.ring, tile);
    const int stage = slot.stage();
    const uint32_t to =
        arch::shared_address(panels[stage]) + tile::swizzled(LaneRows<Tile>::number(0), arch::lane_index() % 4 * 2);
    slot.wait_empty(0);
    publish_keys(s, stage, tiles.valid_keys());
    RowFactors<Tile> factors[LaneRows<Tile>::kCount];
    bool exact = true;
    HOPWELL_UNROLL
    for (int i = 0; i < LaneRows<Tile>::kCount; ++i) exact &= factors[i].compute(codes.scales[i]);
    HOPWELL_UNROLL
    for (int part = 0; part < 2; ++part) {
      const PartOfTile<Tile> of_part(part);
      tile::ScaledCodes decoder(exact);
      HOPWELL_UNROLL
      for (int n = of_part.begin; n < of_part.end; ++n) {
        const int panel = tile::score_panel<Tile::kDqk>(n);
        if (panel == Tile::kPlainPanel) continue;
        if (panel % Tile::kPanelsOfGroup == 0 && panel > 0) {
          slot.wait_empty(Tile::group_of(panel));
          if (panel == 4 && Tile::kPlainPanel == 7) copy_plain_panel(s, panels, stage);
        }
        HOPWELL_UNROLL
        for (int i = 0; i < LaneRows<Tile>::kCount; ++i) codes.store(factors[i], to, i, panel, decoder);
      }
      if (!decoder.is_right()) decode_exactly(s, panels, stage, part);
      if (part == 1) {
        more = tiles.advance();
        publish_end(s, stage, !more);
        if constexpr (Tile::kPlainPanel >= 0) arch::cp_async_wait_all();
      }
      arch::fence_proxy_async();
      slot.commit(part);
    }
    if (!more) return;
    codes.load(tiles);
    if constexpr (Tile::kPlainPanel == 8) {
      const tile::RingSlot next(s.ring, tile + 1);
      next.wait_empty(Tile::kRopeGroup);
      copy_plain_panel(s, panels, next.stage());
    }
  }
}

// ---- rows of bf16 ---------------------------------------------------------------------------------------------------

template <class Tile>
HOPWELL_DEVICE void produce_from_plain(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  TilesOfSplit<Tile> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  constexpr int kRows = Tile::kKeys / Tile::kProducingWarps / 4;  // of a lane
  const int lane = arch::lane_index();
  const int first_row = arch::warp_index() % Tile::kProducingWarps * 4 * kRows + lane / 8;
  if (!more) {
    tile::ring_stage(s.ring, 0).commit(0);
    tile::arrive_after_copies<true>(tile::ring_stage(s.ring, 0).full(0));
  }
  HOPWELL_NO_UNROLL
  for (int tile = 0; more; ++tile) {
    const tile::RingSlot slot(s.ring, tile);
    const int stage = slot.stage();
    const uint32_t to = arch::shared_address(panels[stage]) + tile::swizzled(first_row, lane % 8);
    slot.wait_empty(0);
    publish_keys(s, stage, tiles.valid_keys());
    const unsigned char *rows[kRows], *second[kRows];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int number = tiles.number(first_row + 4 * i);
      rows[i] = s.rows[number] + 16 * (lane % 8);
      second[i] = rows[i] + 2 * kDv;
      if constexpr (Tile::Row::kMayHaveRopeCache)
        if (p.rope_cache.data) second[i] = s.second[number] + 16 * (lane % 8);
    }
    more = tiles.advance();
    HOPWELL_NO_UNROLL
    for (int n = 0; n < Tile::kPanels; ++n) {
      const int panel = tile::score_panel<Tile::kDqk>(n);
      if (panel % Tile::kPanelsOfGroup == 0 && panel > 0) slot.wait_empty(Tile::group_of(panel));
      HOPWELL_UNROLL
      for (int i = 0; i < kRows; ++i)
        arch::cp_async(tile::four_rows_on(to, uint32_t(i)) + uint32_t(panel) * tile::kPanelBytes,
                       panel == 8 ? second[i] : rows[i] + 128 * panel);
      if (n != Tile::kPanelsOfGroup - 1 && n != Tile::kPanels - 1) continue;
      const int part = n < Tile::kPanelsOfGroup ? 0 : 1;
      if (part == 1) publish_end(s, stage, !more);
      slot.commit(part);
      tile::arrive_after_copies<true>(slot.full(part));
    }
  }
  arch::cp_async_wait_all();
}

template <class Tile>
HOPWELL_DEVICE void produce(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  if constexpr (Tile::kCopiesRows)
    produce_from_plain(p, s, panels);
  else
    produce_from_codes(p, s, panels);
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
