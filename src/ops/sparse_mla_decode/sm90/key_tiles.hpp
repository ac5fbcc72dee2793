// The kernels of sparse_mla_decode for Hopper: tiles of 64 keys in shared memory, as producers fill them and other
// warpgroups read them.
//
//     panel   64 rows of 64 columns of bf16, as wgmma reads them: eight panels of K[:, :512], which are V too, then RoPE
//     full    in two parts: panels 0 to 3, then RoPE and panels 4 to 7
//     empty   in two groups: panels 0 to 3, and panels 4 to 7. The reader of S releases the first after it has read RoPE
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
  // The CTA's last warpgroups. Each fills whole tiles: with two, the tiles of a list in turns.
  static constexpr int kProducers = kTheProducers, kProducingGroups = kProducers / 128, kFillingWarps = 4;
  static constexpr int kReadingWarps = 4;  // that release a group of panels
  static constexpr int kListed = 128;      // entries that are listed at a time: two tiles at most
  static_assert(kListed == 2 * kKeys && kProducingGroups <= 2);

  static constexpr int kPanelsOfGroup = 4;

  // Rows of bf16 are copied unmodified. So is one panel of rows of codes: RoPE of V3.2, or V4's last panel.
  static constexpr bool kCopiesRows = !Row::kHasCodes;
  // While codes of a tile are decoded, the rows of the next tile are listed.
  static constexpr int kLists = kCopiesRows ? 1 : 2;
  static constexpr int kPlainPanel = Row::kRopeIsPlain && Row::kHasRope ? 8 : Row::is_plain(7) ? 7 : -1;
};

// The panels of a ring's stages, 1,024-byte aligned. They are no member of KeyTiles, whose size would then be a multiple of
// 1,024 bytes.
template <class Tile>
using KeyPanels = unsigned char[Tile::kStages][Tile::kPanels * tile::kPanelBytes];

template <class Tile>
struct KeyTiles {
  // Lists, in turns. A warpgroup writes the rows of its own tiles.
  const unsigned char* rows[Tile::kLists * Tile::kListed];
  const unsigned char* second[RowAddress<typename Tile::Row>::kHasSecond ? Tile::kLists * Tile::kListed : 1];
  Entries entries[Tile::kProducingGroups];               // of the split: a copy for each warpgroup
  alignas(16) int counts[Tile::kProducingGroups][2][4];  // valid entries that each of its warps has found
  int tiles_before[Tile::kProducingGroups];              // tiles of earlier lists
  int valid_keys[Tile::kStages];                         // of a tile
  bool is_last[Tile::kStages], has_keys;                 // of the split's tiles; whether the split has a tile
  tile::RingBarriers<Tile::kStages, 2, 2> ring;

  // Executed by one thread, before a barrier of the CTA.
  HOPWELL_DEVICE void initialise() {
    ring.init(Tile::kFillingWarps + (Tile::kCopiesRows ? 128 : 0), Tile::kReadingWarps);
    if constexpr (Tile::kCopiesRows)
      arch::fence_mbarrier_init();  // kept: a producer's copies may complete on a barrier before thread 0 copies Q
  }
};

// Of the producing warpgroups, one each; of the other warpgroups. Barrier 0 is the CTA's.
constexpr int kListBarrier = 1, kReaderBarrier = 3;

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
