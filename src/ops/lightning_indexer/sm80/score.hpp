// lightning_indexer by mma.sync: the index scores of some queries and all keys; bf16, fp32, or e4m3, which is converted
// to bf16 on loading.
//
//     score[s,t] = k_scale[t] · Σ_j w[s,j] · q_scale[s,j] · relu(q[s,j,:] · k[t,:])        a NaN becomes −inf
//
// or, without relu, of the products themselves.
//
// Tile      a CTA has 256 keys (128 in fp32), whose rows stay in registers as operand A of mma, 32 (16) per warp; and
//           tiles of 64 rows of q: the heads of one or several queries, or 64 heads of a query with more heads
// Roles     eight warps, each with its own keys; all of them copy q, into three stages (two in fp32)
// Timeline  copies  q1 ▓▓▓▓▓▓▓▓▓▓ q2 ▓▓▓▓▓▓▓▓▓▓▓▓ q3 ▓▓▓▓▓▓
//           warps   k │ q0: mma ▓▓▓ relu, sums ▓ │ q1 …             one barrier per tile of q
// Sums      first over the heads in a lane, then over the quad: in a fixed order
// Budget    shared: stages of 64 × 256 B per bf16 split term + 320 B, and 128 B: 50,304 B (bf16), 99,072 B (fp32)
//           registers: keys 64 of 128 (96 of 255)
// Bound     tensor cores: 2 · h_index · d_index operations per query and key
#pragma once

#include <type_traits>

#include "arch/sm80/async_copy.hpp"
#include "ops/lightning_indexer/score_task.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/mma_tile.hpp"
#include "tile/gpu/row_major.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

using tile::Chunk, tile::kColumnBlocks, tile::kHeadTile, tile::kSplitTerms, tile::MmaRows;

struct ScoreConfig {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
};
template <class T>
constexpr int kStages = sizeof(T) <= 2 ? 3 : 2;
template <class T>
constexpr int kTilesM = sizeof(T) <= 2 ? 2 : 1;  // 16-key tiles per warp
template <class T>
constexpr int kKeysOfCta = 16 * kTilesM<T> * ScoreConfig::kWarps;

template <class T>
struct ScoreParams : ScoreTask {
  tile::RowMajor<T> q, k;
  int64_t q_stride;  // query stride
  int column_blocks;
};

template <class T>
struct ScoreStorage {
  tile::MmaTile<kSplitTerms<T>, kHeadTile> q[kStages<T>];
  alignas(16) float weights[kStages<T>][kHeadTile];
  Span visible[kStages<T>][kHeadTile / 8];  // per query
  Span of_warp[2][ScoreConfig::kWarps];
};
static_assert(sizeof(ScoreStorage<float>) <= 99 * 1024);

template <class T>
HOPWELL_DEVICE KeyRow<T> row_of_key(const ScoreParams<T>& p, int key) {
  return {p.k.data + key * p.k.stride, key < p.s_kv};
}

// Copies consecutive tiles of q: a thread copies every fourth chunk of one row, and loads the row's weight or the
// visible keys of its query.
template <class T>
struct QueryLoader {
  int row, query_of_tile;
  int query, head, tile_of_query = 0;  // of the next tile

  // Starts at the first tile of a query.
  HOPWELL_DEVICE QueryLoader(const ScoreParams<T>& p, int first_tile) : row(arch::thread_index() / 4) {
    query_of_tile = row / p.padded_heads;
    query = first_tile / p.tiles_per_query * p.queries_per_tile + query_of_tile;
    head = row - query_of_tile * p.padded_heads;
  }

  template <class Params>
  HOPWELL_DEVICE void copy(const Params& p, ScoreStorage<T>& s, int stage) {
    const int quarter = arch::thread_index() % 4;
    const bool has_query = query_of_tile < p.queries_per_tile && query < p.queries,
               exists = has_query && head < p.heads;
    const int64_t at = p.first_query + query;
    const T* from = p.q.data + (exists ? at * p.q_stride + head * p.q.stride : 0);
    const auto copy_chunk = [&](int number) {
      if (sizeof(T) == 2 && p.q.in_chunks) {
        const bool wanted = exists && 8 * number < p.q.columns;
        arch::cp_async(s.q[stage].address(0) + tile::chunk_offset(uint32_t(row), uint32_t(number)),
                       from + (wanted ? 8 * number : 0), wanted ? 16 : 0);
      } else {
        s.q[stage].store(row, number, exists ? p.q.chunk(from, 8 * number) : Chunk<kSplitTerms<T>>{});
      }
    };
    if constexpr (sizeof(T) == 1) {  // unrolled, the decoding spills registers
      HOPWELL_NO_UNROLL
      for (int block = 0; block < p.column_blocks; ++block) copy_chunk(4 * block + quarter);
    } else {
      HOPWELL_UNROLL
      for (int block = 0; block < kColumnBlocks; ++block) {
        if (block >= p.column_blocks) break;
        copy_chunk(4 * block + quarter);
      }
    }
    if (quarter == 0) s.weights[stage][row] = exists ? weight_of<T>(p, at, head) : 0;
    if (quarter == 1 && row % p.padded_heads == 0 && query_of_tile < p.queries_per_tile)
      s.visible[stage][query_of_tile] = has_query ? visible_to(p, query) : Span{};
    advance(p);
  }

 private:
  HOPWELL_DEVICE void advance(const ScoreParams<T>& p) {
    head += kHeadTile;
    if (++tile_of_query < p.tiles_per_query) return;
    head -= p.tiles_per_query * kHeadTile, tile_of_query = 0;
    query += p.queries_per_tile;
  }
};

// Loads this lane's keys.
template <class T, class Params>
HOPWELL_DEVICE void load_keys(const Params& p, int first, MmaRows<kSplitTerms<T>> (&keys)[kTilesM<T>]) {
  const int g = tile::fragment_row(), t = tile::quad_lane();
  HOPWELL_UNROLL
  for (int m = 0; m < kTilesM<T>; ++m) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const KeyRow<T> row = row_of_key(p, first + 16 * m + 8 * half + g);
      HOPWELL_UNROLL
      for (int block = 0; block < kColumnBlocks; ++block)
        keys[m].chunk[block][half] =
            row.exists && block < p.column_blocks ? p.k.chunk(row.data, 32 * block + 8 * t) : Chunk<kSplitTerms<T>>{};
    }
  }
}

// Adds rows of a tile from `row` on (8 kN heads of one query) to the scores of this lane's keys. Only `heads` of the
// rows are not padding.
template <bool kWhole, bool kRelu, int kN, class T>
HOPWELL_DEVICE void add_heads(const ScoreParams<T>& p, const ScoreStorage<T>& s, int stage, int row, int heads,
                              const MmaRows<kSplitTerms<T>> (&keys)[kTilesM<T>], float (&sums)[kTilesM<T>][2]) {
  float d[kN][kTilesM<T>][4] = {};
  tile::multiply<kWhole>(d, keys, s.q[stage], row, p.column_blocks);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * kN; ++i) {
    const int column = i / 2 * 8 + tile::fragment_column() + i % 2;
    const float weight = s.weights[stage][row + column];
    if (heads < 8 * kN && column >= heads) continue;  // the product of a padding head may be NaN
    HOPWELL_UNROLL
    for (int j = 0; j < 2 * kTilesM<T>; ++j) {
      const float product = d[i / 2][j / 2][j % 2 * 2 + i % 2];
      sums[j / 2][j % 2] += weight * (kRelu ? tile::relu(product) : product);
    }
  }
}

// Lane t of a quad stores the scores of a key; `scale` is that key's scale. The score of a key that does not exist is
// absent_score().
template <class T>
HOPWELL_DEVICE void store_scores(const ScoreParams<T>& p, int query, int first_key, float scale, bool exists,
                                 const float (&sums)[kTilesM<T>][2]) {
  const int g = tile::fragment_row(), t = tile::quad_lane();
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * kTilesM<T>; ++i) {
    const float sum = tile::sum_of_quad(sums[i / 2][i % 2]);
    const int key = first_key + 8 * i + g;
    if (i == t && key < p.s_kv)
      p.scores[query * p.pitch + key] = exists ? tile::index_score(sum * scale) : absent_score();
  }
}

// Scores of the keys of a part and the queries of its tiles. kWhole: d_index > 96. Params: a type or a
// reference; see the kernel.
template <bool kWhole, bool kRelu, class T, class Params>
HOPWELL_DEVICE void score_part(Params p, ScoreStorage<T>& s, const ScorePart part) {
  const int first_key = part.first_key + arch::warp_index() * 16 * kTilesM<T>;
  const auto [first, end] = part.tiles;
  if (first >= end) return;
  QueryLoader<T> loader(p, first);
  for (int i = 0; i < kStages<T> - 1; ++i) {
    if (first + i < end) loader.copy(p, s, i);
    arch::cp_async_commit();
  }
  MmaRows<kSplitTerms<T>> keys[kTilesM<T>];
  load_keys<T>(p, first_key, keys);
  const int stored_key = first_key + 8 * tile::quad_lane() + tile::fragment_row();
  const float scale = scale_of_key<T>(p, stored_key);
  const bool exists = has_key(p, stored_key);
  float sums[kTilesM<T>][2] = {};
  int query = first / p.tiles_per_query * p.queries_per_tile, head_tile = 0;  // of this tile
  for (int number = first, stage = 0; number < end; ++number) {
    arch::cp_async_wait<kStages<T> - 2>();
    arch::syncthreads();
    const int ahead = (stage + kStages<T> - 1) % kStages<T>;
    if (number + kStages<T> - 1 < end) loader.copy(p, s, ahead);
    arch::cp_async_commit();
    const int left = p.heads - head_tile * kHeadTile, heads = left < kHeadTile ? left : kHeadTile;
    for (int i = 0; i < p.queries_per_tile && query + i < p.queries; ++i) {
      if (!s.visible[stage][i].overlaps(first_key, 16 * kTilesM<T>)) continue;
      int head = 0;
      for (; heads - head > 8; head += 16)
        add_heads<kWhole, kRelu, 2>(p, s, stage, i * p.padded_heads + head, heads - head, keys, sums);
      if (head < heads) add_heads<kWhole, kRelu, 1>(p, s, stage, i * p.padded_heads + head, heads - head, keys, sums);
      if (head_tile + 1 < p.tiles_per_query) continue;
      store_scores<T>(p, query + i, first_key, scale, exists, sums);
      HOPWELL_UNROLL
      for (auto& of_keys : sums) of_keys[0] = of_keys[1] = 0;
    }
    if (++head_tile == p.tiles_per_query) head_tile = 0, query += p.queries_per_tile;
    stage = stage + 1 == kStages<T> ? 0 : stage + 1;
  }
}

template <bool kWhole, bool kRelu, class T>
__global__ void __launch_bounds__(ScoreConfig::kThreads, sizeof(T) <= 2 ? 2 : 1)
    lightning_indexer_score_sm80(const __grid_constant__ ScoreParams<T> p) {
  auto& s = arch::dynamic_smem<ScoreStorage<T>>();
  const auto groups_per_slice = [&](int blocks, int groups) { return mma_groups_per_slice(blocks, groups, p.sms); };
  const ScorePart part =
      p.masked ? visible_part_of_grid<kKeysOfCta<T>>(p, s.of_warp, groups_per_slice) : part_of_grid<kKeysOfCta<T>>(p);
  // nvcc 13.0 spills registers with bf16 if the parameters are passed by reference, and with fp8 if by value.
  using Passed = std::conditional_t<sizeof(T) == 2, ScoreParams<T>, const ScoreParams<T>&>;
  score_part<kWhole, kRelu, T, Passed>(p, s, part);
}

// Without relu, which is rare, only the variant for any d_index is compiled.
template <class T>
auto kernel_for(const ScoreParams<T>& p, bool relu) {
  if (!relu) return lightning_indexer_score_sm80<false, false, T>;
  return p.column_blocks == kColumnBlocks ? lightning_indexer_score_sm80<true, true, T>
                                          : lightning_indexer_score_sm80<false, true, T>;
}

// Scores of `count` queries from `first` on.
template <class T>
void launch_score(const Problem& problem, void* workspace, std::int64_t first, std::int64_t count, Stream stream) {
  const ScorePlan plan = plan_mma_score(problem, count, kKeysOfCta<T>);
  ScoreParams<T> p{score_task(problem, plan, workspace, first, count)};
  p.q = tile::row_major<T>(problem.q, 2), p.k = tile::row_major<T>(problem.k, 1);
  p.q_stride = problem.q.stride[0];
  p.column_blocks = static_cast<int>((problem.d_index + tile::kBlockColumns - 1) / tile::kBlockColumns);
  runtime::launch(kName, kernel_for(p, problem.relu),
                  runtime::shape_of_ctas(plan.key_blocks * plan.slices, ScoreConfig::kThreads, sizeof(ScoreStorage<T>)),
                  stream, p);
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
