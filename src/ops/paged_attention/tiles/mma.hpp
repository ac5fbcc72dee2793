// paged_attention on the tensor cores, for up to 8 query vectors that share a KV head: GQA groups, several query
// tokens, and layout vllm, whose chunks are just what the fragments of mma are made of, for any number.
//
// Tile      of a warp: 4,096 / kD keys of one KV head, 8 KiB of K and 8 KiB of V, swizzled for ldmatrix
// Products  mma m16n8k16. S = q K^T: 16 rows hold 8 query vectors twice, rows 0–7 the high part of an fp32 value, rows
//           8–15 what rounding it to 16 bits has lost; the two results are added. out^T = V^T P^T: 16 dimensions by 8
//           queries, high and low parts of P one after the other into the same sums. 8 rows or half of the products
//           would be empty anyway, so this costs nothing, and leaves 16 bits of a bf16 product, 22 of an fp16 one. S
//           comes out as P goes in
// Timeline  K 0 ▓ │ copy K 0 │ K 1 ▓ │ copy K 1 │ softmax ▓▓ │ V 0 ▓ │ copy V 0 │ V 1 ▓ │ copy V 1 │ next tile: K 0 ▓ …
//           three or four of the four parts are on their way at any time; kD 256: K ▓ │ copy K │ softmax ▓▓ │ V ▓ │ …
// Budget    shared: 8 warps × (16,384 + 16 · kD of q + 4 · 8 · keys of bias + 16 + 2 partial results of 32 · kD) + 6.5
//           KiB; registers: kD / 4 of the output, kD / 4 of q, ~150 others. kD 256: 6 warps; q stays in the partial
//           result's memory, of which ldmatrix reads it again for every 8 keys
// Bound     memory; the tensor cores are 2 % busy
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

template <class T, int kD, int kTokens>
struct MmaTile : MmaTileCopy<T, kD, kTokens> {
  using Type = T;
  using Copies = MmaTileCopy<T, kD, kTokens>;
  using Stage = typename Copies::Stage;
  using Copies::chunk_index, Copies::key_chunk_index, Copies::token_chunk_index, Copies::row, Copies::quad;
  using Copies::kHalves, Copies::kParts, Copies::kCopiesQuery;
  using Copies::kVllm, Copies::kRows, Copies::kKeys, Copies::kChunks, Copies::kPages, Copies::kOffsetV;
  static constexpr bool kHoldsQuery = kD <= 128;  // in registers
  static constexpr int kKeysOfLookup = 16;        // that share a page
  // fp16 has no exponents for small probabilities: they are held 2^14 times as large, below 2^15 with the slack.
  static constexpr float kShift = std::is_same_v<T, fp16> ? 14 : 0;
  static constexpr float kSlack = std::is_same_v<T, fp16> ? 1 : 8;  // how far a logit may lie above the maximum

  using Partial = WarpPartial<kRows * kD, kRows>;

  static constexpr int head = 0;
  uint32_t q[kHoldsQuery ? kD / 16 : 1][4], q_rows;  // q_rows: of q in shared memory
  int q_row;                                         // the one of them that this lane reads for ldmatrix
  float out[kD / 16][4], scale;  // out: transposed; scale: of the products with q, in units of log 2
  RunningSoftmax softmax;

  HOPWELL_DEVICE explicit MmaTile(const Params&) {}
  HOPWELL_DEVICE void prefetch_query(const Params&, const QueryVector&) {}  // it comes with the first tile
  // q + u in two parts of 16 bits, by way of the partial result's memory: high parts as rows 0 to 7, low parts as rows
  // 8 to 15. The largest |q + u| of a row is scaled to between 1 and 2, so that no type is left.
  HOPWELL_DEVICE void begin_segment(const Params& p, const QueryVector& vector, Partial& partial, const Stage& stage) {
    arch::cp_async_wait<kParts - 1>();
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    auto* chunks = reinterpret_cast<arch::Words4*>(partial.values);
    HOPWELL_NO_UNROLL
    for (int first = 0; first < p.schedule.queries; first += 32 / kChunks) {
      const int of_row = first + lane / kChunks;
      QueryVector other = vector;
      other.query = arch::shuffle(vector.query, 4 * of_row), other.head = arch::shuffle(vector.head, 4 * of_row);
      RawElements raw{};
      if (kCopiesQuery && p.query.aligned)
        raw.half[0] = stage.q[of_row * kChunks + chunk];  // its own copy
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
      chunks[chunk_index(of_row, chunk)] = high, chunks[chunk_index(of_row + 8, chunk)] = low;
    }
    arch::syncwarp();
    q_rows = arch::shared_address(chunks);
    const int last = p.schedule.queries - 1;  // of the rows that there are; the others repeat it
    q_row = smaller(lane % 8, last) + (lane & 8);
    if constexpr (kHoldsQuery) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i) load_query(i, q[i]);
    }
    scale = partial.stats[smaller(row, last)].maximum;
    arch::syncwarp();  // kept: nobody writes the partial result before many more steps of all lanes
    HOPWELL_UNROLL
    for (int i = 0; i < kD / 16; ++i)
      for (float& sum : out[i]) sum = 0;
    softmax = {};
  }

  // Computes a tile, if there is one, and lets its stage be filled again, part by part.
  template <class Refill>
  HOPWELL_DEVICE void step(const Params& p, const QueryVector& vector, int tile_key, Stage& stage, uint32_t address,
                           bool exists, const Refill& refill) {
    float s[kKeys / 8][4], bias[kKeys / 8][2];
    uint32_t pages = 0, weights[kKeys / 16][4];
    HOPWELL_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (exists) {
        arch::cp_async_wait<kParts - 1>();
        arch::syncwarp();  // the other lanes' copies are there
        if (half == 0) pages = stage.pages[0], load_biases(p, vector, tile_key, stage, bias);
        multiply(half, address, s);
        arch::syncwarp();  // all have read what is copied to next
      }
      refill(half);
    }
    if (exists) softmax_tile(p, vector, tile_key, stage, pages, bias, s, weights);
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
    const float sum = tile::sum_of_quad(softmax.sum);
    HOPWELL_UNROLL
    for (int i = 0; i < kD / 16; ++i)
      for (int e = 0; e < 4; ++e) to.values[(2 * quad + e % 2) * kD + 16 * i + e / 2 * 8 + lane / 4] = out[i][e];
    if (quad == 0) to.stats[row] = {softmax.maximum - kShift, sum};
  }
  static HOPWELL_DEVICE int pitch() { return kD; }

 private:
  // The biases of keys 8 t + 2 quad + e.
  HOPWELL_DEVICE void load_biases(const Params& p, const QueryVector& vector, int tile_key, const Stage& stage,
                                  float (&bias)[kKeys / 8][2]) const {
    if (!p.bias.exists()) return;
    const auto* words = reinterpret_cast<const uint32_t*>(stage.bias[row]);
    const bool full_words = p.bias.type == Float::fp32, aligned = p.bias.aligned;
    const uintptr_t row_begin = full_words || aligned ? 0 : bias_row_of(p.bias, vector);
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      const int j = 8 * t + 2 * quad;
      if (full_words) {
        bias[t][0] = arch::bit_cast<float>(words[j]), bias[t][1] = arch::bit_cast<float>(words[j + 1]);
      } else if (aligned) {
        bias[t][0] = decode(words[j / 2] & 0xffff, p.bias.type), bias[t][1] = decode(words[j / 2] >> 16, p.bias.type);
      } else {
        for (int e = 0; e < 2; ++e) {
          const int64_t column = p.bias.column_of(vector.position, tile_key + j + e);
          bias[t][e] = decode_bias(p.bias, words[j + e], uint32_t(row_begin + uintptr_t(column) * 2) & 2);
        }
      }
    }
  }
  // Products to logits: s[t][e] of key 8 t + 2 quad + e. True if a bias of −inf hides a key from any lane's row.
  HOPWELL_DEVICE bool add_biases(const Params& p, const QueryVector& vector, int tile_key,
                                 const float (&bias)[kKeys / 8][2], float (&s)[kKeys / 8][4]) const {
    bool hidden = false;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2; ++e) s[t][e] = (s[t][e] + s[t][2 + e]) * scale;
    if (p.bias.exists()) {
      float lowest = INFINITY;
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) {
        for (int e = 0; e < 2; ++e) {
          lowest = fminf(lowest, bias[t][e]);
          s[t][e] += bias[t][e] * p.bias.log2_scale;
        }
      }
      hidden = arch::ballot(lowest == -INFINITY) != 0;
      if (hidden) {
        HOPWELL_UNROLL
        for (int t = 0; t < kKeys / 8; ++t)
          for (int e = 0; e < 2; ++e) s[t][e] = bias[t][e] == -INFINITY ? -INFINITY : s[t][e];
      }
    }
    if (p.bias.alibi_slopes) {
      const float slope = alibi_slope(p.bias, vector.head);
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t)
        for (int e = 0; e < 2; ++e) s[t][e] -= slope * float(vector.position - (tile_key + 8 * t + 2 * quad + e));
    }
    return hidden;
  }
  HOPWELL_DEVICE void mask(const QueryVector& vector, int tile_key, uint32_t pages, float (&s)[kKeys / 8][4]) const {
    if (tile_key >= vector.visible.begin && tile_key + kKeys <= vector.visible.end && pages == (1U << kPages) - 1)
      return;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int key = tile_key + 8 * t + 2 * quad + e;
        if (key < vector.visible.begin || key >= vector.visible.end || !(pages >> (t / 2) & 1)) s[t][e] = -INFINITY;
      }
    }
  }

  // 16 dimensions of q, as mma takes them.
  HOPWELL_DEVICE void load_query(int i, uint32_t (&fragment)[4]) const {
    arch::ldmatrix(fragment, q_rows + uint32_t(16 * chunk_index(q_row, 2 * i, arch::lane_index() / 16)));
  }
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
          load_query(2 * i, of_q), mma(s[t], of_q, b[0], b[1], T{});
          load_query(2 * i + 1, of_q), mma(other, of_q, b[2], b[3], T{});
        }
      }
      for (int e = 0; e < 4; ++e) s[t][e] += other[e];
    }
  }
  // Whether this lane's row does not see keys of the tile whose values have been copied, for other rows or in whole
  // chunks.
  static HOPWELL_DEVICE bool shares_values(const QueryVector& vector, int tile_key) {
    return tile_key < vector.visible.begin || vector.visible.end < smaller(vector.end, tile_key + kKeys);
  }
  // Products to weights of the values, in high parts and low parts; the values that a weight of 0 does not remove are
  // wiped out.
  HOPWELL_DEVICE void softmax_tile(const Params& p, const QueryVector& vector, int tile_key, Stage& stage,
                                   uint32_t pages, const float (&bias)[kKeys / 8][2], float (&s)[kKeys / 8][4],
                                   uint32_t (&weights)[kKeys / 16][4]) {
    const bool hidden = add_biases(p, vector, tile_key, bias, s);
    mask(vector, tile_key, pages, s);
    if (hidden || ((kVllm || p.query.q_len > 1) && arch::ballot(shares_values(vector, tile_key)) != 0))
      clear_hidden_values(vector, tile_key, s, stage);
    float maximum = -INFINITY;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) maximum = fmaxf(maximum, fmaxf(s[t][0], s[t][1]));
    maximum = tile::max_of_quad(maximum);
    // The maximum that is subtracted follows the true one only when that is far above: seldom.
    const float raised = maximum > softmax.maximum + kSlack ? maximum : softmax.maximum;
    const bool higher = raised != softmax.maximum;
    const float base = tile::finite_reference(raised) - kShift;
    if (arch::ballot(higher) != 0) {
      const float factor = higher ? arch::exp2_approx(softmax.maximum - raised) : 1;
      softmax.maximum = raised, softmax.sum *= factor;
      const float of_query[2] = {arch::shuffle(factor, 8 * quad), arch::shuffle(factor, 8 * quad + 4)};
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i)
        for (int e = 0; e < 4; ++e) out[i][e] *= of_query[e % 2];
    }
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      const float x = arch::exp2_approx(s[t][0] - base), y = arch::exp2_approx(s[t][1] - base);
      softmax.sum += x + y;
      s[t][0] = x, s[t][1] = y;
      split(x, y, weights[t / 2][t % 2], weights[t / 2][2 + t % 2], T{});
    }
  }
  // V^T P^T of a half, or all: of the keys, in layout vllm of the dimensions.
  HOPWELL_DEVICE void accumulate(int half, uint32_t values, const uint32_t (&weights)[kKeys / 16][4]) {
    constexpr int kSteps = kKeys / 16, kBlocks = kD / 16;
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int t = kVllm ? 0 : half * kSteps / kHalves; t < (kVllm ? kSteps : (half + 1) * kSteps / kHalves); ++t) {
      HOPWELL_UNROLL
      for (int i = kVllm ? half * kBlocks / 2 : 0; i < (kVllm ? (half + 1) * kBlocks / 2 : kBlocks); ++i) {
        uint32_t a[4];
        if constexpr (kVllm)
          arch::ldmatrix(a, values + uint32_t(16 * token_chunk_index(16 * i + lane % 16, 2 * t + lane / 16)));
        else
          arch::ldmatrix<arch::Transpose::yes>(
              a, values + uint32_t(16 * chunk_index(16 * t + lane / 16 * 8 + lane % 8, 2 * i, lane / 8 % 2)));
        mma(out[i], a, weights[t][0], weights[t][1], T{});
        mma(out[i], a, weights[t][2], weights[t][3], T{});
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
    uint32_t hidden = 0;  // bit 2 t + e for key 8 t + 2 quad + e, if its values have been copied
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2; ++e)
        hidden |= s[t][e] == -INFINITY && tile_key + 8 * t + 2 * quad + e < vector.end ? 1U << (2 * t + e) : 0;
    uint32_t from_any = hidden;  // row
    HOPWELL_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) from_any |= arch::shuffle_xor(from_any, mask);
    uint32_t lost[2] = {};  // bit i: the infinite value of dimension 8 i + lane / 4 that query 2 quad + e sees
    arch::cp_async_wait<kParts / 2>();
    arch::syncwarp();  // all values are there
    HOPWELL_NO_UNROLL
    for (int owner = 0; owner < 4; ++owner) {
      HOPWELL_NO_UNROLL
      for (uint32_t left = arch::shuffle(from_any, owner); left != 0; left &= left - 1) {
        const int bit = int(arch::bfind(left & (0U - left))), key = bit / 2 * 8 + 2 * owner + bit % 2;
        const uint32_t rows = arch::ballot(quad == owner && !(hidden >> bit & 1));  // that see it
        const auto is_infinite = [&](int e) { return (value_of(stage, key, e) & kExponent) == kExponent; };
        uint32_t wiped = ~0U;  // bit i: this lane's dimension lane + 32 i
        if (rows != 0) {
          wiped = 0;
          HOPWELL_NO_UNROLL
          for (int i = 0; lane + 32 * i < kD; ++i) wiped |= is_infinite(lane + 32 * i) ? 1U << i : 0;
          if (arch::ballot(wiped != 0) == 0) continue;
          uint32_t infinite = 0;
          HOPWELL_NO_UNROLL
          for (int i = 0; i < kD / 8; ++i) infinite |= is_infinite(8 * i + lane / 4) ? 1U << i : 0;
          for (int e = 0; e < 2; ++e) lost[e] |= rows >> (4 * (2 * quad + e) + owner) & 1 ? infinite : 0;
        }
        arch::syncwarp();  // nobody reads what the others wipe out
        HOPWELL_NO_UNROLL
        for (int i = 0; lane + 32 * i < kD; ++i)
          if (wiped >> i & 1) value_of(stage, key, lane + 32 * i) = 0;
      }
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kD / 8; ++i)
      for (int e = 0; e < 2; ++e)
        if (lost[e] >> i & 1) out[i / 2][i % 2 * 2 + e] = NAN;
  }
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
