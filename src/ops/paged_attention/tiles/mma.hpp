// paged_attention on the tensor cores, for up to 8 query vectors that share a KV head: GQA groups, several query
// tokens, and layout vllm, whose chunks are just what the fragments of mma are made of, for any number. Groups of 9 to 16
// heads may have two blocks of 8, so that a pass over the keys is enough (plan.cpp).
//
// Tile      of a warp: 4,096 / kD keys of one KV head, 8 KiB of K and 8 KiB of V, swizzled for ldmatrix; of two blocks of
//           kD 128 16 keys, half as much
// Products  mma m16n8k16. S = q K^T: 16 rows hold 8 query vectors twice, rows 0–7 the high part of an fp32 value, rows
//           8–15 what rounding it to 16 bits has lost; the two results are added. out^T = V^T P^T: 16 dimensions by 8
//           queries, high and low parts of P one after the other into the same sums. 8 rows or half of the products
//           would be empty anyway, so this costs nothing, and leaves 16 bits of a bf16 product, 22 of an fp16 one. S
//           comes out as P goes in. Two blocks: the 16 rows of S are 16 query vectors, high parts and low parts of q one
//           after the other into the same sums; each fragment of K and of V serves both blocks
// Timeline  K 0 ▓ │ copy K 0 │ K 1 ▓ │ copy K 1 │ softmax ▓▓ │ V 0 ▓ │ copy V 0 │ V 1 ▓ │ copy V 1 │ next tile: K 0 ▓ …
//           three or four of the four parts are on their way at any time; 16 keys: K ▓ │ copy K │ softmax ▓▓ │ V ▓ │ …
// Budget    shared: 8 warps × (16,384 + 16 · kD of q + 4 · 8 · keys of bias + 16 + 2 partial results of 32 · kD) + 6.5
//           KiB; registers: kD / 4 of the output, kD / 4 of q, ~150 others. kD 256: 6 warps; q stays in the partial
//           result's memory, of which ldmatrix reads it again for every 8 keys. Two blocks: q there too, read again for
//           every half of the keys, partial results of 64 · kD; 7 warps, of kD 128 8
// Bound     memory, and with two blocks instructions; the tensor cores are 2 % busy with one
//
// A lane's query vector is that of row lane / 4, as in the fragments.
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/paged_attention/gpu/merge.hpp"
#include "ops/paged_attention/tiles/mma_copy.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

HOPWELL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
  const uint32_t b[2] = {b0, b1};
  arch::mma_m16n8k16_bf16(d, a, b);
}
HOPWELL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, fp16) {
  const uint32_t b[2] = {b0, b1};
  arch::mma_m16n8k16_fp16(d, a, b);
}
// Two numbers rounded to 16 bits, and two of what that has lost.
HOPWELL_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low, bf16) {
  high = arch::pack_bf16(x, y);
  low = arch::pack_bf16(x - arch::bit_cast<float>(high << 16), y - arch::bit_cast<float>(high & 0xffff0000));
}
HOPWELL_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low, fp16) {
  high = arch::pack_fp16(x, y);
  low = arch::pack_fp16(x - arch::to_float(fp16{uint16_t(high)}), y - arch::to_float(fp16{uint16_t(high >> 16)}));
}

template <class T, int kD, int kTokens, int kBlocks = 1>
struct MmaTile : MmaTileCopy<T, kD, kTokens, kBlocks> {
  using Type = T;
  using Copies = MmaTileCopy<T, kD, kTokens, kBlocks>;
  using Stage = typename Copies::Stage;
  using Copies::chunk_index, Copies::key_chunk_index, Copies::token_chunk_index, Copies::row, Copies::quad,
      Copies::vector_of;
  using Copies::kHalves, Copies::kParts, Copies::kCopiesQuery, Copies::kBiasPart;
  using Copies::kVllm, Copies::kRows, Copies::kKeys, Copies::kChunks, Copies::kPages, Copies::kOffsetV;
  static constexpr bool kHoldsQuery = kD <= 128 && kBlocks == 1;  // in registers
  static constexpr int kKeysOfLookup = 16;                        // that share a page
  // fp16 has no exponents for small probabilities: they are held 2^14 times as large, below 2^15 with the slack.
  static constexpr float kShift = std::is_same_v<T, fp16> ? 14 : 0;
  static constexpr float kSlack = std::is_same_v<T, fp16> ? 1 : 8;  // how far a logit may lie above the maximum

  using Partial = WarpPartial<kRows * kD, kRows>;

  static constexpr int head = 0;
  uint32_t q[kHoldsQuery ? kD / 16 : 1][4], q_rows;  // q_rows: of q in shared memory
  int q_row;                                         // the one of them that this lane reads for ldmatrix
  float out[kBlocks][kD / 16][4], scale[kBlocks];    // transposed; of the products with q, in units of log 2
  RunningSoftmax softmax[kBlocks];

  HOPWELL_DEVICE explicit MmaTile(const Params&) {}
  HOPWELL_DEVICE void prefetch_query(const Params&, const QueryVector&) {}  // it comes with the first tile
  // q + u in two parts of 16 bits, by way of the partial result's memory: high parts as rows 0 to 7 (15 of two blocks),
  // low parts as those that follow. The largest |q + u| of a row is scaled to between 1 and 2, so that no type is left.
  HOPWELL_DEVICE void begin_segment(const Params& p, const QueryVector& vector, Partial& partial, const Stage& stage) {
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    auto* chunks = reinterpret_cast<arch::Words4*>(partial.values);
    if constexpr (kBlocks == 1)
      arch::cp_async_wait<kParts - 1>();
    else
      load_queries(p, vector, chunks);
    HOPWELL_NO_UNROLL
    for (int first = 0; first < p.schedule.queries; first += 32 / kChunks) {
      const int of_row = first + lane / kChunks;
      QueryVector other = vector;
      other.query = arch::shuffle(vector.query, 4 * of_row), other.head = head_of_row(vector, of_row);
      RawElements raw{};
      if (kCopiesQuery && p.query.aligned)
        raw.half[0] = stage.q[of_row * kChunks + chunk];  // its own copy
      else if (kBlocks > 1 && p.query.aligned)
        raw.half[0] = chunks[chunk_index(of_row + kRows, chunk)];  // its own
      else
        raw = load_q<T, 8>(p, other, 8 * chunk);
      float x[8], largest = 0;
      query_plus<T>(raw, load_u<8>(p, other, 8 * chunk), p.query.u_type, x);
      HOPWELL_UNROLL
      for (float element : x) largest = fmaxf(largest, fabsf(element));
      largest = tile::reduce<1, kChunks / 2>(largest, tile::Larger{});
      const uint32_t exponent = arch::bit_cast<uint32_t>(largest) >> 23;
      const uint32_t kept = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
      const float down = arch::bit_cast<float>((254 - kept) << 23);
      if (chunk == 0) partial.stats[of_row].maximum = arch::bit_cast<float>(kept << 23) * p.query.log2_scale;
      arch::Words4 high, low;
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) split(x[2 * i] * down, x[2 * i + 1] * down, high.w[i], low.w[i], T{});
      chunks[chunk_index(of_row, chunk)] = high, chunks[chunk_index(of_row + kRows, chunk)] = low;
    }
    arch::syncwarp();
    q_rows = arch::shared_address(chunks);
    const int last = p.schedule.queries - 1;  // of the rows that there are; the others repeat it
    q_row = kBlocks == 1 ? smaller(lane % 8, last) + (lane & 8) : smaller(lane % 16, last);
    if constexpr (kHoldsQuery) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i) load_query(i, q[i], lane);
    }
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) scale[b] = partial.stats[smaller(row + 8 * b, last)].maximum;
    arch::syncwarp();  // kept: nobody writes the partial result before many more steps of all lanes
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i)
        for (float& sum : out[b][i]) sum = 0;
      softmax[b] = {};
    }
  }

  // Computes a tile, if there is one, and lets its stage be filled again, part by part.
  template <class Refill>
  HOPWELL_DEVICE void step(const Params& p, const QueryVector& vector, int tile_key, Stage& stage, uint32_t address,
                           bool exists, const Refill& refill) {
    float s[kKeys / 8][4], bias[kKeys / 8][2 * kBlocks];
    uint32_t pages = 0, weights[kBlocks][kKeys / 16][4];
    HOPWELL_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (exists) {
        arch::cp_async_wait<kParts - 1>();
        arch::syncwarp();  // the other lanes' copies are there
        if constexpr (kBlocks == 1) {
          if (half == 0) pages = stage.pages[0], load_biases(p, vector, tile_key, stage, bias);
          multiply(half, address, s);
        } else {
          multiply_blocks(half, address, s);
          if (half == kBiasPart) pages = stage.pages[0], load_biases(p, vector, tile_key, stage, bias);
        }
        arch::syncwarp();  // all have read what is copied to next
      } else if constexpr (kBlocks > 1) {
        // Values that nobody uses: without them the compiler would keep registers for those of the step before.
        for (int t = half * kKeys / 8 / kHalves; t < (half + 1) * kKeys / 8 / kHalves; ++t)
          for (float& x : s[t]) x = 0;
        if (half == kBiasPart)
          for (auto& of_keys : bias)
            for (float& x : of_keys) x = 0;
      }
      refill(half);
    }
    if (exists) {
      softmax_tile(p, vector, tile_key, stage, pages, bias, s, weights);
    } else if constexpr (kBlocks > 1) {
      for (auto& of_block : weights)
        for (auto& of_keys : of_block)
          for (uint32_t& x : of_keys) x = 0;
    }
    HOPWELL_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (exists) {
        arch::cp_async_wait<kParts - 1>();
        arch::syncwarp();  // the other lanes' copies are there
        accumulate(half, address + kOffsetV, weights);
        arch::syncwarp();  // all have read what is copied to next
      }
      refill(kHalves + half);
    }
  }

  HOPWELL_DEVICE void store_partial(const Params&, Partial& to) const {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const float sum = tile::sum_of_quad(softmax[b].sum);
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i)
        for (int e = 0; e < 4; ++e)
          to.values[(2 * quad + e % 2 + 8 * b) * kD + 16 * i + e / 2 * 8 + lane / 4] = out[b][i][e];
      if (quad == 0) to.stats[row + 8 * b] = {softmax[b].maximum - kShift, sum};
    }
  }
  static HOPWELL_DEVICE int pitch() { return kD; }

 private:
  static HOPWELL_DEVICE int head_of_row(const QueryVector& vector, int of_row) {
    if constexpr (kBlocks == 1) return arch::shuffle(vector.head, 4 * of_row);
    return arch::shuffle(vector.head, 0) + of_row;  // q_len is 1
  }
  // Query vectors as they lie in memory, to where their low parts will be. All loads are under way together.
  HOPWELL_DEVICE void load_queries(const Params& p, const QueryVector& vector, arch::Words4* chunks) const {
    if (!p.query.aligned) return;
    constexpr int kAtOnce = 32 / kChunks;  // rows
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    RawElements raw[kRows / kAtOnce];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const int of_row = i * kAtOnce + lane / kChunks;
      QueryVector other = vector;
      other.head = head_of_row(vector, of_row);
      if (of_row < p.schedule.queries) raw[i] = load_q<T, 8>(p, other, 8 * chunk);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / kAtOnce; ++i)
      chunks[chunk_index(i * kAtOnce + lane / kChunks + kRows, chunk)] = raw[i].half[0];
  }
  // The biases of keys 8 t + 2 quad + e, of block b as bias[t][2 b + e].
  HOPWELL_DEVICE void load_biases(const Params& p, const QueryVector& vector, int tile_key, const Stage& stage,
                                  float (&bias)[kKeys / 8][2 * kBlocks]) const {
    if (!p.bias.exists()) {
      if constexpr (kBlocks > 1)  // as above
        for (auto& of_keys : bias)
          for (float& x : of_keys) x = 0;
      return;
    }
    const bool full_words = p.bias.type == Float::fp32, aligned = p.bias.aligned;
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const auto* words = reinterpret_cast<const uint32_t*>(stage.bias[row + 8 * b]);
      const uintptr_t row_begin = full_words || aligned ? 0 : bias_row_of(p.bias, vector_of(p, vector, b));
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) {
        const int j = 8 * t + 2 * quad;
        float* of_block = &bias[t][2 * b];
        if (full_words) {
          of_block[0] = arch::bit_cast<float>(words[j]), of_block[1] = arch::bit_cast<float>(words[j + 1]);
        } else if (aligned) {
          of_block[0] = decode(words[j / 2] & 0xffff, p.bias.type);
          of_block[1] = decode(words[j / 2] >> 16, p.bias.type);
        } else {
          for (int e = 0; e < 2; ++e) {
            const int64_t column = p.bias.column_of(vector.position, tile_key + j + e);
            of_block[e] = decode_bias(p.bias, words[j + e], uint32_t(row_begin + uintptr_t(column) * 2) & 2);
          }
        }
      }
    }
  }
  // Products to logits: s[t][2 b + e] of key 8 t + 2 quad + e, block b. True if a bias of −inf hides a key from any
  // lane's row.
  HOPWELL_DEVICE bool add_biases(const Params& p, const QueryVector& vector, int tile_key,
                                 const float (&bias)[kKeys / 8][2 * kBlocks], float (&s)[kKeys / 8][4]) const {
    bool hidden = false;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2 * kBlocks; ++e) s[t][e] = (kBlocks == 1 ? s[t][e] + s[t][2 + e] : s[t][e]) * scale[e / 2];
    if (p.bias.exists()) {
      float lowest = INFINITY;
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) {
        for (int e = 0; e < 2 * kBlocks; ++e) {
          lowest = fminf(lowest, bias[t][e]);
          s[t][e] += bias[t][e] * p.bias.log2_scale;
        }
      }
      hidden = arch::ballot(lowest == -INFINITY) != 0;
      if (hidden) {
        HOPWELL_UNROLL
        for (int t = 0; t < kKeys / 8; ++t)
          for (int e = 0; e < 2 * kBlocks; ++e) s[t][e] = bias[t][e] == -INFINITY ? -INFINITY : s[t][e];
      }
    }
    if (p.bias.alibi_slopes) {
      HOPWELL_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        const float slope = alibi_slope(p.bias, vector_of(p, vector, b).head);
        HOPWELL_UNROLL
        for (int t = 0; t < kKeys / 8; ++t)
          for (int e = 0; e < 2; ++e)
            s[t][2 * b + e] -= slope * float(vector.position - (tile_key + 8 * t + 2 * quad + e));
      }
    }
    return hidden;
  }
  HOPWELL_DEVICE void mask(const QueryVector& vector, int tile_key, uint32_t pages, float (&s)[kKeys / 8][4]) const {
    if (tile_key >= vector.visible.begin && tile_key + kKeys <= vector.visible.end && pages == (1U << kPages) - 1)
      return;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int e = 0; e < 2 * kBlocks; ++e) {
        const int key = tile_key + 8 * t + 2 * quad + e % 2;
        if (key < vector.visible.begin || key >= vector.visible.end || !(pages >> (t / 2) & 1)) s[t][e] = -INFINITY;
      }
    }
  }

  // 16 dimensions of q, as mma takes them; of two blocks the high parts or the low ones.
  HOPWELL_DEVICE void load_query(int i, uint32_t (&fragment)[4], int lane, bool low = false) const {
    const int rows_before = low ? kRows * kChunks : 0;
    arch::ldmatrix(fragment, q_rows + uint32_t(16 * (rows_before + chunk_index(q_row, 2 * i, lane / 16))));
  }
  // By a shuffle, so that the compiler finds addresses out in every step and keeps no registers for them.
  static HOPWELL_DEVICE int lane_of_step() { return arch::shuffle(arch::lane_index(), arch::lane_index()); }
  // S = q k^T for half of the keys, or all: s[t] for keys 8 t to 8 t + 7, high parts and low parts.
  HOPWELL_DEVICE void multiply(int half, uint32_t keys, float (&s)[kKeys / 8][4]) const {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int t = half * kKeys / 8 / kHalves; t < (half + 1) * kKeys / 8 / kHalves; ++t) {
      float other[4];  // a second sum, as the tensor cores take their time
      for (int e = 0; e < 4; ++e) s[t][e] = other[e] = 0;
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 32; ++i) {
        uint32_t b[4];
        arch::ldmatrix(b, keys + uint32_t(16 * key_chunk_index(8 * t + lane % 8, 4 * i, lane / 8)));
        if constexpr (kHoldsQuery) {
          mma(s[t], q[2 * i], b[0], b[1], T{}), mma(other, q[2 * i + 1], b[2], b[3], T{});
        } else {
          uint32_t of_q[4];
          load_query(2 * i, of_q, lane), mma(s[t], of_q, b[0], b[1], T{});
          load_query(2 * i + 1, of_q, lane), mma(other, of_q, b[2], b[3], T{});
        }
      }
      for (int e = 0; e < 4; ++e) s[t][e] += other[e];
    }
  }
  // The same for two blocks: s[t] of both. Each fragment of q is loaded once for all keys of the half.
  HOPWELL_DEVICE void multiply_blocks(int half, uint32_t keys, float (&s)[kKeys / 8][4]) const {
    constexpr int kCount = kKeys / 8 / kHalves, kNextKey = kVllm ? 1 : kChunks;  // chunks to it
    const int lane = lane_of_step(), begin = half * kCount;
    constexpr int kSums = kCount < 4 ? 2 : 1;  // of a product, as the tensor cores take their time
    float sums[kSums][kCount][4] = {};
    HOPWELL_UNROLL
    for (int i = 0; i < kD / 32; ++i) {
      uint32_t q_high[2][4], q_low[2][4];
      for (int j = 0; j < 2; ++j) load_query(2 * i + j, q_high[j], lane), load_query(2 * i + j, q_low[j], lane, true);
      HOPWELL_UNROLL
      for (int t = 0; t < kCount; ++t) {
        uint32_t b[4];
        arch::ldmatrix(b,
                       keys + uint32_t(16 * (8 * (begin + t) * kNextKey + key_chunk_index(lane % 8, 4 * i, lane / 8))));
        for (int j = 0; j < 2; ++j) mma(sums[0][t], q_high[j], b[2 * j], b[2 * j + 1], T{});
        for (int j = 0; j < 2; ++j) mma(sums[kSums - 1][t], q_low[j], b[2 * j], b[2 * j + 1], T{});
      }
    }
    HOPWELL_UNROLL
    for (int t = 0; t < kCount; ++t)
      for (int e = 0; e < 4; ++e) s[begin + t][e] = kSums == 1 ? sums[0][t][e] : sums[0][t][e] + sums[1][t][e];
  }
  // Whether this lane's row does not see keys of the tile whose values have been copied, for other rows or in whole
  // chunks.
  static HOPWELL_DEVICE bool shares_values(const QueryVector& vector, int tile_key) {
    return tile_key < vector.visible.begin || vector.visible.end < smaller(vector.end, tile_key + kKeys);
  }
  // Products to weights of the values, in high parts and low parts; the values that a weight of 0 does not remove are
  // wiped out.
  HOPWELL_DEVICE void softmax_tile(const Params& p, const QueryVector& vector, int tile_key, Stage& stage,
                                   uint32_t pages, const float (&bias)[kKeys / 8][2 * kBlocks],
                                   float (&s)[kKeys / 8][4], uint32_t (&weights)[kBlocks][kKeys / 16][4]) {
    const bool hidden = add_biases(p, vector, tile_key, bias, s);
    mask(vector, tile_key, pages, s);
    if (hidden || ((kVllm || p.query.q_len > 1) && arch::ballot(shares_values(vector, tile_key)) != 0))
      clear_hidden_values(vector, tile_key, s, stage);
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      float maximum = -INFINITY;
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) maximum = fmaxf(maximum, fmaxf(s[t][2 * b], s[t][2 * b + 1]));
      maximum = tile::max_of_quad(maximum);
      // The maximum that is subtracted follows the true one only when that is far above: seldom.
      const float raised = maximum > softmax[b].maximum + kSlack ? maximum : softmax[b].maximum;
      const bool higher = raised != softmax[b].maximum;
      const float base = tile::finite_reference(raised) - kShift;
      if (arch::ballot(higher) != 0) {
        const float factor = higher ? arch::exp2_approx(softmax[b].maximum - raised) : 1;
        softmax[b].maximum = raised, softmax[b].sum *= factor;
        const float of_query[2] = {arch::shuffle(factor, 8 * quad), arch::shuffle(factor, 8 * quad + 4)};
        HOPWELL_UNROLL
        for (int i = 0; i < kD / 16; ++i)
          for (int e = 0; e < 4; ++e) out[b][i][e] *= of_query[e % 2];
      }
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) {
        const float x = arch::exp2_approx(s[t][2 * b] - base), y = arch::exp2_approx(s[t][2 * b + 1] - base);
        softmax[b].sum += x + y;
        s[t][2 * b] = x, s[t][2 * b + 1] = y;
        split(x, y, weights[b][t / 2][t % 2], weights[b][t / 2][2 + t % 2], T{});
      }
    }
  }
  // V^T P^T of a half, or all: of the keys, in layout vllm of the dimensions.
  HOPWELL_DEVICE void accumulate(int half, uint32_t values, const uint32_t (&weights)[kBlocks][kKeys / 16][4]) {
    constexpr int kSteps = kKeys / 16, kChunkPairs = kD / 16;
    const int lane = kBlocks == 1 ? arch::lane_index() : lane_of_step();
    HOPWELL_UNROLL
    for (int t = kVllm ? 0 : half * kSteps / kHalves; t < (kVllm ? kSteps : (half + 1) * kSteps / kHalves); ++t) {
      HOPWELL_UNROLL
      for (int i = kVllm ? half * kChunkPairs / kHalves : 0;
           i < (kVllm ? (half + 1) * kChunkPairs / kHalves : kChunkPairs); ++i) {
        uint32_t a[4];
        if constexpr (kVllm)
          arch::ldmatrix(a, values + uint32_t(16 * token_chunk_index(16 * i + lane % 16, 2 * t + lane / 16)));
        else if constexpr (kBlocks == 1)
          arch::ldmatrix<arch::Transpose::yes>(
              a, values + uint32_t(16 * chunk_index(16 * t + lane / 16 * 8 + lane % 8, 2 * i, lane / 8 % 2)));
        else  // the same, of which the compiler keeps less in registers
          arch::ldmatrix<arch::Transpose::yes>(
              a,
              values + uint32_t(16 * (16 * t * kChunks + chunk_index(lane / 16 * 8 + lane % 8, 2 * i, lane / 8 % 2))));
        for (int part = 0; part < 4; part += 2)
          for (int b = 0; b < kBlocks; ++b) mma(out[b][i], a, weights[b][t][part], weights[b][t][part + 1], T{});
      }
    }
  }
  // What is not finite has all bits of the exponent.
  static constexpr uint32_t kExponent = std::is_same_v<T, fp16> ? 0x7c00 : 0x7f80;
  static HOPWELL_DEVICE uint16_t& value_of(Stage& stage, int key, int dimension) {
    if constexpr (kVllm) {
      auto& chunk = stage.v[token_chunk_index(dimension, key / 8)];
      return reinterpret_cast<uint16_t*>(&chunk)[key % 8];
    }
    return reinterpret_cast<uint16_t*>(&stage.v[chunk_index(key, dimension / 8)])[dimension % 8];
  }
  // Values of keys that a row does not see may be infinite or NaN, which a weight of 0 does not remove: they are wiped
  // out. Results of rows that do see them are made NaN, so that store_infinite finds them again.
  HOPWELL_DEVICE void clear_hidden_values(const QueryVector& vector, int tile_key, const float (&s)[kKeys / 8][4],
                                          Stage& stage) {
    const int lane = arch::lane_index();
    uint32_t hidden[kBlocks] = {};  // bit 2 t + e for key 8 t + 2 quad + e, if its values have been copied
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2 * kBlocks; ++e)
        hidden[e / 2] |=
            s[t][e] == -INFINITY && tile_key + 8 * t + 2 * quad + e % 2 < vector.end ? 1U << (2 * t + e % 2) : 0;
    uint32_t from_any = hidden[0];  // row
    for (int b = 1; b < kBlocks; ++b) from_any |= hidden[b];
    HOPWELL_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) from_any |= arch::shuffle_xor(from_any, mask);
    uint32_t lost[kBlocks][2] = {};  // bit i: the infinite value of dimension 8 i + lane / 4 that query 2 quad + e sees
    arch::cp_async_wait<kParts / 2>();
    arch::syncwarp();  // all values are there
    HOPWELL_NO_UNROLL
    for (int owner = 0; owner < 4; ++owner) {
      HOPWELL_NO_UNROLL
      for (uint32_t left = arch::shuffle(from_any, owner); left != 0; left &= left - 1) {
        const int bit = int(arch::bfind(left & (0U - left))), key = bit / 2 * 8 + 2 * owner + bit % 2;
        uint32_t rows[kBlocks], any = 0;  // that see it
        HOPWELL_UNROLL
        for (int b = 0; b < kBlocks; ++b) any |= rows[b] = arch::ballot(quad == owner && !(hidden[b] >> bit & 1));
        const auto is_infinite = [&](int e) { return (value_of(stage, key, e) & kExponent) == kExponent; };
        uint32_t wiped = ~0U;  // bit i: this lane's dimension lane + 32 i
        if (any != 0) {
          wiped = 0;
          HOPWELL_NO_UNROLL
          for (int i = 0; lane + 32 * i < kD; ++i) wiped |= is_infinite(lane + 32 * i) ? 1U << i : 0;
          if (arch::ballot(wiped != 0) == 0) continue;
          uint32_t infinite = 0;
          HOPWELL_NO_UNROLL
          for (int i = 0; i < kD / 8; ++i) infinite |= is_infinite(8 * i + lane / 4) ? 1U << i : 0;
          HOPWELL_UNROLL
          for (int b = 0; b < kBlocks; ++b)
            for (int e = 0; e < 2; ++e) lost[b][e] |= rows[b] >> (4 * (2 * quad + e) + owner) & 1 ? infinite : 0;
        }
        arch::syncwarp();  // nobody reads what the others wipe out
        HOPWELL_NO_UNROLL
        for (int i = 0; lane + 32 * i < kD; ++i)
          if (wiped >> i & 1) value_of(stage, key, lane + 32 * i) = 0;
      }
    }
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 8; ++i)
        for (int e = 0; e < 2; ++e)
          if (lost[b][e] >> i & 1) out[b][i / 2][i % 2 * 2 + e] = NAN;
    }
  }
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
