// The kernel of sparse_mla_decode for many heads on Hopper: its producer, which fills tiles with rows of bf16. See
// many_heads.hpp.
//
// Codes go from global memory to registers, are decoded and stored to panels. A lane has 16 codes of two rows in every
// panel: of rows lane / 4 and lane / 4 + 8 of its warp's 16, chunks 2 · (lane % 4) and 2 · (lane % 4) + 1. As soon as it
// has decoded 16 codes, it loads those of the next tile into their registers, so that 32 KB are always in flight. Eight
// lanes store to eight different chunks of a panel's rows: no bank conflicts. Rows of bf16, and the bf16 part of rows of
// codes, go to the panels by cp.async.
//
// Rows past the last key of a tile repeat that key. Their scores are masked, so they add 0 times values that the query
// has selected.
#pragma once

#include <bit>

#include "arch/sm80/async_copy.hpp"
#include "ops/sparse_mla_decode/sm90/many_heads_tile.hpp"
#include "tile/gpu/e4m3.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET::many_heads {

#if HOPWELL_HAS_SM90A

// ---- which rows -----------------------------------------------------------------------------------------------------

// Lists the rows of a split's valid entries in order, kListed entries at a time, and cuts the list into tiles. Entries
// and pages of the next lists are loaded ahead.
template <class Config>
struct TilesOfSplit {
  using Row = typename Config::Row;
  const SplitParams& p;
  Storage<Config>& s;
  uint32_t next;               // this thread's entry of the next list
  int entry, page;             // its value, and its page
  int after;                   // value of the entry of the list after it
  int listed = 0;              // rows in the list
  int first = -Config::kKeys;  // row of the list with which the tile begins

  // All threads of the producer call it.
  HOPWELL_DEVICE TilesOfSplit(const SplitParams& params, Storage<Config>& storage)
      : p(params), s(storage), next(uint32_t(thread())) {
    const Entries entries(p, Work(p, Config::kHeads));
    if (thread() == 0) s.entries = entries;
    entry = entries.entry(next), page = entries.page(entry), after = entries.entry(next + Config::kListed);
    arch::barrier_sync(kListBarrier, Config::kThreadsOfRole);
  }
  static HOPWELL_DEVICE int thread() { return arch::thread_index() % Config::kThreadsOfRole; }

  HOPWELL_DEVICE void list() {
    const int warp = arch::warp_index() % Config::kWarpsOfRole, lane = arch::lane_index();
    const int slot = s.entries.slot(entry, page);
    const uint32_t valid = arch::ballot(slot >= 0);
    if (lane == 0) s.counts[warp] = std::popcount(valid);
    arch::barrier_sync(kListBarrier, Config::kThreadsOfRole);
    int before = std::popcount(valid & ((1U << lane) - 1));
    listed = first = 0;
    HOPWELL_UNROLL
    for (int w = 0; w < Config::kWarpsOfRole; ++w) {
      before += w < warp ? s.counts[w] : 0;
      listed += s.counts[w];
    }
    if (slot >= 0) {
      const RowAddress<Row> address(p, s.entries.keys->cache, slot);
      s.rows[before] = address.data;
      if constexpr (RowAddress<Row>::kHasSecond) s.second[before] = address.second;
    }
    next += Config::kListed;
    entry = after, page = s.entries.page(entry), after = s.entries.entry(next + Config::kListed);
    arch::barrier_sync(kListBarrier, Config::kThreadsOfRole);
  }

  // Goes to the next tile. Returns whether there is one. All threads of the producer call it.
  HOPWELL_DEVICE bool advance() {
    first += Config::kKeys;
    while (first >= listed && next - uint32_t(thread()) < uint32_t(s.entries.count)) list();
    return first < listed;
  }
  [[nodiscard]] HOPWELL_DEVICE int valid_keys() const {
    return listed - first < Config::kKeys ? listed - first : Config::kKeys;
  }
  // Number in the list of row `row` of the tile.
  [[nodiscard]] HOPWELL_DEVICE int number(int row) const { return first + row < listed ? first + row : listed - 1; }
};

// Publishes a tile's number of keys, when its first group is empty and before its first part is committed; and whether it
// is the last tile, when the second group is empty and before the second part is committed.
template <class Config>
HOPWELL_DEVICE void publish_keys(Storage<Config>& s, int stage, int valid_keys) {
  if (TilesOfSplit<Config>::thread() == 0) s.valid_keys[stage] = valid_keys;
}
template <class Config>
HOPWELL_DEVICE void publish_end(Storage<Config>& s, int stage, bool is_last) {
  if (TilesOfSplit<Config>::thread() == 0) s.is_last[stage] = is_last;
}
// Tells the other roles whether the split has keys. Executed before the first commit.
template <class Config>
HOPWELL_DEVICE void publish_has_keys(Storage<Config>& s, bool has_keys) {
  if (TilesOfSplit<Config>::thread() == 0) s.has_keys = has_keys;
}

// ---- rows of codes --------------------------------------------------------------------------------------------------

// A lane's two rows of a tile.
template <class Config>
struct LaneRows {
  using Row = typename Config::Row;
  const unsigned char *data[2], *scales[2];  // data: with the lane's offset in a panel

  static HOPWELL_DEVICE int offset() { return arch::lane_index() % 4 * 16; }
  // Of the tile. Not by warp_index(), because lanes call it alone.
  static HOPWELL_DEVICE int row() { return TilesOfSplit<Config>::thread() / 32 * 16 + arch::lane_index() / 4; }

  // Also keeps the rows in shared memory, for decode_exactly of the same warp.
  HOPWELL_DEVICE void find(const TilesOfSplit<Config>& tiles, int stage) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int number = tiles.number(row() + 8 * half);
      const unsigned char* of_row = tiles.s.rows[number];
      data[half] = of_row + offset(), scales[half] = of_row + Row::kScalesAt;
      if constexpr (Row::kScalesLieElsewhere) scales[half] = tiles.s.second[number];
      if (arch::lane_index() % 4 != 0) continue;
      tiles.s.row_of_tile[stage][row() + 8 * half] = of_row;
      if constexpr (Row::kScalesLieElsewhere) tiles.s.scales_of_tile[stage][row() + 8 * half] = scales[half];
    }
  }
};

// Scales of a lane's rows as they are in the cache.
template <class Config>
struct LaneScales {
  using Row = typename Config::Row;
  static constexpr int kBytes = !Row::kHasScales ? 0 : Row::kScalesLieElsewhere ? Row::kSecondBytes : 16;
  uint32_t words[2][kBytes > 0 ? kBytes / 4 : 1];

  HOPWELL_DEVICE void load(const LaneRows<Config>& rows) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      if constexpr (kBytes == 16) {
        const arch::Words4 v = arch::load_streaming(rows.scales[half]);
        HOPWELL_UNROLL
        for (int i = 0; i < 4; ++i) words[half][i] = v.w[i];
      } else if constexpr (kBytes == 8) {
        const auto v = arch::load_vector<arch::Words2>(rows.scales[half]);
        words[half][0] = v.w[0], words[half][1] = v.w[1];
      }
    }
  }
};

// Factors of a lane's codes. A word has the factors of both rows, or four panels' scales of one row as ue8m0.
template <class Config>
struct LaneFactors {
  using Row = typename Config::Row;
  static constexpr bool kIsFp32 = Row::kFormat.scale == mla_cache::Scale::fp32;
  static constexpr int kWords = !Row::kHasScales ? 1 : kIsFp32 ? Row::kFormat.tiles() : 4;
  uint32_t words[kWords];
  bool exact = true;  // all of them

  HOPWELL_DEVICE explicit LaneFactors(const LaneScales<Config>& scales) {
    using tile::ScaledCodes;
    if constexpr (kIsFp32) {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords; ++i) {
        const auto low = ScaledCodes::factor_of(arch::bit_cast<float>(scales.words[0][i])),
                   high = ScaledCodes::factor_of(arch::bit_cast<float>(scales.words[1][i]));
        exact = exact && low.exact && high.exact;
        words[i] = arch::permute_bytes<0x5410>(low.pair, high.pair);
      }
    } else if constexpr (Row::kHasScales) {
      const bool upper = arch::lane_index() % 4 >= 2;  // of tiles of 32 codes, the lane has every second scale
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t* of_row = scales.words[i / 2];
        if constexpr (Row::kFormat.tile == 64)
          words[i] = of_row[i % 2];
        else
          words[i] = arch::permute_bytes<0x6420>(of_row[i % 2 * 2] >> (upper ? 8 : 0),
                                                 of_row[i % 2 * 2 + 1] >> (upper ? 8 : 0));
        HOPWELL_UNROLL
        for (int panel = i % 2 * 4; panel < i % 2 * 4 + 4 && 64 * panel < Row::kFormat.codes; ++panel)
          exact = exact && ScaledCodes::factor_of_ue8m0(byte_of(i / 2, panel)).exact;
      }
    }
  }
  [[nodiscard]] HOPWELL_DEVICE uint32_t byte_of(int half, int panel) const {
    return words[2 * half + panel / 4] >> panel % 4 * 8 & 0xff;
  }
  /// The factor of the codes of a row in a panel.
  [[nodiscard]] HOPWELL_DEVICE uint32_t of(int half, int panel) const {
    if constexpr (!Row::kHasScales)
      return tile::ScaledCodes::factor_of(1).pair;
    else if constexpr (kIsFp32)
      return half == 0 ? arch::half_twice<false>(words[panel * 64 / Row::kFormat.tile])
                       : arch::half_twice<true>(words[panel * 64 / Row::kFormat.tile]);
    else
      return tile::ScaledCodes::factor_of_ue8m0(byte_of(half, panel)).pair;
  }
};

// Addresses of a lane's two chunks of its first row in panel 0. The second row is at + 1024.
struct LaneChunks {
  uint32_t first, second;

  template <class Config>
  HOPWELL_DEVICE LaneChunks(const Storage<Config>& s, int stage)
      : first(arch::shared_address(s.keys[stage]) +
              tile::swizzled(LaneRows<Config>::row(), arch::lane_index() % 4 * 2)),
        second(first ^ 16) {}
  HOPWELL_DEVICE void store(int panel, int half, const arch::Words4 (&chunks)[2]) const {
    const uint32_t offset = uint32_t(panel) * tile::kPanelBytes + uint32_t(half) * 1024;
    arch::store_shared_v4(first + offset, chunks[0]);
    arch::store_shared_v4(second + offset, chunks[1]);
  }
};

// Codes of a lane on their way: 16 of two rows for each panel of codes.
template <class Config>
struct LaneCodes {
  using Row = typename Config::Row;
  static constexpr int kPanels = Config::kPanels - (Config::kPlainPanel >= 0 ? 1 : 0);
  static_assert(Config::kPlainPanel < 0 || Config::kPlainPanel == kPanels);
  arch::Words4 codes[kPanels][2];

  HOPWELL_DEVICE void load(const LaneRows<Config>& rows, int panel, int half) {
    codes[panel][half] = arch::load_streaming(rows.data[half] + 64 * panel);
  }
  HOPWELL_DEVICE void load(const LaneRows<Config>& rows) {
    HOPWELL_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      HOPWELL_UNROLL
      for (int half = 0; half < 2; ++half) load(rows, panel, half);
    }
  }
  // Stores a panel of one row.
  HOPWELL_DEVICE void store(const LaneFactors<Config>& factors, const LaneChunks& to, int panel, int half,
                            tile::ScaledCodes& decoder) const {
    arch::Words4 chunks[2];
    const uint32_t factor = factors.of(half, panel);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) decoder.decode(codes[panel][half].w[i], factor, &chunks[i / 2].w[i % 2 * 2]);
    to.store(panel, half, chunks);
  }
};

// Decodes a lane's codes of one part of a tile as the operator defines them, for NaN codes and any scales. Reads them
// again. Panels are positions `begin` to `end` − 1 of score_panel. Few registers: the codes rotate through them.
template <class Config>
HOPWELL_DEVICE void decode_exactly(Storage<Config>& s, int stage, int begin, int end) {
  using Row = typename Config::Row;
  using Lane = LaneRows<Config>;
  const int quarter = arch::lane_index() % 4;
  HOPWELL_NO_UNROLL
  for (int n = begin; n < end; ++n) {
    const int panel = tile::score_panel<Config::kDqk>(n);
    if (panel == Config::kPlainPanel) continue;
    uint32_t codes[8];
    float scale[2];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = Lane::row() + 8 * half;
      const unsigned char* data = s.row_of_tile[stage][row];
      const unsigned char* scales = Row::kScalesLieElsewhere ? s.scales_of_tile[stage][row] : data + Row::kScalesAt;
      const auto words = arch::load_vector<arch::Words4>(data + Lane::offset() + 64 * panel);
      scale[half] = Row::scale_among(scales, panel, Row::kScales > 1 ? quarter / 2 : 0);
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) codes[4 * half + i] = words.w[i];
    }
    HOPWELL_NO_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = codes[0];
      const float scale_of_row = i < 4 ? scale[0] : scale[1];
      HOPWELL_UNROLL
      for (int j = 0; j < 7; ++j) codes[j] = codes[j + 1];
      float x[4];
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) x[j] = tile::e4m3_to_float(word >> 8 * j & 0xff) * scale_of_row;
      const uint32_t at = tile::swizzled(Lane::row() + i / 4 * 8, 2 * quarter + i / 2 % 2) + uint32_t(i % 2 * 8);
      *reinterpret_cast<arch::Words2*>(s.keys[stage] + uint32_t(panel) * tile::kPanelBytes + at) = {
          arch::pack_bf16(x[0], x[1]), arch::pack_bf16(x[2], x[3])};
    }
  }
}

// Copies the panel of bf16 of this warp's rows of codes.
template <class Config>
HOPWELL_DEVICE void copy_plain_panel(const Storage<Config>& s, int stage) {
  const int chunk = arch::lane_index() % 8, first = TilesOfSplit<Config>::thread() / 32 * 16 + arch::lane_index() / 8;
  const uint32_t panel = arch::shared_address(s.keys[stage]) + uint32_t(Config::kPlainPanel) * tile::kPanelBytes;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i)
    arch::cp_async(panel + tile::swizzled(first + 4 * i, chunk),
                   s.row_of_tile[stage][first + 4 * i] + Config::Row::kFormat.plain_at + 16 * chunk);
}

template <class Config>
HOPWELL_DEVICE void produce_from_codes(const SplitParams& p, Storage<Config>& s) {
  TilesOfSplit<Config> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  if (!more) return tile::ring_stage(s.key_ring, 0).commit(0);
  LaneRows<Config> next;
  LaneScales<Config> next_scales;
  LaneCodes<Config> codes;
  next.find(tiles, 0);
  arch::syncwarp();  // later rows are kept before a commit, which synchronises too
  next_scales.load(next);
  codes.load(next);
  uint32_t stage = 0, parity = 0;
  HOPWELL_NO_UNROLL
  while (more) {
    const auto slot = tile::ring_stage(s.key_ring, int(stage), parity);
    const LaneChunks to(s, int(stage));
    if constexpr (Config::kPlainPanel == 8) {
      slot.wait_empty(Config::kRopeGroup);
      copy_plain_panel(s, int(stage));
    }
    slot.wait_empty(0);
    publish_keys(s, int(stage), tiles.valid_keys());
    const LaneFactors<Config> factors(next_scales);
    more = tiles.advance();
    if (more) {
      next.find(tiles, int(stage ^ 1));
      next_scales.load(next);
    }
    HOPWELL_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int begin = part == 0 ? 0 : Config::kPanelsOfGroup;
      const int end = part == 0 ? Config::kPanelsOfGroup : Config::kPanels;
      tile::ScaledCodes decoder(factors.exact);
      HOPWELL_UNROLL
      for (int n = begin; n < end; ++n) {
        const int panel = tile::score_panel<Config::kDqk>(n);
        if (panel == Config::kPlainPanel) continue;
        if (panel % Config::kPanelsOfGroup == 0 && panel > 0) {
          slot.wait_empty(Config::group_of(panel));
          if (panel == 4 && Config::kPlainPanel == 7) copy_plain_panel(s, int(stage));
        }
        HOPWELL_UNROLL
        for (int half = 0; half < 2; ++half) {
          codes.store(factors, to, panel, half, decoder);
          if (more) codes.load(next, panel, half);
        }
        // A limit for the compiler, which otherwise spills a register to interleave more codes.
        if constexpr (Config::kPlainPanel == 7) arch::syncwarp();  // kept: order alone, for registers
      }
      if (!decoder.is_right()) decode_exactly<Config>(s, int(stage), begin, end);
      if (part == 1) {
        publish_end(s, int(stage), !more);
        if constexpr (Config::kPlainPanel >= 0) arch::cp_async_wait_all();
      }
      arch::fence_proxy_async();
      slot.commit(part);
    }
    stage ^= 1, parity ^= stage ^ 1;
  }
}

// ---- rows of bf16 ---------------------------------------------------------------------------------------------------

template <class Config>
HOPWELL_DEVICE void produce_from_plain(const SplitParams& p, Storage<Config>& s) {
  TilesOfSplit<Config> tiles(p, s);
  bool more = tiles.advance();
  publish_has_keys(s, more);
  const int lane = arch::lane_index(), first_row = arch::warp_index() % Config::kWarpsOfRole * 16 + lane / 8;
  uint32_t stage = 0, parity = 0;
  if (!more) {
    tile::ring_stage(s.key_ring, 0).commit(0);
    tile::arrive_after_copies<true>(tile::ring_stage(s.key_ring, 0).full(0));
  }
  HOPWELL_NO_UNROLL
  while (more) {
    const auto slot = tile::ring_stage(s.key_ring, int(stage), parity);
    const uint32_t to = arch::shared_address(s.keys[stage]) + tile::swizzled(first_row, lane % 8);
    slot.wait_empty(0);
    publish_keys(s, int(stage), tiles.valid_keys());
    const unsigned char *rows[4], *second[4];
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int number = tiles.number(first_row + 4 * i);
      rows[i] = s.rows[number] + 16 * (lane % 8);
      second[i] = rows[i] + 2 * kDv;
      if constexpr (Config::Row::kMayHaveRopeCache)
        if (p.rope_cache.data) second[i] = s.second[number] + 16 * (lane % 8);
    }
    more = tiles.advance();
    HOPWELL_NO_UNROLL
    for (int n = 0; n < Config::kPanels; ++n) {
      const int panel = tile::score_panel<Config::kDqk>(n);
      if (panel % Config::kPanelsOfGroup == 0 && panel > 0) slot.wait_empty(Config::group_of(panel));
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i)
        arch::cp_async(tile::four_rows_on(to, uint32_t(i)) + uint32_t(panel) * tile::kPanelBytes,
                       panel == 8 ? second[i] : rows[i] + 128 * panel);
      if (n != Config::kPanelsOfGroup - 1 && n != Config::kPanels - 1) continue;
      const int part = n < Config::kPanelsOfGroup ? 0 : 1;
      if (part == 1) publish_end(s, int(stage), !more);
      slot.commit(part);
      tile::arrive_after_copies<true>(slot.full(part));
    }
    stage ^= 1, parity ^= stage ^ 1;
  }
  arch::cp_async_wait_all();
}

template <class Config>
HOPWELL_DEVICE void produce(const SplitParams& p, Storage<Config>& s) {
  if constexpr (Config::kCopiesRows)
    produce_from_plain(p, s);
  else
    produce_from_codes(p, s);
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET::many_heads
