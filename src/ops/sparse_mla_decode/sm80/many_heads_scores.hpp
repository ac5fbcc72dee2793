// The split kernel of sparse_mla_decode for 64 heads: Q, the scores S = Q Kᵀ and their softmax. See many_heads.hpp.
#pragma once

#include "ops/sparse_mla_decode/sm80/many_heads_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// ---- Q ----------------------------------------------------------------------------------------------------------------

// The part of S that a warp computes.
struct ScoresOfHeads {
  int half, first_head;

  HOPWELL_DEVICE explicit ScoresOfHeads(int warp) : half(warp / 4), first_head(warp % 4 * 16) {}
  HOPWELL_DEVICE int block(int number) const { return 4 * half + number; }  // number: 0 to 3
};

// A warp's 16 heads and half of the columns of Q, as operand A: four chunks of 16 columns in each of four blocks, and
// half of RoPE.
template <class Config>
struct QueryOfHalf {
  using Row = typename Config::Row;
  uint32_t words[4][4][4], rope[Row::kHasRope ? 2 : 1][4];

  // Calls each(words, column, plain) for all chunks: their words, first column, and whether they are bf16.
  template <class Each>
  HOPWELL_DEVICE void for_each_chunk(const ScoresOfHeads& of, const Each& each) {
    HOPWELL_UNROLL
    for (int b = 0; b < 4; ++b) {
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < 4; ++chunk)
        each(words[b][chunk], 64 * of.block(b) + 16 * chunk, Row::is_plain(of.block(b)));
    }
    if constexpr (Row::kHasRope) {
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) each(rope[chunk], kDv + 32 * of.half + 16 * chunk, Row::kRopeIsPlain);
    }
  }

  // Loads unconverted bf16, and writes the largest |q| of each head over the warp's columns.
  HOPWELL_DEVICE void load(const SplitParams& p, ManyHeadsStorage<Config>& s) {
    const ScoresOfHeads of(arch::warp_index());
    const int g = tile::fragment_row(), t = tile::quad_lane();
    const Work work = work_of<Config>(p);
    const bf16* of_query = query_of(p, work.query);
    uint32_t largest[2] = {0, 0};
    for_each_chunk(of, [&](uint32_t (&w)[4], int column, bool plain) {
      HOPWELL_UNROLL
      for (int row = 0; row < 2; ++row) {
        const int head = work.first_head + of.first_head + g + 8 * row;
        const bool exists = head < p.h_q;
        const bf16* at = of_query + (exists ? head : 0) * p.q_stride[2] + column + (plain ? 2 : 4) * t;
        HOPWELL_UNROLL
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = *reinterpret_cast<const uint32_t*>(at + (plain ? 8 : 2) * i);
          w[2 * i + row] = exists ? word : 0;
          // As integers, NaN is the largest.
          largest[row] = tile::Larger{}(largest[row],
                                        tile::Larger{}(w[2 * i + row] << 16 & 0x7fffffff, w[2 * i + row] & 0x7fff0000));
        }
      }
    });
    HOPWELL_UNROLL
    for (int row = 0; row < 2; ++row) {
      const uint32_t of_quad = tile::reduce<1, 2>(largest[row], tile::Larger{});
      if (t == 0) s.maxima[of.half][of.first_head + g + 8 * row] = arch::bit_cast<float>(of_quad);
    }
  }

  // Converts the elements after a barrier. Elements that are multiplied by codes become fp16, in the order of codes.
  HOPWELL_DEVICE void convert(const ManyHeadsStorage<Config>& s) {
    const ScoresOfHeads of(arch::warp_index());
    HOPWELL_UNROLL
    for (int row = 0; row < 2; ++row) {
      const float down = unit_of(s, of.first_head + tile::fragment_row() + 8 * row).down;
      for_each_chunk(of, [&](uint32_t (&w)[4], int, bool plain) {
        float x[4];
        HOPWELL_UNROLL
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = w[i / 2 * 2 + row];
          x[i] = arch::bit_cast<float>(i % 2 ? word & 0xffff0000 : word << 16) * down;
        }
        w[row] = plain ? arch::pack_bf16(x[0], x[1]) : arch::pack_fp16(x[0], x[2]);
        w[2 + row] = plain ? arch::pack_bf16(x[2], x[3]) : arch::pack_fp16(x[1], x[3]);
      });
    }
  }

  static HOPWELL_DEVICE QueryUnit unit_of(const ManyHeadsStorage<Config>& s, int head) {
    const uint32_t largest =
        tile::Larger{}(arch::bit_cast<uint32_t>(s.maxima[0][head]), arch::bit_cast<uint32_t>(s.maxima[1][head]));
    return query_unit(arch::bit_cast<float>(largest));
  }
};

// ---- S = Q Kᵀ ---------------------------------------------------------------------------------------------------------

using PartialScores = float[2][4];  // of 16 heads and 16 keys, over some of the columns

enum class Products { fp16, bf16 };

template <Products kProducts>
HOPWELL_DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kProducts == Products::fp16)
    arch::mma_m16n8k16_fp16(d, a, b);
  else
    arch::mma_m16n8k16_bf16(d, a, b);
}

// Adds the products of 16 columns, from byte `offset` of the decoded rows on, with 16 keys from `key` on.
template <Products kProducts, class Config>
HOPWELL_DEVICE void multiply_chunk(const ManyHeadsStorage<Config>& s, int key, int offset, const uint32_t (&q)[4],
                                   PartialScores& d) {
  const int lane = WarpAndLane().lane;
  uint32_t b[4];
  arch::ldmatrix(b, arch::shared_address(&s.decoded[key + lane / 16 * 8 + lane % 8][offset + lane / 8 % 2 * 16]));
  const uint32_t of_first[2] = {b[0], b[1]}, of_second[2] = {b[2], b[3]};
  multiply<kProducts>(d[0], q, of_first), multiply<kProducts>(d[1], q, of_second);
}

// The partial scores of a block of codes with exact scales. Without scales they keep the factor of decoded codes:
// kScoreUnit.
template <class Config>
HOPWELL_DEVICE void multiply_codes(const ManyHeadsStorage<Config>& s, int key, int block, const uint32_t (&q)[4][4],
                                   PartialScores& partial) {
  using Row = typename Config::Row;
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    PartialScores products = {};
    HOPWELL_UNROLL
    for (int chunk = Row::kChunksOfScale * i; chunk < Row::kChunksOfScale * (i + 1); ++chunk)
      multiply_chunk<Products::fp16>(s, key, 128 * block + 32 * chunk, q[chunk], Row::kHasScales ? products : partial);
    if constexpr (Row::kHasScales) {
      const float* factors = &s.key_factors[block][i][key + tile::fragment_column(WarpAndLane().lane)];
      HOPWELL_UNROLL
      for (int x = 0; x < 8; ++x) {
        float& score = partial[x / 4][x % 4];
        score = fmaf(products[x / 4][x % 4], factors[x / 4 * 8 + x % 2], score);
      }
    }
  }
}

// The same for any scales. Q is read again as bf16, because the kernel keeps it in registers as fp16.
template <class Config>
HOPWELL_DEVICE void multiply_scaled_codes(const SplitParams& p, const ManyHeadsStorage<Config>& s, int key, int block,
                                          PartialScores& partial) {
  const Work work = work_of<Config>(p);
  const ScoresOfHeads of(WarpAndLane().warp);
  const int g = tile::fragment_row(WarpAndLane().lane), first_head = work.first_head + of.first_head + g;
  const bf16* at = query_of(p, work.query) + 64 * block + 4 * tile::quad_lane(WarpAndLane().lane);
  PartialScores products = {};
  HOPWELL_NO_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) {
    uint32_t q[4];
    HOPWELL_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int head = first_head + 8 * row;
      uint32_t pairs[2] = {0, 0};
      if (head < p.h_q) even_odd_of_four(at + head * p.q_stride[2] + 16 * chunk, pairs);
      q[row] = pairs[0], q[2 + row] = pairs[1];
    }
    multiply_chunk<Products::bf16>(s, key, 128 * block + 32 * chunk, q, products);
  }
  HOPWELL_UNROLL
  for (int n = 0; n < 2; ++n) {
    HOPWELL_UNROLL
    for (int x = 0; x < 4; ++x) {
      const float down = QueryOfHalf<Config>::unit_of(s, of.first_head + g + x / 2 * 8).down;
      partial[n][x] = fmaf(products[n][x], down, partial[n][x]);
    }
  }
}

// A chunk of RoPE. Rows that have codes there have no scales.
template <class Config>
HOPWELL_DEVICE void multiply_rope(const ManyHeadsStorage<Config>& s, int key, int chunk, const uint32_t (&q)[4],
                                  PartialScores& partial) {
  constexpr Products kProducts = Config::Row::kRopeIsPlain ? Products::bf16 : Products::fp16;
  multiply_chunk<kProducts>(s, key, 2 * kDv + 32 * chunk, q, partial);
}

// Writes a warp's scores of a step. In between the copies of the next step start.
template <class Config>
HOPWELL_DEVICE void multiply_keys(const SplitParams& p, ManyHeadsStorage<Config>& s, const QueryOfHalf<Config>& q,
                                  const Copies<Config>& copies, const typename Copies<Config>::Step& next) {
  using Row = typename Config::Row;
  const ScoresOfHeads of(WarpAndLane().warp);
  HOPWELL_NO_UNROLL
  for (int key = 0; key < Config::kKeys; key += 16) {
    PartialScores sum = {};
    HOPWELL_UNROLL
    for (int b = 0; b < 4; ++b) {
      if (b == 2) copies.start(next, key / 16);
      const int block = of.block(b);
      PartialScores partial = {};
      if constexpr (Row::kHasRope)
        if (b % 2 == 0) multiply_rope(s, key, 2 * of.half + b / 2, q.rope[b / 2], partial);
      if (Row::is_plain(block)) {
        HOPWELL_UNROLL
        for (int chunk = 0; chunk < 4; ++chunk)
          multiply_chunk<Products::bf16>(s, key, 128 * block + 32 * chunk, q.words[b][chunk], partial);
      } else if (!Row::kHasScales || s.exact[block]) {
        multiply_codes(s, key, block, q.words[b], partial);
      } else {
        multiply_scaled_codes(p, s, key, block, partial);
      }
      HOPWELL_UNROLL
      for (int x = 0; x < 8; ++x) sum[x / 4][x % 4] += partial[x / 4][x % 4];
    }
    const int lane = WarpAndLane().lane;
    HOPWELL_UNROLL
    for (int x = 0; x < 4; ++x) {
      const int head = of.first_head + tile::fragment_row(lane) + x / 2 * 8, n = x % 2;
      float* to = &s.heads[of.half][head].scores[key + 8 * n + tile::fragment_column(lane)];
      arch::store_vector(to, arch::Words2{{arch::bit_cast<uint32_t>(sum[n][x / 2 * 2]),
                                           arch::bit_cast<uint32_t>(sum[n][x / 2 * 2 + 1])}});
    }
  }
}

// ---- softmax ----------------------------------------------------------------------------------------------------------

// Converts Q, and initialises the softmax of each head.
template <class Config>
HOPWELL_DEVICE void begin_softmax(const SplitParams& p, ManyHeadsStorage<Config>& s, QueryOfHalf<Config>& q) {
  q.convert(s);
  const int head = arch::thread_index() / Config::kLanesOfHead, lane = arch::thread_index() % Config::kLanesOfHead;
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kKeysOfLane; ++i) s.sums[head][lane * Config::kKeysOfLane + i] = 0;
  if (lane != 0) return;
  HeadOfStep& of = s.heads[0][head];
  of.row_max = -INFINITY, of.up = QueryOfHalf<Config>::unit_of(s, head).up / kScoreUnit<Config>;
  of.scale_log2 = p.scale_log2 * p.kv_scale_factor();
}

// Adds the two halves of a step's scores, and writes P and the head's row_scale.
template <class Config>
HOPWELL_DEVICE void softmax(ManyHeadsStorage<Config>& s) {
  constexpr int kKeysOfLane = Config::kKeysOfLane;
  const int t = arch::thread_index_anew(), head = t / Config::kLanesOfHead,
            key = t % Config::kLanesOfHead * kKeysOfLane;
  HeadOfStep& of = s.heads[0][head];
  const float up = of.up, scale_log2 = of.scale_log2;
  float row_max = of.row_max, x[kKeysOfLane], maximum = -INFINITY;
  HOPWELL_UNROLL
  for (int i = 0; i < kKeysOfLane; ++i) {
    const float* halves[2] = {of.scores, s.heads[1][head].scores};
    x[i] = key + i < s.keys_of_step ? (halves[0][key + i] + halves[1][key + i]) * up * scale_log2 : -INFINITY;
    maximum = fmaxf(maximum, x[i]);
  }
  maximum = tile::reduce<1, Config::kLanesOfHead / 2>(maximum, tile::Larger{});
  const float factor = tile::update_row_max(row_max, fmaxf(row_max, maximum));
  const float base = tile::finite_row_max(row_max);
  float* sums = &s.sums[head][key];
  HOPWELL_UNROLL
  for (int i = 0; i < kKeysOfLane; ++i) {
    x[i] = arch::exp2_approx(x[i] - base);
    sums[i] = tile::rescaled(sums[i], factor) + x[i];
  }
  arch::Words4 p;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) p.w[i] = arch::pack_fp16(x[2 * i], x[2 * i + 1]);
  arch::store_vector(&s.p[head][key], p);
  arch::syncwarp();  // all lanes of the head have read row_max
  if (key == 0) of.row_max = row_max, of.factor = factor;
}

// The statistics of the head of this thread's softmax.
template <class Config>
HOPWELL_DEVICE Stats stats_of(const ManyHeadsStorage<Config>& s) {
  constexpr int kKeysOfLane = Config::kKeysOfLane;
  const int t = arch::thread_index_anew(), head = t / Config::kLanesOfHead;
  const float* sums = &s.sums[head][t % Config::kLanesOfHead * kKeysOfLane];
  float sum[kKeysOfLane];
  HOPWELL_UNROLL
  for (int i = 0; i < kKeysOfLane; ++i) sum[i] = sums[i];
  HOPWELL_UNROLL
  for (int distance = 1; distance < kKeysOfLane; distance *= 2) {
    HOPWELL_UNROLL
    for (int i = 0; i < kKeysOfLane; i += 2 * distance) sum[i] += sum[i + distance];
  }
  return {s.heads[0][head].row_max, tile::reduce<1, Config::kLanesOfHead / 2>(sum[0], tile::Plus{})};
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
