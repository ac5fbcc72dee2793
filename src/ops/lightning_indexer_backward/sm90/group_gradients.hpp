// lightning_indexer_backward for Hopper without indices: dq, dw, and the contribution to dk of a query group
// (groups.hpp). Formulas and bf16x3 splits as in gradients.hpp.
//
// Tile      a CTA has 128 rows, the heads of its queries; 64 keys per step
// Roles     warpgroups 0, 1  heads    one block each: q k^T, 64 rows × 64 keys, and its signs for the entries; dq; dw
//           warpgroup 2      entries  dk of the tile, summed over the queries and added once
//           warpgroup 3      gather   producer: keys, and g and its split for every query, in six stages
// Products  The split factors are masked as in gradients.hpp. The heads pass the signs of their products
//           to the entries as ballots, 1 KB per tile, so that the entries need no products for them. The entries' A is
//           the split of w_j g_i, so that one accumulator sums the rows of all queries. Deterministic sums, and
//           ungrouped queries, use the split of w_j alone, with one product per query, and sum g_i times it: for 64
//           columns of dk at a time, which fit in registers.
// Timeline  gather   K3 ▒▒▒▒│ K4 ▒▒▒▒│ …
//           heads 0  S0 ▓▓ signs dQ0 ▓▓▓▓▓▓ │ S1 ▓▓ …
//           heads 1  S0 ▓▓ signs dQ0 ▓▓▓▓▓▓ │ S1 ▓▓ …
//           entries               dK0 ▓▓▓▓▓▓▓▓▓▓▓▓ stage │ dK1 ▓▓▓ …      the copy engine adds during the next tile
// Budget    shared: q 32,768 + 6 × (16,384 rows + 6,400 numbers at most) + 4 × 8,192 rows of dk + 144 of barriers +
//           1,356
//           registers: heads 64 for dq + 32 scores + 32 of A (160); entries 64 for dk + 24 of A, or 64 for sums + 32
//           for dk + 24 (144); gather 48
// Bound     tensor cores: 2 × (1 + 3 + 3 terms) × 64 × 64 × 128, 3,584 clocks per tile; adds 32 KB per tile
#pragma once

#include "ops/lightning_indexer_backward/sm90/gradients.hpp"
#include "ops/lightning_indexer_backward/sm90/groups.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

struct GroupGradientConfig {
  static constexpr int kThreads = 512, kHeadRegisters = 160, kEntryRegisters = 144, kOtherRegisters = 48;
};

template <int kRows>
struct GroupGradientStorage {
  alignas(1024) unsigned char q[kBlocks][kTileBytes];
  GroupRing<6, GroupTile<kGroupQueries<kRows>>> ring;
  StagedRows staged[4];
  Group group;  // in shared memory to save registers
  GroupKeys<kGroupQueries<kRows>> keys;
  alignas(8) float weights[kGroupRows];
  uint32_t weight_terms[kBlocks][kGradientTerms][kHeadTile / 2];  // bf16 split of pairs of adjacent rows
};
static_assert(sizeof(GroupGradientStorage<16>) <= arch::sm90::kMaxSharedBytes);

// ---- heads ----------------------------------------------------------------------------------------------------------

// Stores which of this warp's products are positive. Eight keys and 16 rows have four words, by the lowest bit of the
// key and the half of the rows. Bit 4 · row + key / 2 is the bit of a row of 8 and a key of 8.
template <int kQueries>
HOPWELL_DEVICE void note_positive(GroupTile<kQueries>& tile, int step, const float (&scores)[32]) {
  HOPWELL_UNROLL
  for (int keys = 0; keys < 8; ++keys) {
    arch::Words4 words;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) words.w[i] = arch::ballot(scores[4 * keys + i / 2 + i % 2 * 2] > 0);
    if (arch::lane_index() == 0) *reinterpret_cast<arch::Words4*>(tile.positive[keys][step]) = words;
  }
}

// Adds g times the products of this thread's rows with a tile's keys. An entry without a score may have products with a
// key of another query.
template <bool kRelu>
HOPWELL_DEVICE void add_weights(float (&d_weights)[2], const float (&g)[kTileEntries], const float (&scores)[32]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) {
    const FloatPair of_entries = pair_at(g + i / 2 * 8 + tile::fragment_column());
    HOPWELL_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const float of_entry = of_entries.of[odd], score = scores[2 * i + odd];
      float& sum = d_weights[i % 2];
      sum = has_score(of_entry) ? sum + of_entry * (kRelu ? fmaxf(score, 0) : score) : sum;
    }
  }
}

// Mask of two adjacent keys, 16 bits each: keys with positive products, or all keys.
template <bool kRelu>
HOPWELL_DEVICE uint32_t mask_of(float low, float high) {
  return (!kRelu || low > 0 ? 0xffffU : 0) | (!kRelu || high > 0 ? 0xffff0000U : 0);
}

// d_q += A · the rows of a tile, like multiply_rows, but term by term, so that A takes fewer registers.
template <bool kRelu>
HOPWELL_DEVICE void multiply_split(float (&d_q)[64], const float (&scores)[32],
                                   const uint32_t (&split_terms)[kGradientTerms][32], uint32_t rows) {
  HOPWELL_UNROLL
  for (int split_term = kGradientTerms - 1; split_term >= 0; --split_term) {
    uint32_t a[4][4];
    HOPWELL_UNROLL
    for (int i = 0; i < 16; ++i)
      a[i / 4][i % 4] =
          mask_of<kRelu>(scores[2 * i], scores[2 * i + 1]) & split_terms[split_term][i / 2 * 4 + tile::quad_lane()];
    start_term(d_q, a, rows);
    if (split_term < kGradientTerms - 1 && split_term > 0)
      arch::wgmma_wait<1>();  // kept: the compiler reuses the registers of A
  }
}

template <int kRows>
HOPWELL_DEVICE void store_block(const GroupParams& p, const GroupGradientStorage<kRows>& s, const Group& group,
                                int block, int member, const float (&d_q)[64], const float (&d_weights)[2]) {
  const int thread = arch::thread_index_anew();
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = block * kHeadTile + tile::wgmma_row_of(thread) + 8 * half;
    store_head(p, s.weights[row], group.first + member, row % kRows, half, tile::quad_lane(thread), d_q,
               tile::sum_of_quad(d_weights[half]));
  }
}

template <bool kRelu, int kRows>
HOPWELL_DEVICE void accumulate_block(const GroupParams& p, GroupGradientStorage<kRows>& s, const Group& group,
                                     const QuerySet& set, int number, int block) {
  const int step = 4 * block + arch::warp_index() % 4, member = step * 16 / kRows;  // a warp's rows belong to one query
  const uint32_t q = arch::shared_address(s.q[block]);
  float d_q[64] = {}, d_weights[2] = {0, 0};
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < set.tiles(); ++tile) {
    const GroupSlot<decltype(s.ring)> slot{s.ring, number + tile};
    auto& numbers = slot.numbers();
    float scores[32];
    slot.wait_full();
    arch::fence_proxy_async();
    start_scores(scores, q, slot.rows());
    arch::wgmma_wait<0>(scores);
    if constexpr (kRelu) {
      note_positive(numbers, step, scores);
      slot.commit(1);
    }
    multiply_split<kRelu>(d_q, scores, numbers.g_terms[member], slot.rows());
    add_weights<kRelu>(d_weights, numbers.g[member], scores);
    arch::wgmma_wait<0>(d_q);
    slot.release();
  }
  if (set.has(member)) store_block(p, s, group, block, member, d_q, d_weights);
}

// ---- entries --------------------------------------------------------------------------------------------------------

// This lane's keys of a tile: `own` and 8 further on; and the key that it adds, among its warp's 16, if the lane index
// is below 16.
struct EntryRows {
  int first = arch::warp_index() % 4 * 16, own = first + tile::fragment_row(), added = first + arch::lane_index() % 16;
  bool adds = arch::lane_index() < 16;

  // Signs of the products of a key of this lane (`half`: the key 8 further on) with rows 2t and 2t + 1 (`upper`: of the
  // upper half of the step's rows): bits 0 and 4.
  template <int kQueries>
  HOPWELL_DEVICE uint32_t positive(const GroupTile<kQueries>& tile, int step, int half, int upper) const {
    return tile.positive[first / 8 + half][step][own % 2][upper] >> (8 * tile::quad_lane() + own % 8 / 2);
  }
};

// A of 64 keys × 16 rows: split of a row's factor where its product is positive.
struct RowFragments {
  uint32_t of_term[kGradientTerms][4];
};

// … factor: the weight.
template <bool kRelu, int kRows>
HOPWELL_DEVICE RowFragments mask_weights(const GroupGradientStorage<kRows>& s,
                                         const GroupTile<kGroupQueries<kRows>>& tile, const EntryRows& rows, int step) {
  RowFragments a;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int half = i % 2, upper = i / 2;  // of the keys; of the rows
    uint32_t mask = 0xffffffffU;
    if constexpr (kRelu) {
      const uint32_t bits = rows.positive(tile, step, half, upper);
      mask = ((bits & 1U) | (bits << 12 & 0x10000U)) * 0xffffU;
    }
    HOPWELL_UNROLL
    for (int split_term = 0; split_term < kGradientTerms; ++split_term)
      a.of_term[split_term][i] =
          mask & s.weight_terms[step / 4][split_term][step % 4 * 8 + 4 * upper + tile::quad_lane()];
  }
  return a;
}

// … factor: the weight times g of each row's query. A NaN in g keeps all products.
template <bool kRelu, int kRows>
HOPWELL_DEVICE RowFragments scale_weights(const GroupGradientStorage<kRows>& s,
                                          const GroupTile<kGroupQueries<kRows>>& tile, const EntryRows& rows,
                                          int step) {
  RowFragments a;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int half = i % 2, upper = i / 2;
    const float given = tile.g[step * 16 / kRows][rows.own + 8 * half], g = has_score(given) ? given : 0;
    const FloatPair weights = pair_at(s.weights + 16 * step + 8 * upper + tile::fragment_column());
    float low = g * weights.of[0], high = g * weights.of[1];
    if constexpr (kRelu) {
      const uint32_t bits = rows.positive(tile, step, half, upper) | (g != g ? 0xffffffffU : 0);
      low = bits & 1U ? low : 0, high = bits & 16U ? high : 0;
    }
    HOPWELL_UNROLL
    for (int split_term = 0; split_term < kGradientTerms; ++split_term)
      a.of_term[split_term][i] = tile::take_term(low) >> 16 | tile::take_term(high);
  }
  return a;
}

// d (+)= A · 16 rows of q, all of their 128 columns or 64 of them, smallest terms first. `q`: the block's rows from the
// first column on.
template <int kSize>
HOPWELL_DEVICE void multiply_step(float (&d)[kSize], const RowFragments& a, uint32_t q, int step, bool accumulate) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  const uint32_t rows = q + uint32_t(step / 4) * kTileBytes + uint32_t(step % 4) * 16 * 128;
  arch::wgmma_fence();  // kept: the thread has written the registers of A and of the sums
  HOPWELL_UNROLL
  for (int split_term = kGradientTerms - 1; split_term >= 0; --split_term)
    arch::wgmma_rs<kOptions>(d, a.of_term[split_term], arch::at_address(tile::kRowsAcrossK, rows),
                             accumulate || split_term < kGradientTerms - 1);
  arch::wgmma_commit();
  if (accumulate) arch::wgmma_wait<1>();  // kept: the compiler reuses the registers of A
}

HOPWELL_DEVICE void add_sums(const GroupParams& p, StagedRows& staged, int key, const float (&sums)[64]) {
  staged.wait();
  staged.store<float, 16>([&](int half, int block) {
    const float* const pair = sums + 4 * block + 2 * half;
    return StagedRows::Pair<float>{pair[0], pair[1]};
  });
  staged.add(key >= 0, p.d_k + key * p.d_k_stride, p.columns);
}

// dk of a tile, summed over the queries and added once. All values are finite here, see groups.hpp.
template <bool kRelu, int kRows, int kTheBlocks>
HOPWELL_DEVICE void accumulate_together(const GroupParams& p, GroupGradientStorage<kRows>& s, const QuerySet& set,
                                        int number) {
  const EntryRows rows;
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < set.tiles(); ++tile) {
    const GroupSlot<decltype(s.ring)> slot{s.ring, number + tile};
    const auto& numbers = slot.numbers();
    slot.wait_full(kRelu ? 1 : 0);  // the signs arrive after the numbers
    float d_k[64];
    HOPWELL_UNROLL
    for (int step = 0; step < 4 * kTheBlocks; ++step) {
      const RowFragments a = scale_weights<kRelu>(s, numbers, rows, step);
      multiply_step(d_k, a, arch::shared_address(s.q[0]), step, step > 0);
    }
    const int key = rows.adds ? numbers.key[rows.added] : -1;
    slot.release();
    arch::wgmma_wait<0>(d_k);
    add_sums(p, s.staged[arch::warp_index() % 4], key, d_k);
  }
}

// Adds a query's contribution to a sum: a float, or a multiple of the key's unit, whose scale is 0 if there is no key.
HOPWELL_DEVICE void add_to(float& sum, float x, double) { sum += x; }
HOPWELL_DEVICE void add_to(int64_t& sum, float x, double scale) { sum += tile::to_wide_fixed(x, scale); }

// Address of a key's sums of type Sum, whether they are added to at all, and `scale` of a key.
HOPWELL_DEVICE float* sums_of(const GroupParams& p, int key, float) { return p.d_k + key * p.d_k_stride; }
HOPWELL_DEVICE int64_t* sums_of(const GroupParams& p, int key, int64_t) {
  return p.fixed_d_k + int64_t{key} * p.columns;
}
HOPWELL_DEVICE float bound_of_key(const GroupParams& p, int key) {
  return p.fixed_d_k ? bound_of(p.bounds.largest[key], p.bounds.count[key]) : 0;
}

// Sums 64 columns of a tile's dk, from `first` on, over the queries: one product per query, times its g.
template <bool kRelu, class Sum, int kRows>
HOPWELL_DEVICE void sum_queries(Sum (&sums)[32], const GroupGradientStorage<kRows>& s, const QuerySet& set,
                                const GroupTile<kGroupQueries<kRows>>& tile, const EntryRows& rows, int first,
                                const double (&scale)[2]) {
  HOPWELL_NO_UNROLL
  for (int member = 0; member < kGroupQueries<kRows>; ++member) {
    if (!set.has(member)) continue;
    float d_k[32];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / 16; ++i) {
      const int step = member * kRows / 16 + i;
      const RowFragments a = mask_weights<kRelu>(s, tile, rows, step);
      multiply_step(d_k, a, arch::shared_address(s.q[0]) + uint32_t(first / 64) * tile::kPanelBytes, step, i > 0);
    }
    arch::wgmma_wait<0>(d_k);
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float g = tile.g[member][rows.own + 8 * half];
      if (!has_score(g)) continue;
      HOPWELL_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int at = i / 2 * 4 + 2 * half + i % 2;
        add_to(sums[at], g * d_k[at], scale[half]);
      }
    }
  }
}

// The same for deterministic sums and for ungrouped queries: a query adds nothing where it has no score.
template <class Sum, bool kRelu, int kRows>
HOPWELL_DEVICE void accumulate_one_by_one(const GroupParams& p, GroupGradientStorage<kRows>& s, const QuerySet& set,
                                          int number) {
  const EntryRows rows;
  StagedRows& staged = s.staged[arch::warp_index() % 4];
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < set.tiles(); ++tile) {
    const GroupSlot<decltype(s.ring)> slot{s.ring, number + tile};
    const auto& numbers = slot.numbers();
    slot.wait_full(kRelu ? 1 : 0);  // the signs arrive after the numbers
    double scale[2];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = numbers.key[rows.own + 8 * half];
      scale[half] = key < 0 ? 0 : tile::wide_power_of_two(tile::unit_exponent<tile::kWideBits>(bound_of_key(p, key)));
    }
    HOPWELL_NO_UNROLL
    for (int first = 0; first < p.columns; first += 64) {
      Sum sums[32] = {};
      sum_queries<kRelu>(sums, s, set, numbers, rows, first, scale);
      const int key = rows.adds ? numbers.key[rows.added] : -1;
      const bool adds = key >= 0 && bound_of_key(p, key) < INFINITY;
      staged.wait();
      staged.store<Sum, 8>([&](int half, int block) {
        const Sum* const pair = sums + 4 * block + 2 * half;
        return StagedRows::Pair<Sum>{pair[0], pair[1]};
      });
      staged.add(adds, sums_of(p, key, Sum{}) + first, p.columns - first < 64 ? p.columns - first : 64);
    }
    slot.release();
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// One CTA per group.
template <bool kRelu, int kRows>
__global__ void __launch_bounds__(GroupGradientConfig::kThreads, 1)
    lightning_indexer_bwd_group_gradients_sm90(const __grid_constant__ GroupParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<GroupGradientStorage<kRows>>();
  const int index = arch::grid_size() - 1 - arch::block_index();  // late queries see more keys, so they start first
  const Group group = group_of<kRows>(p, index);
  const bool ungrouped = p.ungrouped[index] != 0;
  if (arch::thread_index() == 0) {
    const auto head_warps = uint32_t(4 * group.blocks);
    s.ring.barriers.init(head_warps, head_warps + 4, kGroupArrivals - head_warps);
    arch::fence_mbarrier_init();
    s.group = group;
  }
  load_keys(p, group, s.keys);
  load_group<kRows>(p, s.q[0], s.weights, group, GroupGradientConfig::kThreads);
  arch::syncthreads();
  if (const int row = arch::thread_index(); row < group.blocks * kHeadTile)
    store_split(s.weight_terms[row / kHeadTile], row % kHeadTile, s.weights[row]);
  arch::syncthreads();
  const int role = arch::warpgroup_index();
  if (role < kBlocks) {
    arch::setmaxnreg_inc<GroupGradientConfig::kHeadRegisters>();
    if (role < s.group.blocks)
      for_each_set(s.group, s.keys, ungrouped, [&](const QuerySet& set, int number) {
        accumulate_block<kRelu, kRows>(p, s, s.group, set, number, role);
      });
  } else if (role == kBlocks) {
    arch::setmaxnreg_inc<GroupGradientConfig::kEntryRegisters>();
    arch::fence_proxy_async();  // fences q; the heads fence it with every tile
    for_each_set(s.group, s.keys, ungrouped, [&](const QuerySet& set, int number) {
      if (p.fixed_d_k)
        accumulate_one_by_one<int64_t, kRelu>(p, s, set, number);
      else if (ungrouped)
        accumulate_one_by_one<float, kRelu>(p, s, set, number);
      else if (s.group.blocks == 1)
        accumulate_together<kRelu, kRows, 1>(p, s, set, number);
      else
        accumulate_together<kRelu, kRows, kBlocks>(p, s, set, number);
    });
    arch::bulk_wait<0>();  // the copy engine must have read the rows
  } else {
    arch::setmaxnreg_dec<GroupGradientConfig::kOtherRegisters>();
    for_each_set(s.group, s.keys, ungrouped,
                 [&](const QuerySet& set, int number) { gather_keys(p, s.ring, s.group, s.keys, set, number); });
    arch::cp_async_wait_all();  // no thread exits before its copies complete
  }
#endif
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
