// paged_attention on the tensor cores, for up to 8 query vectors that share a KV head: GQA groups, several query
// tokens, and layout vllm, whose chunks are just what the fragments of mma are made of, for any number. Groups of 9 to 16
// heads may have two blocks of 8, so that a pass over the keys is enough (plan.cpp).
//
// Tile      of a warp: 64, 32 or 16 keys of one KV head, 12 or 16 KiB of K and V, swizzled for ldmatrix; with q in two
//           parts of two blocks half as much
// Products  mma m16n8k16. S = q K^T: 16 rows hold 8 query vectors twice, rows 0–7 the high part of an fp32 value, rows
//           8–15 what rounding it to 16 bits has lost; the two results are added. out^T = V^T P^T: 16 dimensions by 8
//           queries, high and low parts of P one after the other into the same sums. 8 rows or half of the products
//           would be empty anyway, so this costs nothing, and leaves 16 bits of a bf16 product, 22 of an fp16 one. S
//           comes out as P goes in. An exact q, to which nothing is added, has no low parts (plan.cpp's exact_query): the
//           16 rows of S of two blocks are 16 query vectors. Of q in two parts two blocks have high and low parts one after
//           the other into the same sums
// Timeline  K 0 ▓ │ copy K 0 │ K 1 ▓ │ copy K 1 │ softmax ▓▓ │ V 0 ▓ │ copy V 0 │ V 1 ▓ │ copy V 1 │ next tile: K 0 ▓ …
//           three or four of the four parts are on their way at any time; 16 keys: K ▓ │ copy K │ softmax ▓▓ │ V ▓ │ …
// Budget    shared: 8 warps × (16,384 or 12,288 + 16 · kD of q + 4 · 8 · (keys + 4) of bias + 16 + 2 partial results of
//           32 · kD) + 6.5 KiB; an exact q is not in it, and the last partial result lies in the ring. Two blocks have twice
//           the biases and partial results. q in two parts of two blocks of kD 128, or of kD 256, lies in the partial
//           result; kD 256 has 6 warps then. Registers: kD / 4 of the output and of q (exact: half as much for a block),
//           ~110 to 150 others
// Bound     memory; the tensor cores are 2 % busy with one block
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

// Tiles of two blocks, and of other d than 64 and 128, are for exact queries first of all.
template <class T, int kD, int kTokens, int kBlocks = 1, bool kExactQuery = kBlocks == 2 || (kD != 64 && kD != 128)>
struct MmaTile : MmaTileCopy<T, kD, kTokens, kBlocks, kExactQuery> {
  using Type = T;
  using Copies = MmaTileCopy<T, kD, kTokens, kBlocks, kExactQuery>;
  using Stage = typename Copies::Stage;
  using Copies::chunk_index, Copies::column_chunk_index, Copies::token_chunk_index, Copies::eight_of,
      Copies::sixteen_of, Copies::place_of, Copies::row, Copies::quad, Copies::vector_of;
  using Copies::kHalves, Copies::kParts, Copies::kCopiesQuery, Copies::kBiasPart;
  using Copies::kVllm, Copies::kRows, Copies::kKeys, Copies::kChunks, Copies::kPages, Copies::kLanesOfPage,
      Copies::kOffsetV;
  using typename Copies::ChunkAddress;
  static constexpr bool kHoldsQuery = kExactQuery || kD * kBlocks <= 128;  // in registers, else in the partial result
  static constexpr int kKeysOfLookup = 16;                                 // that share a page
  // There is room for an eighth warp if the ring's memory is the last segment's partial result's, too.
  static constexpr bool kStoresResults = kExactQuery;
  static constexpr bool kRegistersAreScarce = kExactQuery && kD * kBlocks >= 256;
  // fp16 has no exponents for small probabilities: they are held 2^14 times as large, below 2^15 with the slack.
  static constexpr float kShift = std::is_same_v<T, fp16> ? 14 : 0;
  static constexpr float kSlack = std::is_same_v<T, fp16> ? 1 : 8;  // how far a logit may lie above the maximum

  using Results = WarpPartial<kRows * kD, kRows>;
  struct alignas(128) Partial : Results {};  // q lies in it as keys do in a stage

  static constexpr bool kAbreast = true;
  int head = 0;
  // Of two blocks in two parts the low parts follow the high ones.
  uint32_t q[!kHoldsQuery ? 1 : kExactQuery ? kD / 16 : kD / 16 * kBlocks][kExactQuery ? 2 * kBlocks : 4];
  uint32_t q_chunk;                // address of the first chunk of q that this lane reads for ldmatrix
  float out[kBlocks][kD / 16][4];  // transposed
  float scale[kBlocks];            // of the products with q in two parts: what q + u was divided by
  RunningSoftmax softmax[kBlocks];

  HOPWELL_DEVICE explicit MmaTile(const Params&) {}
  // Where there is no u to add, q as it lies in memory; else it comes with the first tile.
  HOPWELL_DEVICE void prefetch_query(const Params& p, const QueryVector& vector) {
    if constexpr (kExactQuery) {
      HOPWELL_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        const QueryVector of_block = vector_of(p, vector, b);
        const T* from = static_cast<const T*>(p.query.q) + of_block.sequence * p.query.strides[0] +
                        of_block.query * p.query.strides[1] + of_block.head * p.query.strides[2] + 2 * quad;
        HOPWELL_UNROLL
        for (int i = 0; i < kChunks; ++i)
          q[i / 2][i % 2 * kBlocks + b] = 8 * i < p.query.d ? *reinterpret_cast<const uint32_t*>(from + 8 * i) : 0;
      }
    }
  }
  HOPWELL_DEVICE void begin_segment(const Params& p, const QueryVector& vector, Partial& partial, const Stage& stage) {
    if constexpr (!kExactQuery) split_query(p, vector, partial, stage);
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
    float s[kKeys / 8][4];
    bool hidden = false;
    uint32_t weights[kBlocks][kKeys / 16][4];
    HOPWELL_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (exists) {
        arch::cp_async_wait<kParts - 1>();
        arch::syncwarp();  // the other lanes' copies are there
        multiply(half, address, s);
        if (half == kBiasPart) {
          hidden = finish_logits(p, vector, tile_key, stage, s);
          mask(vector, tile_key, stage.pages[0], s);
        }
        arch::syncwarp();  // all have read what is copied to next
      }
      refill(half);
    }
    if (exists) softmax_tile(p, vector, tile_key, stage, hidden, s, weights);
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
  // Stores the result of a whole row block.
  HOPWELL_DEVICE void store_results(const Params& p, const Segment& segment) const {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const float sum_of_row = tile::sum_of_quad(softmax[b].sum);
      HOPWELL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int of_block = 2 * quad + e, of_row = of_block + 8 * b;
        const float maximum = arch::shuffle(softmax[b].maximum, 4 * of_block) - kShift;
        const float sum = arch::shuffle(sum_of_row, 4 * of_block);
        const int in_row_block = head * p.schedule.queries + smaller(of_row, p.schedule.queries - 1);
        const OutputRow to = output_row_of(p, segment.row_block, in_row_block);
        if (of_row >= p.schedule.queries || !to.exists) continue;
        T* row_begin = out_at<T>(p.output, segment.sequence, to);
        uint32_t infinite = 0;  // bit i: dimension 8 i + lane / 4
        HOPWELL_UNROLL
        for (int i = 0; i < kD / 8; ++i) {
          const float value = out[b][i / 2][i % 2 * 2 + e];
          if (8 * i + lane / 4 < p.query.d) from_fp32(mean_of(sum, value), row_begin + 8 * i + lane / 4);
          infinite |= value * 0 != 0 ? 1U << i : 0;
        }
        if (lane / 4 == 0 && p.output.lse)
          *lse_at(p.output, segment.sequence, to) = tile::lse_of(maximum, sum, -INFINITY);
        if (!(sum > 0 && sum < INFINITY)) continue;
        HOPWELL_NO_UNROLL
        for (; infinite != 0; infinite &= infinite - 1) {
          const int dimension = 8 * int(arch::bfind(infinite & (0U - infinite))) + lane / 4;
          if (dimension < p.query.d) call_store_infinite<T>(p, segment.sequence, to, dimension, dimension + 1);
        }
      }
    }
  }

 private:
  static HOPWELL_DEVICE int head_of_row(const QueryVector& vector, int of_row) {
    if constexpr (kBlocks == 1) return arch::shuffle(vector.head, 4 * of_row);
    return arch::shuffle(vector.head, 0) + of_row;  // q_len is 1
  }
  // Query vectors, and u of them if `with_u`, as they lie in memory, to where their low and high parts will be. All loads
  // are under way together.
  HOPWELL_DEVICE void load_queries(const Params& p, const QueryVector& vector, bool with_u,
                                   arch::Words4* chunks) const {
    constexpr int kAtOnce = 32 / kChunks;  // rows
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    const auto* u = static_cast<const uint16_t*>(p.query.u) + 8 * chunk;
    RawElements q_raw[kRows / kAtOnce];
    arch::Words4 u_raw[kRows / kAtOnce];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const int of_row = i * kAtOnce + lane / kChunks;
      QueryVector other = vector;
      other.query = arch::shuffle(vector.query, 4 * of_row), other.head = head_of_row(vector, of_row);
      if (of_row < p.schedule.queries) q_raw[i] = load_q<T, 8>(p, other, 8 * chunk);
      u_raw[i] = {};
      if (of_row < p.schedule.queries && with_u && 8 * chunk < p.query.d)
        u_raw[i] = arch::load_vector<arch::Words4>(u + other.head * p.query.u_stride);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const int of_row = i * kAtOnce + lane / kChunks;
      chunks[chunk_index(of_row, chunk)] = u_raw[i], chunks[chunk_index(of_row + kRows, chunk)] = q_raw[i].half[0];
    }
  }
  // q + u in two parts of 16 bits, by way of the partial result's memory: high parts as rows 0 to 7 (15 of two blocks),
  // low parts as those that follow. The largest |q + u| of a row is scaled to between 1 and 2, so that no type is left.
  HOPWELL_DEVICE void split_query(const Params& p, const QueryVector& vector, Partial& partial, const Stage& stage) {
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    auto* chunks = reinterpret_cast<arch::Words4*>(partial.values);
    const bool loaded = !kCopiesQuery && p.query.aligned;
    const bool u_loaded = loaded && p.query.u && p.query.u_aligned && p.query.u_type != Float::fp32;
    if constexpr (kCopiesQuery)
      arch::cp_async_wait<kParts - 1>();
    else if (loaded)
      load_queries(p, vector, u_loaded, chunks);
    HOPWELL_NO_UNROLL
    for (int first = 0; first < p.schedule.queries; first += 32 / kChunks) {
      const int of_row = first + lane / kChunks;
      QueryVector other = vector;
      other.query = arch::shuffle(vector.query, 4 * of_row), other.head = head_of_row(vector, of_row);
      // Its own copies, if there are any.
      RawElements q_raw{}, u_raw{};
      if (p.query.aligned)
        q_raw.half[0] = kCopiesQuery ? stage.q[of_row * kChunks + chunk] : chunks[chunk_index(of_row + kRows, chunk)];
      else
        q_raw = load_q<T, 8>(p, other, 8 * chunk);
      if (u_loaded)
        u_raw.half[0] = chunks[chunk_index(of_row, chunk)];
      else
        u_raw = load_u<8>(p, other, 8 * chunk);
      float x[8], largest = 0;
      query_plus<T>(q_raw, u_raw, p.query.u_type, x);
      HOPWELL_UNROLL
      for (float element : x) largest = fmaxf(largest, fabsf(element));
      largest = tile::reduce<1, kChunks / 2>(largest, tile::Larger{});
      const uint32_t exponent = arch::bit_cast<uint32_t>(largest) >> 23;
      const uint32_t kept = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
      const float down = arch::bit_cast<float>((254 - kept) << 23);
      if (chunk == 0) partial.stats[of_row].maximum = arch::bit_cast<float>(kept << 23);
      arch::Words4 high, low;
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) split(x[2 * i] * down, x[2 * i + 1] * down, high.w[i], low.w[i], T{});
      chunks[chunk_index(of_row, chunk)] = high, chunks[chunk_index(of_row + kRows, chunk)] = low;
    }
    arch::syncwarp();
    const int last = p.schedule.queries - 1;  // of the rows that there are; the others repeat it
    const int of_row = kBlocks == 1 ? smaller(lane % 8, last) + (lane & 8) : smaller(lane % 16, last);
    q_chunk = arch::shared_address(chunks) + uint32_t(16 * chunk_index(of_row, lane / 16));
    if constexpr (kHoldsQuery) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16 * kBlocks; ++i) load_query(i % (kD / 16), q_chunk + part_offset(i / (kD / 16)), q[i]);
    }
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) scale[b] = partial.stats[smaller(row + 8 * b, last)].maximum;
    arch::syncwarp();  // kept: nobody writes the partial result before many more steps of all lanes
  }
  // Biases of 16 bits that have a word for each key (mma_copy.hpp), each to fp32 in place. They are seldom there, and
  // unrolled with what uses them they took a quarter of a kernel's compilation.
  HOPWELL_DEVICE void decode_words(const Params& p, const QueryVector& vector, int tile_key, Stage& stage) const {
    HOPWELL_NO_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      auto* words = reinterpret_cast<uint32_t*>(stage.bias[row + 8 * b]);
      const uintptr_t row_begin = bias_row_of(p.bias, vector_of(p, vector, b));
      HOPWELL_NO_UNROLL
      for (int j = quad; j < kKeys; j += 4) {
        const int64_t column = p.bias.column_of(vector.position, tile_key + j);
        const uint32_t half = uint32_t(row_begin + uintptr_t(column) * 2) & 2;
        words[j] = arch::bit_cast<uint32_t>(decode_bias(p.bias, words[j], half));
      }
    }
    arch::syncwarp();
  }
  // The biases of keys 8 t + 2 quad and the next one, of block b.
  HOPWELL_DEVICE void load_biases(const PositionBias& of, const Stage& stage, int b, int t, float (&bias)[2]) const {
    const auto* words = reinterpret_cast<const uint32_t*>(stage.bias[row + 8 * b]);
    const int j = 8 * t + 2 * quad;
    if (of.type == Float::fp32 || !of.aligned)
      bias[0] = arch::bit_cast<float>(words[j]), bias[1] = arch::bit_cast<float>(words[j + 1]);
    else
      bias[0] = decode(words[j / 2] & 0xffff, of.type), bias[1] = decode(words[j / 2] >> 16, of.type);
  }
  // What is subtracted from the logits, and how far one may lie above that before the maximum is raised.
  HOPWELL_DEVICE float base_of(int b) const {
    return softmax[b].maximum == -INFINITY ? 0 : softmax[b].maximum - kShift;
  }
  HOPWELL_DEVICE float limit_of(int b) const { return softmax[b].maximum == -INFINITY ? -INFINITY : kSlack + kShift; }
  // Of eight keys, the product of the lane's key e % 2 with the query of block e / 2, or the sum of its two parts.
  HOPWELL_DEVICE float product_of(const float (&s)[4], int e) const {
    if constexpr (kExactQuery) return s[e];
    return (kBlocks > 1 ? s[e] : s[e] + s[2 + e]) * scale[e / 2];
  }
  // Products to logits, less what is subtracted from them: s[t][2 b + e] of key 8 t + 2 quad + e, block b. True if a bias
  // of −inf hides a key from any lane's row.
  HOPWELL_DEVICE bool finish_logits(const Params& p, const QueryVector& vector, int tile_key, Stage& stage,
                                    float (&s)[kKeys / 8][4]) const {
    bool hidden = false;
    const auto load_any = [&](int b, int t, float (&bias)[2]) { load_biases(p.bias, stage, b, t, bias); };
    if (!p.bias.exists()) {
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t)
        for (int e = 0; e < 2 * kBlocks; ++e) s[t][e] = fmaf(product_of(s[t], e), p.query.log2_scale, -base_of(e / 2));
    } else if (p.bias.aligned && p.bias.type == Float::bf16) {
      hidden = add_biases(p, s, [&](int b, int t, float (&bias)[2]) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(stage.bias[row + 8 * b])[4 * t + quad];
        bias[0] = arch::bit_cast<float>(word << 16), bias[1] = arch::bit_cast<float>(word & 0xffff0000);
      });
    } else {
      if (!p.bias.aligned && p.bias.type != Float::fp32) decode_words(p, vector, tile_key, stage);
      hidden = add_biases(p, s, load_any);
    }
    if (hidden) hide_keys(s, load_any);
    if (p.bias.alibi_slopes) subtract_slopes(p, vector, tile_key, s);
    return hidden;
  }
  template <class Load>
  HOPWELL_DEVICE bool add_biases(const Params& p, float (&s)[kKeys / 8][4], const Load& load) const {
    float lowest = INFINITY;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        float bias[2];
        load(b, t, bias);
        for (int e = 0; e < 2; ++e) {
          lowest = fminf(lowest, bias[e]);
          s[t][2 * b + e] =
              fmaf(product_of(s[t], 2 * b + e), p.query.log2_scale, fmaf(bias[e], p.bias.log2_scale, -base_of(b)));
        }
      }
    }
    return arch::ballot(lowest == -INFINITY) != 0;
  }
  // A bias of −inf hides its key, whatever the product is and whatever the bias is multiplied by.
  template <class Load>
  HOPWELL_DEVICE void hide_keys(float (&s)[kKeys / 8][4], const Load& load) const {
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        float bias[2];
        load(b, t, bias);
        for (int e = 0; e < 2; ++e) s[t][2 * b + e] = bias[e] == -INFINITY ? -INFINITY : s[t][2 * b + e];
      }
    }
  }
  HOPWELL_DEVICE void subtract_slopes(const Params& p, const QueryVector& vector, int tile_key,
                                      float (&s)[kKeys / 8][4]) const {
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const float slope = alibi_slope(p.bias, vector_of(p, vector, b).head);
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t)
        for (int e = 0; e < 2; ++e)
          s[t][2 * b + e] -= slope * float(vector.position - (tile_key + 8 * t + 2 * quad + e));
    }
  }
  HOPWELL_DEVICE void mask(const QueryVector& vector, int tile_key, uint32_t pages, float (&s)[kKeys / 8][4]) const {
    if (tile_key >= vector.visible.begin && tile_key + kKeys <= vector.visible.end && pages == ~0U) return;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int e = 0; e < 2 * kBlocks; ++e) {
        const int key = tile_key + 8 * t + 2 * quad + e % 2;
        if (key < vector.visible.begin || key >= vector.visible.end || !(pages >> (t / 2 * kLanesOfPage) & 1))
          s[t][e] = -INFINITY;
      }
    }
  }

  // 16 dimensions of q, as mma takes them, from `rows` on: where the lane's first chunk lies of those. Dimensions 64 apart
  // have places that differ by a constant: few addresses to find out before the first tile.
  static HOPWELL_DEVICE void load_query(int i, uint32_t rows, uint32_t (&of_q)[4]) {
    arch::ldmatrix(of_q, (rows ^ uint32_t(16 * (2 * i % 8))) + uint32_t(16 * (2 * i / 8 * 8)));
  }
  static HOPWELL_DEVICE constexpr uint32_t part_offset(int part) { return uint32_t(16 * kChunks * kRows * part); }
  // S = q k^T for half of the keys, or all: s[t] for keys 8 t to 8 t + 7, of both blocks, or high parts and low parts.
  HOPWELL_DEVICE void multiply(int half, uint32_t keys, float (&s)[kKeys / 8][4]) const {
    constexpr int kCount = kKeys / 8 / kHalves;
    const int lane = arch::lane_index();
    // Of this lane's chunks, for ldmatrix: key lane % 8 and chunk lane / 8.
    const ChunkAddress in_rows(keys, lane % 8, lane / 8);
    const uint32_t in_columns = keys + uint32_t(16 * column_chunk_index(lane % 8, lane / 8));
    const auto load_keys = [&](int t, int i, uint32_t (&b)[4]) {
      arch::ldmatrix(
          b, kVllm ? in_columns + uint32_t(16 * column_chunk_index(8 * t, 4 * i)) : in_rows.moved(8 * t, 4 * i));
    };
    if constexpr (kExactQuery || (kHoldsQuery && kBlocks == 1)) {
      HOPWELL_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const int t = eight_of(half, j);
        float other[4];  // a second sum, as the tensor cores take their time
        for (int e = 0; e < 4; ++e) s[t][e] = other[e] = 0;
        HOPWELL_UNROLL
        for (int i = 0; i < kD / 32; ++i) {
          uint32_t b[4];
          load_keys(t, i, b);
          multiply_query(s[t], q[2 * i], b[0], b[1]), multiply_query(other, q[2 * i + 1], b[2], b[3]);
        }
        for (int e = 0; e < 4; ++e) s[t][e] += other[e];
      }
    } else {
      // Each fragment of q is loaded once for all keys of the half. By a shuffle, so that the compiler keeps one address
      // alone and finds those near it out in every step.
      const uint32_t rows = arch::shuffle(q_chunk, lane);
      float sums[kCount][2][4] = {};
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 32; ++i) {
        uint32_t of_q[kBlocks][2][4];  // of two blocks high parts and low parts
        for (int part = 0; part < kBlocks; ++part) {
          for (int e = 0; e < 2; ++e) {
            if constexpr (kHoldsQuery) {
              for (int word = 0; word < 4; ++word) of_q[part][e][word] = q[kD / 16 * part + 2 * i + e][word];
            } else {
              load_query(2 * i + e, rows + part_offset(part), of_q[part][e]);
            }
          }
        }
        HOPWELL_UNROLL
        for (int j = 0; j < kCount; ++j) {
          uint32_t b[4];
          load_keys(eight_of(half, j), i, b);
          for (int part = 0; part < kBlocks; ++part)
            for (int e = 0; e < 2; ++e) mma(sums[j][e], of_q[part][e], b[2 * e], b[2 * e + 1], T{});
        }
      }
      HOPWELL_UNROLL
      for (int j = 0; j < kCount; ++j)
        for (int e = 0; e < 4; ++e) s[eight_of(half, j)][e] = sums[j][0][e] + sums[j][1][e];
    }
  }
  template <int kWords>
  static HOPWELL_DEVICE void multiply_query(float (&s)[4], const uint32_t (&of_q)[kWords], uint32_t b0, uint32_t b1) {
    if constexpr (kWords == 4) {
      mma(s, of_q, b0, b1, T{});
    } else {
      const uint32_t rows[4] = {of_q[0], 0, of_q[1], 0};  // 8 to 15 are empty
      mma(s, rows, b0, b1, T{});
    }
  }
  // Whether this lane's row does not see keys of the tile whose values have been copied, for other rows or in whole
  // chunks.
  static HOPWELL_DEVICE bool shares_values(const QueryVector& vector, int tile_key) {
    return tile_key < vector.visible.begin || vector.visible.end < smaller(vector.end, tile_key + kKeys);
  }
  // Logits to weights of the values, in high parts and low parts; the values that a weight of 0 does not remove are wiped
  // out.
  HOPWELL_DEVICE void softmax_tile(const Params& p, const QueryVector& vector, int tile_key, Stage& stage, bool hidden,
                                   float (&s)[kKeys / 8][4], uint32_t (&weights)[kBlocks][kKeys / 16][4]) {
    if (hidden || ((kVllm || p.query.q_len > 1) && arch::ballot(shares_values(vector, tile_key)) != 0))
      clear_hidden_values(vector, tile_key, s, stage);
    // The maximum that is subtracted follows the true one only when that is far above: seldom.
    float maximum[kBlocks];  // of the lane's keys
    bool higher = false;
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      maximum[b] = fmaxf(s[0][2 * b], s[0][2 * b + 1]);
      HOPWELL_UNROLL
      for (int t = 1; t < kKeys / 8; ++t) maximum[b] = fmaxf(maximum[b], fmaxf(s[t][2 * b], s[t][2 * b + 1]));
      higher |= maximum[b] > limit_of(b);
    }
    if (arch::ballot(higher) != 0) {
      HOPWELL_UNROLL
      for (int b = 0; b < kBlocks; ++b) raise_maximum(b, tile::max_of_quad(maximum[b]), s);
    }
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) {
        const float x = arch::exp2_approx(s[t][2 * b]), y = arch::exp2_approx(s[t][2 * b + 1]);
        softmax[b].sum += x + y;
        s[t][2 * b] = x, s[t][2 * b + 1] = y;
        auto& of_keys = weights[b][sixteen_of(t)];
        split(x, y, of_keys[place_of(t)], of_keys[2 + place_of(t)], T{});
      }
    }
  }
  // Raises what is subtracted from block b's logits, where the largest lies above the limit, and shrinks its sums.
  HOPWELL_DEVICE void raise_maximum(int b, float largest, float (&s)[kKeys / 8][4]) {
    const bool higher = largest > limit_of(b);
    const float base = base_of(b), raised = higher ? largest + base : softmax[b].maximum;
    const float factor = higher ? arch::exp2_approx(softmax[b].maximum - raised) : 1;
    softmax[b].maximum = raised, softmax[b].sum *= factor;
    const float more = base_of(b) - base;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2; ++e) s[t][2 * b + e] -= more;
    const float of_query[2] = {arch::shuffle(factor, 8 * quad), arch::shuffle(factor, 8 * quad + 4)};
    HOPWELL_UNROLL
    for (int i = 0; i < kD / 16; ++i)
      for (int e = 0; e < 4; ++e) out[b][i][e] *= of_query[e % 2];
  }
  // V^T P^T of a half, or all: of the keys, in layout vllm of the dimensions.
  HOPWELL_DEVICE void accumulate(int half, uint32_t values, const uint32_t (&weights)[kBlocks][kKeys / 16][4]) {
    constexpr int kSteps = kKeys / 16, kChunkPairs = kD / 16;
    const int lane = arch::lane_index();
    const ChunkAddress first(values, lane / 16 * (8 * kHalves) + lane % 8, lane / 8 % 2);
    HOPWELL_UNROLL
    for (int t = kVllm ? 0 : half * kSteps / kHalves; t < (kVllm ? kSteps : (half + 1) * kSteps / kHalves); ++t) {
      HOPWELL_UNROLL
      for (int i = kVllm ? half * kChunkPairs / kHalves : 0;
           i < (kVllm ? (half + 1) * kChunkPairs / kHalves : kChunkPairs); ++i) {
        uint32_t a[4];
        if constexpr (kVllm)
          arch::ldmatrix(a, values + uint32_t(16 * token_chunk_index(16 * i + lane % 16, 2 * t + lane / 16)));
        else
          arch::ldmatrix<arch::Transpose::yes>(
              a, first.moved(8 * eight_of(half, 2 * (t - half * (kSteps / kHalves))), 2 * i));
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
