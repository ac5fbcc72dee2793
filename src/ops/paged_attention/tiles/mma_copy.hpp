// paged_attention on the tensor cores: a tile of keys and values, how it is copied and how it lies in a stage.
//
// A stage holds one tile, in parts that are copied and used one after the other: two of K and two of V, 4 KiB each; of a
// tile of 16 keys, which lie on one page, all of K and all of V. As soon as a part has been used, the same part of the
// next tile is on its way.
#pragma once

#include "ops/paged_attention/tiles/tile_inputs.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// `kTokens` tells the layouts apart: 0 for rows, nhd and hnd; for vllm how many chunks of a dimension of V, of eight
// tokens each, are copied side by side, so that a warp reads whole lines of memory: all of the tile where a block has
// as many tokens, else two, the 16 tokens of a block, whose dimensions follow one another. `kBlocks`: of 8 query vectors
// each; a lane has one of each block.
template <class T, int kD, int kTokens, int kBlocks = 1>
struct MmaTileCopy {
  static constexpr int kLaneBytes = 0;  // tiles are the warp's
  // With two blocks of d 128 room for an eighth warp counts more than larger tiles.
  static constexpr int kRows = 8 * kBlocks, kKeys = kBlocks == 2 && kD == 128 ? 16 : 4096 / kD, kChunks = kD / 8,
                       kPages = kKeys / 16;
  static constexpr bool kVllm = kTokens > 0;
  static constexpr int kStages = 1, kHalves = kPages > 1 ? 2 : 1, kParts = 2 * kHalves;  // of K and V; of a tile
  static constexpr bool kCopiesQuery = kD <= 128 && kBlocks == 1;  // else there is no room for it in a stage
  // With which part biases come: with the last one of K where registers are few, as they are used after it.
  static constexpr int kBiasPart = kBlocks == 1 ? 0 : kHalves - 1;
  static constexpr uint32_t kOffsetV = kKeys * kChunks * 16;  // in a stage

  struct Stage {
    arch::Words4 k[kKeys * kChunks], v[kKeys * kChunks];
    arch::Words4 q[kCopiesQuery ? kRows * kChunks : 1];  // of the segment that begins, where q lies in whole chunks
    arch::Words4 bias[kRows][kKeys / 4];  // of a row: whole chunks as they lie in memory, or a word for each key
    uint32_t pages[4];                    // bit i: the page of keys 16 i and following exists
  };
  int first_key, row, quad;

  HOPWELL_DEVICE MmaTileCopy() {
    const int lane = arch::lane_index();
    first_key = lane % kPages * 16, row = lane / 4, quad = lane % 4;
  }
  // Where chunks lie in a stage, so that no eight that ldmatrix reads together meet in a bank. Rows: eight dimensions
  // of a key. Layout vllm has such chunks of K, key by key, and chunks of V of eight tokens of a dimension.
  static HOPWELL_DEVICE int chunk_index(int key, int chunk) { return key * kChunks + (chunk ^ (key & 7)); }
  // Of chunk `first` + `more`, which lie in the same eight: where `first` is known to the compiler, addresses of others
  // are the same but for a constant.
  static HOPWELL_DEVICE int chunk_index(int key, int first, int more) {
    return chunk_index(key, first % 8 + more) + first / 8 * 8;
  }
  static HOPWELL_DEVICE int key_chunk_index(int key, int first, int more) {
    return kVllm ? key_chunk_index(key, first + more) : chunk_index(key, first, more);
  }
  static HOPWELL_DEVICE int key_chunk_index(int key, int chunk) {
    return kVllm ? chunk * kKeys + key : chunk_index(key, chunk);
  }
  static HOPWELL_DEVICE int token_chunk_index(int dimension, int chunk) {
    const int group = chunk / kTokens;
    return (group * kD + dimension) * kTokens + ((chunk - group * kTokens) ^ (dimension * kTokens / 8 & (kTokens - 1)));
  }

  // The lane's query vector of a block, from that of the first. Where there are two q_len is 1, so that they differ in
  // the head alone.
  HOPWELL_DEVICE QueryVector vector_of(const Params& p, const QueryVector& first, int block) const {
    QueryVector vector = first;
    if (block > 0) vector.head += smaller(8 * block, p.schedule.queries - 1 - row);
    return vector;
  }

  HOPWELL_DEVICE CopySource copy_source(const Params& p, const QueryVector& vector) const {
    const int lane = arch::lane_index(), key = lane / kChunks, chunk = lane % kChunks;
    if constexpr (kVllm)
      return copy_source_of(p, vector, sizeof(T), int64_t{lane / 16} * p.cache.k_group + lane % 16 * p.cache.k_slot,
                            int64_t{lane / kTokens} * p.cache.v_group, 0);
    return copy_source_of(p, vector, sizeof(T), int64_t{key} * p.cache.k_slot + 16 * chunk,
                          int64_t{key} * p.cache.v_slot + 16 * chunk, 0);
  }
  HOPWELL_DEVICE void copy(const Params& p, const CopySource& source, const KeyTile& tile, Stage& to, uint32_t address,
                           int part) const {
    const QueryVector& vector = source.vector;
    const int begin = larger(0, vector.position - vector.query - p.bias.window + 1);  // what the first query sees
    const int half = part % kHalves;
    const bool values = part / kHalves;
    if constexpr (kVllm)
      if (values) return copy_tokens(p, source, tile, begin, half, address + kOffsetV);
    HOPWELL_UNROLL
    for (int i = half * kPages / kHalves; i < (half + 1) * kPages / kHalves; ++i) {
      const int page = arch::shuffle(tile.page, i), key = tile.key + 16 * i;
      const int64_t slot = page >= 0 ? key % p.cache.block : 0, number = page >= 0 ? page : 0;
      const uint32_t seen = page >= 0 ? first_bits(vector.end - key, 16) & ~first_bits(begin - key, 16) : 0;
      const char* at = values ? source.v + number * p.cache.v_page + slot * p.cache.v_slot
                              : source.k + number * p.cache.k_page + slot * p.cache.k_slot;
      if constexpr (kVllm)
        copy_columns(p, at, i, seen, address);
      else
        copy_rows(p, at, values ? p.cache.v_slot : p.cache.k_slot, i, seen, address + (values ? kOffsetV : 0));
    }
    if (part != kBiasPart) return;
    if (kCopiesQuery && tile.begins_segment && p.query.aligned) copy_query(p, vector, to);
    if (p.bias.exists()) {
      HOPWELL_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        copy_bias_of_row(p, source_of(p, source, block), tile.key, to.bias[row + 8 * block]);
    }
    const uint32_t pages = arch::ballot(tile.page >= 0);
    if (arch::lane_index() == 0) to.pages[0] = pages & ((1U << kPages) - 1);
  }

 private:
  // Where the bias of a block comes from.
  HOPWELL_DEVICE CopySource source_of(const Params& p, const CopySource& first, int block) const {
    CopySource source = first;
    source.vector = vector_of(p, first.vector, block);
    const int64_t heads = source.vector.head - first.vector.head;
    if (block > 0) source.bias += uintptr_t(heads * p.bias.strides[2]) * (p.bias.type == Float::fp32 ? 4 : 2);
    return source;
  }
  HOPWELL_DEVICE void copy_query(const Params& p, const QueryVector& vector, Stage& to) const {
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    HOPWELL_NO_UNROLL
    for (int first = 0; first < p.schedule.queries; first += 32 / kChunks) {
      const int of_row = first + lane / kChunks;
      const int64_t at = vector.sequence * p.query.strides[0] +
                         arch::shuffle(vector.query, 4 * of_row) * p.query.strides[1] +
                         arch::shuffle(vector.head, 4 * of_row) * p.query.strides[2] + 8 * chunk;
      const bool exists = 8 * chunk < p.query.d;
      arch::cp_async(arch::shared_address(&to.q[of_row * kChunks + chunk]),
                     static_cast<const T*>(p.query.q) + (exists ? at : 0), exists ? 16 : 0);
    }
  }
  // The 16 keys from 16 i on, those whose bits are set.
  static HOPWELL_DEVICE void copy_rows(const Params& p, const char* rows, int stride, int i, uint32_t seen,
                                       uint32_t address) {
    const int lane = arch::lane_index(), key_of_lane = lane / kChunks, chunk = lane % kChunks;
    const uint32_t wanted = 8 * chunk < p.query.d ? seen >> key_of_lane : 0;
    HOPWELL_UNROLL
    for (int r = 0; r < 16; r += 32 / kChunks)
      arch::cp_async(address + uint32_t(16 * chunk_index(16 * i + r + key_of_lane, chunk)), rows + int64_t{r} * stride,
                     int(wanted >> r & 1) * 16);
  }
  // Layout vllm: two chunks of K by 16 keys at a time.
  static HOPWELL_DEVICE void copy_columns(const Params& p, const char* k, int i, uint32_t seen, uint32_t address) {
    const int lane = arch::lane_index(), size = int(seen >> lane % 16 & 1) * 16;
    HOPWELL_UNROLL
    for (int j = 0; j < kD / 16; ++j) {
      const int chunk = 2 * j + lane / 16;
      arch::cp_async_of_line(address + uint32_t(16 * key_chunk_index(16 * i + lane % 16, chunk)),
                             k + int64_t{2 * j} * p.cache.k_group, 8 * chunk < p.query.d ? size : 0);
    }
  }
  // V in layout vllm, half of the dimensions, or all. Of a chunk that begins with hidden tokens all is copied;
  // clear_hidden_values sees to them.
  static HOPWELL_DEVICE void copy_tokens(const Params& p, const CopySource& source, const KeyTile& tile, int begin,
                                         int half, uint32_t address) {
    const int lane = arch::lane_index(), end = source.vector.end;
    HOPWELL_UNROLL
    for (int first_chunk = 0; first_chunk < kKeys / 8; first_chunk += kTokens) {
      const int chunk = first_chunk + lane % kTokens, key = tile.key + 8 * chunk;
      const int page = arch::shuffle(tile.page, chunk / 2);
      const int bytes = page >= 0 && begin < key + 8 && key < end ? 2 * smaller(end - key, 8) : 0;
      const char* v =
          source.v + (bytes ? page : 0) * p.cache.v_page + int64_t{bytes ? key % p.cache.block : 0} * p.cache.v_slot;
      HOPWELL_UNROLL
      for (int first = half * kD / kHalves; first < (half + 1) * kD / kHalves; first += 32 / kTokens) {
        const int dimension = first + lane / kTokens;
        arch::cp_async_of_line(address + uint32_t(16 * token_chunk_index(dimension, chunk)),
                               v + int64_t{first} * p.cache.v_group, dimension < p.query.d ? bytes : 0);
      }
    }
  }
  // Whole chunks where the rows of the bias allow it, else a word for each key.
  HOPWELL_DEVICE void copy_bias_of_row(const Params& p, const CopySource& source, int key,
                                       arch::Words4 (&to)[kKeys / 4]) const {
    const Keys& seen = source.vector.visible;
    if (!p.bias.aligned) {
      auto* words = reinterpret_cast<uint32_t*>(to);
      HOPWELL_NO_UNROLL
      for (int j = quad; j < kKeys; j += 4)
        copy_bias(p.bias, source, key + j, key + j >= seen.begin && key + j < seen.end, words + j);
      return;
    }
    const int shift = p.bias.type == Float::fp32 ? 2 : 1;  // of bytes of an element
    HOPWELL_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      const int first = (quad + 4 * i) << (4 - shift), column = key + first;
      if (first >= kKeys) continue;
      const int bytes = larger(0, smaller((p.bias.extent - column) << shift, 16));
      arch::cp_async_of_line(
          arch::shared_address(&to[quad + 4 * i]),
          reinterpret_cast<const void*>(source.bias + uintptr_t(unsigned(bytes ? column << shift : 0))), bytes);
    }
  }
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
