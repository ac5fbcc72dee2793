// sparse_mla_decode on GPUs: attention of one split of a query's keys, by mma.sync, for rows of every format.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ        keys and output columns are the 16 rows of a product, heads its 8 columns
//
// Tile      one query, 8 or 16 heads, one split of its entries; 32 keys per step
// Roles     eight warps. K: warp w has columns 64 w to 64 w + 63 of all keys, and warps 0 to 3 have 16 columns of RoPE
//           each. Every warp writes its share of S. Softmax: warp w has heads w, or 2 w and 2 w + 1, and adds the eight
//           shares in order. Output: warp w has columns 64 w to 64 w + 63
// Timeline  step     0                                                  1
//           copies   keys 2 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓  keys 3 ▓▓▓▓ …
//           warps    wait 0 │ S ▓▓▓▓▓ │ softmax ▓ │ O += P V ▓▓▓▓▓     │ wait 1 │ S …
// Codes     Both products read the raw codes by ldmatrix and decode them in registers to fp16, which has every e4m3
//           number. Seen as 16-bit elements, ldmatrix.trans gives two columns of two keys in a word. Q is fp16 too,
//           divided by a power of two for each head so that its largest element is within 2^14 … 2^15. A block's scale
//           multiplies its share of S in fp32, and P in fp16. This is exact for scales that are powers of two from
//           2^-22 to 2^7. If a step has other scales, its blocks are decoded to bf16(fp32(code · scale)) in fp32,
//           as the operator defines them, and multiplied as bf16. A NaN code makes the key's scores NaN
// Entries   256 at a time. The rows of valid entries are listed in order, so steps are full and invalid entries cost
//           nothing. Rows past the last one are filled with zeros and masked
// Budget    16 heads, V3.2 rows: shared: keys 3 × 20,992 + S 18,432 + P 1,280 + rows 2,048 + 1,152 = 85,888 B
//           registers: Q 20 + O 32 + ~70 (128: two CTAs per SM; 16 heads of V4: one)
// Bound     memory; then issue slots: about 85 instructions of a warp per key for 16 heads, 130 with ShiftedCodes
#pragma once

#include <bit>
#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/e4m3.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template <class TheCodes, class TheRows, int kTheHeads>
struct SplitConfig {
  using Codes = TheCodes;
  using Row = TheRows;
  static constexpr int kHeads = kTheHeads, kHeadBlocks = kHeads / 8;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kKeys = 32, kListed = kThreads;  // keys of a step; entries that are listed at a time
  static constexpr int kStages = TheRows::kHasCodes ? 3 : 2;
  static constexpr int kStageBytes = kKeys * TheRows::kPitch;
  static constexpr int kPitchS = kKeys + 4, kPitchP = kKeys + 8;  // elements; no bank conflicts
  static constexpr int kLanesOfHead = 32 / kHeadBlocks;           // in the softmax; each has kHeadBlocks keys
  static constexpr int kSteps = 4 + (TheRows::kHasRope ? 1 : 0);  // of 16 columns, in the product of K and Q
  // Two, except where a kernel needs more than 128 registers: 16 heads of V4, whose last block is bf16.
  static constexpr int kCtasOfSm = kHeads == 16 && TheRows::kHasCodes && TheRows::is_plain(7) ? 1 : 2;
  static constexpr bool kFp16 = TheRows::kHasCodes;                      // type of P and of Q, but for plain blocks
  static constexpr float kScaleUnit = TheRows::kHasScales ? 0x1p8F : 1;  // factor of scales as fp16
};

template <class Config>
struct SplitStorage {
  using Row = typename Config::Row;
  alignas(128) unsigned char stages[Config::kStages][Config::kStageBytes];
  alignas(16) float scores[Config::kWarps][Config::kHeads][Config::kPitchS];  // shares of S
  alignas(16) uint16_t p[Config::kHeads][Config::kPitchP];
  alignas(16) uint16_t scales[Config::kWarps][Row::kScales][Config::kKeys];  // of each warp's block, fp16
  const unsigned char* rows[Config::kListed];
  const unsigned char* second[Row::kSecondBytes > 0 || Row::kMayHaveRopeCache ? Config::kListed : 1];
  float factors[Config::kHeads];                 // row_scale of a step; at the end the factor of the output
  float maxima[Config::kWarps][Config::kHeads];  // of |q| over a warp's columns
  int counts[Config::kWarps];                    // valid entries that each warp has listed
  int keys[Config::kStages];                     // of a stage that are valid
};

// ---- the work of a CTA ------------------------------------------------------------------------------------------------

// The query, the split and the tile of heads of a CTA. Read again where it is needed, to save registers.
struct Work {
  int number;  // of the split, among those of the launch
  int split;   // of the query
  int query;
  int first_head;

  HOPWELL_DEVICE Work(const SplitParams& p, int heads)
      : number(arch::block_index() / p.head_tiles),
        split(number % p.splits),
        query(p.first_query + number / p.splits),
        first_head(arch::block_index() % p.head_tiles * heads) {}
};

// The entries of a split, in one of the caches.
struct Entries {
  const Keys* keys;
  const int* row;
  int count;
  uint32_t visible;  // entries from this number on are not valid
  const int* table;  // or null

  HOPWELL_DEVICE Entries(const SplitParams& p, const Work& work) {
    const bool is_extra = work.split >= p.splits_of_keys;
    keys = is_extra ? &p.extra : &p.keys;
    const PagedSelection& selection = keys->selection;
    const int64_t b = work.query / p.q_len, i = work.query % p.q_len, visible_entries = selection.visible(b, i);
    const int64_t first = (is_extra ? work.split - p.splits_of_keys : work.split) * p.keys_per_split,
                  left = selection.length(b, i) - first;
    row = selection.row(b, i) + first;
    count = int(left < 0 ? 0 : left < p.keys_per_split ? left : p.keys_per_split);
    constexpr int64_t kMost = int64_t{1} << 31;  // of numbers that an int32 can have
    visible = uint32_t(visible_entries < kMost ? visible_entries : kMost);
    table = selection.has_tables ? selection.block_tables + b * selection.tables_stride : nullptr;
  }
  /// The slot that entry `at` names, or -1 if it is not valid.
  HOPWELL_DEVICE int slot(int at) const {
    const int entry = at < count ? row[at] : -1;
    if (uint32_t(entry) >= visible) return -1;
    if (!table) return entry;
    const int block = int(keys->selection.block), page = table[entry / block];
    return uint32_t(page) < uint32_t(keys->selection.blocks) ? page * block + entry % block : -1;
  }
};

// Lists a split's rows and copies them to the stages, in order.
template <class Config>
struct Copies {
  using Row = typename Config::Row;
  static constexpr int kThreadsOfRow = Config::kThreads / Config::kKeys;

  const SplitParams& p;
  SplitStorage<Config>& s;
  int next = 0;    // entry that is listed next
  int count;       // entries
  int listed = 0;  // rows in the list
  int taken = 0;   // of them, by copies
  int steps = 0;   // whose copies have been issued

  // Lists the rows of the next kListed entries that are valid, in their order.
  HOPWELL_DEVICE void list() {
    const Entries entries(p, Work(p, Config::kHeads));
    const int warp = arch::warp_index(), lane = arch::lane_index();
    const int slot = entries.slot(next + arch::thread_index());
    const uint32_t valid = arch::ballot(slot >= 0);
    if (lane == 0) s.counts[warp] = std::popcount(valid);
    arch::syncthreads();
    int before = std::popcount(valid & ((1U << lane) - 1));
    listed = taken = 0;
    HOPWELL_UNROLL
    for (int w = 0; w < Config::kWarps; ++w) {
      before += w < warp ? s.counts[w] : 0;
      listed += s.counts[w];
    }
    if (slot >= 0) {
      const mla_cache::Blocks& cache = entries.keys->cache;
      const int block = slot / int(cache.block), row = slot % int(cache.block);
      const unsigned char* data = cache.data + block * cache.stride;
      if constexpr (Row::kMayHaveRopeCache) {
        const int pitch = p.rope_cache.data ? 2 * kDv : Row::kFormat.data_pitch;
        s.rows[before] = data + row * pitch;
        if (p.rope_cache.data)
          s.second[before] = p.rope_cache.data + block * p.rope_cache.stride + row * (2 * (Row::kWidth - kDv));
      } else {
        s.rows[before] = data + int64_t{row} * Row::kFormat.data_pitch;
        if constexpr (Row::kSecondBytes > 0)
          s.second[before] = data + cache.block * Row::kFormat.data_pitch + int64_t{row} * Row::kFormat.scale_pitch;
      }
    }
    next = count - next > Config::kListed ? next + Config::kListed : count;
    arch::syncthreads();
  }

  // Starts the copies of the next step's keys, if there is one. All threads call it.
  HOPWELL_DEVICE void issue(int stage) {
    while (taken >= listed && next < count) list();
    if (taken < listed) {
      const int thread = arch::thread_index() % kThreadsOfRow, row = arch::thread_index() / kThreadsOfRow;
      copy_row(arch::shared_address(s.stages[stage]) + uint32_t(row * Row::kPitch), taken + row, thread);
      const int left = listed - taken;
      if (arch::thread_index() == 0) s.keys[stage] = left < Config::kKeys ? left : Config::kKeys;
      taken += Config::kKeys, ++steps;
    }
    arch::cp_async_commit();
  }

  HOPWELL_DEVICE void copy_row(uint32_t to, int number, int thread) const {
    constexpr int kDataChunks = Row::kDataBytes / 16;
    const bool valid = number < listed;
    const unsigned char* row = valid ? s.rows[number] : p.keys.cache.data;
    int chunks = kDataChunks;
    if constexpr (Row::kMayHaveRopeCache) {
      if (p.rope_cache.data) {
        chunks = 2 * kDv / 16;
        const unsigned char* rope = valid ? s.second[number] : p.rope_cache.data;
        arch::cp_async(to + uint32_t(Row::kRopeAt + 16 * thread), rope + 16 * thread, valid ? 16 : 0);
      }
    }
    HOPWELL_UNROLL
    for (int chunk = thread; chunk < kDataChunks; chunk += kThreadsOfRow)
      if (chunk < chunks) arch::cp_async(to + uint32_t(16 * chunk), row + 16 * chunk, valid ? 16 : 0);
    if constexpr (Row::kSecondBytes > 0) {
      const unsigned char* second = valid ? s.second[number] : p.keys.cache.data;
      if (thread == kThreadsOfRow - 1)
        arch::cp_async<Row::kSecondBytes>(to + Row::kDataBytes, second, valid ? Row::kSecondBytes : 0);
    }
  }
};

// ---- Q ----------------------------------------------------------------------------------------------------------------

// A power of two that brings a head's largest |q| to 2^14 … 2^15, so that all of q fits in fp16; and its inverse.
struct QueryUnit {
  float down, up;
};
HOPWELL_DEVICE QueryUnit query_unit(float largest) {
  const int of_largest = int(arch::bit_cast<uint32_t>(largest) >> 23) - 127;
  // Infinities and NaN need no unit. Of smaller elements nothing is left in the scores.
  const int e = of_largest == 128 ? 0 : of_largest < -86 ? -100 : of_largest - 14;
  return {mla_cache::power_of_two(-e), mla_cache::power_of_two(e)};
}

HOPWELL_DEVICE const bf16* query_of(const SplitParams& p, int query) {
  return p.q + query / p.q_len * p.q_stride[0] + query % p.q_len * p.q_stride[1];
}

// A warp's columns of Q as operand B of its products, 16 columns a step: a chunk of its block, or of RoPE.
template <class Config>
struct Query {
  using Row = typename Config::Row;
  uint32_t words[Config::kSteps][Config::kHeadBlocks][2];

  // Whether step i multiplies bf16. Its lanes then have columns 2 t, 2 t + 1 and those + 8 of 16; for codes 4 t … 4 t + 3.
  static HOPWELL_DEVICE bool is_plain(int warp, int step) { return step < 4 ? Row::is_plain(warp) : Row::kRopeIsPlain; }
  static HOPWELL_DEVICE int column_of(int warp, int step) { return step < 4 ? 64 * warp + 16 * step : kDv + 16 * warp; }
  static HOPWELL_DEVICE bool has(int warp, int step) { return step < 4 || warp < 4; }

  // Loads unconverted bf16, and writes the largest |q| of the warp's columns.
  HOPWELL_DEVICE void load(const SplitParams& p, SplitStorage<Config>& s, const Work& work) {
    const int warp = arch::warp_index(), g = arch::lane_index() / 4, t = arch::lane_index() % 4;
    const bf16* of_query = query_of(p, work.query);
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      const int head = work.first_head + 8 * j + g;
      const bf16* row = of_query + (head < p.h_q ? head : 0) * p.q_stride[2];
      float largest = 0;
      HOPWELL_UNROLL
      for (int step = 0; step < Config::kSteps; ++step) {
        const bool exists = head < p.h_q && has(warp, step), plain = is_plain(warp, step);
        const bf16* at = row + (has(warp, step) ? column_of(warp, step) : 0) + (plain ? 2 : 4) * t;
        HOPWELL_UNROLL
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = *reinterpret_cast<const uint32_t*>(at + (plain ? 8 : 2) * i);
          words[step][j][i] = exists ? word : 0;
          const float low = arch::bit_cast<float>(words[step][j][i] << 16 & 0x7fffffff),
                      high = arch::bit_cast<float>(words[step][j][i] & 0x7fff0000);
          // As integers, NaN is the largest.
          largest = arch::bit_cast<float>(
              tile::Larger{}(arch::bit_cast<uint32_t>(largest),
                             tile::Larger{}(arch::bit_cast<uint32_t>(low), arch::bit_cast<uint32_t>(high))));
        }
      }
      if constexpr (Config::kFp16) {
        const uint32_t of_quad = tile::reduce<1, 2>(arch::bit_cast<uint32_t>(largest), tile::Larger{});
        if (t == 0) s.maxima[warp][8 * j + g] = arch::bit_cast<float>(of_quad);
      }
    }
  }

  // Converts the elements after a barrier.
  HOPWELL_DEVICE void convert(const SplitStorage<Config>& s) {
    if constexpr (!Config::kFp16) return;
    const int warp = arch::warp_index(), g = arch::lane_index() / 4;
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      const float down = unit_of(s, 8 * j + g).down;
      HOPWELL_UNROLL
      for (int step = 0; step < Config::kSteps; ++step) {
        float x[4];
        HOPWELL_UNROLL
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = words[step][j][i / 2];
          x[i] = arch::bit_cast<float>(i % 2 ? word & 0xffff0000 : word << 16) * down;
        }
        if (is_plain(warp, step)) {
          words[step][j][0] = arch::pack_bf16(x[0], x[1]), words[step][j][1] = arch::pack_bf16(x[2], x[3]);
        } else {
          constexpr bool kAdjacent = Config::Codes::kAdjacent;
          words[step][j][0] = arch::pack_fp16(x[0], x[kAdjacent ? 1 : 2]);
          words[step][j][1] = arch::pack_fp16(x[kAdjacent ? 2 : 1], x[3]);
        }
      }
    }
  }

  static HOPWELL_DEVICE QueryUnit unit_of(const SplitStorage<Config>& s, int head) {
    uint32_t largest = 0;
    HOPWELL_UNROLL
    for (int w = 0; w < Config::kWarps; ++w)
      largest = tile::Larger{}(largest, arch::bit_cast<uint32_t>(s.maxima[w][head]));
    return query_unit(arch::bit_cast<float>(largest));
  }
};

// ---- S = K Q ----------------------------------------------------------------------------------------------------------

// Whether products of fp16 are exact for a scale: 0, or a power of two from 2^-22 to 2^7.
HOPWELL_DEVICE bool is_exact_scale(float scale) {
  const uint32_t bits = arch::bit_cast<uint32_t>(scale), exponent = bits >> 23;
  return bits == 0 || ((bits & 0x7fffff) == 0 && exponent >= 127 - 22 && exponent <= 127 + 7);
}

// Address of this lane's row for ldmatrix: 16 keys from `key` on, and the two 16-byte chunks from byte `offset` on.
template <class Config>
HOPWELL_DEVICE uint32_t matrices_of_keys(const SplitStorage<Config>& s, int stage, int key, int offset) {
  const int lane = arch::lane_index();
  return arch::shared_address(s.stages[stage]) +
         uint32_t((key + lane % 16) * Config::Row::kPitch + offset + lane / 16 * 16);
}

// bf16(fp32(code · scale)) of two codes in bytes `low` and `high` of a word, with a scale each.
HOPWELL_DEVICE uint32_t scaled_codes(uint32_t codes, int low, int high, float scale_low, float scale_high) {
  return arch::pack_bf16(tile::e4m3_to_float(codes >> 8 * low & 0xff) * scale_low,
                         tile::e4m3_to_float(codes >> 8 * high & 0xff) * scale_high);
}

template <class Config>
using ScoresOfWarp = float[Config::kHeadBlocks][4];

// The share of a block of codes, exact scales. scale: of key `lane` of the step.
template <class Config>
HOPWELL_DEVICE void multiply_codes(const SplitStorage<Config>& s, int stage, int key, const Query<Config>& q,
                                   const float (&scale)[Config::Row::kScales], ScoresOfWarp<Config>& shares) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), g = arch::lane_index() / 4;
  uint32_t words[2][4];  // of chunks 0, 1 and 2, 3: keys g and g + 8 of the first, then of the second chunk
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) arch::ldmatrix(words[i], matrices_of_keys(s, stage, key, Row::offset_of(warp) + 32 * i));
  float products[Row::kScales][Config::kHeadBlocks][4] = {};
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) {
    const tile::CodePairs low = Config::Codes::pairs(words[chunk / 2][chunk % 2 * 2]),
                          high = Config::Codes::pairs(words[chunk / 2][chunk % 2 * 2 + 1]);
    uint32_t a[4] = {low.first, high.first, low.second, high.second};
    if constexpr (Config::Codes::kFindsNan) {
      if (chunk == 3) {
        HOPWELL_UNROLL
        for (int row = 0; row < 2; ++row) {
          uint32_t nan = 0;
          HOPWELL_UNROLL
          for (int i = 0; i < 4; ++i) nan |= Config::Codes::nan_bits(words[i / 2][i % 2 * 2 + row]);
          if (nan & 0x80808080) a[row] = 0x7fff7fff;
        }
      }
    }
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j)
      arch::mma_m16n8k16_fp16(products[chunk / Row::kChunksOfScale][j], a, q.words[chunk][j]);
  }
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    HOPWELL_UNROLL
    for (int row = 0; row < 2; ++row) {
      float factor = 1 / Config::Codes::kUnit;
      if constexpr (Row::kHasScales) factor *= arch::shuffle(scale[i], key + 8 * row + g);
      HOPWELL_UNROLL
      for (int n = 0; n < 2 * Config::kHeadBlocks; ++n) {
        float& share = shares[n / 2][2 * row + n % 2];
        share = fmaf(products[i][n / 2][2 * row + n % 2], factor, share);
      }
    }
  }
}

// The same for any scales. Q is read again as bf16, because the kernel keeps it in registers as fp16.
template <class Config>
HOPWELL_DEVICE void multiply_scaled_codes(const SplitParams& p, const SplitStorage<Config>& s, int stage, int key,
                                          const float (&scale)[Config::Row::kScales], ScoresOfWarp<Config>& shares) {
  using Row = typename Config::Row;
  const Work work(p, Config::kHeads);
  const int warp = arch::warp_index(), g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  const bf16* of_query = query_of(p, work.query);
  float products[Config::kHeadBlocks][4] = {};
  HOPWELL_NO_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) {
    uint32_t words[2];
    arch::ldmatrix(words, matrices_of_keys(s, stage, key, Row::offset_of(warp) + 16 * chunk));
    float scale_of_chunk = scale[0];
    if constexpr (Row::kScales > 1) scale_of_chunk = chunk < Row::kChunksOfScale ? scale[0] : scale[1];
    const float low = arch::shuffle(scale_of_chunk, key + g), high = arch::shuffle(scale_of_chunk, key + 8 + g);
    const uint32_t a[4] = {scaled_codes(words[0], 0, 1, low, low), scaled_codes(words[1], 0, 1, high, high),
                           scaled_codes(words[0], 2, 3, low, low), scaled_codes(words[1], 2, 3, high, high)};
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      const int head = work.first_head + 8 * j + g;
      uint32_t b[2] = {0, 0};
      if (head < p.h_q) {
        const bf16* at = of_query + head * p.q_stride[2] + 64 * warp + 16 * chunk + 4 * t;
        b[0] = *reinterpret_cast<const uint32_t*>(at), b[1] = *reinterpret_cast<const uint32_t*>(at + 2);
      }
      arch::mma_m16n8k16_bf16(products[j], a, b);
    }
  }
  HOPWELL_UNROLL
  for (int j = 0; j < Config::kHeadBlocks; ++j) {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float down = Query<Config>::unit_of(s, 8 * j + 2 * t + i).down;
      shares[j][i] = fmaf(products[j][i], down, shares[j][i]);
      shares[j][2 + i] = fmaf(products[j][2 + i], down, shares[j][2 + i]);
    }
  }
}

// A step of 16 columns of bf16, at byte `offset` of the rows.
template <class Config>
HOPWELL_DEVICE void multiply_plain(const SplitStorage<Config>& s, int stage, int key, int offset,
                                   const uint32_t (&q)[Config::kHeadBlocks][2], ScoresOfWarp<Config>& shares) {
  uint32_t a[4];
  arch::ldmatrix(a, matrices_of_keys(s, stage, key, offset));
  HOPWELL_UNROLL
  for (int j = 0; j < Config::kHeadBlocks; ++j) arch::mma_m16n8k16_bf16(shares[j], a, q[j]);
}

// 16 columns of RoPE. Codes have no scale there.
template <class Config>
HOPWELL_DEVICE void multiply_rope(const SplitStorage<Config>& s, int stage, int key, const Query<Config>& q,
                                  ScoresOfWarp<Config>& shares) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index();
  if constexpr (Row::kRopeIsPlain) {
    multiply_plain(s, stage, key, Row::kRopeAt + 32 * warp, q.words[4], shares);
  } else {
    uint32_t words[2];
    arch::ldmatrix(words, matrices_of_keys(s, stage, key, Row::kRopeAt + 16 * warp));
    const tile::CodePairs low = Config::Codes::pairs(words[0]), high = Config::Codes::pairs(words[1]);
    uint32_t a[4] = {low.first, high.first, low.second, high.second};
    HOPWELL_UNROLL
    for (int row = 0; row < 2; ++row)
      if (Config::Codes::nan_bits(words[row]) & 0x80808080) a[row] = 0x7fff7fff;
    float products[Config::kHeadBlocks][4] = {};
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      arch::mma_m16n8k16_fp16(products[j], a, q.words[4][j]);
      for (int i = 0; i < 4; ++i) shares[j][i] = fmaf(products[j][i], 1 / Config::Codes::kUnit, shares[j][i]);
    }
  }
}

// Loads the scales of this warp's block, key `lane`, and writes them as factors of P. Returns whether all are exact.
template <class Config>
HOPWELL_DEVICE bool load_scales(SplitStorage<Config>& s, int stage, float (&scale)[Config::Row::kScales]) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), lane = arch::lane_index();
  bool exact = true;
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    scale[i] = Row::scale(s.stages[stage] + lane * Row::kPitch, warp, i);
    exact = exact && is_exact_scale(scale[i]);
    s.scales[warp][i][lane] = uint16_t(arch::pack_fp16(scale[i] * Config::kScaleUnit, 0));
  }
  return arch::ballot(!exact) == 0;
}

// Writes this warp's share of the scores of a step. Returns whether the scales of its block are exact.
template <class Config>
HOPWELL_DEVICE bool multiply_keys(const SplitParams& p, SplitStorage<Config>& s, int stage, const Query<Config>& q) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  const bool plain = Row::is_plain(warp);
  bool exact = true;
  float scale[Row::kScales] = {};
  if constexpr (Row::kHasScales)
    if (!plain) exact = load_scales(s, stage, scale);
  HOPWELL_UNROLL
  for (int key = 0; key < Config::kKeys; key += 16) {
    ScoresOfWarp<Config> shares = {};
    if constexpr (Row::kHasRope)
      if (warp < 4) multiply_rope(s, stage, key, q, shares);
    if (plain) {
      if constexpr (Row::kHasPlain) {
        HOPWELL_UNROLL
        for (int chunk = 0; chunk < 4; ++chunk)
          multiply_plain(s, stage, key, Row::offset_of(warp) + 32 * chunk, q.words[chunk], shares);
      }
    } else if constexpr (Row::kHasCodes) {
      if (exact)
        multiply_codes(s, stage, key, q, scale, shares);
      else if constexpr (Row::kHasScales)
        multiply_scaled_codes(p, s, stage, key, scale, shares);
    }
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) s.scores[warp][8 * j + 2 * t + i % 2][key + g + i / 2 * 8] = shares[j][i];
    }
  }
  return exact;
}

// ---- softmax ----------------------------------------------------------------------------------------------------------

// A lane's head and its softmax: row_max of the head, and a sum for each key of the lane in a step. So a sum is over the
// same keys for 8 and for 16 heads.
template <class Config>
struct SoftmaxOfHead {
  int head;  // of the tile
  float up;  // unit of q
  float row_max = -INFINITY, sums[Config::kHeadBlocks] = {};

  HOPWELL_DEVICE Stats stats() const {
    float sum = sums[0];
    if constexpr (Config::kHeadBlocks == 2) sum += sums[1];
    return {row_max, tile::reduce<1, Config::kLanesOfHead / 2>(sum, tile::Plus{})};
  }
};

// Adds the shares of a step's scores, and writes P and the head's row_scale.
template <class Config>
HOPWELL_DEVICE void softmax(SplitStorage<Config>& s, int stage, float scale_log2, SoftmaxOfHead<Config>& of) {
  constexpr int kKeysOfLane = Config::kHeadBlocks;
  const int key = arch::lane_index() % Config::kLanesOfHead * kKeysOfLane;
  float x[kKeysOfLane] = {}, maximum = -INFINITY;
  HOPWELL_UNROLL
  for (int w = 0; w < Config::kWarps; ++w) {
    HOPWELL_UNROLL
    for (int i = 0; i < kKeysOfLane; ++i) x[i] += s.scores[w][of.head][key + i];
  }
  HOPWELL_UNROLL
  for (int i = 0; i < kKeysOfLane; ++i) {
    x[i] = key + i < s.keys[stage] ? x[i] * of.up * scale_log2 : -INFINITY;
    maximum = fmaxf(maximum, x[i]);
  }
  maximum = tile::reduce<1, Config::kLanesOfHead / 2>(maximum, tile::Larger{});
  const float factor = tile::update_row_max(of.row_max, fmaxf(of.row_max, maximum));
  const float base = tile::finite_row_max(of.row_max);
  HOPWELL_UNROLL
  for (int i = 0; i < kKeysOfLane; ++i) {
    x[i] = arch::exp2_approx(x[i] - base);
    of.sums[i] = tile::rescaled(of.sums[i], factor) + x[i];
    s.p[of.head][key + i] = uint16_t(Config::kFp16 ? arch::pack_fp16(x[i], 0) : arch::pack_bf16(x[i], 0));
  }
  if (key == 0) s.factors[of.head] = factor;
}

// ---- O += P V ---------------------------------------------------------------------------------------------------------

// Output of a warp's 64 columns: four blocks of 16 columns.
template <class Config>
using Output = float[4][Config::kHeadBlocks][4];

// Column of row `half` · 8 + lane / 4 of an output block: ldmatrix.trans gives pairs of columns of codes.
template <class Config>
HOPWELL_DEVICE int column_of_output(int warp, int block, int half) {
  const int g = arch::lane_index() / 4;
  return 64 * warp + 16 * block + (Config::Row::is_plain(warp) ? 8 * half + g : 2 * g + half);
}

// Rescales the output if row_max of a head has changed.
template <class Config>
HOPWELL_DEVICE void rescale(const SplitStorage<Config>& s, Output<Config>& out) {
  const int t = arch::lane_index() % 4;
  float factor[Config::kHeadBlocks][2];
  bool changed = false;
  HOPWELL_UNROLL
  for (int n = 0; n < 2 * Config::kHeadBlocks; ++n) {
    factor[n / 2][n % 2] = s.factors[n / 2 * 8 + 2 * t + n % 2];
    changed = changed || factor[n / 2][n % 2] != 1;
  }
  if (arch::ballot(changed) == 0) return;
  HOPWELL_UNROLL
  for (int n = 0; n < 4 * Config::kHeadBlocks; ++n) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)
      out[n / Config::kHeadBlocks][n % Config::kHeadBlocks][i] *= factor[n % Config::kHeadBlocks][i % 2];
  }
}

// P of 16 keys and all heads as operand B.
template <class Config>
HOPWELL_DEVICE void load_p(const SplitStorage<Config>& s, int key, uint32_t (&b)[Config::kHeadBlocks][2]) {
  const int lane = arch::lane_index(), head = Config::kHeadBlocks == 2 ? lane / 16 * 8 + lane % 8 : lane % 8;
  uint32_t words[2 * Config::kHeadBlocks];
  arch::ldmatrix(words, arch::shared_address(&s.p[head][key + lane / 8 % 2 * 8]));
  HOPWELL_UNROLL
  for (int n = 0; n < 2 * Config::kHeadBlocks; ++n) b[n / 2][n % 2] = words[n];
}

// P as bf16, times `unit`.
template <class Config>
HOPWELL_DEVICE void convert_p(uint32_t (&b)[Config::kHeadBlocks][2], float unit) {
  HOPWELL_UNROLL
  for (int n = 0; n < 2 * Config::kHeadBlocks; ++n) {
    uint32_t& word = b[n / 2][n % 2];
    word = arch::pack_bf16(arch::to_float(arch::fp16{uint16_t(word)}) * unit,
                           arch::to_float(arch::fp16{uint16_t(word >> 16)}) * unit);
  }
}

// Factor by which the output of a block is too large: that of scales as fp16, and of codes.
template <class Config>
HOPWELL_DEVICE float unit_of_output(int warp) {
  return Config::Row::is_plain(warp) ? 1 : Config::kScaleUnit * Config::Codes::kUnit;
}

// O += P V for a block of codes with exact scales, 16 keys.
template <class Config>
HOPWELL_DEVICE void accumulate_codes(const SplitStorage<Config>& s, int stage, int key, Output<Config>& out) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), t = arch::lane_index() % 4;
  uint32_t p[Config::kHeadBlocks][2], b[Row::kScales][Config::kHeadBlocks][2];
  load_p(s, key, p);
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    HOPWELL_UNROLL
    for (int n = 0; n < 2; ++n) {
      [[maybe_unused]] const uint32_t scales =
          *reinterpret_cast<const uint32_t*>(&s.scales[warp][i][key + 8 * n + 2 * t]);
      HOPWELL_UNROLL
      for (int j = 0; j < Config::kHeadBlocks; ++j)
        b[i][j][n] = Row::kHasScales ? arch::multiply_fp16(p[j][n], scales) : p[j][n];
    }
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t words[4];  // two columns of two keys each: keys 2 t and 2 t + 8 of chunk 2 i, then of chunk 2 i + 1
    arch::ldmatrix<arch::Transpose::yes>(words, matrices_of_keys(s, stage, key, Row::offset_of(warp) + 32 * i));
    HOPWELL_UNROLL
    for (int n = 0; n < 2; ++n) {
      const tile::CodePairs low = Config::Codes::even_odd(words[2 * n]),
                            high = Config::Codes::even_odd(words[2 * n + 1]);
      const uint32_t a[4] = {low.first, low.second, high.first, high.second};
      HOPWELL_UNROLL
      for (int j = 0; j < Config::kHeadBlocks; ++j)
        arch::mma_m16n8k16_fp16(out[2 * i + n][j], a, b[(2 * i + n) / Row::kChunksOfScale][j]);
    }
  }
}

// The same for any scales.
template <class Config>
HOPWELL_DEVICE void accumulate_scaled_codes(const SplitStorage<Config>& s, int stage, int key, Output<Config>& out) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), t = arch::lane_index() % 4;
  uint32_t b[Config::kHeadBlocks][2];
  load_p(s, key, b);
  convert_p<Config>(b, unit_of_output<Config>(warp));
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) {
    uint32_t words[2], a[4];
    arch::ldmatrix<arch::Transpose::yes>(words, matrices_of_keys(s, stage, key, Row::offset_of(warp) + 16 * chunk));
    HOPWELL_UNROLL
    for (int n = 0; n < 2; ++n) {
      float scale[2];
      for (int i = 0; i < 2; ++i)
        scale[i] =
            Row::scale(s.stages[stage] + (key + 8 * n + 2 * t + i) * Row::kPitch, warp, chunk / Row::kChunksOfScale);
      a[2 * n] = scaled_codes(words[n], 0, 2, scale[0], scale[1]);
      a[2 * n + 1] = scaled_codes(words[n], 1, 3, scale[0], scale[1]);
    }
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) arch::mma_m16n8k16_bf16(out[chunk][j], a, b[j]);
  }
}

// The same for a block of bf16.
template <class Config>
HOPWELL_DEVICE void accumulate_plain(const SplitStorage<Config>& s, int stage, int key, Output<Config>& out) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index();
  uint32_t b[Config::kHeadBlocks][2];
  load_p(s, key, b);
  if constexpr (Config::kFp16) convert_p<Config>(b, 1);
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) {
    uint32_t words[4];
    arch::ldmatrix<arch::Transpose::yes>(words, matrices_of_keys(s, stage, key, Row::offset_of(warp) + 32 * chunk));
    const uint32_t a[4] = {words[0], words[2], words[1], words[3]};
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) arch::mma_m16n8k16_bf16(out[chunk][j], a, b[j]);
  }
}

template <class Config>
HOPWELL_DEVICE void accumulate(const SplitStorage<Config>& s, int stage, bool exact, Output<Config>& out) {
  using Row = typename Config::Row;
  const bool plain = Row::is_plain(arch::warp_index());
  rescale(s, out);
  HOPWELL_UNROLL
  for (int key = 0; key < Config::kKeys; key += 16) {
    if (plain) {
      if constexpr (Row::kHasPlain) accumulate_plain(s, stage, key, out);
    } else if constexpr (Row::kHasCodes) {
      if (exact)
        accumulate_codes(s, stage, key, out);
      else if constexpr (Row::kHasScales)
        accumulate_scaled_codes(s, stage, key, out);
    }
  }
}

// ---- results ----------------------------------------------------------------------------------------------------------

// Element of a lane's output: its head of the tile and its column.
template <class Config, class Store>
HOPWELL_DEVICE void for_each_output(const Output<Config>& out, const Store& store) {
  const int warp = arch::warp_index(), t = arch::lane_index() % 4;
  const float unit = 1 / unit_of_output<Config>(warp);
  HOPWELL_UNROLL
  for (int block = 0; block < 4; ++block) {
    HOPWELL_UNROLL
    for (int n = 0; n < 4 * Config::kHeadBlocks; ++n) {
      const int j = n / 4, i = n % 4;
      store(8 * j + 2 * t + i % 2, column_of_output<Config>(warp, block, i / 2), out[block][j][i] * unit);
    }
  }
}

// Writes the results of a query that has no other splits. `head_of_lane` and `stats`: of the lane's softmax.
template <class Config>
HOPWELL_DEVICE void store_results(const SplitParams& p, SplitStorage<Config>& s, int head_of_lane, const Stats& stats,
                                  const Output<Config>& out) {
  const Work work(p, Config::kHeads);
  const bool stores = arch::lane_index() % Config::kLanesOfHead == 0 && work.first_head + head_of_lane < p.h_q;
  if (stores) s.factors[head_of_lane] = finish_head(p, work.query, work.first_head + head_of_lane, stats, true);
  arch::syncthreads();
  for_each_output<Config>(out, [&](int head, int column, float value) {
    if (work.first_head + head >= p.h_q) return;
    const int64_t at = row_of_out(p, work.query, work.first_head + head) + column;
    const float result = final_value(value, s.factors[head]);
    if (p.out_is_fp32)
      static_cast<float*>(p.out)[at] = result;
    else
      static_cast<bf16*>(p.out)[at] = arch::to_bf16(result);
  });
}

// Writes the partial result of a split.
template <class Config>
HOPWELL_DEVICE void store_partial(const SplitParams& p, int head_of_lane, const Stats& stats, const Output<Config>& out,
                                  bool empty) {
  const Work work(p, Config::kHeads);
  const int64_t first = int64_t{work.number} * p.h_q + work.first_head;
  const bool stores = arch::lane_index() % Config::kLanesOfHead == 0 && work.first_head + head_of_lane < p.h_q;
  if (stores) p.partial_stats[first + head_of_lane] = arch::bit_cast<arch::Words2>(stats);
  if (empty) return;
  for_each_output<Config>(out, [&](int head, int column, float value) {
    if (work.first_head + head < p.h_q) p.partial_out[(first + head) * kDv + column] = value;
  });
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasOfSm)
    sparse_mla_decode_split(const __grid_constant__ SplitParams p) {
  auto& s = arch::dynamic_smem<SplitStorage<Config>>();
  SoftmaxOfHead<Config> of{arch::warp_index() * Config::kHeadBlocks + arch::lane_index() / Config::kLanesOfHead, 1};
  Output<Config> out = {};
  Query<Config> q{};
  float scale_log2 = 0;
  Copies<Config> copies{p, s, 0, Entries(p, Work(p, Config::kHeads)).count};
  const auto after = [](int stage) { return stage == Config::kStages - 1 ? 0 : stage + 1; };
  // The steps before step 0 only issue copies, so that the code for them exists once.
  HOPWELL_NO_UNROLL
  for (int step = 1 - Config::kStages, stage = 0, free = 0; step < 0 || step < copies.steps; ++step) {
    if (step >= 0) {
      arch::cp_async_wait<Config::kStages - 2>();
      arch::syncthreads();
    }
    copies.issue(free);
    free = after(free);
    if (step < -1) continue;
    if (step < 0) {
      if (copies.steps == 0) break;
      q.load(p, s, Work(p, Config::kHeads));
      if constexpr (Config::kFp16) {
        arch::syncthreads();
        q.convert(s);
        of.up = Query<Config>::unit_of(s, of.head).up;
      }
      scale_log2 = p.scale_log2 * p.kv_scale_factor();
      continue;
    }
    const bool exact = multiply_keys(p, s, stage, q);
    arch::syncthreads();
    softmax(s, stage, scale_log2, of);
    arch::syncthreads();
    accumulate(s, stage, exact, out);
    stage = after(stage);
  }
  tile::launch_dependents();
  const Stats stats = of.stats();
  if (p.splits == 1) {
    arch::syncthreads();  // before factors are written again
    store_results(p, s, of.head, stats, out);
  } else {
    store_partial<Config>(p, of.head, stats, out, copies.steps == 0);
  }
}

// ---- on the host ------------------------------------------------------------------------------------------------------

template <class Config>
SplitKernel split_kernel_of() {
  static_assert(sizeof(SplitStorage<Config>) <= 99 * 1024);
  return {sparse_mla_decode_split<Config>, Config::kThreads, sizeof(SplitStorage<Config>)};
}

template <class Codes, class RowsOfFormat>
SplitKernel split_kernel(int heads) {
  return heads == 8 ? split_kernel_of<SplitConfig<Codes, RowsOfFormat, 8>>()
                    : split_kernel_of<SplitConfig<Codes, RowsOfFormat, 16>>();
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
