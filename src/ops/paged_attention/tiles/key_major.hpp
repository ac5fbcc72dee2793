// paged_attention on the CUDA cores: the tile for layouts nhd and hnd, whose keys and values are rows.
//
// Tile      kKeys keys for each group of `lanes` lanes, a power of two, that share a key's row. A lane has one to five
//           8-element vectors of the row (plan.cpp: key_major_shape). The chunks of a row are dealt to the lanes
//           alternately, so that a load of the warp reads contiguous memory: several heads (nhd) or several keys (hnd)
// Roles     all warps are alike: each copies and multiplies its own tiles
// Copies    with one vector a lane, each lane copies its own chunks. Rows of more vectors are packed in a stage, in
//           memory order: a copy of the warp has 512 contiguous bytes, whatever rows they belong to
// Sums      q · k is summed over the lanes by halving, 4 + 2 + 1 exchanges for eight keys. Then each lane has the logit
//           of one key. P·V needs no exchange before the end of a segment
#pragma once

#include "ops/paged_attention/gpu/merge.hpp"
#include "ops/paged_attention/tiles/cuda_core_stage.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

template <class T, int kVectors, int kKeys>
struct KeyMajorSizes {
  static constexpr int kChunksOfVector = 8 / kElements<T>, kChunksOfKey = kVectors * kChunksOfVector;
  static constexpr bool kPacked = kVectors > 1;
  // Rows of 32 chunks in a stage. Packed rows with two vectors a lane have four lanes a key, and the last lane lacks a
  // vector.
  static constexpr int kRows = kKeys * kChunksOfKey - (kPacked && kVectors % 2 == 0 ? kKeys * kChunksOfVector / 4 : 0);
  // With two or three vectors a lane, packed rows are slower with a third stage. Four vectors were not measured.
  static constexpr int kRingStages = kVectors == 2 || kVectors == 3 ? 2 : stages_of(kRows);
};
template <class T, int kVectors, int kTheKeys, bool kFused>
struct KeyMajorTile : KeyMajorSizes<T, kVectors, kTheKeys>,
                      WholeTileStep<KeyMajorTile<T, kVectors, kTheKeys, kFused>,
                                    KeyMajorSizes<T, kVectors, kTheKeys>::kRingStages, (kVectors > 1)> {
  using Type = T;
  using Sizes = KeyMajorSizes<T, kVectors, kTheKeys>;
  using Sizes::kChunksOfKey, Sizes::kPacked, Sizes::kRows;
  static constexpr int kKeys = kTheKeys, kLaneChunks = kKeys * kChunksOfKey;
  static constexpr int kDims = 8 * kVectors;  // dimensions of a lane
  static constexpr int kHeld = kVectors;      // vectors of the row block's next queries that a lane holds
  using Stage = CudaCoreStage<kRows, kFused ? kRows : 0>;
  using Partial = WarpPartial<256 * kVectors, kMaxJoinedHeads>;
  static constexpr bool kStoresResults = false, kRegistersAreScarce = false, kInterleavesHeads = false;
  static constexpr int kLaneBytes = kPacked ? 0 : 16;  // from one lane's chunks to the next one's
  static constexpr int kKeysOfLookup = kKeys;  // a lane's keys share a page, because the first is a multiple of kKeys

  static constexpr int row = 0;  // row blocks have one query
  int lanes, place, head, first_key;
  int chunks;          // the lane's chunks of a key that lie within d
  int copies, my_key;  // lanes that get the logit of the same key; this key, among the lane's keys
  // Packed: chunks of a key's rows; 2^16 / row_chunks; the lane's first chunk; keys that certainly share a page.
  int row_chunks, reciprocal, own, page_keys;
  float q[kDims], qv[kFused ? kDims : 1], out[kDims];
  RawElements raw[kHeld];
  RunningSoftmax softmax;

  HOPWELL_DEVICE explicit KeyMajorTile(const Params& p) : lanes(p.schedule.lanes), copies(lanes / kKeys) {
    const int lane = arch::lane_index(), head_and_keys = lane / p.schedule.lanes;
    place = lane - head_and_keys * lanes;
    my_key = place / copies;
    head = head_and_keys % p.schedule.heads, first_key = head_and_keys / p.schedule.heads * kKeys;
    chunks = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kChunksOfKey; ++i) chunks += dimension(i) < p.query.d ? 1 : 0;
    if constexpr (kPacked) {
      const int of_head = p.query.d / kElements<T>;
      row_chunks = p.schedule.heads * of_head;
      reciprocal = (row_chunks + 0xffff) / row_chunks;  // exact for the chunks of a stage: below 2^16 / row_chunks
      own = first_key * row_chunks + head * of_head + place;
      page_keys = kKeys;  // tiles begin with a multiple of 16 or of their own keys
      while (page_keys < smaller(16, p.schedule.tile) && p.cache.block % (2 * page_keys) == 0) page_keys *= 2;
    }
  }
  // First dimension of a chunk of the lane.
  HOPWELL_DEVICE int dimension(int chunk) const { return (chunk * lanes + place) * kElements<T>; }

  HOPWELL_DEVICE CopySource copy_source(const Params& p, const QueryVector& vector) const {
    if constexpr (kPacked) {
      const int offset = -head * p.query.d * int(sizeof(T));  // back to the row block's first head
      return copy_source_of(p, vector, sizeof(T), offset, offset, 0);
    }
    return copy_source_of(p, vector, sizeof(T), 16 * place, 16 * place, dimension(0));
  }
  HOPWELL_DEVICE void copy(const Params& p, const CopySource& source, const KeyTile& tile, Stage& to, uint32_t address,
                           int) const {
    const int lane = arch::lane_index(), key = tile.key + first_key;
    const QueryVector& vector = source.vector;
    const Cache& cache = p.cache;
    uint32_t seen = first_bits(vector.visible.end - key, kKeys) & ~first_bits(vector.visible.begin - key, kKeys);
    if (cache.scattered) {
      copy_scattered(p, vector, key, seen, to);
    } else {
      if (tile.page < 0) seen = 0;
      if constexpr (kPacked) {
        if (lanes * p.schedule.heads == 32)
          copy_joined(p, source, tile, seen, address);
        else
          copy_packed(p, source, tile, address);
      } else {
        const int64_t page = seen ? tile.page : 0, slot = seen ? key % cache.block : 0;
        copy_chunks(source.k + page * cache.k_page + slot * cache.k_slot, cache.k_slot, seen, address);
        copy_chunks(source.v + page * cache.v_page + slot * cache.v_slot, cache.v_slot, seen,
                    address + Stage::kOffsetV);
      }
    }
    const bool visible = seen >> my_key & 1;
    const uint32_t half = copy_bias(p.bias, source, key + my_key, visible, &to.bias[lane]);
    to.visible[lane] = (visible ? 1 : 0) | half;
    if constexpr (kFused)
      if (!p.bias.r_direct) copy_r(p, source, key, seen, address);
  }

  HOPWELL_DEVICE void prefetch_query(const Params& p, const QueryVector& vector) {
    HOPWELL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const HeldVector held(p, *this, vector, i);
      raw[i] = held.exists ? load_q<T, 8>(p, held.vector, held.element) : RawElements{};
    }
  }
  HOPWELL_DEVICE void begin_segment(const Params& p, const QueryVector& vector, Partial& partial, const Stage&) {
    deal_query(p, vector, partial, q, p.query.u_type, load_u<8>);
    if constexpr (kFused) deal_query(p, vector, partial, qv, p.bias.v_type, load_v<8>);
    HOPWELL_UNROLL
    for (float& sum : out) sum = 0;
    softmax = {};
  }

  HOPWELL_DEVICE void compute(const Params& p, const QueryVector& vector, int tile_key, Stage& stage,
                              uint32_t address) {
    const int lane = arch::lane_index(), first = tile_key + first_key;
    float x[kKeys];
    HOPWELL_UNROLL
    for (int j = 0; j < kKeys; ++j) x[j] = 0;
    multiply(address, q, x);
    if constexpr (kFused) {
      if (p.bias.post_scale) {
        HOPWELL_UNROLL
        for (float& content : x) content *= p.bias.scale;
      }
      if (p.bias.r_direct)
        multiply_r(p, vector, first, x);
      else
        multiply(address + Stage::kOffsetR, qv, x);
    }
    float logit = sum_over_lanes(x) * (kFused ? p.bias.log2_scale : p.query.log2_scale);
    const bool hidden = finish_logit(p.bias, vector, vector.position - first - my_key, stage, logit);
    if (p.bias.exists()) clear_hidden_values(hidden, stage);
    float maximum = logit;
    HOPWELL_UNROLL
    for (int keys = kKeys, mask = lanes / 2; keys > 1; keys /= 2, mask /= 2)
      maximum = fmaxf(maximum, arch::shuffle_xor(maximum, mask));
    float factor;
    const float mine = softmax.update(logit, maximum, factor);
    HOPWELL_UNROLL
    for (float& sum : out) sum *= factor;
    HOPWELL_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const float weight = arch::shuffle(mine, (lane & -lanes) + j * copies);
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < kChunksOfKey; ++chunk) {
        float v[kElements<T>];
        unpack<T>(load_chunk(address + Stage::kOffsetV, j, chunk), v);
        HOPWELL_UNROLL
        for (int e = 0; e < kElements<T>; ++e) out[chunk * kElements<T> + e] += weight * v[e];
      }
    }
  }

  HOPWELL_DEVICE void store_partial(const Params& p, Partial& to) const {
    RowStats stats{softmax.maximum, softmax.sum};
    float value[kDims];
    HOPWELL_UNROLL
    for (int e = 0; e < kDims; ++e) value[e] = out[e];
    HOPWELL_UNROLL
    for (int keys = kKeys, mask = lanes / 2; keys > 1; keys /= 2, mask /= 2)
      stats.sum += arch::shuffle_xor(stats.sum, mask);
    for (int mask = lanes * p.schedule.heads; mask < 32; mask *= 2) {  // lanes with other keys of the same head
      const float maximum = fmaxf(stats.maximum, arch::shuffle_xor(stats.maximum, mask));
      const float weight = arch::exp2_approx(stats.maximum - tile::finite_row_max(maximum));
      stats.maximum = maximum, stats.sum *= weight;
      stats.sum += arch::shuffle_xor(stats.sum, mask);
      HOPWELL_UNROLL
      for (float& sum : value) {
        sum *= weight;
        sum += arch::shuffle_xor(sum, mask);
      }
    }
    if (first_key > 0) return;
    HOPWELL_UNROLL
    for (int i = 0; i < kChunksOfKey; ++i)
      for (int e = 0; e < kElements<T>; ++e) to.values[head * pitch() + dimension(i) + e] = value[i * kElements<T> + e];
    if (place == 0) to.stats[head] = stats;
  }
  HOPWELL_DEVICE int pitch() const { return lanes * kDims; }

 private:
  struct HeldVector {
    QueryVector vector;
    int element, at;  // index in the row; index in a partial result, where the rows have the layout of values
    bool exists;
    HOPWELL_DEVICE HeldVector(const Params& p, const KeyMajorTile& tile, const QueryVector& of_lane, int i)
        : vector(of_lane) {
      const int index = arch::lane_index() + 32 * i, of_head = index / kVectors / p.schedule.lanes;
      vector.head += (of_head - tile.head) * p.query.group;
      at = 8 * index, element = at - of_head * tile.pitch(), exists = of_head < p.schedule.heads;
    }
  };
  // Distributes q + other to the lanes, through the partial result's memory.
  template <class LoadOther>
  HOPWELL_DEVICE void deal_query(const Params& p, const QueryVector& vector, Partial& partial, float (&to)[kDims],
                                 Float type, const LoadOther& load_other) const {
    HOPWELL_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const HeldVector held(p, *this, vector, i);
      if (!held.exists) continue;
      float x[8];
      query_plus<T>(raw[i], load_other(p, held.vector, held.element), type, x);
      HOPWELL_UNROLL
      for (int e = 0; e < 8; ++e) partial.values[held.at + e] = x[e];
    }
    arch::syncwarp();
    HOPWELL_UNROLL
    for (int i = 0; i < kChunksOfKey; ++i)
      for (int e = 0; e < kElements<T>; ++e)
        to[i * kElements<T> + e] = partial.values[head * pitch() + dimension(i) + e];
    arch::syncwarp();  // kept: except for q + v, lanes write the partial result only after many more steps
  }
  HOPWELL_DEVICE void copy_chunks(const char* from, int stride, uint32_t seen, uint32_t destination) const {
    HOPWELL_UNROLL
    for (int key = 0; key < kKeys; ++key, from += stride) {
      const char* at = from;
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < kChunksOfKey; ++chunk, at += 16 * lanes)
        arch::cp_async(destination + uint32_t((key * kChunksOfKey + chunk) * kWarpChunkBytes), at,
                       chunk < chunks ? int(seen >> key & 1) * 16 : 0);
    }
  }
  // Copies packed rows if the heads of the row block take all lanes. Then all lanes have the same keys, the rows of a
  // key are contiguous, and the address of a chunk needs no division.
  HOPWELL_DEVICE void copy_joined(const Params& p, const CopySource& source, const KeyTile& tile, uint32_t seen,
                                  uint32_t to) const {
    const Cache& cache = p.cache;
    const int lane_offset = 16 * arch::lane_index();
    const int64_t page = seen ? tile.page : 0, slot = seen ? tile.key % cache.block : 0;
    const char *k = source.k + page * cache.k_page + slot * cache.k_slot + lane_offset,
               *v = source.v + page * cache.v_page + slot * cache.v_slot + lane_offset;
    to += uint32_t(lane_offset);
    HOPWELL_UNROLL
    for (int key = 0; key < kKeys; ++key, k += cache.k_slot, v += cache.v_slot, to += uint32_t(16 * row_chunks)) {
      const int size = int(seen >> key & 1) * 16;
      HOPWELL_UNROLL
      for (int i = 0; i < kChunksOfKey; ++i) {
        if (32 * i + arch::lane_index() >= row_chunks) continue;
        arch::cp_async(to + uint32_t(i * kWarpChunkBytes), k + i * kWarpChunkBytes, size);
        arch::cp_async(to + uint32_t(i * kWarpChunkBytes) + Stage::kOffsetV, v + i * kWarpChunkBytes, size);
      }
    }
  }
  // Copies packed rows of any other number of heads: page_keys keys at a time, which always share a page. Their rows
  // are contiguous except for a gap between two keys.
  HOPWELL_DEVICE void copy_packed(const Params& p, const CopySource& source, const KeyTile& tile, uint32_t to) const {
    const Cache& cache = p.cache;
    const Keys& visible = source.vector.visible;
    const int key_of_lane = tile.key + first_key;
    uint32_t seen =
        first_bits(visible.end - key_of_lane, page_keys) & ~first_bits(visible.begin - key_of_lane, page_keys);
    if (tile.page < 0) seen = 0;
    const int64_t page = seen ? tile.page : 0, slot = seen ? key_of_lane % cache.block : 0;
    const char *k = source.k + page * cache.k_page + slot * cache.k_slot,
               *v = source.v + page * cache.v_page + slot * cache.v_slot;
    const int count = page_keys * row_chunks, lane_offset = 16 * arch::lane_index(),
              k_gap = cache.k_slot - 16 * row_chunks, v_gap = cache.v_slot - 16 * row_chunks;
    const int page_lanes = page_keys / kKeys * lanes * p.schedule.heads;
    HOPWELL_NO_UNROLL
    for (int lane = 0; lane < 32; lane += page_lanes, to += uint32_t(16 * count)) {
      const char *its_k = shuffle_pointer(k, lane), *its_v = shuffle_pointer(v, lane);
      const uint32_t its_keys = arch::shuffle(seen, lane);
      HOPWELL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int chunk = 32 * i + arch::lane_index(), key = chunk * reciprocal >> 16;
        if (chunk >= count) continue;
        const int size = int(its_keys >> key & 1) * 16;
        const uint32_t at = to + uint32_t(lane_offset + i * kWarpChunkBytes);
        arch::cp_async(at, its_k + (lane_offset + key * k_gap) + i * kWarpChunkBytes, size);
        arch::cp_async(at + Stage::kOffsetV, its_v + (lane_offset + key * v_gap) + i * kWarpChunkBytes, size);
      }
    }
  }
  static HOPWELL_DEVICE const char* shuffle_pointer(const char* pointer, int lane) {
    const auto bits = reinterpret_cast<uintptr_t>(pointer);
    const uint32_t low = arch::shuffle(uint32_t(bits), lane),
                   high = arch::shuffle(uint32_t(uint64_t{bits} >> 32), lane);
    return reinterpret_cast<const char*>(uintptr_t{uint64_t{high} << 32 | low});
  }
  HOPWELL_DEVICE void copy_r(const Params& p, const CopySource& source, int key, uint32_t seen,
                             uint32_t address) const {
    const int farthest = source.vector.position - key;  // distance of the first key
    if (farthest < p.bias.extent)
      return copy_chunks(source.r + int64_t{farthest} * p.bias.r_row_bytes, -p.bias.r_row_bytes, seen,
                         address + Stage::kOffsetR);
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int j = i / kChunksOfKey, chunk = i % kChunksOfKey, row = p.bias.r_row_of(source.vector.position, key + j);
      const bool wanted = (seen >> j & 1) && chunk < chunks && row >= 0;
      arch::cp_async(address + Stage::kOffsetR + uint32_t(i * kWarpChunkBytes),
                     source.r + int64_t{wanted ? row : 0} * p.bias.r_row_bytes + chunk * lanes * 16, wanted ? 16 : 0);
    }
  }
  HOPWELL_DEVICE void copy_scattered(const Params& p, const QueryVector& vector, int key, uint32_t& seen,
                                     Stage& to) const {
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int j = i / kChunksOfKey, first = dimension(i % kChunksOfKey);
      if (kPacked && i % kChunksOfKey >= chunks) continue;
      const int page = seen >> j & 1 ? p.cache.page_of(vector.sequence, key + j) : -1;
      if (page < 0) seen &= ~(1U << j);
      const auto gather = [&](arch::Words4& chunk, const void* cache, const CacheStrides& at) {
        gather_chunk<T>(chunk, [&](int e) -> const T* {
          if (page < 0 || first + e >= p.query.d) return nullptr;
          return element_of<T>(cache, at, page, vector.kv_head, (key + j) % p.cache.block, first + e);
        });
      };
      gather(chunk_of(to.k, i), p.cache.k, p.cache.k_at);
      gather(chunk_of(to.v, i), p.cache.v, p.cache.v_at);
    }
  }

  // A lane's chunk in a stage's K or V: its index, a reference, and its elements with zeros beyond d.
  HOPWELL_DEVICE int packed_at(int key, int chunk) const { return own + key * row_chunks + chunk * lanes; }
  HOPWELL_DEVICE arch::Words4& chunk_of(arch::Words4 (&rows)[kRows][32], int i) const {
    if constexpr (!kPacked) return rows[i][arch::lane_index()];
    const int at = packed_at(i / kChunksOfKey, i % kChunksOfKey);
    return rows[at / 32][at % 32];
  }
  HOPWELL_DEVICE arch::Words4 load_chunk(uint32_t rows, int key, int chunk) const {
    if constexpr (!kPacked)
      return arch::load_shared_v4(rows + uint32_t((key * kChunksOfKey + chunk) * kWarpChunkBytes));
    const bool in_last_vector = chunk >= kChunksOfKey - Sizes::kChunksOfVector;  // only there a row may end
    if (in_last_vector && chunk >= chunks) return {};
    return arch::load_shared_v4(rows + uint32_t(16 * packed_at(key, chunk)));
  }
  HOPWELL_DEVICE void multiply(uint32_t rows, const float (&by)[kDims], float (&x)[kKeys]) const {
    HOPWELL_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const bool first = i % kChunksOfKey == 0;
      float row[kElements<T>],
          sum = first ? x[i / kChunksOfKey] : 0;  // a sum a chunk, because few keys are few independent chains
      unpack<T>(load_chunk(rows, i / kChunksOfKey, i % kChunksOfKey), row);
      HOPWELL_UNROLL
      for (int e = 0; e < kElements<T>; ++e) sum += by[i % kChunksOfKey * kElements<T> + e] * row[e];
      x[i / kChunksOfKey] = first ? sum : x[i / kChunksOfKey] + sum;
    }
  }
  HOPWELL_DEVICE void multiply_r(const Params& p, const QueryVector& vector, int first, float (&x)[kKeys]) const {
    HOPWELL_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const int row = p.bias.r_row_of(vector.position, first + j);
      if (row < 0 || first + j > vector.position) continue;
      const int64_t at = vector.head * p.bias.r_head_stride + row * p.bias.r_stride;
      HOPWELL_UNROLL
      for (int i = 0; i < kChunksOfKey; ++i) {
        if (i >= chunks) continue;
        HOPWELL_UNROLL
        for (int e = 0; e < kElements<T>; ++e)
          x[j] += qv[i * kElements<T> + e] *
                  decode(load_bits(p.bias.r, p.bias.r_type, at + dimension(i) + e), p.bias.r_type);
      }
    }
  }
  // Exchanges sums with the lane at distance `mask`: each lane keeps half of the keys, until one key is left.
  HOPWELL_DEVICE float sum_over_lanes(float (&x)[kKeys]) const {
    int mask = lanes / 2;
    HOPWELL_UNROLL
    for (int half = kKeys / 2; half >= 1; half /= 2, mask /= 2) {
      const bool upper = place & mask;
      tile::share_sums(x, half, mask, upper);
    }
    for (; mask >= 1; mask /= 2) x[0] += arch::shuffle_xor(x[0], mask);
    return x[0];
  }
  // Clears the values of keys that a bias of −inf hides, because a weight of 0 does not remove NaN.
  HOPWELL_DEVICE void clear_hidden_values(bool hidden, Stage& stage) const {
    const int lane = arch::lane_index();
    const uint32_t lanes_hidden = arch::ballot(hidden);
    if (lanes_hidden == 0) return;
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      if (kPacked && i % kChunksOfKey >= chunks) continue;
      if (lanes_hidden >> ((lane & -lanes) + i / kChunksOfKey * copies) & 1) chunk_of(stage.v, i) = {};
    }
  }
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
