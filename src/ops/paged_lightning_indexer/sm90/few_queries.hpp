// paged_lightning_indexer for Hopper: index scores of sequences that have few queries, as in decode. e4m3, with relu.
//
// Tile      a CTA has a run of items: 128 keys of a sequence, and all of its queries in this pass, at most four tiles
//           of 64 rows of q
// Roles     warpgroups 0, 1, 2   score      every third item: keys in registers as operand A of wgmma, and sums over
//                                           the heads, as in lightning_indexer/sm90/score.hpp, with the same bits
//           warps 12, 13, 14     keys       producer: rows and scales of the keys of every third item
//           warp 15              sequences  producer: q, weights and parameters of each sequence
// Timeline  keys       item 0 │ item 1 │ … as stages become free; pages of 32 boxes are looked up at a time
//           score 0    wait ▓ item 0 ░ store │ wait ▓ item 3 ░ …          ▓: products; ░: relu, weights, sums
//           score 1       wait ▓ item 1 ░ store │ …
// Budget    shared: keys 9 × 16 KB + scales 9 × 512 B, sequences 2 × (32 KB of q + 1.3 KB of
//           weights and ~300 B): 216 KB
// Bound     memory: an item is 16.9 KB, 850 clocks of DRAM on an H200; products of a tile of q take 256 clocks
#pragma once

#include <bit>

#include "ops/paged_lightning_indexer/sm90/params.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {
namespace few_queries {

struct Config {
  using T = arch::e4m3;
  static constexpr int kGroups = 3, kKeyWarps = 3, kHalves = 2, kRows = 64, kKeys = kHalves * kRows;
  static constexpr int kStages = 9, kMostTiles = 4, kSequences = 2;
  static constexpr int kThreads = 128 * (kGroups + 1), kScoreRegisters = 152, kOtherRegisters = 56;
  static constexpr uint32_t kTileBytes = tile::kPanelBytes;  // of 64 rows of q or of keys
};

// The keys of an item.
struct Item {
  int first_key, sequence;  // sequence: of the CTA, counted from 0
  uint32_t absent;          // bit i: rows 8 i to 8 i + 7 have no page, and no scales
};

// A sequence of the CTA. Its tiles of q are in Storage.
struct Sequence {
  indexer::HeadWeights weights[Config::kMostTiles];
  SequenceTask task;
};

struct Storage {
  alignas(1024) unsigned char keys[Config::kStages][Config::kHalves][Config::kTileBytes];
  alignas(1024) unsigned char q[Config::kSequences][Config::kMostTiles][Config::kTileBytes];
  alignas(16) float scales[Config::kStages][Config::kKeys];
  Item items[Config::kStages];
  Sequence sequences[Config::kSequences];
  WorkStorage<Config::kThreads / 32> work;
  tile::RingBarriers<Config::kStages> ring;
  tile::RingBarriers<Config::kSequences> sequence_ring;
};

#if HOPWELL_HAS_SM90A

// Calls run(work, items) for each sequence of the CTA: its first item, and how many follow each other.
template <class Run>
HOPWELL_DEVICE void for_each_sequence(const SequenceTask& task, const Storage& s, const Run& run) {
  WorkItem work = s.work.item;
  HOPWELL_NO_UNROLL
  while (work.left > 0) {
    const int of_sequence = tile::ceil_div(work.keys, Config::kKeys) - work.block,
              items = of_sequence < work.left ? of_sequence : work.left;
    run(work, items);
    work.left -= items - 1, work.block += items - 1;
    advance<Config::kKeys>(task, work);
  }
}

// ---- producers ------------------------------------------------------------------------------------------------------

HOPWELL_DEVICE void produce_keys(const Sm90Params<Config::T>& p, Storage& s, int warp) {
  const int box_rows = p.box_rows, boxes = Config::kKeys / box_rows;  // of an item
  const int at_once = 32 / boxes;                                     // items whose boxes are looked up together
  int n = 0, sequence = 0;
  for_each_sequence(p.task, s, [&](const WorkItem& work, int items) {
    PagedKeys of = p.task;
    of.sequence = p.task.first_sequence + work.sequence;
    const int first = work.block * Config::kKeys;
    // Lane i has box i of the next items.
    const auto look_up = [&](int item) {
      return box_of(of, first + item * Config::kKeys + arch::lane_index() * box_rows, work.keys);
    };
    HOPWELL_NO_UNROLL
    for (int done = 0; done < items; done += at_once) {
      const Box own = look_up(done);  // while the copies of earlier items are on their way
      const uint32_t exist = arch::ballot(own.page >= 0);
      const int count = items - done < at_once ? items - done : at_once;
      HOPWELL_NO_UNROLL
      for (int i = 0; i < count; ++i, ++n) {
        if (n % Config::kKeyWarps != warp) continue;
        const tile::RingSlot<Config::kStages> slot(s.ring, n);
        const int stage = slot.stage();
        const uint32_t own_exist = exist >> boxes * i & ((1U << boxes) - 1);
        if (arch::lane_index() == 0) {
          slot.wait_empty();
          uint32_t absent = 0;
          for (int box = 0; box < boxes; ++box)
            if (!(own_exist >> box & 1)) absent |= ((1U << box_rows / 8) - 1) << box * box_rows / 8;
          s.items[stage] = {first + (done + i) * Config::kKeys, sequence, absent};
          const uint32_t scale_bytes = uint32_t(std::popcount(own_exist) * box_rows) * uint32_t(sizeof(float));
          arch::mbarrier_arrive_expect_tx(slot.full(), Config::kHalves * Config::kTileBytes + scale_bytes);
        }
        HOPWELL_NO_UNROLL
        for (int box = 0; box < boxes; ++box) {
          const Box at{arch::shuffle(own.page, i * boxes + box), arch::shuffle(own.row, i * boxes + box)};
          if (arch::lane_index() != 0) continue;
          copy_rows(p, arch::shared_address(s.keys[stage]) + uint32_t(box * box_rows) * 128, 0, at, slot.full());
          if (at.page >= 0) copy_scales(p, s.scales[stage] + box * box_rows, at, slot.full());
        }
      }
      // The selection. Before the first copies, the launch would delay them.
      if (warp == 0 && sequence == 0 && done == 0) tile::launch_dependents();
    }
    ++sequence;
  });
}

HOPWELL_DEVICE void produce_sequences(const Sm90Params<Config::T>& p, Storage& s) {
  int n = 0;
  for_each_sequence(p.task, s, [&](const WorkItem& work, int) {
    const tile::RingSlot<Config::kSequences> slot(s.sequence_ring, n++);
    Sequence& of = s.sequences[slot.stage()];
    slot.wait_empty();
    if (arch::lane_index() == 0) set_item<Config::T>(of.task, p.task, work);
    arch::syncwarp();
    const SequenceTask& task = of.task;
    if (arch::lane_index() == 0) arch::mbarrier_expect_tx(slot.full(), uint32_t(task.tiles) * Config::kTileBytes);
    indexer::TileCursor at(task, 0);
    HOPWELL_NO_UNROLL
    for (; at.tile < task.tiles; at.advance(task)) {
      if (arch::lane_index() == 0)
        arch::tma_load<4>(arch::shared_address(s.q[slot.stage()][at.tile]), p.q,
                          {0, at.head_tile * tile::kHeadTile, int(task.first_query) + at.query, int(task.sequence)},
                          slot.full());
      const auto loaded = indexer::load_tile_weights<false, Config::T>(task, at);
      of.weights[at.tile].store(uint32_t(arch::lane_index()), loaded.weights);
    }
    slot.commit();
  });
}

// ---- scores ---------------------------------------------------------------------------------------------------------

HOPWELL_DEVICE indexer::StoredKey<Config::T> stored_key(const Storage& s, int stage, int keys) {
  const int row = indexer::StoredKey<Config::T>::row(), key = s.items[stage].first_key + row;
  const bool exists = (s.items[stage].absent >> row / 8 & 1) == 0;
  return {key, key < keys, exists, exists ? s.scales[stage][row] : 1};
}

// kHeads: see query_tiles in lightning_indexer/sm90/score.hpp.
template <int kHeads>
HOPWELL_DEVICE void score_items(Storage& s, int group) {
  using T = Config::T;
  const tile::FragmentLane lane;
  const int items = s.work.item.left;
  int held = -1;  // sequence of the CTA that this warpgroup reads
  HOPWELL_NO_UNROLL
  for (int n = group; n < items; n += Config::kGroups) {
    const tile::RingSlot<Config::kStages> slot(s.ring, n);
    slot.wait_full();
    const int stage = slot.stage(), sequence = s.items[stage].sequence;
    HOPWELL_NO_UNROLL
    while (held < sequence) {
      if (held >= 0) tile::RingSlot<Config::kSequences>(s.sequence_ring, held).release();
      tile::RingSlot<Config::kSequences>(s.sequence_ring, ++held).wait_full();
    }
    const Sequence& of = s.sequences[sequence % Config::kSequences];
    indexer::ScoreKeys<T> keys[Config::kHalves];
    HOPWELL_UNROLL
    for (int i = 0; i < Config::kHalves; ++i)
      tile::load_fragments(lane, arch::shared_address(s.keys[stage][i]), keys[i]);
    const indexer::StoredKey<T> stored = stored_key(s, stage, of.task.s_kv);
    slot.release();
    indexer::Sums sums[Config::kHalves] = {};
    HOPWELL_NO_UNROLL
    for (indexer::TileCursor at(of.task, 0); at.tile < of.task.tiles;
         at.advance(indexer::query_tiles<kHeads>(of.task))) {
      const uint32_t rows = arch::shared_address(s.q[sequence % Config::kSequences][at.tile]);
      float d[Config::kHalves][32];
      indexer::start_products<T>(d[0], keys[0], rows);
      indexer::start_products<T>(d[1], keys[1], rows);
      arch::wgmma_wait<0>(d[0], d[1]);
      indexer::add_heads<kHeads, true>(of.task, d, of.weights[at.tile], at, stored, sums);
    }
  }
  // The producer may wait for this stage although this warpgroup has no item of a later sequence.
  if (held >= 0) tile::RingSlot<Config::kSequences>(s.sequence_ring, held).release();
}

#endif

}  // namespace few_queries

template <int kHeads>
__global__ void __launch_bounds__(few_queries::Config::kThreads, 1)
    paged_lightning_indexer_score_few_sm90(const __grid_constant__ Sm90Params<few_queries::Config::T> p) {
#if HOPWELL_HAS_SM90A
  using few_queries::Config;
  auto& s = arch::dynamic_smem<few_queries::Storage>();
  if (arch::thread_index() == 32) {
    arch::prefetch_tensor_map(p.k), arch::prefetch_tensor_map(p.q);
    s.ring.init(1, 4);
    s.sequence_ring.init(1, 4 * Config::kGroups);
    arch::fence_mbarrier_init();
  }
  tile::wait_for_prior_kernels();
  if (first_item<Config::kKeys>(p.task, s.work).left == 0) return;
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < Config::kGroups) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    few_queries::score_items<kHeads>(s, group);
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters>();
    const int producer = warp - 4 * Config::kGroups;
    if (producer < Config::kKeyWarps)
      few_queries::produce_keys(p, s, producer);
    else
      few_queries::produce_sequences(p, s);
  }
#endif
}

}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
