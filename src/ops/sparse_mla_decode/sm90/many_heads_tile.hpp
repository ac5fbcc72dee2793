// The kernel of sparse_mla_decode for many heads on Hopper: its tile, its shared memory and its barriers. See
// many_heads.hpp.
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "ops/sparse_mla_decode/gpu/work.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/score_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET::many_heads {

enum class Role { low, high, producer };  // of the warpgroups; the third and the fourth are producers

template <class TheRow>
struct Config {
  using Row = TheRow;
  static constexpr int kHeads = 64, kKeys = 64, kStages = 2;  // keys of a tile
  static constexpr int kDqk = Row::kWidth, kPanels = kDqk / 64;
  static constexpr int kThreads = 512, kReaders = 256, kReadingWarps = 4;  // of each of the other roles
  static constexpr int kProducers = kThreads - kReaders, kProducingWarps = kProducers / 32;
  static constexpr int kLowRegisters = 192, kHighRegisters = 160, kProducerRegisters = 80;
  static constexpr int kListed = 128;  // entries that are listed at a time

  // A tile becomes full in two parts: panels 0 to 3, then RoPE and panels 4 to 7. It is released in three groups: the
  // low warpgroup's four panels, the high warpgroup's four panels, and RoPE.
  static constexpr int kPanelsOfGroup = 4, kRopeGroup = 2, kGroups = kPanels > 8 ? 3 : 2;
  static constexpr HOPWELL_HOST_DEVICE int group_of(int panel) { return panel / kPanelsOfGroup; }

  // Rows of bf16 are copied unmodified. Of rows of codes, one panel of bf16 is: RoPE of V3.2, or the last one of V4.
  static constexpr bool kCopiesRows = !Row::kHasCodes;
  static constexpr int kPlainPanel = Row::kRopeIsPlain && Row::kHasRope ? 8 : Row::is_plain(7) ? 7 : -1;
};

template <class Config>
struct Storage {
  alignas(1024) unsigned char q[Config::kPanels * tile::kPanelBytes];
  alignas(1024) unsigned char keys[Config::kStages][Config::kPanels * tile::kPanelBytes];
  alignas(1024) unsigned char p[tile::kPanelBytes];
  const unsigned char* rows[Config::kListed];
  const unsigned char* second[RowAddress<typename Config::Row>::kHasSecond ? Config::kListed : 1];
  float row_scale[Config::kHeads], factor[Config::kHeads];  // of O before a tile; of O at the end
  Entries entries;                                          // of the split
  // The rows of codes of the producers' tile, and their scales.
  const unsigned char* row_of_tile[Config::kCopiesRows ? 1 : Config::kKeys];
  const unsigned char* scales_of_tile[Config::Row::kScalesLieElsewhere ? Config::kKeys : 1];
  alignas(16) int counts[Config::kListed / 32];  // valid entries that each warp has listed
  int valid_keys[Config::kStages];               // of a tile
  bool is_last[Config::kStages], has_keys;       // of the split's tiles; whether the split has a tile
  tile::RingBarriers<Config::kStages, 2, Config::kGroups> key_ring;
  tile::RingBarriers<1> p_ring;
  arch::mbarrier scores_done, factors_full;
};

// Executed by one thread, before a barrier of the CTA.
template <class Config>
HOPWELL_DEVICE void initialise(Storage<Config>& s) {
  constexpr uint32_t kWarps = Config::kReadingWarps;
  s.key_ring.init(Config::kProducingWarps + (Config::kCopiesRows ? Config::kProducers : 0), kWarps);
  s.p_ring.init(kWarps, kWarps);
  tile::init_barriers(kWarps, s.scores_done, s.factors_full);
}

constexpr int kListBarrier = 1, kQueryBarrier = 2;  // numbers of barriers; 0 is the CTA's

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET::many_heads
