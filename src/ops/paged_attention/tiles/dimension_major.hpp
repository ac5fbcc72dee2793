// paged_attention on the CUDA cores: the tile for layout vllm, whose keys are split into columns of 16 bytes and whose
// values are transposed.
//
// Tile      a lane has 8 columns of one key, and 8 chunks of V: 8 consecutive tokens (fp32: 4) of one dimension each
// Roles     all warps are alike: each copies and multiplies its own tiles
// Sums      a lane has most or all of a logit. The outputs are summed over the lanes with other tokens at the end of a
//           segment
#pragma once

#include "ops/paged_attention/gpu/merge.hpp"
#include "ops/paged_attention/tiles/cuda_core_stage.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

template <class T>
struct DimensionMajorTile : WholeTileStep<DimensionMajorTile<T>, stages_of(8), false> {
  using Type = T;
  using Stage = CudaCoreStage<8, 0>;
  using Partial = WarpPartial<256, 1>;
  static constexpr bool kStoresResults = false, kRegistersAreScarce = false, kInterleavesHeads = false;
  static constexpr int kLaneBytes = 16;  // from one lane's chunks to the next one's
  static constexpr int kLaneChunks = 8;
  static constexpr uint32_t kOffsetV = Stage::kOffsetV;
  static constexpr int kTokens = kElements<T>, kDims = kLaneChunks * kElements<T>;
  static constexpr int kKeysOfLookup = 1;

  static constexpr int head = 0, row = 0;
  int first_key, first_chunk, groups;  // groups: chunks of tokens in a tile
  int first_dim, next_dim;             // first dimension of the lane's chunks of V; distance to the next
  float q[kDims], out[kLaneChunks];
  RunningSoftmax softmax;

  HOPWELL_DEVICE explicit DimensionMajorTile(const Params& p) : groups(p.schedule.tile / kTokens) {
    const int lane = arch::lane_index();  // tile and groups are powers of two, lanes · tile is 32
    first_key = lane & (p.schedule.tile - 1), first_chunk = (lane - first_key) * p.schedule.lanes / 32 * kLaneChunks;
    next_dim = p.schedule.lanes * kTokens, first_dim = (lane - (lane & (groups - 1))) * next_dim / 32;
  }
  HOPWELL_DEVICE int token() const { return (arch::lane_index() & (groups - 1)) * kTokens; }  // the lane's first token
  HOPWELL_DEVICE int dimension(int i) const { return i * next_dim + first_dim; }

  HOPWELL_DEVICE CopySource copy_source(const Params& p, const QueryVector& vector) const {
    return copy_source_of(p, vector, sizeof(T), int64_t{first_chunk} * p.cache.k_group,
                          int64_t{first_dim} * p.cache.v_group, 0);
  }
  HOPWELL_DEVICE void copy(const Params& p, const CopySource& source, const KeyTile& tile, Stage& to, uint32_t address,
                           int) const {
    const int lane = arch::lane_index(), key = tile.key + first_key;
    const QueryVector& vector = source.vector;
    const Cache& cache = p.cache;
    const bool visible = key >= vector.visible.begin && key < vector.visible.end && tile.page >= 0;
    const int page_of_values = arch::shuffle(tile.page, token());
    if (cache.scattered) {
      copy_scattered(p, vector, tile, visible, to);
    } else {
      const int first = tile.key + token();
      int tokens = larger(0, smaller(vector.visible.end - first, kTokens));
      if (page_of_values < 0 || first + kTokens <= vector.visible.begin) tokens = 0;
      const int64_t k_page = visible ? tile.page : 0, v_page = tokens ? page_of_values : 0;
      const char* k = source.k + k_page * cache.k_page + int64_t{visible ? key % cache.block : 0} * cache.k_slot;
      const char* v = source.v + v_page * cache.v_page + int64_t{tokens ? first % cache.block : 0} * cache.v_slot;
      const int chunks = visible ? p.query.d / kElements<T> - first_chunk : 0;  // this lane's chunks within d, or more
      const int limit = tokens ? p.query.d - first_dim : 0, v_step = next_dim * cache.v_group;
      HOPWELL_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        arch::cp_async(address + uint32_t(i * kWarpChunkBytes), k + int64_t{i} * cache.k_group, i < chunks ? 16 : 0);
        arch::cp_async(address + kOffsetV + uint32_t(i * kWarpChunkBytes), v + int64_t{i} * v_step,
                       i * next_dim < limit ? tokens * int(sizeof(T)) : 0);
      }
    }
    const uint32_t half = copy_bias(p.bias, source, key, visible, &to.bias[lane]);
    to.visible[lane] = (visible ? 1 : 0) | half;
  }

  HOPWELL_DEVICE void prefetch_query(const Params&, const QueryVector&) {}  // q does not fit in registers
  HOPWELL_DEVICE void begin_segment(const Params& p, const QueryVector& vector, Partial&, const Stage&) {
    HOPWELL_UNROLL
    for (int first = 0; first < kDims; first += 8) {
      const int element = first_chunk * kElements<T> + first;
      float x[8];
      query_plus<T>(load_q<T, 8>(p, vector, element), load_u<8>(p, vector, element), p.query.u_type, x);
      HOPWELL_UNROLL
      for (int e = 0; e < 8; ++e) q[first + e] = x[e];
    }
    HOPWELL_UNROLL
    for (float& sum : out) sum = 0;
    softmax = {};
  }

  HOPWELL_DEVICE void compute(const Params& p, const QueryVector& vector, int tile_key, Stage& stage,
                              uint32_t address) {
    const int key = tile_key + first_key;
    float logit = multiply(address, q) * p.query.log2_scale;
    if (p.bias.r) logit += multiply_r(p, vector, key);
    for (int mask = p.schedule.tile; mask < 32; mask *= 2) logit += arch::shuffle_xor(logit, mask);
    const bool hidden = finish_logit(p.bias, vector, vector.position - key, stage, logit);
    clear_hidden_values(hidden || key < vector.visible.begin, stage);
    const float maximum = tile::reduce<1, 16>(logit, tile::Larger{});
    float factor, weight[kTokens];
    const float mine = softmax.update(logit, maximum, factor);
    HOPWELL_UNROLL
    for (int t = 0; t < kTokens; ++t) weight[t] = arch::shuffle(mine, token() + t);
    HOPWELL_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      float v[kTokens];
      unpack<T>(arch::load_shared_v4(address + kOffsetV + uint32_t(i * kWarpChunkBytes)), v);
      out[i] *= factor;
      HOPWELL_UNROLL
      for (int t = 0; t < kTokens; ++t) out[i] += weight[t] * v[t];
    }
  }

  HOPWELL_DEVICE void store_partial(const Params&, Partial& to) const {
    float sum = softmax.sum;
    for (int mask = groups * kTokens / 2; mask >= 1; mask /= 2) sum += arch::shuffle_xor(sum, mask);
    HOPWELL_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      float value = out[i];
      for (int mask = groups / 2; mask >= 1; mask /= 2) value += arch::shuffle_xor(value, mask);
      if (token() == 0) to.values[dimension(i)] = value;
    }
    if (arch::lane_index() == 0) to.stats[0] = {softmax.maximum, sum};
  }
  static HOPWELL_DEVICE int pitch() { return 256; }

 private:
  HOPWELL_DEVICE void copy_scattered(const Params& p, const QueryVector& vector, const KeyTile& tile, bool visible,
                                     Stage& to) const {
    const int lane = arch::lane_index(), key = tile.key + first_key;
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      gather_chunk<T>(to.k[i][lane], [&](int e) -> const T* {
        const int element = (first_chunk + i) * kElements<T> + e;
        if (!visible || element >= p.query.d) return nullptr;
        return element_of<T>(p.cache.k, p.cache.k_at, tile.page, vector.kv_head, key % p.cache.block, element);
      });
      gather_chunk<T>(to.v[i][lane], [&](int t) -> const T* {
        const int of = tile.key + token() + t;
        if (of < vector.visible.begin || of >= vector.visible.end || dimension(i) >= p.query.d) return nullptr;
        const int page = p.cache.page_of(vector.sequence, of);
        return page < 0
                   ? nullptr
                   : element_of<T>(p.cache.v, p.cache.v_at, page, vector.kv_head, of % p.cache.block, dimension(i));
      });
    }
  }

  static HOPWELL_DEVICE float multiply(uint32_t rows, const float (&by)[kDims]) {
    float x[kLaneChunks];  // independent sums
    HOPWELL_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      float row[kElements<T>];
      unpack<T>(arch::load_shared_v4(rows + uint32_t(i * kWarpChunkBytes)), row);
      x[i] = 0;
      HOPWELL_UNROLL
      for (int e = 0; e < kElements<T>; ++e) x[i] += by[i * kElements<T> + e] * row[e];
    }
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
  // (q + v)·r. q + v does not fit in registers, so each key reads it from L1.
  HOPWELL_DEVICE float multiply_r(const Params& p, const QueryVector& vector, int key) const {
    const int row = p.bias.r_row_of(vector.position, key), first = first_chunk * kElements<T>;
    if (row < 0 || key > vector.position) return 0;
    float x = 0;
    HOPWELL_NO_UNROLL
    for (int e = first; e < first + kDims && e < p.query.d; e += 8) {
      float query[8], of_r[8] = {};
      query_plus<T>(load_q<T, 8>(p, vector, e), load_v<8>(p, vector, e), p.bias.v_type, query);
      add_elements(load_elements<8>(p.bias.r, p.bias.r_type,
                                    vector.head * p.bias.r_head_stride + row * p.bias.r_stride + e, p.bias.r_aligned),
                   p.bias.r_type, of_r);
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) x += query[i] * of_r[i];
    }
    return x * p.bias.log2_scale;
  }
  // Clears the values of hidden keys that share a chunk with visible keys, because a weight of 0 does not remove NaN.
  HOPWELL_DEVICE void clear_hidden_values(bool hidden, Stage& stage) const {
    const uint32_t keys_hidden = arch::ballot(hidden);
    if (keys_hidden == 0) return;
    const int lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      HOPWELL_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        if (!(keys_hidden >> (token() + t) & 1)) continue;
        if constexpr (sizeof(T) == 4)
          stage.v[i][lane].w[t] = 0;
        else
          stage.v[i][lane].w[t / 2] &= t % 2 ? 0xffff : 0xffff0000;
      }
    }
  }
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
