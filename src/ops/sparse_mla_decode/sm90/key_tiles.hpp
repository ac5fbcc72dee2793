// The kernels of sparse_mla_decode for Hopper: tiles of 64 keys in shared memory, and the barriers between the warps
// that fill them and the warpgroups that read them.
//
//     panel     64 rows of 64 columns of bf16, as wgmma reads them: eight panels of K[:, :512], which are V too, then
//               RoPE
//     columns   decoded rows: of each 16 columns the even ones come first, then the odd ones, because two codes of a
//               word are decoded by one instruction. Q has the same order, and so have the output columns of P V
//     parts     of a tile: panels 0 to 3, then RoPE and panels 4 to 7; or panels 0 to 2, then the rest. A stage has a
//               barrier `full` and a barrier `empty` for each. The warpgroup that multiplies P and V of part 1 releases
//               part 1. P exists only after S, so S does not read part 1 any more
//     gather    a warpgroup that finds the rows of valid entries and gives them to the dequant warps: gather.hpp
//     dequant   eight warps that write a tile's panels: decoded_rows.hpp for rows of codes, copied_rows.hpp for rows of
//               bf16
//
// The tiles of a CTA's splits follow each other in the ring. A split without keys has one tile of 0 keys.
#pragma once

#include <algorithm>

#include "arch/sm80/bits.hpp"
#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "ops/sparse_mla_decode/gpu/work.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/score_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// kReaders: threads that load Q and have the output, the first of the CTA; `readers` are these. kMoreReaders, which
// only score, follow, then one gather and two dequant warpgroups. kExtraBytes: of a stage behind the panels of V, for
// the softmax's result. They may be written when RoPE and the raw rows have been read.
template <class TheRow, int kTheReaders, int kTheStages = 2, int kThePanelsOfPart = 4, int kExtraBytes = 0,
          int kMoreReaders = 0>
struct KeyTile {
  using Row = TheRow;
  static constexpr int kKeys = 64, kStages = kTheStages;
  static constexpr int kDqk = Row::kWidth, kPanels = kDqk / 64, kPanelsOfPart = kThePanelsOfPart;
  static constexpr int kReaders = kTheReaders, kReleasingWarps = 4;  // of a part
  static constexpr int kGatherThreads = 128, kGatherWarps = kGatherThreads / 32;
  static constexpr int kDequantThreads = 256, kDequantWarps = kDequantThreads / 32;
  static constexpr int kFirstDequantThread = kReaders + kMoreReaders + kGatherThreads,
                       kThreads = kFirstDequantThread + kDequantThreads;

  // Rows of bf16 are copied unmodified. Rows of codes are copied to offset kRawAt of the stage, where part 1 will be,
  // and decoded from there. One panel of them is bf16 and is copied: RoPE of V3.2, panel 7 of V4.
  static constexpr bool kCopiesRows = !Row::kHasCodes;
  // A bulk copy needs a multiple of 16 bytes. V4's 8 bytes of scales come by cp.async.
  static constexpr bool kThreadsCopyScales = !kCopiesRows && Row::kSecondBytes % 16 != 0;
  static constexpr bool kEvenOdd = Row::kHasCodes;  // order of columns in each 16
  // Whether a dequant thread whose row has needed fp32 decodes the next ones in fp32 at once. Usually all rows of a cache
  // need it or none. The kernel for 64 heads has no register for it: other rows would take 3 % longer (H200).
  static constexpr bool kRemembersFp32 = kMoreReaders > 0;
  static constexpr int kPlainPanel = Row::kRopeIsPlain && Row::kHasRope ? 8 : Row::is_plain(7) ? 7 : -1;
  static constexpr int kPanelsBytes = kPanels * int(tile::kPanelBytes);
  static constexpr int kRawBytes = kCopiesRows ? 0 : (kKeys * Row::kPitch + 1023) / 1024 * 1024,
                       kRawAt = std::max(kPanelsOfPart * int(tile::kPanelBytes), kPanelsBytes - kRawBytes);
  static constexpr int kExtraAt = 8 * int(tile::kPanelBytes), kExtraEnd = (kExtraAt + kExtraBytes + 1023) / 1024 * 1024;
  static constexpr int kStageBytes = std::max({kPanelsBytes, kRawAt + kRawBytes, kExtraEnd});
};

// The even and the odd columns of 16 columns of bf16.
struct EvenOdd {
  arch::Words4 even, odd;
  HOPWELL_DEVICE EvenOdd(const arch::Words4& first, const arch::Words4& second) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t* pairs = i < 2 ? &first.w[2 * i] : &second.w[2 * i - 4];
      even.w[i] = arch::permute_bytes<0x5410>(pairs[0], pairs[1]);
      odd.w[i] = arch::permute_bytes<0x7632>(pairs[0], pairs[1]);
    }
  }
};

// The stages of the ring, 1,024-byte aligned. They are no member of KeyTiles, whose size would then be a multiple of
// 1,024 bytes.
template <class Tile>
using KeyPanels = unsigned char[Tile::kStages][Tile::kStageBytes];

// Keys of a tile, and whether it is the last of its split.
struct TileInfo {
  int16_t keys, is_last;
};

// The addresses of a tile's rows; second: of the rows of rope_cache.
template <class Tile>
struct RowAddresses {
  const unsigned char* data[Tile::kKeys];
  const unsigned char* second[RowAddress<typename Tile::Row>::kHasSecond ? Tile::kKeys : 1];
};

struct NoAddresses {};  // of rows of codes, which the gather warpgroup copies

template <class Tile>
struct KeyTiles {
  // Slots of tiles that do not begin with 64 valid entries: each gather warp's rows of two tiles.
  int slots[Tile::kGatherWarps][2 * Tile::kKeys / Tile::kGatherWarps];
  Entries entries;                         // of the present split
  TileInfo gathered_info[Tile::kStages];   // for the dequant warps
  TileInfo info[Tile::kStages];            // for the readers
  arch::mbarrier gathered[Tile::kStages];  // gathered_info and rows of codes, or addresses of rows, are there
  arch::mbarrier read[Tile::kStages];      // rows of codes: the codes of part 1 have been read
  tile::RingBarriers<Tile::kStages, 2, 2> ring;
  std::conditional_t<Tile::kCopiesRows, RowAddresses<Tile>, NoAddresses> rows[Tile::kStages];

  // Executed by one thread, before a barrier of the CTA.
  HOPWELL_DEVICE void initialise() {
    ring.init(Tile::kDequantWarps + (Tile::kCopiesRows ? Tile::kDequantThreads : 0), Tile::kReleasingWarps);
    // Threads of the gather warpgroup arrive after their own copies.
    tile::init_barriers(Tile::kGatherWarps + (Tile::kThreadsCopyScales ? Tile::kGatherThreads : 0), gathered);
    if constexpr (!Tile::kCopiesRows) tile::init_barriers(Tile::kDequantWarps, read);
    arch::fence_mbarrier_init();  // kept: copies complete on barriers that another thread has initialised
  }
};

// Calls make(slot, keys) for each tile of the CTA's splits, when its stage is empty and its rows are there. Executed by
// the dequant warps.
template <class Tile, class Make>
HOPWELL_DEVICE void for_each_tile(const SplitParams& p, KeyTiles<Tile>& s, const Make& make) {
  int splits = Work(p).splits;
  HOPWELL_NO_UNROLL
  for (int tile = 0; splits > 0; ++tile) {
    const tile::RingSlot slot(s.ring, tile);
    const int stage = slot.stage();
    arch::mbarrier_wait(s.gathered[stage], slot.parity());
    const TileInfo info = s.gathered_info[stage];
    slot.wait_empty(0);  // kept: few heads release part 0 before part 1, for which the gather warpgroup has waited
    if (arch::thread_index() == Tile::kFirstDequantThread) s.info[stage] = info;
    splits -= info.is_last;
    make(slot, int(info.keys));
  }
}

// Named barriers: of the gather warpgroup; of the readers. Barrier 0 is the CTA's.
constexpr int kGatherBarrier = 1, kReaderBarrier = 2;

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
