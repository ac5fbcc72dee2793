// The kernels of sparse_mla_decode for Hopper: tiles of 64 keys in shared memory, and the barriers between the warps
// that fill them and the warpgroups that read them.
//
//     panel     64 rows of 64 columns of bf16, as wgmma reads them: eight panels of K[:, :512], which are V too, then
//               RoPE
//     parts     of a tile: panels 0 to 3, then RoPE and panels 4 to 7. A stage has a barrier `full` and a barrier
//               `empty` for each. A warpgroup that has read P, so after S, releases part 1
//     feeder    a warpgroup that finds the rows of valid entries and gives them to the fillers: feeder.hpp
//     fillers   write a tile's panels: decoded_rows.hpp for rows of codes, copied_rows.hpp for rows of bf16
//
// The tiles of a CTA's splits follow each other in the ring. A split without keys has one tile of 0 keys.
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "ops/sparse_mla_decode/gpu/work.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/score_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// kReaders: threads of the CTA that read tiles. They are its first. A feeding warpgroup and the fillers follow.
template <class TheRow, int kTheReaders>
struct KeyTile {
  using Row = TheRow;
  static constexpr int kKeys = 64, kStages = 2;
  static constexpr int kDqk = Row::kWidth, kPanels = kDqk / 64, kPanelsOfPart = 4;
  static constexpr int kReaders = kTheReaders, kReadingWarps = 4;  // warps that release a part
  static constexpr int kFeeders = 128, kFeedingWarps = kFeeders / 32;
  static constexpr int kFillers = 256, kFillingWarps = kFillers / 32, kFirstFiller = kReaders + kFeeders;
  static constexpr int kThreads = kFirstFiller + kFillers;

  // Rows of bf16 are copied unmodified. Rows of codes are copied to the stage first, behind the panels of part 0, and
  // decoded from there. One panel of them is bf16 and only moves: RoPE of V3.2, or V4's last panel.
  static constexpr bool kCopiesRows = !Row::kHasCodes;
  static constexpr int kPlainPanel = Row::kRopeIsPlain && Row::kHasRope ? 8 : Row::is_plain(7) ? 7 : -1;
  static constexpr int kPanelsBytes = kPanels * int(tile::kPanelBytes), kRawAt = kPanelsOfPart * int(tile::kPanelBytes);
  static constexpr int kRawBytes = kCopiesRows ? 0 : (kRawAt + kKeys * Row::kPitch + 1023) / 1024 * 1024;
  static constexpr int kStageBytes = kRawBytes > kPanelsBytes ? kRawBytes : kPanelsBytes;
};

// The stages of the ring, 1,024-byte aligned. They are no member of KeyTiles, whose size would then be a multiple of
// 1,024 bytes.
template <class Tile>
using KeyPanels = unsigned char[Tile::kStages][Tile::kStageBytes];

// Keys of a tile, and whether it is the last of its split.
struct TileInfo {
  int16_t keys, is_last;
};

// The addresses of a tile's rows, and of what lies elsewhere.
template <class Tile>
struct RowAddresses {
  const unsigned char* data[Tile::kKeys];
  const unsigned char* second[RowAddress<typename Tile::Row>::kHasSecond ? Tile::kKeys : 1];
};

struct NoAddresses {};  // of rows of codes, which the feeder copies

template <class Tile>
struct KeyTiles {
  // Slots of valid entries, where a tile is not 64 entries in a row: for each feeding warp a ring of its rows.
  int slots[Tile::kFeedingWarps][2 * Tile::kKeys / Tile::kFeedingWarps];
  Entries entries;                     // of the split that is fed
  TileInfo fed_info[Tile::kStages];    // for the fillers
  TileInfo info[Tile::kStages];        // for the readers
  arch::mbarrier fed[Tile::kStages];   // fed_info, and rows of codes or the addresses of rows of bf16
  arch::mbarrier read[Tile::kStages];  // rows of codes: the fillers have read them
  tile::RingBarriers<Tile::kStages, 2, 2> ring;
  std::conditional_t<Tile::kCopiesRows, RowAddresses<Tile>, NoAddresses> rows[Tile::kStages];

  // Executed by one thread, before a barrier of the CTA.
  HOPWELL_DEVICE void initialise() {
    // Bytes of a second address that no bulk copy can have are copied by all feeders.
    constexpr bool kFeedersCopy = !Tile::kCopiesRows && Tile::Row::kSecondBytes % 16 != 0;
    ring.init(Tile::kFillingWarps + (Tile::kCopiesRows ? Tile::kFillers : 0), Tile::kReadingWarps);
    tile::init_barriers(Tile::kFeedingWarps + (kFeedersCopy ? Tile::kFeeders : 0), fed);
    if constexpr (!Tile::kCopiesRows) tile::init_barriers(Tile::kFillingWarps, read);
    arch::fence_mbarrier_init();  // kept: copies complete on barriers that another thread has initialised
  }
};

// Waits until part 0 of a stage is empty and tells the readers about its next tile. Executed by the fillers.
template <class Tile, class Slot>
HOPWELL_DEVICE void begin_tile(KeyTiles<Tile>& s, const Slot& slot, TileInfo info) {
  slot.wait_empty(0);  // kept: few heads release part 0 before part 1, for which the feeder has waited
  if (arch::thread_index() == Tile::kFirstFiller) s.info[slot.stage()] = info;
}

// Named barriers: of the feeders; of the readers. Barrier 0 is the CTA's.
constexpr int kFeederBarrier = 1, kReaderBarrier = 2;

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
