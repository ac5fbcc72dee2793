// paged_attention on the tensor cores: a tile of keys and values, how it is copied and how it lies in a stage.
//
// A stage holds one tile, in parts that are copied and used one after the other: two of K and two of V; of a tile of 16
// keys, which lie on one page, all of K and all of V. As soon as a part has been used, the same part of the next tile is
// on its way. In rows a part has the first or the last 8 keys of every page, so that a lane copies from one page alone:
// it finds its address out once and goes on by a row at a time.
#pragma once

#include "ops/paged_attention/tiles/tile_inputs.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// `kTokens` tells the layouts apart: 0 for rows, nhd and hnd; for vllm how many chunks of a dimension of V, of eight
// tokens each, are copied side by side, so that a warp reads whole lines of memory: all of the tile where a block has
// as many tokens, else two, the 16 tokens of a block, whose dimensions follow one another. `kBlocks`: of 8 query vectors
// each; a lane has one of each block. `kExactQuery`: q has no low parts and is loaded into registers; what plan.cpp's
// exact_query says is given.
template <class T, int kD, int kTokens, int kBlocks, bool kExactQuery>
struct MmaTileCopy {
  static constexpr int kLaneBytes = 0;  // tiles are the warp's
  // As plan.cpp's mma_keys: with q in two parts of two blocks eight warps count more than larger tiles (measured).
  static constexpr int kMostKeys = kD <= 64 ? 64 : kD <= 128 ? 32 : 16;
  static constexpr int kRows = 8 * kBlocks, kKeys = kBlocks > 1 && !kExactQuery ? kMostKeys / 2 : kMostKeys,
                       kChunks = kD / 8, kPages = kKeys / 16, kLanesOfPage = 32 / kPages;
  static constexpr bool kVllm = kTokens > 0;
  static constexpr int kStages = 1, kHalves = kPages > 1 ? 2 : 1, kParts = 2 * kHalves;  // of K and V; of a tile
  // With many registers in use a step without a tile to compute would cost more. Else short code counts, of short calls.
  static constexpr bool kFewRegisters = kBlocks > 1 || (kD != 64 && kD != 128);
  static constexpr int kPartsApart = kFewRegisters ? kParts : 0;
  static constexpr bool kCopiesQuery = !kFewRegisters;  // else there is no room for it in a stage, or no need
  static constexpr int kBiasPart = kHalves - 1;  // biases come with the last part of K, after which they are used
  static constexpr uint32_t kOffsetV = kKeys * kChunks * 16;  // in a stage

  struct Stage {
    arch::Words4 k[kKeys * kChunks], v[kKeys * kChunks];
    arch::Words4 q[kCopiesQuery ? kRows * kChunks : 1];  // of the segment that begins, where q lies in whole chunks
    // Of a row: whole chunks as they lie in memory, or a word for each key. One more, so that rows begin in other banks.
    arch::Words4 bias[kRows][kKeys / 4 + 1];
    uint32_t pages[4];  // bit of a lane: the page that it copies from exists
  };
  int first_key, row, quad;

  HOPWELL_DEVICE MmaTileCopy() {
    const int lane = arch::lane_index();
    first_key = kPages == 1 ? 0 : lane / kLanesOfPage * 16, row = lane / 4, quad = lane % 4;
  }
  // Where chunks lie in a stage, so that no eight that ldmatrix reads together meet in a bank. Rows: eight dimensions
  // of a key. Whole lines of a row, eight chunks each, lie together; half a line that is left lies with those of the
  // other keys, behind them. Layout vllm has chunks of K key by key, and chunks of V of eight tokens of a dimension.
  static constexpr int kLineChunks = kChunks / 8 * 8, kRestChunks = kChunks - kLineChunks;
  static_assert(kRestChunks == 0 || (kRestChunks == 4 && !kVllm));
  static HOPWELL_DEVICE int line_chunk_index(int key, int chunk) { return key * kLineChunks + (chunk ^ (key & 7)); }
  static HOPWELL_DEVICE int rest_chunk_index(int key, int chunk) {
    return kKeys * kLineChunks + key * kRestChunks + (chunk ^ (key / 2 & 3));
  }
  static HOPWELL_DEVICE int chunk_index(int key, int chunk) {
    return kRestChunks > 0 && chunk >= kLineChunks ? rest_chunk_index(key, chunk - kLineChunks)
                                                   : line_chunk_index(key, chunk);
  }
  // Addresses of a key's chunk `more` of its lines and of its rest.
  struct ChunkAddress {
    uint32_t line, rest;
    HOPWELL_DEVICE ChunkAddress(uint32_t begin, int key, int more)
        : line(begin + uint32_t(16 * line_chunk_index(key, more))),
          rest(begin + uint32_t(16 * rest_chunk_index(key, more))) {}
    // Of chunk `more` + `chunk` of `key` + `keys`. For constants: keys are a multiple of 8, and no carry from `more`
    // reaches the bits of `chunk`. Stages begin at multiples of 128 bytes.
    [[nodiscard]] HOPWELL_DEVICE uint32_t moved(int keys, int chunk) const {
      if (chunk >= kLineChunks)
        return (rest ^ uint32_t(16 * (chunk - kLineChunks))) + uint32_t(16 * keys * kRestChunks);
      return (line ^ uint32_t(16 * (chunk % 8))) + uint32_t(16 * (keys * kLineChunks + chunk / 8 * 8));
    }
  };
  // Eight keys of half `half` of a tile, the j-th of them: the first of them is 8 times that. And where S of eight keys
  // goes in P: to which 16 keys, of all halves one after the other, and to which eight of those.
  static HOPWELL_DEVICE constexpr int eight_of(int half, int j) {
    return kVllm ? half * (kKeys / 8 / kHalves) + j : kHalves * j + half;
  }
  static HOPWELL_DEVICE constexpr int sixteen_of(int eight) {
    return kVllm ? eight / 2 : eight % kHalves * (kPages / kHalves) + eight / kHalves / 2;
  }
  static HOPWELL_DEVICE constexpr int place_of(int eight) { return kVllm ? eight % 2 : eight / kHalves % 2; }
  static HOPWELL_DEVICE int column_chunk_index(int key, int chunk) { return chunk * kKeys + key; }  // vllm
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
    const int lane = arch::lane_index();
    if constexpr (kVllm)
      return copy_source_of(p, vector, sizeof(T), int64_t{lane / 16} * p.cache.k_group + lane % 16 * p.cache.k_slot,
                            int64_t{lane / kTokens} * p.cache.v_group, 0);
    const int first_row = FirstColumns::row(), first_chunk = FirstColumns::chunk();
    return copy_source_of(p, vector, sizeof(T), int64_t{first_row} * p.cache.k_slot + 16 * first_chunk,
                          int64_t{first_row} * p.cache.v_slot + 16 * first_chunk, 0);
  }
  // For copy_rows: the lane's page holds 16 keys of the tile, of which most often all are seen.
  HOPWELL_DEVICE void locate(const Params& p, const CopySource& source, KeyTile& tile) const {
    const int key = tile.key + first_key;
    const bool whole = tile.page >= 0 && key >= first_visible(p, source.vector) && key + 16 <= source.vector.end;
    tile.slot = key % p.cache.block;
    tile.bytes = !whole ? -1 : 8 * LastColumns::chunk() < p.query.d ? 16 : 0;
  }
  HOPWELL_DEVICE void copy(const Params& p, const CopySource& source, const KeyTile& tile, Stage& to, uint32_t address,
                           int part) const {
    const QueryVector& vector = source.vector;
    const int half = part % kHalves;
    const bool values = part / kHalves;
    if constexpr (kVllm) {
      if (values)
        copy_tokens(p, source, tile, half, address + kOffsetV);
      else
        copy_columns(p, source, tile, half, address);
    } else {
      copy_rows(p, source, tile, values, half, address + (values ? kOffsetV : 0));
    }
    if (part == 0 && kCopiesQuery && tile.begins_segment && p.query.aligned) copy_query(p, vector, to);
    if (part != kBiasPart) return;
    if (p.bias.exists()) copy_biases(p, source, tile.key, to);
    const uint32_t pages = arch::ballot(tile.page >= 0);
    if (arch::lane_index() == 0) to.pages[0] = pages;
  }

 private:
  // Chunks of a row, as many as a power of two, that lanes copy side by side: kRowsAtOnce rows of every page at a time.
  template <int kFirst, int kWidth>
  struct Columns {
    static constexpr int kFirstChunk = kFirst, kRowsAtOnce = kLanesOfPage / kWidth;
    static constexpr bool kLast = kFirst + kWidth == kChunks;  // of others d has all
    // The first row of its page that a lane copies, and its chunk.
    static HOPWELL_DEVICE int row() { return arch::lane_index() % kLanesOfPage / kWidth; }
    static HOPWELL_DEVICE int chunk() { return kFirst + arch::lane_index() % kWidth; }
  };
  static constexpr int kFirstWidth = kChunks == 12 ? 8 : kChunks == 24 ? 16 : kChunks;
  using FirstColumns = Columns<0, kFirstWidth>;
  using LastColumns =
      std::conditional_t<kFirstWidth == kChunks, FirstColumns, Columns<kFirstWidth, kChunks - kFirstWidth>>;
  // The first key that any query sees.
  static HOPWELL_DEVICE int first_visible(const Params& p, const QueryVector& vector) {
    if constexpr (kBlocks > 1) return vector.visible.begin;  // q_len is 1
    return larger(0, vector.position - vector.query - p.bias.window + 1);
  }
  // Of the 16 keys from `key` on, those that any query sees.
  static HOPWELL_DEVICE uint32_t seen_of(const Params& p, const QueryVector& vector, int key) {
    return first_bits(vector.end - key, 16) & ~first_bits(first_visible(p, vector) - key, 16);
  }
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
  // A part of K or of V.
  HOPWELL_DEVICE void copy_rows(const Params& p, const CopySource& source, const KeyTile& tile, bool values, int half,
                                uint32_t address) const {
    copy_columns_of_rows<FirstColumns>(p, source, tile, values, half, address);
    if constexpr (!FirstColumns::kLast) copy_columns_of_rows<LastColumns>(p, source, tile, values, half, address);
  }
  template <class Columns>
  HOPWELL_DEVICE void copy_columns_of_rows(const Params& p, const CopySource& source, const KeyTile& tile, bool values,
                                           int half, uint32_t address) const {
    constexpr bool kRest = Columns::kFirstChunk >= kLineChunks;
    constexpr int kRowsAtOnce = Columns::kRowsAtOnce, kCopies = 16 / kRowsAtOnce / kHalves,
                  kPitch = kRest ? kRestChunks : kLineChunks;
    const int chunk = Columns::chunk(), begin = half * kCopies * kRowsAtOnce;
    // By a shuffle, so that the compiler multiplies it and adds the product in one instruction.
    const int slot_bytes = arch::shuffle(values ? p.cache.v_slot : p.cache.k_slot, 0);
    const auto page_bytes = uint32_t(values ? p.cache.v_page : p.cache.k_page);  // plan.cpp: no mma for more or below 0
    const char* from = values ? source.v : source.k;
    if constexpr (Columns::kFirstChunk > 0)
      from += (Columns::row() - FirstColumns::row()) * slot_bytes + 16 * (chunk - FirstColumns::chunk());
    const uint32_t to = address + uint32_t(16 * chunk_index(first_key + Columns::row(), chunk));
    const auto copy_row = [&](const char* at, int i, int size) {
      const int row = begin + i * kRowsAtOnce;  // from Columns::row() on, of whose bits it has none
      arch::cp_async((to ^ uint32_t(16 * (kRest ? row / 2 & 3 : row & 7))) + uint32_t(16 * kPitch * row),
                     at + int64_t{i * kRowsAtOnce} * slot_bytes, size);
    };
    if (tile.bytes >= 0) {
      const char* at = from + uint64_t{unsigned(tile.page)} * page_bytes + int64_t{tile.slot + begin} * slot_bytes;
      HOPWELL_UNROLL
      for (int i = 0; i < kCopies; ++i) copy_row(at, i, !Columns::kLast || tile.bytes > 0 ? 16 : 0);
      return;
    }
    const bool wanted = tile.page >= 0 && (!Columns::kLast || 8 * chunk < p.query.d);
    const uint32_t seen = wanted ? seen_of(p, source.vector, tile.key + first_key) >> (begin + Columns::row()) : 0;
    if (seen != 0) from += uint64_t{unsigned(tile.page)} * page_bytes + int64_t{tile.slot + begin} * slot_bytes;
    HOPWELL_UNROLL
    for (int i = 0; i < kCopies; ++i) copy_row(from, i, seen >> (i * kRowsAtOnce) & 1 ? 16 : 0);
  }
  // Layout vllm, the keys of half of the pages, or of all: two chunks of K by 16 keys at a time.
  HOPWELL_DEVICE void copy_columns(const Params& p, const CopySource& source, const KeyTile& tile, int half,
                                   uint32_t address) const {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int i = half * kPages / kHalves; i < (half + 1) * kPages / kHalves; ++i) {
      const int page = arch::shuffle(tile.page, i * kLanesOfPage), key = tile.key + 16 * i;
      const int64_t slot = page >= 0 ? key % p.cache.block : 0, number = page >= 0 ? page : 0;
      const uint32_t seen = page >= 0 ? seen_of(p, source.vector, key) : 0;
      const char* k = source.k + number * p.cache.k_page + slot * p.cache.k_slot;
      const int size = int(seen >> lane % 16 & 1) * 16;
      HOPWELL_UNROLL
      for (int j = 0; j < kD / 16; ++j) {
        const int chunk = 2 * j + lane / 16;
        arch::cp_async_of_line(address + uint32_t(16 * column_chunk_index(16 * i + lane % 16, chunk)),
                               k + int64_t{2 * j} * p.cache.k_group, 8 * chunk < p.query.d ? size : 0);
      }
    }
  }
  // V in layout vllm, half of the dimensions, or all. Of a chunk that begins with hidden tokens all is copied;
  // clear_hidden_values sees to them.
  static HOPWELL_DEVICE void copy_tokens(const Params& p, const CopySource& source, const KeyTile& tile, int half,
                                         uint32_t address) {
    const int lane = arch::lane_index(), begin = first_visible(p, source.vector), end = source.vector.end;
    HOPWELL_UNROLL
    for (int first_chunk = 0; first_chunk < kKeys / 8; first_chunk += kTokens) {
      const int chunk = first_chunk + lane % kTokens, key = tile.key + 8 * chunk;
      const int page = arch::shuffle(tile.page, chunk / 2 * kLanesOfPage);
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
  HOPWELL_DEVICE void copy_biases(const Params& p, const CopySource& source, int key, Stage& to) const {
    if (p.bias.aligned && key + kKeys <= p.bias.extent)
      return p.bias.type == Float::fp32 ? copy_bias_chunks<4>(p, source, key, to)
                                        : copy_bias_chunks<2>(p, source, key, to);
    HOPWELL_NO_UNROLL
    for (int block = 0; block < kBlocks; ++block)
      copy_bias_of_row(p, source_of(p, source, block), key, to.bias[row + 8 * block]);
  }
  // Those of all keys of the tile, elements of kBytes.
  template <int kBytes>
  HOPWELL_DEVICE void copy_bias_chunks(const Params& p, const CopySource& source, int key, Stage& to) const {
    constexpr int kChunksOfRow = kKeys * kBytes / 16;
    const int heads = smaller(8, p.schedule.queries - 1 - row);  // from the row of a block to that of the next one
    HOPWELL_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const uintptr_t at = source.bias + uintptr_t(unsigned(kBytes * key + 16 * quad)) +
                           uintptr_t(int64_t{block * heads * p.bias.head_chunks} * 16);
      const uint32_t to_row = arch::shared_address(&to.bias[row + 8 * block][quad]);
      HOPWELL_UNROLL
      for (int i = 0; i < kChunksOfRow; i += 4)
        if (i + 4 <= kChunksOfRow || i + quad < kChunksOfRow)
          arch::cp_async_of_line(to_row + uint32_t(16 * i), reinterpret_cast<const void*>(at + uintptr_t(16 * i)), 16);
    }
  }
  HOPWELL_DEVICE void copy_bias_of_row(const Params& p, const CopySource& source, int key,
                                       arch::Words4 (&to)[kKeys / 4 + 1]) const {
    const Keys& seen = source.vector.visible;
    if (!p.bias.aligned) {
      auto* words = reinterpret_cast<uint32_t*>(to);
      HOPWELL_NO_UNROLL
      for (int j = quad; j < kKeys; j += 4)
        copy_bias(p.bias, source, key + j, key + j >= seen.begin && key + j < seen.end, words + j);
      return;
    }
    const int shift = p.bias.type == Float::fp32 ? 2 : 1;  // of bytes of an element
    HOPWELL_NO_UNROLL
    for (int chunk = quad; chunk << (4 - shift) < kKeys; chunk += 4) {
      const int column = key + (chunk << (4 - shift));
      const int bytes = larger(0, smaller((p.bias.extent - column) << shift, 16));
      arch::cp_async_of_line(
          arch::shared_address(&to[chunk]),
          reinterpret_cast<const void*>(source.bias + uintptr_t(unsigned(bytes ? column << shift : 0))), bytes);
    }
  }
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
