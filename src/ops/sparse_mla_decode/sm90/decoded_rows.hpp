// The kernels of sparse_mla_decode for Hopper: the dequant warps, where rows are codes: they decode them to
// panels of bf16.
//
//     stage      0 ────────── panels 0 to 3 ──────────│── panels 4 to 7, RoPE ──
//                                                     │── rows as the gather warpgroup has copied them ──
//
// With three panels in part 0, panel 3 belongs to part 1, and the raw rows end where RoPE ends.
//
// The panels of part 1 replace the rows. So a warp reads its codes of part 1 to registers, and stores panels of part 1
// when all warps have read theirs. Lanes l, l + 8, l + 16 and l + 24 have row l of a warp's eight, and 16 codes of each
// panel. Loads have no bank conflicts, because the pitch of rows is an odd number of 16-byte units. Stores have none,
// because panels are swizzled.
//
// Rows past the last key of a tile are decoded to zeros. Their scores are masked.
#pragma once

#include <utility>

#include "arch/sm90/convert.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"
#include "tile/gpu/e4m3.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

// The scales of a thread's codes in one part of a tile. Panels are counted in the part. Codes of RoPE are the
// last panel of part 1.
template <class Tile>
struct PartScales {
  using Row = typename Tile::Row;
  static constexpr auto kScale = Row::kFormat.scale;
  static constexpr int kTile = Row::kFormat.tile;  // codes that share a scale
  static constexpr int kColumnsOfPart = 64 * Tile::kPanelsOfPart;
  // fp32: word i is scale i of the part, whose first panel may begin in the middle of it. ue8m0: a byte for each scale.
  uint32_t words[3] = {};

  // piece: 16 codes of a panel.
  template <int kPart>
  HOPWELL_DEVICE void load(const unsigned char* row, int piece) {
    if constexpr (kScale == mla_cache::Scale::fp32) {
      constexpr int kFirst = kPart == 0 ? 0 : kColumnsOfPart / kTile,
                    kEnd = kPart == 0 ? (kColumnsOfPart + kTile - 1) / kTile : 512 / kTile;
      const auto* const at = reinterpret_cast<const uint32_t*>(row + Row::kScalesAt) + kFirst;
      HOPWELL_UNROLL
      for (int i = 0; i < kEnd - kFirst; ++i) words[i] = at[i];
    } else if constexpr (kScale == mla_cache::Scale::ue8m0) {
      static_assert(Tile::kPanelsOfPart == 4);
      constexpr int kBytesOfPart = kColumnsOfPart / kTile;
      const auto* const at = reinterpret_cast<const uint32_t*>(row + Row::kScalesAt + kBytesOfPart * kPart);
      words[0] = at[0];
      if constexpr (kBytesOfPart == 8) words[1] = at[1];
      // Where a panel has two scales, the lower byte of each 16 bits becomes this thread's.
      if constexpr (kTile == 32) words[0] >>= 8 * (piece / 2), words[1] >>= 8 * (piece / 2);
    }
  }
  // A selection, because an index would need local memory.
  [[nodiscard]] HOPWELL_DEVICE uint32_t word(int i) const { return i == 0 ? words[0] : i == 1 ? words[1] : words[2]; }
  template <int kPart>
  [[nodiscard]] HOPWELL_DEVICE uint32_t fp32(int panel) const {
    const int first = kPart == 0 ? 0 : kColumnsOfPart / kTile;
    return word((kColumnsOfPart * kPart + 64 * panel) / kTile - first);
  }
  [[nodiscard]] HOPWELL_DEVICE uint32_t byte(int panel) const {
    return kTile == 32 ? word(panel / 2) >> 16 * (panel % 2) & 0xff : words[0] >> 8 * panel & 0xff;
  }
  template <int kPart>
  [[nodiscard]] HOPWELL_DEVICE float value(int panel) const {
    if constexpr (kScale == mla_cache::Scale::none) return 1;
    if constexpr (kScale == mla_cache::Scale::fp32) return arch::bit_cast<float>(fp32<kPart>(panel));
    return mla_cache::ue8m0(uint8_t(byte(panel)));
  }
  template <int kPart>
  [[nodiscard]] HOPWELL_DEVICE tile::ScaledCodes::Factor factor(int panel) const {
    if constexpr (kScale == mla_cache::Scale::ue8m0) return tile::ScaledCodes::factor_of_ue8m0(byte(panel));
    return tile::ScaledCodes::factor_of(value<kPart>(panel));
  }
};

// Decodes 16 codes to two chunks: even columns at `to`, odd ones at to ^ 16. `decode(word, odd)`: two of four codes.
template <class Decode>
HOPWELL_DEVICE void store_decoded(const arch::Words4& codes, uint32_t to, const Decode& decode) {
  HOPWELL_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    arch::Words4 chunk;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) chunk.w[i] = decode(codes.w[i], odd == 1);
    arch::store_shared_v4(to ^ uint32_t(16 * odd), chunk);
  }
}
// The same in fp32, as the operator defines the values: for NaN codes and for scales that ScaledCodes does not support.
HOPWELL_DEVICE void store_decoded_exactly(const arch::Words4& codes, float scale, uint32_t to) {
  store_decoded(codes, to, [&](uint32_t word, bool odd) {
    const uint32_t pair = odd ? arch::permute_bytes<0x31>(word, 0) : arch::permute_bytes<0x20>(word, 0);
    const uint32_t values = arch::unpack_e4m3(uint16_t(pair));
    return arch::pack_bf16(arch::to_float(arch::fp16{uint16_t(values)}) * scale,
                           arch::to_float(arch::fp16{uint16_t(values >> 16)}) * scale);
  });
}

// A thread's codes of a row in one part of a tile, and their scales.
template <class Tile>
struct PartCodes {
  using Row = typename Tile::Row;
  static constexpr bool kRopeIsCodes = Row::kHasRope && !Row::kRopeIsPlain;
  // Panels of a part that are codes.
  static constexpr HOPWELL_HOST_DEVICE int panels(int part) {
    return part == 0 ? Tile::kPanelsOfPart
                     : 8 - Tile::kPanelsOfPart - (Row::is_plain(7) ? 1 : 0) + (kRopeIsCodes ? 1 : 0);
  }
  // Which of `codes` a panel is in. Part 0 takes 0 and 1 in turns. The first two panels of part 1 go on with these
  // turns; panel i ≥ 2 is in i.
  static constexpr HOPWELL_HOST_DEVICE int at(int part, int panel) {
    return part == 0 ? panel % 2 : panel < 2 ? (panels(0) + panel) % 2 : panel;
  }
  arch::Words4 codes[panels(1)] = {};
  PartScales<Tile> scales;

  static HOPWELL_DEVICE arch::Words4 load(const unsigned char* row, int part, int piece, int panel) {
    return *reinterpret_cast<const arch::Words4*>(row + 64 * (Tile::kPanelsOfPart * part + panel) + 16 * piece);
  }

  // Decodes part kPart. to: address of its first panel. Calls after(i) when panel i has been decoded. Returns whether
  // all scales are exact and no code is NaN. Otherwise the caller decodes again.
  template <int kPart, class After>
  HOPWELL_DEVICE bool decode(uint32_t to, const After& after) {
    bool exact = true;
    HOPWELL_UNROLL
    for (int i = 0; i < panels(kPart); ++i) exact = exact && scales.template factor<kPart>(i).exact;
    tile::ScaledCodes decoder(exact);
    HOPWELL_UNROLL
    for (int i = 0; i < panels(kPart); ++i) {
      const uint32_t factor = scales.template factor<kPart>(i).pair;
      store_decoded(codes[at(kPart, i)], to + uint32_t(i) * tile::kPanelBytes,
                    [&](uint32_t word, bool odd) { return decoder.decode(word, odd, factor); });
      after(i);
    }
    return decoder.is_right();
  }
};

// A dequant thread's row of a tile and its 16 codes of each panel. Computed where it is needed, to save registers.
struct DequantLane {
  uint32_t thread;

  HOPWELL_DEVICE DequantLane() : thread(uint32_t(arch::thread_index())) { arch::pin_registers(thread); }
  template <class Tile>
  [[nodiscard]] HOPWELL_DEVICE int row() const {
    return int((thread - Tile::kFirstDequantThread) / 32 * 8 + thread % 8);
  }
  [[nodiscard]] HOPWELL_DEVICE int piece() const { return int(thread % 32 / 8); }
};

// Decodes this thread's codes of one tile.
template <class Tile>
struct TileDecoder {
  using Row = typename Tile::Row;
  using Codes = PartCodes<Tile>;
  static constexpr bool kPlain = Tile::kPlainPanel >= 0;
  unsigned char (&stage)[Tile::kStageBytes];
  bool& exactly;  // whether to decode in fp32 at once, because a row of this thread needed it
  bool has_row;   // whether the tile has a key for the thread's row
  Codes codes;

  HOPWELL_DEVICE TileDecoder(unsigned char (&of_tile)[Tile::kStageBytes], int keys, bool& needed_fp32)
      : stage(of_tile), exactly(needed_fp32), has_row(DequantLane().row<Tile>() < keys) {}

  // The caller publishes part 0. The codes of the first two panels of part 1 are in registers then.
  HOPWELL_DEVICE void decode_part_0() {
    if (has_row) {
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) codes.codes[i] = load(0, i);
      codes.scales.template load<0>(row(), DequantLane().piece());
    }
    if (has_row && exactly) {
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) codes.codes[Codes::at(1, i)] = load(1, i);
    } else {
      // After panel i, loads panel i + 2. The last two loads are panels 0 and 1 of part 1.
      const bool is_right = codes.template decode<0>(panel(0), [&](int i) {
        constexpr int kPanels = Codes::panels(0);
        if (has_row) codes.codes[i % 2] = i + 2 < kPanels ? load(0, i + 2) : load(1, i + 2 - kPanels);
      });
      if (!has_row || is_right) return;
      exactly = Tile::kRemembersFp32;
    }
    HOPWELL_NO_UNROLL
    for (int i = 0; i < Codes::panels(0); ++i)
      store_decoded_exactly(load(0, i), codes.scales.template value<0>(i), panel(i));
  }
  // wait() returns when every dequant warp has loaded its codes of part 1, because panels of part 1 overwrite the rows.
  template <class Wait>
  HOPWELL_DEVICE void decode_part_1(const Wait& wait) {
    arch::Words4 plain[2] = {};
    if (has_row) {
      codes.scales.template load<1>(row(), DequantLane().piece());
      HOPWELL_UNROLL
      for (int i = 2; i < Codes::panels(1); ++i) codes.codes[i] = load(1, i);
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i)
        if (kPlain)
          plain[i] = *reinterpret_cast<const arch::Words4*>(row() + Row::kFormat.plain_at + 32 * DequantLane().piece() +
                                                            16 * i);
    }
    wait();
    if (kPlain) {
      const EvenOdd columns(plain[0], plain[1]);
      arch::store_shared_v4(panel(Tile::kPlainPanel), columns.even);
      arch::store_shared_v4(panel(Tile::kPlainPanel) ^ 16, columns.odd);
    }
    if (!has_row || !exactly) {
      const bool is_right = codes.template decode<1>(panel(Tile::kPanelsOfPart), [](int) {});
      if (!has_row || is_right) return;
      exactly = Tile::kRemembersFp32;
    }
    if constexpr (Codes::at(1, 0) == 1) std::swap(codes.codes[0], codes.codes[1]);
    HOPWELL_NO_UNROLL
    for (int i = 0; i < Codes::panels(1); ++i) {
      store_decoded_exactly(codes.codes[0], codes.scales.template value<1>(i), panel(Tile::kPanelsOfPart + i));
      HOPWELL_UNROLL
      for (int j = 0; j + 1 < Codes::panels(1); ++j) codes.codes[j] = codes.codes[j + 1];
    }
  }

 private:
  [[nodiscard]] HOPWELL_DEVICE const unsigned char* row() const {
    return stage + Tile::kRawAt + DequantLane().row<Tile>() * Row::kPitch;
  }
  // Where the thread stores its first chunk of a panel.
  [[nodiscard]] HOPWELL_DEVICE uint32_t panel(int number) const {
    return arch::shared_address(stage) + uint32_t(number) * tile::kPanelBytes +
           tile::swizzled(DequantLane().row<Tile>(), 2 * DequantLane().piece());
  }
  [[nodiscard]] HOPWELL_DEVICE arch::Words4 load(int part, int panel_of_part) const {
    return Codes::load(row(), part, DequantLane().piece(), panel_of_part);
  }
};

// Decodes the rows of all tiles.
template <class Tile>
HOPWELL_DEVICE void decode_rows(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  bool exactly = false;
  for_each_tile(p, s, [&](const auto& slot, int keys) {
    TileDecoder<Tile> decoder(panels[slot.stage()], keys, exactly);
    decoder.decode_part_0();
    arch::fence_proxy_async();
    slot.commit(0);
    decoder.decode_part_1([&] {
      arch::mbarrier& read = s.read[slot.stage()];
      tile::arrive_warp(read);
      arch::mbarrier_wait(read, slot.parity());
    });
    arch::fence_proxy_async();
    slot.commit(1);
  });
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
