// paged_attention on the tensor cores: copies of a tile of keys and values, and its layout in a stage.
//
// A stage holds one tile, in parts that are copied and used one after the other: two parts of K and two of V. A tile of
// 16 keys, which lie on one page, has all of K as a part and all of V as a part. After a part has been used, the copy
// of the same part of the next tile starts. With layouts nhd and hnd, a part has the first or the last 8 keys of every
// page, so a lane copies from a single page: it computes its address once and then advances row by row.
#pragma once

#include "ops/paged_attention/tiles/tile_inputs.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// kTokens       0: rows (nhd and hnd). Layout vllm: chunks of 8 tokens of a dimension of V that neighbouring lanes
//               copy, so that a warp reads whole lines: all of the tile if a page has as many tokens, otherwise two,
//               the 16 tokens of a page whose dimensions are contiguous
// kBlocks       blocks of 8 query vectors; a lane has a query vector of each block
// kExactQuery   q has no low part and is loaded into registers: requires plan.cpp's exact_query
template <class T, int kD, int kTokens, int kBlocks, bool kExactQuery>
struct MmaTileCopy {
  static constexpr int kLaneBytes = 0;  // a tile belongs to the whole warp
  // Equal to plan.cpp's mma_keys. Two blocks with a split q: eight warps are faster than larger tiles (measured).
  static constexpr int kMostKeys = kD <= 64 ? 64 : kD <= 128 ? 32 : 16;
  static constexpr int kRows = 8 * kBlocks, kKeys = kBlocks > 1 && !kExactQuery ? kMostKeys / 2 : kMostKeys,
                       kChunks = kD / 8, kPages = kKeys / 16, kLanesOfPage = 32 / kPages;
  static constexpr bool kVllm = kTokens > 0;
  static constexpr int kStages = 1, kHalves = kPages > 1 ? 2 : 1,
                       kParts = 2 * kHalves;  // parts of K or V; parts of a tile
  // If many registers are in use, a step without a tile to compute costs too much, so first tiles have copies of their
  // own. Otherwise shorter code is faster, because calls are short.
  static constexpr bool kFewRegisters = kBlocks > 1 || (kD != 64 && kD != 128);
  static constexpr int kPartsApart = kFewRegisters ? kParts : 0;
  static constexpr bool kCopiesQuery = !kFewRegisters;  // otherwise q does not fit in a stage, or is exact
  static constexpr int kBiasPart = kHalves - 1;  // biases are copied with the last part of K, after which they are used
  static constexpr uint32_t kOffsetV = kKeys * kChunks * 16;  // in a stage

  struct Stage {
    arch::Words4 k[kKeys * kChunks], v[kKeys * kChunks];
    arch::Words4 q[kCopiesQuery ? kRows * kChunks : 1];  // q of the segment that begins, if q is aligned
    // A row's biases: whole chunks, unconverted, or a word for each key. The padding shifts rows to different banks.
    arch::Words4 bias[kRows][kKeys / 4 + 1];
    uint32_t pages[4];  // bit i: the page that lane i copies from exists
  };
  int first_key, row, quad;

  HOPWELL_DEVICE MmaTileCopy() {
    const int lane = arch::lane_index();
    first_key = kPages == 1 ? 0 : lane / kLanesOfPage * 16, row = tile::fragment_row(), quad = tile::quad_lane();
  }
  // Indices of chunks in a stage. The 8 chunks that ldmatrix reads together lie in different banks. Rows: a chunk is 8
  // dimensions of a key. Whole lines of a row, 8 chunks each, come first; the remaining half lines of all keys follow.
  // Layout vllm: a chunk of K is a part of a key, a chunk of V is 8 tokens of a dimension.
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
  // Addresses of chunk `more` of a key, in its whole lines and in its half line.
  struct ChunkAddress {
    uint32_t line, rest;
    HOPWELL_DEVICE ChunkAddress(uint32_t begin, int key, int more)
        : line(begin + uint32_t(16 * line_chunk_index(key, more))),
          rest(begin + uint32_t(16 * rest_chunk_index(key, more))) {}
    // Address of chunk `more` + `chunk` of key `key` + `keys`, for constants: `keys` is a multiple of 8, and the sum
    // `more` + `chunk` has no carry. Stages begin at multiples of 128 bytes.
    [[nodiscard]] HOPWELL_DEVICE uint32_t moved(int keys, int chunk) const {
      if (chunk >= kLineChunks)
        return (rest ^ uint32_t(16 * (chunk - kLineChunks))) + uint32_t(16 * keys * kRestChunks);
      return (line ^ uint32_t(16 * (chunk % 8))) + uint32_t(16 * (keys * kLineChunks + chunk / 8 * 8));
    }
  };
  // Keys of a tile come in eights: eight i has keys 8 i to 8 i + 7. eight_of: the j-th eight of a half. sixteen_of,
  // place_of: the S of an eight becomes one half (place_of) of a 16-key step of P (sixteen_of), counted over all
  // halves.
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

  // The lane's query vector of block `block`, from its query vector of block 0. Two blocks imply q_len = 1, so only the
  // head differs.
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
  // For copy_rows: the lane's page holds 16 keys of the tile. Usually all of them are seen.
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
  // A power of two of a row's chunks, which neighbouring lanes copy: kRowsAtOnce rows of every page at a time.
  template <int kFirst, int kWidth>
  struct Columns {
    static constexpr int kFirstChunk = kFirst, kRowsAtOnce = kLanesOfPage / kWidth;
    static constexpr bool kLast = kFirst + kWidth == kChunks;  // only the last columns may lie beyond d
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
  // Bit i: any query sees key `key` + i, i < 16.
  static HOPWELL_DEVICE uint32_t seen_of(const Params& p, const QueryVector& vector, int key) {
    return first_bits(vector.end - key, 16) & ~first_bits(first_visible(p, vector) - key, 16);
  }
  // The copy source of block `block`, with its bias.
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
  // Copies a part of K or of V.
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
    // The shuffle makes the compiler multiply and add in one instruction.
    const int slot_bytes = arch::shuffle(values ? p.cache.v_slot : p.cache.k_slot, 0);
    const auto page_bytes = uint32_t(values ? p.cache.v_page : p.cache.k_page);  // plan.cpp: no mma for more or below 0
    const char* from = values ? source.v : source.k;
    if constexpr (Columns::kFirstChunk > 0)
      from += (Columns::row() - FirstColumns::row()) * slot_bytes + 16 * (chunk - FirstColumns::chunk());
    const uint32_t to = address + uint32_t(16 * chunk_index(first_key + Columns::row(), chunk));
    const auto copy_row = [&](const char* at, int i, int size) {
      const int row = begin + i * kRowsAtOnce;  // added to Columns::row(), without a carry
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
  // Copies K of layout vllm, for half of the pages, or all: two chunks of 16 keys at a time.
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
  // Copies V of layout vllm, half of the dimensions, or all. A chunk that begins with hidden tokens is copied whole;
  // clear_hidden_values clears their values.
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
  // Copies biases: whole chunks if the rows of the bias are aligned, otherwise a word for each key.
  HOPWELL_DEVICE void copy_biases(const Params& p, const CopySource& source, int key, Stage& to) const {
    if (p.bias.aligned && key + kKeys <= p.bias.extent)
      return p.bias.type == Float::fp32 ? copy_bias_chunks<4>(p, source, key, to)
                                        : copy_bias_chunks<2>(p, source, key, to);
    HOPWELL_NO_UNROLL
    for (int block = 0; block < kBlocks; ++block)
      copy_bias_of_row(p, source_of(p, source, block), key, to.bias[row + 8 * block]);
  }
  // Copies the biases of all keys of the tile, kBytes each.
  template <int kBytes>
  HOPWELL_DEVICE void copy_bias_chunks(const Params& p, const CopySource& source, int key, Stage& to) const {
    constexpr int kChunksOfRow = kKeys * kBytes / 16;
    const int heads = smaller(8, p.schedule.queries - 1 - row);  // distance of a block's row to the next block's row
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
    const int shift = p.bias.type == Float::fp32 ? 2 : 1;  // log2 of an element's bytes
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
