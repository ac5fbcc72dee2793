// attention_distribution by mma.sync, for any NVIDIA GPU from Ampere on.
//
//     attn[s,i] = Σ_h exp2(score[s,h,i] · scale_log2 − lse[s,h] · log2 e)          0 if entry i is not valid
//
// Tile      one query, 64 keys, 128 heads, whose rows stay in registers as operand A of mma, 16 heads per warp. With at
//           most 64, 32 or 16 heads, two, four or eight warps have the same heads and split the keys. More heads: 128
//           at a time.
// Roles     eight warps: all copy and multiply; warp 0 adds the sums of the warps' heads, writes and normalises.
//           CTAs are persistent; plan.hpp describes their work tiles.
// Timeline  copies  slab 5 ▓▓▓▓▓▓▓ 6 ▓▓▓▓▓▓▓ 7 ▓▓▓▓▓▓▓ …            slabs of 128 columns of a tile's keys
//           warps   0 │ 1 │ 2 │ 3 │ 4 │ exp2, Σ │ 0 (warp 0: a0) …   five for d_qk 576, one barrier each
// Budget    shared: 5 × 64 × 256 rows + 2 × 8 × 64 × 4 sums = 86,016 B (of 101,376 on the smallest GPU)
//           registers: 144 for Q + 32 scores + 16 for keys + ~50, of 255
// Demands   a tile of 64 keys, 128 heads, d_qk 576, in clocks of an A100's SM: 4,608 of tensor cores, 4,608 of shared
//           memory (each warp reads all keys), 512 of exp2; 73,728 B gathered.
// Bound     tensor cores and shared memory with 128 heads, the gather with few
// Order     No order of additions depends on timing: same inputs, same bits.
#pragma once

#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "ops/attention_distribution/row.hpp"
#include "tile/gpu/mma_tile.hpp"
#include "tile/gpu/row_major.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

using tile::kBlockColumns, tile::kColumnBlocks;

struct Config {
  static constexpr int kStages = 5, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kSlabColumns = kColumnBlocks * kBlockColumns, kMaxColumns = 576;
};
using Rows = tile::MmaRows<1>;

struct SharedStorage {
  tile::MmaTile<1, kTileKeys> keys[Config::kStages];  // one slab each
  float sums[2][Config::kWarps][kTileKeys];           // of even and odd tiles: over a warp's 16 heads
};
static_assert(sizeof(SharedStorage) <= 99 * 1024);

// kColumns = 576 is for d_qk above 512 and multiplies zeros up to 576, so that no code depends on d_qk and takes
// registers. kColumns = 512 is for smaller d_qk.
template <int kColumns>
constexpr int kSlabs = (kColumns + Config::kSlabColumns - 1) / Config::kSlabColumns;
template <int kColumns>
HOPWELL_DEVICE int column_blocks(const Params& p) {
  return (kColumns == Config::kMaxColumns ? kColumns : p.d_qk + kBlockColumns - 1) / kBlockColumns;
}

// Copies the slabs of a row's tiles, one after another. A thread copies chunks c and c + 8 of keys k and k + 32.
template <int kColumns>
struct KeyLoader {
  Entries entries;
  int tiles, tile = 0, slab = 0;  // of the next slab
  int keys[2], next_keys[2];      // indices of the entries of its tile and of the next tile

  HOPWELL_DEVICE explicit KeyLoader(const Entries& entries) : entries(entries), tiles(entries.tiles(kTileKeys)) {
    load_keys(0, keys);
    load_keys(1, next_keys);
  }

  HOPWELL_DEVICE void copy(const Params& p, SharedStorage& s, int stage) {
    if (tile < tiles) {
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) copy_key(p, s.keys[stage].address(0), first_row() + 32 * i, keys[i]);
      advance(p);
    }
    arch::cp_async_commit();
  }

 private:
  HOPWELL_DEVICE static int first_row() { return arch::thread_index() / 8; }
  // One tile ahead, because a load takes as long as a tile.
  HOPWELL_DEVICE void load_keys(int of_tile, int (&to)[2]) const {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) to[i] = entries.at(of_tile * kTileKeys + first_row() + 32 * i);
  }
  // Zeros if the key is not valid, and from column d_qk on.
  HOPWELL_DEVICE void copy_key(const Params& p, uint32_t to, int row, int key) const {
    const bool counts = entries.counts(key);
    const bf16* from = p.kv + (counts ? key * p.kv_stride_s : 0);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int chunk = arch::thread_index() % 8 + 8 * i, column = slab * Config::kSlabColumns + 8 * chunk;
      const bool wanted = counts && column < p.d_qk;
      if (column / kBlockColumns < column_blocks<kColumns>(p))
        arch::cp_async(to + tile::chunk_offset(uint32_t(row), uint32_t(chunk)), from + (wanted ? column : 0),
                       wanted ? 16 : 0);
    }
  }
  HOPWELL_DEVICE void advance(const Params& p) {
    if (++slab * kColumnBlocks < column_blocks<kColumns>(p)) return;
    slab = 0, ++tile;
    keys[0] = next_keys[0], keys[1] = next_keys[1];
    load_keys(tile + 1, next_keys);
  }
};

// A warp's 16 heads: this lane's chunks of two of them, the rows of its fragments, and their lse in units of log 2.
// Padding heads are zeros, with lse +inf.
template <int kColumns>
struct Heads {
  Rows q[kSlabs<kColumns>][1];
  float lse[2];

  HOPWELL_DEVICE void load(const Params& p, int query, int first) {
    const tile::RowMajor<bf16> rows{p.q + query * p.q_stride_s, p.q_stride_h, p.d_qk, true};
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int head = first + 8 * half + tile::fragment_row();
      const bool exists = head < p.h_q;
      lse[half] = lse_of(p, query, head);
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns / kBlockColumns; ++i) {
        const int column = kBlockColumns * i + 8 * tile::quad_lane();
        q[i / kColumnBlocks][0].chunk[i % kColumnBlocks][half] =
            exists ? rows.chunk(rows.data + head * rows.stride, column) : tile::Chunk<1>{};
      }
    }
  }
};

// Scores of a warp's 16 heads and 8 kN keys, in groups of up to 32 keys, because a group's rows take registers during
// the products.
template <int kN>
struct Scores {
  static constexpr int kUnroll = kN < 4 ? kN : 4;
  float of_group[kN / kUnroll][kUnroll][1][4] = {};

  HOPWELL_DEVICE float at(int n, int i) const { return of_group[n / kUnroll][n % kUnroll][0][i]; }
  // Adds the products of a slab's column blocks. `blocks` may exceed the number of blocks.
  HOPWELL_DEVICE void add_slab(const Rows (&q)[1], const tile::MmaTile<1, kTileKeys>& keys, int first_key, int blocks) {
    HOPWELL_UNROLL
    for (int i = 0; i < kN / kUnroll; ++i) {
      const int first = first_key + 8 * kUnroll * i;
      if (blocks >= kColumnBlocks)
        tile::multiply<true>(of_group[i], q, keys, first, kColumnBlocks);
      else
        tile::multiply<false>(of_group[i], q, keys, first, blocks);
    }
  }
};

// The sums, of kCount, that a lane has at the end: consecutive sums from `first` on. If several lanes have the same
// sum, one lane writes.
struct SharedSums {
  int first = 0;
  bool writes = true;

  // Exchanges with the lane at distance kDistance.
  template <int kDistance, int kCount>
  HOPWELL_DEVICE void share(float (&c)[kCount]) {
    constexpr int kWidth = kCount * kDistance / 32;
    const bool upper = arch::lane_index() & kDistance;
    if constexpr (kWidth > 0) {
      tile::share_sums(c, kWidth, kDistance, upper);
      first += upper ? kWidth : 0;
    } else {
      c[0] += arch::shuffle_xor(c[0], kDistance);
      writes = writes && !upper;
    }
  }
};

// exp2 of a warp's [16 heads][8 kN keys], summed over the heads, across lanes at distances 16, 8 and 4. Heads with lse
// +inf give 0, because the scores of padding heads are NaN if a key has infinities.
template <int kN>
HOPWELL_DEVICE void sum_heads(const Params& p, const Scores<kN>& scores, const float (&lse)[2], float* sums) {
  float c[2 * kN];
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * kN; ++i) {
    float e[2];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half)
      e[half] = arch::exp2_approx(scores.at(i / 2, i % 2 + 2 * half) * p.scale_log2 - lse[half]);
    c[i] = (lse[0] == INFINITY ? 0 : e[0]) + (lse[1] == INFINITY ? 0 : e[1]);
  }
  SharedSums shared;
  shared.share<16>(c);
  shared.share<8>(c);
  shared.share<4>(c);
  HOPWELL_UNROLL
  for (int i = 0; i < (kN < 8 ? 1 : 2); ++i)
    if (shared.writes) sums[(shared.first + i) / 2 * 8 + tile::fragment_column() + (shared.first + i) % 2] = c[i];
}

// Executed by warp 0: adds the sums of the warps' heads in a fixed order to the sums of earlier heads, and writes.
struct RowWriter {
  Entries entries;
  float total = 0;  // sum of this lane's results after the last heads

  HOPWELL_DEVICE RowWriter(const Params& p, const WorkTile& work) : entries(entries_of(p, work)) {}
  template <int kHeadWarps>
  HOPWELL_DEVICE void write(const Params& p, const WorkTile& work, const float (&sums)[Config::kWarps][kTileKeys],
                            int tile, bool first_heads) {
    float* const row = sums_of(p, work, entries);
    if (tile == 0) total = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int key = 32 * i + arch::lane_index(), entry = tile * kTileKeys + key;
      if (entry >= entries.length) continue;
      const bool counts = entries.key(entry) >= 0;
      float sum = counts && !first_heads ? row[entry] : 0;
      HOPWELL_UNROLL
      for (int warp = 0; warp < kHeadWarps; ++warp) sum += counts ? sums[warp][key] : 0;
      row[entry] = sum;
      total += sum;
    }
  }
};

// Processes all entries of a work tile, and 16 heads for each of kHeadWarps warps.
template <int kColumns, int kHeadWarps>
HOPWELL_DEVICE void add_heads(const Params& p, SharedStorage& s, const WorkTile& work, int first_head,
                              RowWriter& writer) {
  constexpr int kKeysOfWarp = kTileKeys * kHeadWarps / Config::kWarps;
  const int warp = arch::warp_index(), head_warp = warp % kHeadWarps, first_key = warp / kHeadWarps * kKeysOfWarp;
  KeyLoader<kColumns> loader(writer.entries);
  for (int stage = 0; stage < Config::kStages - 1; ++stage) loader.copy(p, s, stage);
  Heads<kColumns> heads;
  heads.load(p, work.query, first_head + 16 * head_warp);
  int stage = 0;
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < loader.tiles; ++tile) {
    Scores<kKeysOfWarp / 8> scores;
    HOPWELL_UNROLL
    for (int slab = 0; slab < kSlabs<kColumns>; ++slab) {
      const int blocks = column_blocks<kColumns>(p) - slab * kColumnBlocks;
      if (blocks <= 0) break;
      arch::cp_async_wait<Config::kStages - 2>();
      arch::syncthreads();
      loader.copy(p, s, (stage + Config::kStages - 1) % Config::kStages);
      if (slab == 0 && tile > 0 && warp == 0)
        writer.write<kHeadWarps>(p, work, s.sums[(tile - 1) % 2], tile - 1, first_head == 0);
      scores.add_slab(heads.q[slab], s.keys[stage], first_key, blocks);
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
    sum_heads(p, scores, heads.lse, s.sums[tile % 2][head_warp] + first_key);
  }
  arch::syncthreads();
  const int last = loader.tiles - 1;
  if (warp == 0) writer.write<kHeadWarps>(p, work, s.sums[last % 2], last, first_head == 0);
}

template <int kColumns, int kHeadWarps>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_distribution_sm80(const __grid_constant__ Params p) {
  auto& s = arch::dynamic_smem<SharedStorage>();
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.plan.work_tiles; number += arch::grid_size()) {
    const WorkTile work = work_tile_of(p.plan, p.selection.topk, number);
    RowWriter writer(p, work);
    const int tiles = writer.entries.tiles(kTileKeys);
    HOPWELL_NO_UNROLL
    for (int pass = 0; pass < head_passes(p) && tiles > 0; ++pass)
      add_heads<kColumns, kHeadWarps>(p, s, work, pass * kHeadsAtATime, writer);
    if (arch::warp_index() == 0) complete_row(p, work, writer.entries, writer.total);
  }
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
