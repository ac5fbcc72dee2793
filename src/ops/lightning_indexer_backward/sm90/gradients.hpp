// lightning_indexer_backward for Hopper: dq, dw, and each query's contribution to dk.
//
//     sum_j = Σ_i (positive_ij g_i) k_i      dq_j = w_j sum_j      dw_j = q_j · sum_j
//     dk_i += g_i Σ_j positive_ij (w_j q_j)
//
// Tile      a CTA has a query and 64 of its heads; 64 entries per step
// Roles     warpgroup 0      heads    dq, 64 × 128, in registers; at the end dw, from dq and q
//           warpgroups 1, 2  entries  dk of alternate tiles; before the first tile the bf16x3 split of w q
//           warpgroup 3      gather   producer: keys, g and its split, and the signs of 64 entries, in six stages
// Products  No scores are computed: the signs of the products were stored, one bit each. A byte's sign bit, replicated
//           over a half register, masks one bf16. For the heads, A is the masked split of g; B is the
//           tile of keys, MN-major. For the entries, A is masked ones, the same for all terms of the split of w q,
//           which is B and stays in shared memory.
// Timeline  gather     K4 ▒▒▒▒│ K5 ▒▒▒▒│ …
//           heads      dQ0 ▓▓▓▓▓▓ │ dQ1 ▓▓▓▓▓▓ │ …
//           entries 1  dK0 ▓▓▓▓▓▓ stage │ dK2 ▓▓▓▓▓▓ …           staged rows of dk: the copy engine
//           entries 2     dK1 ▓▓▓▓▓▓ stage │ dK3 …               adds them during the next tile
// Budget    shared: 3 × 16,384 split of w q + 6 × (16,384 rows + 1,408 entries) + 96 of barriers + 8 × 8,192 rows of
//           dk, 221,824 B with gaps; registers: heads 64 for dq + 16 masks + 32 of A (160); entries 64 for dk + 16 of A
//           (144); gather 64
// Bound     writes to L2: 32 KB of dk and 512 row requests per tile. Tensor cores: 2 × 3 terms × 64 × 64 × 128, 1,536
//           clocks
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/lightning_indexer_backward/sm90/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

struct GradientConfig {
  static constexpr int kThreads = 512, kHeadRegisters = 160, kEntryRegisters = 144, kOtherRegisters = 64;
};

// A warp's contribution to dk: rows of 16 entries. The copy engine adds each row to its key's row. The rows are
// 128-byte aligned, like dk's: the engine sends one request per 128 bytes that are aligned at both ends, 4 per row.
// With a pitch of 544 bytes it sent 7.
struct StagedRows {
  alignas(128) unsigned char rows[16][512];

  // Waits before the rows are written again.
  HOPWELL_DEVICE void wait() const {
    arch::bulk_wait_read<0>();
    arch::syncwarp();
  }
  template <class T>
  struct alignas(2 * sizeof(T)) Pair {
    T low, high;
  };
  // Stores kCount blocks of eight columns. pair_of(half, block): columns 8 · block + fragment_column() and one more,
  // of row fragment_row(), or of the row 8 further on. A block has the same banks in every row, so adjacent rows store
  // different blocks at the same time.
  template <class T, int kCount, class PairOf>
  HOPWELL_DEVICE void store(const PairOf& pair_of) {
    constexpr int kTurns = 16 / sizeof(T);  // number of rows whose blocks cover all banks
    const int turn = tile::fragment_row() % kTurns;
    HOPWELL_UNROLL
    for (int i = 0; i < 2 * kCount; i += kTurns) {
      const int half = i / kCount, first = i % kCount;
      Pair<T> pairs[kTurns];
      HOPWELL_UNROLL
      for (int block = 0; block < kTurns; ++block) pairs[block] = pair_of(half, first + block);
      HOPWELL_UNROLL
      for (int bit = 1; bit < kTurns; bit *= 2) {
        HOPWELL_UNROLL
        for (int low = 0; low < kTurns; ++low) {
          if (low & bit) continue;
          const Pair<T> a = pairs[low], b = pairs[low | bit];
          pairs[low] = turn & bit ? b : a, pairs[low | bit] = turn & bit ? a : b;
        }
      }
      HOPWELL_UNROLL
      for (int block = 0; block < kTurns; ++block)
        *reinterpret_cast<Pair<T>*>(rows[8 * half + tile::fragment_row()] +
                                    sizeof(T) * (8 * (first + (block ^ turn)) + tile::fragment_column())) =
            pairs[block];
    }
  }
  // Lane l adds row l, if the row has a key.
  template <class T>
  HOPWELL_DEVICE void add(bool exists, T* to, int columns) const {
    arch::fence_proxy_async();
    arch::syncwarp();
    if (exists)
      arch::bulk_reduce_add(to, arch::shared_address(rows[arch::lane_index() % 16]),
                            uint32_t(columns) * uint32_t(sizeof(T)));
    arch::bulk_commit();
  }
};

struct GradientStorage {
  alignas(1024) unsigned char weighted_q[kGradientTerms][kTileBytes];  // bf16x3 split of w_j q_j
  EntryRing<6> ring;
  StagedRows staged[8];
  bool any_nan[4];  // of the g that a warp has loaded
};
static_assert(sizeof(GradientStorage) <= arch::sm90::kMaxSharedBytes);

// Masks for the bits of A, or ones: 64 × 64, as fragments.
struct Positive {
  uint32_t fragment[4][4];
};

HOPWELL_DEVICE Positive all_positive(uint32_t ones) {
  Positive a;
  HOPWELL_UNROLL
  for (auto& step : a.fragment) {
    HOPWELL_UNROLL
    for (uint32_t& pair : step) pair = ones;
  }
  return a;
}

// 64 entries × 64 heads: a lane's own word has all of its accumulators. `ones`: value of a pair of positive products.
HOPWELL_DEVICE Positive positive_entries(const EntryTile& tile, uint32_t ones) {
  Positive a;
  const uint32_t bits = tile.positive[arch::thread_index() % 128];
  HOPWELL_UNROLL
  for (int block = 0; block < 8; ++block) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half)
      a.fragment[block / 2][block % 2 * 2 + half] =
          arch::permute_signs(bits << block, 0, half == 0 ? 0x9988 : 0xbbaa) & ones;
  }
  return a;
}

// 64 heads × 64 entries: entries 2t and 2t + 1 of a block of eight have their bits in two words, at the same position.
HOPWELL_DEVICE Positive positive_heads(const EntryTile& tile) {
  Positive a;
  const int warp = arch::warp_index() % 4, head = tile::fragment_row();
  const uint32_t* const words = tile.positive + 8 * tile::quad_lane() + head / 2;
  const uint32_t selector = 0xcc88U + uint32_t(head % 2) * 0x1111U;
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    const uint32_t even = words[32 * step] << 2 * warp, odd = words[32 * step + 4] << 2 * warp;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)  // i % 2: 8 heads more; i / 2: 8 entries more
      a.fragment[step][i] = arch::permute_signs(even << i % 2, odd << i % 2, selector + uint32_t(i / 2) * 0x2222U);
  }
  return a;
}

// Starts d += A · the rows of a tile, 64 × 128. A holds one term of each number's split.
HOPWELL_DEVICE void start_term(float (&d)[64], const uint32_t (&a)[4][4], uint32_t rows) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  const uint64_t b = arch::at_address(tile::kRowsAcrossK, rows);
  arch::wgmma_fence();  // kept: the thread has written the registers of A and of the sums
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) arch::wgmma_rs<kOptions>(d, a[step], b + (uint32_t(step) * 16 * 128 >> 4), true);
  arch::wgmma_commit();
}

// d += (A · split) · the rows of a tile, 64 × 128. `split_terms`: split of g for pairs of entries. Smallest terms
// first.
HOPWELL_DEVICE void multiply_rows(float (&d)[64], const Positive& kept,
                                  const uint32_t (&split_terms)[kGradientTerms][32], uint32_t rows) {
  HOPWELL_UNROLL
  for (int split_term = kGradientTerms - 1; split_term >= 0; --split_term) {
    uint32_t a[4][4];
    const auto* const of_lane = reinterpret_cast<const arch::Words4*>(split_terms[split_term] + 8 * tile::quad_lane());
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {  // of the tile
      const arch::Words4 pairs = of_lane[half];
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) a[2 * half + i / 4][i % 4] = kept.fragment[2 * half + i / 4][i % 4] & pairs.w[i / 2];
    }
    start_term(d, a, rows);
    if (split_term < kGradientTerms - 1 && split_term > 0)
      arch::wgmma_wait<1>();  // kept: the compiler reuses the registers of A
  }
}

// d = A · the sum of the split terms, rows of w q: 64 × 128. Smallest terms first.
HOPWELL_DEVICE void multiply_weighted(float (&d)[64], const Positive& ones, const GradientStorage& s) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  arch::wgmma_fence();  // kept: the thread has written the registers of A and of the sums
  HOPWELL_UNROLL
  for (int split_term = kGradientTerms - 1; split_term >= 0; --split_term) {
    const uint64_t b = arch::at_address(tile::kRowsAcrossK, arch::shared_address(s.weighted_q[split_term]));
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step)
      arch::wgmma_rs<kOptions>(d, ones.fragment[step], b + (uint32_t(step) * 16 * 128 >> 4),
                               split_term < kGradientTerms - 1 || step > 0);
  }
  arch::wgmma_commit();
}

// Computes the split of w_j q_j for 64 heads from `first` on, zeros past the last head; executed by both warpgroups of
// the entries, which read it.
HOPWELL_DEVICE void load_weighted_heads(const Params<bf16>& p, GradientStorage& s, int query, int first) {
  constexpr int kThreads = 256;
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index() % kThreads; i < kHeadTile * 16; i += kThreads) {
    const int row = i / 16, chunk = i % 16, head = first + row;
    float x[8] = {};
    if (head < p.heads) {
      tile::sum_split(p.q.chunk(p.q.data + query * p.q_stride + head * p.q.stride, 8 * chunk), x);
      const float weight = tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head);
      for (float& value : x) value *= weight;
    }
    const auto split_terms = tile::split<kGradientTerms>(x);
    HOPWELL_UNROLL
    for (int split_term = 0; split_term < kGradientTerms; ++split_term)
      arch::store_shared_v4(
          arch::shared_address(s.weighted_q[split_term]) + chunk_in_tile(uint32_t(row), uint32_t(chunk)),
          split_terms.split_term[split_term]);
  }
  arch::fence_proxy_async();
  arch::barrier_sync(1, kThreads);
}

// ---- heads ----------------------------------------------------------------------------------------------------------

// Stores d_q and d_weight of a head, which is row `half` of a thread's two rows; t: index of the thread in its quad. A
// NaN in g makes d_weight NaN, and then all of d_q is NaN, because products of NaN with masked zeros are NaN.
HOPWELL_DEVICE void store_head(const Params<bf16>& p, const float& weight, int query, int head, int half, int t,
                               const float (&d_q)[64], float d_weight) {
  const float nan_or_0 = d_weight != d_weight ? d_weight : 0;
  if (head >= p.heads) return;
  const int64_t at = query * p.d_weights_stride + head;
  if (t == 0 && p.weights_bf16) static_cast<bf16*>(p.d_weights)[at] = arch::to_bf16(d_weight);
  if (t == 0 && !p.weights_bf16) static_cast<float*>(p.d_weights)[at] = d_weight;
  bf16* to = p.d_q + query * p.d_q_stride_s + head * p.d_q_stride_h + 2 * t;
  HOPWELL_UNROLL
  for (int block = 0; block < 16; ++block) {
    if (8 * block + 2 * t >= p.columns) break;
    const auto of_column = [&](int odd) { return weighted(weight, d_q[4 * block + 2 * half + odd]) + nan_or_0; };
    const uint32_t pair = arch::pack_bf16(of_column(0), of_column(1));
    if (p.d_q_in_pairs)
      *reinterpret_cast<uint32_t*>(to + 8 * block) = pair;
    else
      to[8 * block] = {uint16_t(pair)}, to[8 * block + 1] = {uint16_t(pair >> 16)};
  }
}

// This lane's columns of a head's q, adjacent pairs; zeros past the last column.
struct LaneColumns {
  uint32_t pair[16];

  HOPWELL_DEVICE LaneColumns(const Params<bf16>& p, int query, int head, int t) {
    const bf16* const q = p.q.data + query * p.q_stride + head * p.q.stride + 2 * t;
    HOPWELL_UNROLL
    for (int block = 0; block < 16; ++block)
      pair[block] =
          head < p.heads && 8 * block + 2 * t < p.columns ? *reinterpret_cast<const uint32_t*>(q + 8 * block) : 0;
  }
  // Σ_i g_i relu(q · k_i) of a head equals q · Σ_i g_i k_i over the entries with positive products; d_q holds these
  // sums. If a sum is 0, an infinite q adds nothing, because none of its products is positive.
  HOPWELL_DEVICE float times(const float (&d_q)[64], int half) const {
    float sum = 0;
    HOPWELL_UNROLL
    for (int block = 0; block < 16; ++block) {
      const float low = d_q[4 * block + 2 * half], high = d_q[4 * block + 2 * half + 1];
      sum += low != 0 ? arch::bit_cast<float>(pair[block] << 16) * low : 0;
      sum += high != 0 ? arch::bit_cast<float>(pair[block] & 0xffff0000U) * high : 0;
    }
    return sum;
  }
};

// The same sum computed from the products, every fourth entry from t on. Needed because infinite keys with a product
// that is not positive leave NaN in d_q.
template <bool kRelu>
HOPWELL_DEVICE float sum_of_entries(const Params<bf16>& p, int query, int head, const tile::Entries& entries, int t) {
  const bf16* const q = p.q.data + query * p.q_stride + head * p.q.stride;
  const float* const g = p.d_scores + int64_t{query} * p.topk + entries.place();
  float sum = 0;
  HOPWELL_NO_UNROLL
  for (int i = t; i < entries.length; i += 4) {
    if (!has_score(g[i])) continue;
    const bf16* const k = p.k.data + entries.at(i) * p.k.stride;
    float dot = 0;
    HOPWELL_NO_UNROLL
    for (int column = 0; column < p.columns; ++column)
      dot +=
          arch::bit_cast<float>(uint32_t{q[column].bits} << 16) * arch::bit_cast<float>(uint32_t{k[column].bits} << 16);
    sum += g[i] * (kRelu ? fmaxf(dot, 0) : dot);
  }
  return sum;
}

template <bool kRelu>
HOPWELL_DEVICE void store_heads(const Params<bf16>& p, const GradientStorage& s, int query, int first,
                                const tile::Entries& entries, const float (&d_q)[64]) {
  const int t = tile::quad_lane(), head = first + tile::wgmma_row();
  const bool any_nan = s.any_nan[0] || s.any_nan[1] || s.any_nan[2] || s.any_nan[3];
  const auto weight_of = [&](int head) {
    return head < p.heads ? tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head) : 0;
  };
  const float weights[2] = {weight_of(head), weight_of(head + 8)};
  const LaneColumns q[2] = {{p, query, head, t}, {p, query, head + 8, t}};
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int of_half = head + 8 * half;
    const bool exists = of_half < p.heads;
    float d_weight = any_nan ? NAN : tile::sum_of_quad(q[half].times(d_q, half));
    const bool anew = exists && !any_nan && !(fabsf(d_weight) < INFINITY);
    if (arch::ballot(anew) != 0) {
      const float sum = tile::sum_of_quad(anew ? sum_of_entries<kRelu>(p, query, of_half, entries, t) : 0);
      d_weight = anew ? sum : d_weight;
    }
    store_head(p, weights[half], query, of_half, half, t, d_q, d_weight);
  }
}

template <bool kRelu>
HOPWELL_DEVICE void accumulate_heads(const EntryParams& p, GradientStorage& s, int query, int first,
                                     const tile::Entries& entries) {
  float d_q[64] = {};
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < entry_tiles(entries); ++tile) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, tile};
    slot.wait_full();
    arch::fence_proxy_async();
    multiply_rows(d_q, kRelu ? positive_heads(slot.entries()) : all_positive(0xffffffffU), slot.entries().g_terms,
                  slot.rows());
    arch::wgmma_wait<0>(d_q);
    slot.release();
  }
  store_heads<kRelu>(p, s, query, first, entries, d_q);
}

// ---- entries --------------------------------------------------------------------------------------------------------

// Deterministic sums: multiples of the keys' units, 64 columns at a time. keys: of this lane's rows; `key`: of the row
// that it adds, or −1.
HOPWELL_DEVICE void add_fixed(const Params<bf16>& p, StagedRows& staged, const int (&keys)[2], int key,
                              const float (&g)[2], const float (&d_k)[64]) {
  constexpr int kUnroll = 64;
  const auto bound = [&](int of) { return bound_of(p.bounds.largest[of], p.bounds.count[of]); };
  const bool adds = key >= 0 && bound(key) < INFINITY;
  double scale[2];
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half)
    scale[half] = keys[half] < 0 ? 0 : tile::wide_power_of_two(tile::unit_exponent<tile::kWideBits>(bound(keys[half])));
  HOPWELL_UNROLL
  for (int first = 0; first < 2 * kUnroll; first += kUnroll) {
    if (first >= p.columns) break;
    staged.wait();
    staged.store<int64_t, 8>([&](int half, int block) {
      const float* const pair = d_k + 4 * (first / 8 + block) + 2 * half;
      const auto fixed = [&](float x) { return tile::to_wide_fixed(g[half] * x, scale[half]); };
      return StagedRows::Pair<int64_t>{fixed(pair[0]), fixed(pair[1])};
    });
    staged.add(adds, p.fixed_d_k + int64_t{key} * p.columns + first,
               p.columns - first < kUnroll ? p.columns - first : kUnroll);
  }
}

HOPWELL_DEVICE void add_tile(const Params<bf16>& p, StagedRows& staged, const int (&keys)[2], int key,
                             const float (&g)[2], const float (&d_k)[64]) {
  if (p.fixed_d_k) return add_fixed(p, staged, keys, key, g, d_k);
  staged.wait();
  staged.store<float, 16>([&](int half, int block) {
    const float* const pair = d_k + 4 * block + 2 * half;
    return StagedRows::Pair<float>{g[half] * pair[0], g[half] * pair[1]};
  });
  staged.add(key >= 0, p.d_k + key * p.d_k_stride, p.columns);
}

// Processes every second tile, so that a stage always has tiles of the same warpgroup.
template <bool kRelu>
HOPWELL_DEVICE void accumulate_entries(const EntryParams& p, GradientStorage& s, int first_tile, int tiles) {
  constexpr uint32_t kOnes = 0x3f803f80;  // bf16
  HOPWELL_NO_UNROLL
  for (int tile = first_tile; tile < tiles; tile += 2) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, tile};
    const EntryTile& entries = slot.entries();
    const int lane = arch::lane_index(), first = arch::warp_index() % 4 * 16;
    slot.wait_full();
    const Positive ones = kRelu ? positive_entries(entries, kOnes) : all_positive(kOnes);
    const int row = first + tile::fragment_row(), keys[2] = {entries.key[row], entries.key[row + 8]};
    const float g[2] = {entries.g[row], entries.g[row + 8]};
    const int key = lane < 16 ? entries.key[first + lane] : -1;
    slot.release();
    float d_k[64];
    multiply_weighted(d_k, ones, s);
    arch::wgmma_wait<0>(d_k);
    add_tile(p, s.staged[arch::warp_index() - 4], keys, key, g, d_k);
  }
  arch::bulk_wait<0>();  // the copy engine must have read the rows
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// One CTA per query and 64 of its heads.
template <bool kRelu>
__global__ void __launch_bounds__(GradientConfig::kThreads, 1)
    lightning_indexer_bwd_gradients_sm90(const __grid_constant__ EntryParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<GradientStorage>();
  const int query = arch::block_index() / p.head_tiles, head_tile = arch::block_index() % p.head_tiles;
  const int first = head_tile * kHeadTile;
  const tile::Entries entries = tile::entries_of(p.selection, query);
  if (arch::thread_index() == 0) {
    s.ring.barriers.init(kEntryArrivals, 8);
    arch::fence_mbarrier_init();
  }
  if (arch::thread_index() < 4) s.any_nan[arch::thread_index()] = false;
  arch::syncthreads();
  const int group = arch::warpgroup_index();
  if (group == 0) {
    arch::setmaxnreg_inc<GradientConfig::kHeadRegisters>();
    accumulate_heads<kRelu>(p, s, query, first, entries);
  } else if (group < 3) {
    arch::setmaxnreg_inc<GradientConfig::kEntryRegisters>();
    load_weighted_heads(p, s, query, first);
    accumulate_entries<kRelu>(p, s, group - 1, entry_tiles(entries));
  } else {
    arch::setmaxnreg_dec<GradientConfig::kOtherRegisters>();
    tile::wait_for_prior_kernels();
    gather_tiles<true, kRelu>(p, s.ring, query, head_tile, entries, 0, s.any_nan + arch::warp_index() % 4);
    arch::cp_async_wait_all();  // no thread exits before its copies complete
  }
#endif
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
