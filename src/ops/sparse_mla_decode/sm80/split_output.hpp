// The split kernel of sparse_mla_decode: the output O += P V, and the stores of results. See split.hpp.
#pragma once

#include "ops/sparse_mla_decode/sm80/split_tile.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// ---- O += P V -------------------------------------------------------------------------------------------------------

// Output of a warp's 64 columns: four blocks of 16 columns.
template <class Config>
using Output = float[4][Config::kHeadBlocks][4];

// Column of row `half` · 8 + fragment_row() of an output block: ldmatrix.trans gives pairs of columns of codes.
template <class Config>
HOPWELL_DEVICE int column_of_output(int warp, int block, int half) {
  const int g = tile::fragment_row();
  return 64 * warp + 16 * block + (Config::Row::is_plain(warp) ? 8 * half + g : 2 * g + half);
}

// Rescales the output if row_max of a head has changed.
template <class Config>
HOPWELL_DEVICE void rescale(const SplitStorage<Config>& s, Output<Config>& out) {
  float factor[Config::kHeadBlocks][2];
  bool changed = false;
  HOPWELL_UNROLL
  for (int n = 0; n < 2 * Config::kHeadBlocks; ++n) {
    factor[n / 2][n % 2] = s.factors[n / 2 * 8 + tile::fragment_column() + n % 2];
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
  constexpr int kBlocks = Config::kHeadBlocks == 1 ? 1 : 2;  // of a load
  const int lane = arch::lane_index(), head = kBlocks == 2 ? lane / 16 * 8 + lane % 8 : lane % 8;
  HOPWELL_UNROLL
  for (int first = 0; first < Config::kHeadBlocks; first += kBlocks) {
    uint32_t words[2 * kBlocks];
    arch::ldmatrix(words, arch::shared_address(&s.p[8 * first + head][key + lane / 8 % 2 * 8]));
    HOPWELL_UNROLL
    for (int n = 0; n < 2 * kBlocks; ++n) b[first + n / 2][n % 2] = words[n];
  }
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

// Factor by which the output of a block is too large: the factor of fp16 scales times the factor of decoded codes.
template <class Config>
HOPWELL_DEVICE float unit_of_output(int warp) {
  return Config::Row::is_plain(warp) ? 1 : Config::kScaleUnit * Config::Codes::kUnit;
}

// O += P V for a block of codes with exact scales, 16 keys. The products of P and scales are rounded to fp16.
template <class Config>
HOPWELL_DEVICE void accumulate_codes(const SplitStorage<Config>& s, int stage, int key, Output<Config>& out) {
  using Row = typename Config::Row;
  const int warp = arch::warp_index();
  uint32_t p[Config::kHeadBlocks][2], b[Row::kScales][Config::kHeadBlocks][2];
  load_p(s, key, p);
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    HOPWELL_UNROLL
    for (int n = 0; n < 2; ++n) {
      uint32_t scales = 0;
      if constexpr (Row::kHasScales)
        scales = *reinterpret_cast<const uint32_t*>(&s.scales[warp][i][key + 8 * n + tile::fragment_column()]);
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
  const int warp = arch::warp_index();
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
        scale[i] = Row::scale(s.stages[stage] + (key + 8 * n + tile::fragment_column() + i) * Row::kPitch, warp,
                              chunk / Row::kChunksOfScale);
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

// ---- results --------------------------------------------------------------------------------------------------------

// Element of a lane's output: its head of the tile and its column.
template <class Config, class Store>
HOPWELL_DEVICE void for_each_output(const Output<Config>& out, const Store& store) {
  const int warp = arch::warp_index();
  const float unit = 1 / unit_of_output<Config>(warp);
  HOPWELL_UNROLL
  for (int block = 0; block < 4; ++block) {
    HOPWELL_UNROLL
    for (int n = 0; n < 4 * Config::kHeadBlocks; ++n) {
      const int j = n / 4, i = n % 4;
      store(8 * j + tile::fragment_column() + i % 2, column_of_output<Config>(warp, block, i / 2),
            out[block][j][i] * unit);
    }
  }
}

// Writes the results of a query that has no other splits. `head_of_lane` and `stats`: of the lane's softmax.
template <class Config>
HOPWELL_DEVICE void store_results(const SplitParams& p, SplitStorage<Config>& s, int head_of_lane, const Stats& stats,
                                  const Output<Config>& out) {
  const Work work = work_of<Config>(p);
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
  const Work work = work_of<Config>(p);
  const int64_t first = partial_row(p, work.query, work.split) + work.first_head;
  const bool stores = arch::lane_index() % Config::kLanesOfHead == 0 && work.first_head + head_of_lane < p.h_q;
  if (stores) p.partial_stats[first + head_of_lane] = arch::bit_cast<arch::Words2>(stats);
  if (empty) return;
  for_each_output<Config>(out, [&](int head, int column, float value) {
    if (work.first_head + head < p.h_q) p.partial_out[(first + head) * kDv + column] = value;
  });
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
