// lightning_indexer_backward by mma.sync: dq, dw, and each query's contribution to dk.
//
// Tile      a CTA has a query: 64 heads at a time, 32 entries per step
// Roles     four warps. Products: 16 entries × 32 heads each; dk: 16 entries × half of the columns; dq: 16 heads each,
//           in registers
// Timeline  keys, products │ positive, g k to shared memory │ barrier │ dk += … │ dq += … │ barrier │ next entries
// Budget    shared: q 16,384 B per bf16 split term, w q 49,152, g k 24,576, positive 4,096, 768: 94,976 B (bf16),
//           127,744 B (fp32)
#pragma once

#include "ops/lightning_indexer_backward/sm80/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

struct GradientConfig {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kEntries = 32;
};

template <class T>
struct GradientStorage {
  MmaTile<kSplitTerms<T>, kHeadTile> q;
  MmaTile<kGradientTerms, kHeadTile> weighted_q;                                  // w_j q_j
  MmaTile<kGradientTerms, GradientConfig::kEntries> weighted_keys;                // g_i k_i
  alignas(128) unsigned char positive[GradientConfig::kEntries * kHeadTile * 2];  // [entry][head], bf16 0 or 1
  float weights[kHeadTile];
  float d_weights[2][kHeadTile];  // for the entries of two warps
};

// Byte offset in `positive` of chunk 0 to 7 of an entry's 64 heads.
HOPWELL_DEVICE uint32_t positive_at(int entry, int chunk) { return uint32_t(entry * 128 + ((chunk ^ entry % 8) << 4)); }

// This lane's two entries.
struct EntryPair {
  int keys[2];  // −1: no g
  float g[2];
};
template <class T>
HOPWELL_DEVICE EntryPair load_entries(const Params<T>& p, const tile::Entries& all, int query, int first) {
  const float* const gradients = p.d_scores + int64_t{query} * p.topk + all.place();
  EntryPair entries{};
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int entry = first + 8 * half + tile::fragment_row();
    const int key = all.at(entry);
    const float g = entry < all.length ? gradients[entry] : no_score();
    entries.keys[half] = has_score(g) ? key : -1, entries.g[half] = has_score(g) ? g : 0;
  }
  return entries;
}

template <class T>
HOPWELL_DEVICE void load_heads(const Params<T>& p, GradientStorage<T>& s, int query, int first) {
  for_each_chunk(p, query, first, GradientConfig::kThreads,
                 [&](int row, int number, const Chunk<kSplitTerms<T>>& chunk, float weight) {
                   s.q.store(row, number, chunk);
                   float x[8];
                   tile::sum_split(chunk, x);
                   for (float& value : x) value *= weight;
                   s.weighted_q.store(row, number, tile::split_finite<kGradientTerms>(x));
                   if (number == 0) s.weights[row] = weight;
                 });
  arch::syncthreads();
}

// Writes to shared memory which products of 16 entries and 32 heads are positive; adds dw; writes half of g_i k_i.
template <bool kRelu, class T>
HOPWELL_DEVICE void find_positive(const Params<T>& p, GradientStorage<T>& s, const EntryPair& entries, int heads,
                                  float (&d_weights)[4][2]) {
  const int g = tile::fragment_row(), t = tile::quad_lane();
  const int first_entry = arch::warp_index() % 2 * 16, side = arch::warp_index() / 2;
  MmaRows<kSplitTerms<T>> rows[1];
  gather(p, entries.keys, rows[0]);
  HOPWELL_UNROLL
  for (int block = 0; block < kColumnBlocks; ++block) {
    if (block % 2 != side || block >= p.column_blocks) continue;
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      float x[8];
      tile::sum_split(rows[0].chunk[block][half], x);
      for (float& value : x) value *= entries.g[half];
      s.weighted_keys.store(first_entry + 8 * half + g, 4 * block + t, tile::split_finite<kGradientTerms>(x));
    }
  }
  HOPWELL_UNROLL
  for (int pair = 0; pair < 2; ++pair) {
    const int head = 32 * side + 16 * pair;
    if (head >= heads) break;
    float d[2][1][4] = {};
    tile::multiply<false>(d, rows, s.q, head, p.column_blocks);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      constexpr uint32_t kOne = 0x3f80;
      const int block = i / 2, half = i % 2;
      const float low = d[block][0][2 * half], high = d[block][0][2 * half + 1];
      *reinterpret_cast<uint32_t*>(s.positive + positive_at(first_entry + 8 * half + g, head / 8 + block) + 4 * t) =
          (!kRelu || low > 0 ? kOne : 0) | (!kRelu || high > 0 ? kOne << 16 : 0);
      if (entries.keys[half] < 0) continue;  // q may be NaN
      d_weights[2 * pair + block][0] += entries.g[half] * (kRelu ? tile::relu(low) : low);
      d_weights[2 * pair + block][1] += entries.g[half] * (kRelu ? tile::relu(high) : high);
    }
  }
}

// Offset of a lane for ldmatrix in 16 rows and 16 columns of a tile, read transposed.
HOPWELL_DEVICE uint32_t lane_offset() {
  const auto lane = uint32_t(arch::lane_index());
  return tile::chunk_offset(lane % 16, lane / 16);
}
// d += a · 16 rows of the tile from row 16 · `block` on, columns 16 · `column` to 16 · `column` + 15.
template <int kRows>
HOPWELL_DEVICE void multiply_by_columns(float (&d)[2][4], const uint32_t (&a)[4],
                                        const MmaTile<kGradientTerms, kRows>& tile, uint32_t offset, int block,
                                        int column) {
  HOPWELL_UNROLL
  for (int split_term = 0; split_term < kGradientTerms; ++split_term) {
    uint32_t b[4];
    arch::ldmatrix<arch::Transpose::yes>(
        b, tile.address(split_term) + uint32_t(block) * 4096 + (offset ^ uint32_t(column) << 5));
    const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    arch::mma_m16n8k16_bf16(d[0], a, left);
    arch::mma_m16n8k16_bf16(d[1], a, right);
  }
}

// Adds two adjacent columns to a key's row of dk.
template <class T>
HOPWELL_DEVICE void add_to_key(const Params<T>& p, int key, int column, float low, float high) {
  if (p.fixed_d_k) {
    const float bound = bound_of(p.bounds.largest[key], p.bounds.count[key]);
    const int exponent = tile::unit_exponent<tile::kWideBits>(bound);
    const bool none = !(bound < INFINITY);
    int64_t* to = p.fixed_d_k + int64_t{key} * p.columns + column;
    if (none) return;
    arch::red_add(to, tile::to_wide_fixed(low, tile::wide_power_of_two(exponent)));
    if (column + 1 < p.columns) arch::red_add(to + 1, tile::to_wide_fixed(high, tile::wide_power_of_two(exponent)));
    return;
  }
  float* to = p.d_k + key * p.d_k_stride + column;
#if HOPWELL_HAS_SM90
  if (p.d_k_in_pairs && column + 1 < p.columns) return arch::red_add_v2(to, low, high);
#endif
  arch::red_add(to, low);
  if (column + 1 < p.columns) arch::red_add(to + 1, high);
}

// dk of 16 entries, half of the columns.
template <class T>
HOPWELL_DEVICE void add_d_k(const Params<T>& p, const GradientStorage<T>& s, const EntryPair& entries, int heads) {
  const int lane = arch::lane_index(), first_entry = arch::warp_index() % 2 * 16;
  const int side = arch::warp_index() / 2;
  uint32_t a[4][4];
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step)
    if (16 * step < heads)
      arch::ldmatrix(a[step],
                     arch::shared_address(s.positive) + positive_at(first_entry + lane % 16, 2 * step + lane / 16));
  const uint32_t offset = lane_offset();
  HOPWELL_UNROLL
  for (int block = 0; block < kColumnBlocks; ++block) {
    if (block >= p.column_blocks) break;
    float d[2][4] = {};
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step)
      if (16 * step < heads) multiply_by_columns(d, a[step], s.weighted_q, offset, step, 2 * block + side);
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (entries.keys[half] < 0) continue;
      const float g = entries.g[half];
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int at = 32 * block + 16 * side + 8 * i + tile::fragment_column();
        if (at < p.columns) add_to_key(p, entries.keys[half], at, g * d[i][2 * half], g * d[i][2 * half + 1]);
      }
    }
  }
}

// dq of this warp's 16 heads, before multiplication by their weights.
template <class T>
HOPWELL_DEVICE void add_d_q(const Params<T>& p, const GradientStorage<T>& s, float (&d_q)[kColumnBlocks * 2][2][4]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const uint32_t offset = lane_offset();
  HOPWELL_UNROLL
  for (int step = 0; step < GradientConfig::kEntries / 16; ++step) {
    uint32_t a[4];  // heads × entries: transposed from [entry][head]
    arch::ldmatrix<arch::Transpose::yes>(
        a,
        arch::shared_address(s.positive) + positive_at(16 * step + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
    HOPWELL_UNROLL
    for (int i = 0; i < kColumnBlocks * 2; ++i)
      if (i < 2 * p.column_blocks) multiply_by_columns(d_q[i], a, s.weighted_keys, offset, step, i);
  }
}

template <class T>
HOPWELL_DEVICE void store_d_q(const Params<T>& p, const GradientStorage<T>& s, int query, int first,
                              const float (&d_q)[kColumnBlocks * 2][2][4]) {
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * arch::warp_index() + 8 * half + tile::fragment_row(), head = first + row;
    if (head >= p.heads) continue;
    T* to = p.d_q + query * p.d_q_stride_s + head * p.d_q_stride_h;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumnBlocks * 8; ++i) {
      const int column = i / 2 * 8 + tile::fragment_column() + i % 2;
      const float sum = d_q[i / 4][i / 2 % 2][2 * half + i % 2];
      if (column < p.columns) tile::from_fp32(weighted(s.weights[row], sum), to + column);
    }
  }
}

// Sums dw over the lanes with other entries, then over two warps.
template <class T>
HOPWELL_DEVICE void store_d_weights(const Params<T>& p, GradientStorage<T>& s, int query, int first,
                                    const float (&d_weights)[4][2]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (first + warp / 2 * 32 + i / 2 * 8 >= p.heads) break;
    const float sum = tile::sum_of_column(d_weights[i / 2][i % 2]);
    if (lane < 4) s.d_weights[warp % 2][warp / 2 * 32 + i / 2 * 8 + 2 * lane + i % 2] = sum;
  }
  arch::syncthreads();
  const int row = arch::thread_index(), head = first + row;
  if (row >= kHeadTile || head >= p.heads) return;
  const float sum = s.d_weights[0][row] + s.d_weights[1][row];
  const int64_t at = query * p.d_weights_stride + head;
  if (p.weights_bf16)
    static_cast<bf16*>(p.d_weights)[at] = arch::to_bf16(sum);
  else
    static_cast<float*>(p.d_weights)[at] = sum;
}

template <class T, bool kRelu>
__global__ void __launch_bounds__(GradientConfig::kThreads)
    lightning_indexer_bwd_gradients_sm80(const __grid_constant__ Params<T> p) {
  auto& s = arch::dynamic_smem<GradientStorage<T>>();
  const int query = arch::block_index(), own = arch::warp_index() % 2 * 16;
  const tile::Entries all = tile::entries_of(p.selection, query);
  for (int first = 0; first < p.heads; first += kHeadTile) {
    const int heads = p.heads - first < kHeadTile ? p.heads - first : kHeadTile;
    const bool has_heads = 16 * arch::warp_index() < heads;
    float d_q[kColumnBlocks * 2][2][4] = {}, d_weights[4][2] = {};
    load_heads(p, s, query, first);
    for (int entry = 0; entry < all.length; entry += GradientConfig::kEntries) {
      const EntryPair entries = load_entries(p, all, query, entry + own);
      find_positive<kRelu>(p, s, entries, heads, d_weights);
      arch::syncthreads();
      add_d_k(p, s, entries, heads);
      if (has_heads) add_d_q(p, s, d_q);
      arch::syncthreads();  // before the next entries overwrite these
    }
    if (has_heads) store_d_q(p, s, query, first, d_q);
    store_d_weights(p, s, query, first, d_weights);
  }
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
