// The kernels of sparse_mla_decode for Hopper: tiles of 64 keys in shared memory, as producers fill them and other
// warpgroups read them.
//
//     panel   64 rows of 64 columns of bf16, as wgmma reads them: eight panels of K[:, :512], which are V too, then RoPE
//     full    in two parts: panels 0 to 3, then RoPE and panels 4 to 7
//     empty   in three groups: panels 0 to 3, panels 4 to 7, and RoPE
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "ops/sparse_mla_decode/gpu/work.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/score_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template <class TheRow, int kTheStages, int kTheProducers>
struct KeyTile {
  using Row = TheRow;
  static constexpr int kKeys = 64, kStages = kTheStages;
  static constexpr int kDqk = Row::kWidth, kPanels = kDqk / 64;
  static constexpr int kProducers = kTheProducers, kProducingWarps = kProducers / 32;  // the CTA's last warps
  static constexpr int kReadingWarps = 4;                                              // that release a group
  static constexpr int kListed = 128;  // entries that are listed at a time

  static constexpr int kPanelsOfGroup = 4, kRopeGroup = 2, kGroups = kPanels > 8 ? 3 : 2;
  static constexpr HOPWELL_HOST_DEVICE int group_of(int panel) { return panel / kPanelsOfGroup; }

  // Rows of bf16 are copied unmodified. So is one panel of rows of codes: RoPE of V3.2, or V4's last panel.
  static constexpr bool kCopiesRows = !Row::kHasCodes;
  static constexpr int kPlainPanel = Row::kRopeIsPlain && Row::kHasRope ? 8 : Row::is_plain(7) ? 7 : -1;
};

// The panels of a ring's stages, 1,024-byte aligned. They are no member of KeyTiles, whose size would then be a multiple of
// 1,024 bytes.
template <class Tile>
using KeyPanels = unsigned char[Tile::kStages][Tile::kPanels * tile::kPanelBytes];

template <class Tile>
struct KeyTiles {
  const unsigned char* rows[Tile::kListed];
  const unsigned char* second[RowAddress<typename Tile::Row>::kHasSecond ? Tile::kListed : 1];
  Entries entries;  // of the split
  // The rows of codes of the producers' tile, and their scales.
  const unsigned char* row_of_tile[Tile::kCopiesRows ? 1 : Tile::kKeys];
  const unsigned char* scales_of_tile[Tile::Row::kScalesLieElsewhere ? Tile::kKeys : 1];
  alignas(16) int counts[Tile::kListed / 32];  // valid entries that each warp has listed
  int valid_keys[Tile::kStages];               // of a tile
  bool is_last[Tile::kStages], has_keys;       // of the split's tiles; whether the split has a tile
  tile::RingBarriers<Tile::kStages, 2, Tile::kGroups> ring;

  // Executed by one thread, before a barrier of the CTA.
  HOPWELL_DEVICE void initialise() {
    ring.init(Tile::kProducingWarps + (Tile::kCopiesRows ? Tile::kProducers : 0), Tile::kReadingWarps);
  }
};

constexpr int kListBarrier = 1, kReaderBarrier = 2;  // of the producers, of the other warpgroups; 0 is the CTA's

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
