// The split kernel of sparse_mla_decode: Q, the scores S = K Q and their softmax. See split.hpp.
#pragma once

#include "ops/sparse_mla_decode/sm80/split_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// ---- Q --------------------------------------------------------------------------------------------------------------

// A power of two that brings a head's largest |q| to 2^14 … 2^15, so that all of q fits in fp16; and its inverse. It
// is at most 2^100, because it must fit in fp32: a largest |q| below 2^-86 stays below 2^14. If an element is infinite
// or NaN, all finite ones fit in fp16, too. Some may become zeros: the product with an infinite key is then NaN.
struct QueryUnit {
  float down, up;
};
HOPWELL_DEVICE QueryUnit query_unit(float largest) {
  const int of_largest = int(arch::bit_cast<uint32_t>(largest) >> 23) - 127;
  const int e = of_largest < -86 ? -100 : of_largest - 14;
  return {mla_cache::power_of_two(-e), mla_cache::power_of_two(e)};
}

// A warp's columns of Q as operand B of its products, in chunks of 16 columns: four chunks of its block, and a chunk
// of RoPE.
template <class Config>
struct Query {
  using Row = typename Config::Row;
  uint32_t words[Config::kChunks][Config::kHeadBlocks][2];

  // Whether a chunk is multiplied as bf16. Of its 16 columns a lane then has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. With
  // codes a lane has columns 4 t to 4 t + 3.
  static HOPWELL_DEVICE bool is_plain(int warp, int chunk) {
    return chunk < 4 ? Row::is_plain(warp) : Row::kRopeIsPlain;
  }
  static HOPWELL_DEVICE int column_of(int warp, int chunk) {
    return chunk < 4 ? 64 * warp + 16 * chunk : kDv + 16 * warp;
  }
  static HOPWELL_DEVICE bool has(int warp, int chunk) { return chunk < 4 || warp < 4; }

  // Loads unconverted bf16, and writes the largest |q| of the warp's columns.
  HOPWELL_DEVICE void load(const SplitParams& p, SplitStorage<Config>& s, const Work& work) {
    const int warp = arch::warp_index(), g = tile::fragment_row(), t = tile::quad_lane();
    const bf16* of_query = query_of(p, work.query);
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      const int head = work.first_head + 8 * j + g;
      const bf16* row = of_query + (head < p.h_q ? head : 0) * p.q_stride[2];
      float largest = 0;
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        const bool exists = head < p.h_q && has(warp, chunk), plain = is_plain(warp, chunk);
        const bf16* at = row + (has(warp, chunk) ? column_of(warp, chunk) : 0) + (plain ? 2 : 4) * t;
        HOPWELL_UNROLL
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = *reinterpret_cast<const uint32_t*>(at + (plain ? 8 : 2) * i);
          words[chunk][j][i] = exists ? word : 0;
          const float low = arch::bit_cast<float>(words[chunk][j][i] << 16 & 0x7fffffff),
                      high = arch::bit_cast<float>(words[chunk][j][i] & 0x7fff0000);
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
    const int warp = arch::warp_index(), g = tile::fragment_row();
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      const float down = unit_of(s, 8 * j + g).down;
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        float x[4];
        HOPWELL_UNROLL
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = words[chunk][j][i / 2];
          x[i] = arch::bit_cast<float>(i % 2 ? word & 0xffff0000 : word << 16) * down;
        }
        if (is_plain(warp, chunk)) {
          words[chunk][j][0] = arch::pack_bf16(x[0], x[1]), words[chunk][j][1] = arch::pack_bf16(x[2], x[3]);
        } else {
          words[chunk][j][0] = arch::pack_fp16(x[0], x[2]), words[chunk][j][1] = arch::pack_fp16(x[1], x[3]);
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

// ---- S = K Q --------------------------------------------------------------------------------------------------------

// Whether fp16 is exact for a scale and precise enough for its products with P: 0, or a power of two from 2^-13 to 2^7.
// A factor of P is 2^8 · scale, and fp16 loses products below 2^-25. So n keys of a split lose at most
// n · 2^-25 / (2^8 · scale) of a sum of probabilities that is at least 1: for 2^-13 and 2,048 keys 0.2 %.
HOPWELL_DEVICE bool is_exact_scale(float scale) {
  const uint32_t bits = arch::bit_cast<uint32_t>(scale), exponent = bits >> 23;
  return bits == 0 || ((bits & 0x7fffff) == 0 && exponent >= 127 - 13 && exponent <= 127 + 7);
}

template <class Config>
using ScoresOfWarp = float[Config::kHeadBlocks][4];

// The partial scores of a block of codes, exact scales. scale: of key `lane` of the step. Without scales the factor of
// codes stays in the scores: kScoreUnit.
template <class Config>
HOPWELL_DEVICE void multiply_codes(const SplitStorage<Config>& s, int stage, int key, const Query<Config>& q,
                                   const float (&scale)[Config::Row::kScales], ScoresOfWarp<Config>& partial) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), g = tile::fragment_row();
  uint32_t words[2][4];  // of chunks 0, 1 and 2, 3: keys g and g + 8 of the first, then of the second chunk
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) arch::ldmatrix(words[i], matrices_of_keys(s, stage, key, Row::offset_of(warp) + 32 * i));
  ScoresOfWarp<Config> products[Row::kScales] = {};
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) {
    const tile::CodePairs low = Config::Codes::even_odd(words[chunk / 2][chunk % 2 * 2]),
                          high = Config::Codes::even_odd(words[chunk / 2][chunk % 2 * 2 + 1]);
    uint32_t a[4] = {low.first, high.first, low.second, high.second};
    if (chunk == 3) {
      HOPWELL_UNROLL
      for (int row = 0; row < 2; ++row) {
        uint32_t nan = 0;
        HOPWELL_UNROLL
        for (int i = 0; i < 4; ++i) nan |= Config::Codes::nan_bits(words[i / 2][i % 2 * 2 + row]);
        if (nan & 0x80808080) a[row] = 0x7fff7fff;
      }
    }
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j)
      arch::mma_m16n8k16_fp16(Row::kHasScales ? products[chunk / Row::kChunksOfScale][j] : partial[j], a,
                              q.words[chunk][j]);
  }
  if constexpr (Row::kHasScales) {
    HOPWELL_UNROLL
    for (int n = 0; n < 2 * Row::kScales; ++n) {
      const int i = n / 2, row = n % 2;
      const float factor = 1 / Config::Codes::kUnit * arch::shuffle(scale[i], key + 8 * row + g);
      HOPWELL_UNROLL
      for (int x = 0; x < 2 * Config::kHeadBlocks; ++x) {
        float& score = partial[x / 2][2 * row + x % 2];
        score = fmaf(products[i][x / 2][2 * row + x % 2], factor, score);
      }
    }
  }
}

// The same for any scales. Q is read again as bf16, because the kernel keeps it in registers as fp16.
template <class Config>
HOPWELL_DEVICE void multiply_scaled_codes(const SplitParams& p, const SplitStorage<Config>& s, int stage, int key,
                                          const float (&scale)[Config::Row::kScales], ScoresOfWarp<Config>& partial) {
  using Row = typename Config::Row;
  const Work work = work_of<Config>(p);
  const int warp = arch::warp_index(), g = tile::fragment_row(), t = tile::quad_lane();
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
      partial[j][i] = fmaf(products[j][i], down, partial[j][i]);
      partial[j][2 + i] = fmaf(products[j][2 + i], down, partial[j][2 + i]);
    }
  }
}

// A chunk of 16 columns of bf16, at byte `offset` of the rows.
template <class Config>
HOPWELL_DEVICE void multiply_plain(const SplitStorage<Config>& s, int stage, int key, int offset,
                                   const uint32_t (&q)[Config::kHeadBlocks][2], ScoresOfWarp<Config>& partial) {
  uint32_t a[4];
  arch::ldmatrix(a, matrices_of_keys(s, stage, key, offset));
  HOPWELL_UNROLL
  for (int j = 0; j < Config::kHeadBlocks; ++j) arch::mma_m16n8k16_bf16(partial[j], a, q[j]);
}

// 16 columns of RoPE. Rows that have codes there have no scales.
template <class Config>
HOPWELL_DEVICE void multiply_rope(const SplitStorage<Config>& s, int stage, int key, const Query<Config>& q,
                                  ScoresOfWarp<Config>& partial) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index();
  if constexpr (Row::kRopeIsPlain) {
    multiply_plain(s, stage, key, Row::kRopeAt + 32 * warp, q.words[4], partial);
  } else {
    uint32_t words[2];
    arch::ldmatrix(words, matrices_of_keys(s, stage, key, Row::kRopeAt + 16 * warp));
    const tile::CodePairs low = Config::Codes::even_odd(words[0]), high = Config::Codes::even_odd(words[1]);
    uint32_t a[4] = {low.first, high.first, low.second, high.second};
    HOPWELL_UNROLL
    for (int row = 0; row < 2; ++row)
      if (Config::Codes::nan_bits(words[row]) & 0x80808080) a[row] = 0x7fff7fff;
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) arch::mma_m16n8k16_fp16(partial[j], a, q.words[4][j]);
  }
}

// Loads the scales of this warp's block, key `lane`, and writes them as factors of P. Returns whether the scales of all
// valid keys are exact. Other rows are zeros, so their scales are 0 as fp16, but a byte of 0 is the scale 2^-127.
template <class Config>
HOPWELL_DEVICE bool load_scales(SplitStorage<Config>& s, int stage, float (&scale)[Config::Row::kScales]) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), lane = arch::lane_index();
  bool exact = true;
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    scale[i] = Row::scale(s.stages[stage] + lane * Row::kPitch, warp, i);
    exact = exact && (lane >= s.keys[stage] || is_exact_scale(scale[i]));
    s.scales[warp][i][lane] = uint16_t(arch::pack_fp16(scale[i] * Config::kScaleUnit, 0));
  }
  return arch::ballot(!exact) == 0;
}

// Writes this warp's partial scores of a step. Returns whether the scales of its block are exact. In between the
// copies of a later step start: all at once would fill the queue of the load-store unit.
template <class Config>
HOPWELL_DEVICE bool multiply_keys(const SplitParams& p, SplitStorage<Config>& s, int stage, const Query<Config>& q,
                                  const Copies<Config>& copies, const typename Copies<Config>::Step& later) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index(), g = tile::fragment_row(), t = tile::quad_lane();
  const bool plain = Row::is_plain(warp);
  bool exact = true;
  float scale[Row::kScales] = {};
  if constexpr (Row::kHasScales)
    if (!plain) exact = load_scales(s, stage, scale);
  HOPWELL_UNROLL
  for (int key = 0; key < Config::kKeys; key += 16) {
    copies.start(later, key / 16);
    ScoresOfWarp<Config> partial = {};
    if constexpr (Row::kHasRope)
      if (warp < 4) multiply_rope(s, stage, key, q, partial);
    if (plain) {
      if constexpr (Row::kHasPlain) {
        HOPWELL_UNROLL
        for (int chunk = 0; chunk < 4; ++chunk)
          multiply_plain(s, stage, key, Row::offset_of(warp) + 32 * chunk, q.words[chunk], partial);
      }
    } else if constexpr (Row::kHasCodes) {
      if (exact)
        multiply_codes(s, stage, key, q, scale, partial);
      else if constexpr (Row::kHasScales)
        multiply_scaled_codes(p, s, stage, key, scale, partial);
    }
    HOPWELL_UNROLL
    for (int j = 0; j < Config::kHeadBlocks; ++j) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) s.scores[warp][8 * j + 2 * t + i % 2][key + g + i / 2 * 8] = partial[j][i];
    }
  }
  return exact;
}

// ---- softmax --------------------------------------------------------------------------------------------------------

// A lane's head and its softmax: row_max of the head, and a sum for each key of the lane in a step. So a sum is over
// the same keys for any number of heads, and sums are added in pairs.
template <class Config>
struct SoftmaxOfHead {
  int head;  // of the tile
  float up;  // unit of q
  float row_max = -INFINITY, sums[Config::kHeadBlocks] = {};

  HOPWELL_DEVICE Stats stats() const {
    float sum = sums[0];
    if constexpr (Config::kHeadBlocks >= 2) sum += sums[1];
    if constexpr (Config::kHeadBlocks == 4) sum += sums[2] + sums[3];
    return {row_max, tile::reduce<1, Config::kLanesOfHead / 2>(sum, tile::Plus{})};
  }
};

// Adds the partial scores of a step, and writes P and the head's row_scale.
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

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
