// lightning_indexer on GPUs: the index scores of some queries against all keys.
//
//     score[s,t] = Σ_j w[s,j] · relu(q[s,j,:] · k[t,:])        a NaN becomes −inf
//
// Tile      256 keys (128 in fp32) a CTA, whose rows stay in registers as mma's A, 32 (16) a warp; against 64 rows of q
//           at a time, an item: the heads of one or several queries, or of more heads a part
// Roles     eight warps, each with keys of its own; all of them bring q in, three items in turn (two in fp32)
// Timeline  copies  item 1 ▓▓▓▓▓▓▓▓▓▓ item 2 ▓▓▓▓▓▓▓▓▓▓▓▓ item 3 ▓▓▓▓▓▓
//           warps   k │ item 0: mma ▓▓▓ relu, weigh ▓ │ item 1 …             one barrier an item
// Sums      over the heads in a lane first, then over the quad: always in the same order
// Budget    shared: items of 64 × 256 B a limb + 288 B, 50,048 B (bf16), 98,944 B (fp32); registers: keys 64 of 128 (96 of 255)
// Bound     tensor cores: 2 · h_index · d_index operations a query and key
#pragma once

#include "ops/lightning_indexer/sm80_operands.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

struct ScoreConfig {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
};
template <class T>
constexpr int kStages = sizeof(T) == 2 ? 3 : 2;
template <class T>
constexpr int kTilesOfWarp = sizeof(T) == 2 ? 2 : 1;  // of 16 keys
template <class T>
constexpr int kKeysOfCta = 16 * kTilesOfWarp<T> * ScoreConfig::kWarps;

template <class T>
struct ScoreParams {
  Rows<T> q, k;
  int64_t q_stride;  // from query to query
  const void* weights;
  int64_t weights_stride;
  bool weights_bf16;
  Causality causality;
  float* scores;  // [queries, pitch]
  int64_t first_query, pitch;
  int queries, heads, s_kv;
  int padded_heads;            // of a query in an item: a multiple of 8
  int queries_of_item, parts;  // a query with more than 64 heads has several parts
  int items, items_of_slice;   // items of all queries; of a CTA
  int chunks;
};

template <class T>
struct ScoreStorage {
  Tile<kLimbs<T>, kHeads> q[kStages<T>];
  alignas(16) float weights[kStages<T>][kHeads];
  int visible[kStages<T>][kHeads / 8];
};
static_assert(sizeof(ScoreStorage<float>) <= 99 * 1024);

// Brings items in, one after another: a thread every fourth piece of one row of q, and there its weight or what its query
// sees.
template <class T>
struct Supplier {
  int row, of_item;           // which of the item's queries
  int query, head, part = 0;  // of the next item

  // Items from the first part of a query on.
  HOPWELL_DEVICE Supplier(const ScoreParams<T>& p, int first_item) : row(arch::thread_index() / 4) {
    of_item = row / p.padded_heads;
    query = first_item / p.parts * p.queries_of_item + of_item;
    head = row - of_item * p.padded_heads;
  }

  HOPWELL_DEVICE void fetch(const ScoreParams<T>& p, ScoreStorage<T>& s, int stage) {
    const int quarter = arch::thread_index() % 4;
    const bool has_query = of_item < p.queries_of_item && query < p.queries, exists = has_query && head < p.heads;
    const int64_t at = p.first_query + query;
    const T* from = p.q.data + (exists ? at * p.q_stride + head * p.q.stride : 0);
    HOPWELL_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int number = 4 * chunk + quarter;
      if (chunk >= p.chunks) break;
      if (sizeof(T) == 2 && p.q.in_pieces) {
        const bool wanted = exists && 8 * number < p.q.columns;
        arch::cp_async(s.q[stage].address(0) + piece_at(uint32_t(row), uint32_t(number)),
                       from + (wanted ? 8 * number : 0), wanted ? 16 : 0);
      } else {
        s.q[stage].store(row, number, exists ? p.q.piece(from, 8 * number) : Piece<kLimbs<T>>{});
      }
    }
    if (quarter == 0)
      s.weights[stage][row] = exists ? load_weight(p.weights, p.weights_bf16, at * p.weights_stride + head) : 0;
    if (quarter == 1 && row % p.padded_heads == 0 && of_item < p.queries_of_item)
      s.visible[stage][of_item] = has_query ? int(p.causality.visible_keys(at, p.s_kv)) : 0;
    advance(p);
  }

 private:
  HOPWELL_DEVICE void advance(const ScoreParams<T>& p) {
    head += kHeads;
    if (++part < p.parts) return;
    head -= p.parts * kHeads, part = 0;
    query += p.queries_of_item;
  }
};

// This lane's keys.
template <class T>
HOPWELL_DEVICE void load_keys(const ScoreParams<T>& p, int first, Operand<kLimbs<T>> (&keys)[kTilesOfWarp<T>]) {
  const int g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  HOPWELL_UNROLL
  for (int tile = 0; tile < kTilesOfWarp<T>; ++tile) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = first + 16 * tile + 8 * half + g;
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk)
        keys[tile].piece[chunk][half] = key < p.s_kv && chunk < p.chunks
                                            ? p.k.piece(p.k.data + key * p.k.stride, 32 * chunk + 8 * t)
                                            : Piece<kLimbs<T>>{};
    }
  }
}

// Adds rows of an item from `row` on, kBlocks times 8 heads of one query, to the scores of this lane's keys; of them `heads`
// exist.
template <bool kWhole, int kBlocks, class T>
HOPWELL_DEVICE void add_heads(const ScoreParams<T>& p, const ScoreStorage<T>& s, int stage, int row, int heads,
                              const Operand<kLimbs<T>> (&keys)[kTilesOfWarp<T>], float (&sums)[kTilesOfWarp<T>][2]) {
  const int t = arch::lane_index() % 4;
  float d[kBlocks][kTilesOfWarp<T>][4] = {};
  multiply<kWhole>(d, keys, s.q[stage], row, p.chunks);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int column = i / 2 * 8 + 2 * t + i % 2;
    const float weight = s.weights[stage][row + column];
    if (heads < 8 * kBlocks && column >= heads) continue;  // the product of a head that does not exist may be NaN
    HOPWELL_UNROLL
    for (int j = 0; j < 2 * kTilesOfWarp<T>; ++j)
      sums[j / 2][j % 2] += weight * relu(d[i / 2][j / 2][j % 2 * 2 + i % 2]);
  }
}

// Lane t of a quad stores one of its keys' scores.
template <class T>
HOPWELL_DEVICE void store_scores(const ScoreParams<T>& p, int query, int first_key,
                                 const float (&sums)[kTilesOfWarp<T>][2]) {
  const int g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * kTilesOfWarp<T>; ++i) {
    const float sum = tile::sum_of_quad(sums[i / 2][i % 2]);
    const int key = first_key + 8 * i + g;
    if (i == t && key < p.s_kv) p.scores[query * p.pitch + key] = sum == sum ? sum + 0.F : -INFINITY;  // −0 is 0
  }
}

// kWhole: d_index is above 96.
template <bool kWhole, class T>
__global__ void __launch_bounds__(ScoreConfig::kThreads, sizeof(T) == 2 ? 2 : 1)
    score_keys(const __grid_constant__ ScoreParams<T> p) {
  auto& s = arch::dynamic_smem<ScoreStorage<T>>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int first_key = cta.x * kKeysOfCta<T> + arch::warp_index() * 16 * kTilesOfWarp<T>;
  const int first = cta.y * p.items_of_slice;
  const int end = first + p.items_of_slice < p.items ? first + p.items_of_slice : p.items;
  Supplier<T> supplier(p, first);
  for (int i = 0; i < kStages<T> - 1; ++i) {
    if (first + i < end) supplier.fetch(p, s, i);
    arch::cp_async_commit();
  }
  Operand<kLimbs<T>> keys[kTilesOfWarp<T>];
  load_keys(p, first_key, keys);
  float sums[kTilesOfWarp<T>][2] = {};
  int query = first / p.parts * p.queries_of_item, part = 0;  // of this item
  for (int item = first, stage = 0; item < end; ++item) {
    arch::cp_async_wait<kStages<T> - 2>();
    arch::syncthreads();
    const int ahead = (stage + kStages<T> - 1) % kStages<T>;
    if (item + kStages<T> - 1 < end) supplier.fetch(p, s, ahead);
    arch::cp_async_commit();
    const int heads = p.heads - part * kHeads < kHeads ? p.heads - part * kHeads : kHeads;
    for (int i = 0; i < p.queries_of_item && query + i < p.queries; ++i) {
      if (first_key >= s.visible[stage][i]) continue;
      int head = 0;
      for (; heads - head > 8; head += 16)
        add_heads<kWhole, 2>(p, s, stage, i * p.padded_heads + head, heads - head, keys, sums);
      if (head < heads) add_heads<kWhole, 1>(p, s, stage, i * p.padded_heads + head, heads - head, keys, sums);
      if (part + 1 < p.parts) continue;
      store_scores(p, query + i, first_key, sums);
      HOPWELL_UNROLL
      for (auto& tile : sums) tile[0] = tile[1] = 0;
    }
    if (++part == p.parts) part = 0, query += p.queries_of_item;
    stage = stage + 1 == kStages<T> ? 0 : stage + 1;
  }
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
