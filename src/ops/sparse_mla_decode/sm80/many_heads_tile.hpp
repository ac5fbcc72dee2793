// The split kernel of sparse_mla_decode for 64 heads: its tile, its shared memory, and the decoding of codes. See
// many_heads.hpp.
#pragma once

#include "ops/sparse_mla_decode/sm80/split_scores.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template <class TheRows>
struct ManyHeadsConfig {
  using Codes = tile::ShiftedCodes;
  using Row = TheRows;
  static constexpr int kHeads = 64, kHeadGroups = kHeads / 16;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kKeys = 32, kListed = kThreads;  // keys of a step; entries that are listed at a time
  static constexpr int kStages = 1;                     // of raw keys
  static constexpr int kStageBytes = kKeys * Row::kPitch;
  static constexpr int kPitch = 2 * (Row::kWidth + 8),
                       kPitchP = kKeys + 8;  // bytes; elements. ldmatrix has no bank conflicts
  static constexpr int kLanesOfHead = 4, kKeysOfLane = kKeys / kLanesOfHead;  // in the softmax
  static constexpr float kScaleUnit = Row::kHasScales ? 0x1p8F : 1;           // factor of scales as fp16
};

// Scores of a head over half of the columns. Only half 0 uses the other members. In half 1 they are padding.
struct HeadOfStep {
  float scores[32];
  float row_max, factor;  // factor: row_scale of a step; at the end the output's factor
  float up, scale_log2;   // factors of scores: unit of q; sm_scale · log2(e) · kv_scale
};

template <class Config>
struct ManyHeadsStorage : KeysOfSteps<Config> {
  alignas(16) unsigned char decoded[Config::kKeys][Config::kPitch];
  alignas(16) HeadOfStep heads[2][Config::kHeads];
  alignas(16) uint16_t p[Config::kHeads][Config::kPitchP];
  alignas(16) float sums[Config::kHeads][Config::kKeys];  // of a head, for each key of a step
  alignas(16) float key_factors[Config::kWarps][Config::Row::kScales][Config::kKeys];  // of S: scale / kUnit
  float maxima[2][Config::kHeads];  // of |q| over half of the columns
  int keys_of_step;                 // number of valid keys in `decoded`
  bool exact[Config::kWarps];       // whether fp16 is exact for a block's scales: is_exact_scale
};

// A thread's warp and lane, read again at each call, so that values derived from them need no registers across steps.
struct WarpAndLane {
  int warp, lane;
  HOPWELL_DEVICE WarpAndLane() : warp(arch::thread_index_anew() / 32), lane(arch::thread_index_anew() % 32) {}
};

// ---- decoding -----------------------------------------------------------------------------------------------------------

// 16 codes as 16-bit numbers: the even columns, then the odd ones.
struct DecodedChunk {
  arch::Words4 even, odd;
};

// fp16 of 16 codes · kUnit. If a code is NaN, the first two numbers are NaN, which makes all scores of the key NaN.
template <class Codes>
HOPWELL_DEVICE DecodedChunk decode_codes(const arch::Words4& codes) {
  DecodedChunk chunk;
  uint32_t nan = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const tile::CodePairs pairs = Codes::even_odd(codes.w[i]);
    chunk.even.w[i] = pairs.first, chunk.odd.w[i] = pairs.second;
    nan |= Codes::nan_bits(codes.w[i]);
  }
  if (nan & 0x80808080) chunk.even.w[0] = 0x7fff7fff;
  return chunk;
}

// bf16(fp32(code · scale)) of 16 codes.
HOPWELL_DEVICE DecodedChunk decode_scaled_codes(const arch::Words4& codes, float scale) {
  DecodedChunk chunk;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    chunk.even.w[i] = scaled_codes(codes.w[i], 0, 2, scale, scale);
    chunk.odd.w[i] = scaled_codes(codes.w[i], 1, 3, scale, scale);
  }
  return chunk;
}

HOPWELL_DEVICE void store_chunk(uint32_t to, const DecodedChunk& chunk) {
  arch::store_shared_v4(to, chunk.even), arch::store_shared_v4(to + 16, chunk.odd);
}

// Decodes the codes of this warp's block, and writes its factors. Eight lanes have the same columns of eight keys.
template <class Config>
HOPWELL_DEVICE void decode_block(ManyHeadsStorage<Config>& s) {
  using Row = typename Config::Row;
  const auto [warp, lane] = WarpAndLane();
  bool exact = true;
  if constexpr (Row::kHasScales) {
    float scale[Row::kScales];
    exact = load_scales(s, 0, scale);
    HOPWELL_UNROLL
    for (int i = 0; i < Row::kScales; ++i) s.key_factors[warp][i][lane] = 1 / Config::Codes::kUnit * scale[i];
  }
  if (lane == 0) s.exact[warp] = exact;
  const int chunk = lane / 8;
  HOPWELL_UNROLL
  for (int first = 0; first < Config::kKeys; first += 8) {
    const int key = first + lane % 8;
    const unsigned char* row = s.stages[0] + key * Row::kPitch;
    const arch::Words4 codes = arch::load_shared_v4(arch::shared_address(row + Row::offset_of(warp) + 16 * chunk));
    const uint32_t to = arch::shared_address(&s.decoded[key][128 * warp + 32 * chunk]);
    if (exact)
      store_chunk(to, decode_codes<typename Config::Codes>(codes));
    else
      store_chunk(to, decode_scaled_codes(codes, Row::scale(row, warp, chunk / Row::kChunksOfScale)));
  }
}

// Copies eight numbers of bf16, which are not decoded.
HOPWELL_DEVICE void copy_chunk(unsigned char* to, const unsigned char* from) {
  arch::store_shared_v4(arch::shared_address(to), arch::load_shared_v4(arch::shared_address(from)));
}

// Decodes the keys of a step. A warp has a block of columns, and some columns of RoPE. There each lane has a key.
template <class Config>
HOPWELL_DEVICE void decode(ManyHeadsStorage<Config>& s) {
  using Row = typename Config::Row;
  const auto [warp, lane] = WarpAndLane();
  const unsigned char* row = s.stages[0] + lane * Row::kPitch;
  if constexpr (Row::kHasPlain && !Row::kHasRope) {
    if (Row::is_plain(warp)) {
      HOPWELL_UNROLL
      for (int chunk = 0; chunk < 8; ++chunk)
        copy_chunk(&s.decoded[lane][128 * warp + 16 * chunk], row + Row::kFormat.plain_at + 16 * chunk);
      return;
    }
  }
  decode_block(s);
  if constexpr (Row::kHasRope && Row::kRopeIsPlain) {
    copy_chunk(&s.decoded[lane][2 * kDv + 16 * warp], row + Row::kRopeAt + 16 * warp);
  } else if constexpr (Row::kHasRope) {
    if (warp >= 4) return;
    const arch::Words4 codes = arch::load_shared_v4(arch::shared_address(row + Row::kRopeAt + 16 * warp));
    store_chunk(arch::shared_address(&s.decoded[lane][2 * kDv + 32 * warp]),
                decode_codes<typename Config::Codes>(codes));
  }
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
