// paged_attention on the tensor cores, for blocks of 8 query vectors that share a KV head: GQA groups, and several
// query tokens. Layout vllm uses this tile for any number of query vectors, because its chunks are fragments of mma.
// Groups of 9 to 16 heads may have two blocks, so that one pass over the keys is enough (plan.cpp).
//
//     s = scale · q · k + bias, out = Σ_key softmax(s) · v    for each query vector
//
// Tile      64, 32 or 16 keys of one KV head for a warp: 12 or 16 KiB of K and V, swizzled for ldmatrix. Two blocks
//           with q split into two parts: half as many keys
// Roles     all warps are alike: each copies and multiplies its own tiles
// Products  mma m16n8k16. S = q K^T: the 16 rows are 8 query vectors twice, rows 0–7 with the high part of an fp32
//           element, rows 8–15 with its rounding error; the two results are added. out^T = V^T P^T: 16 dimensions by 8
//           queries; the high and the low part of P are added to the same sums, one after the other. The split costs
//           nothing, because 8 rows, or half of the products, would be empty otherwise. A bf16 product keeps 16 bits,
//           an fp16 product 22. S has the layout that P needs. An exact q, to which nothing is added, has no low part
//           (plan.cpp's exact_query): the 16 rows of S are the query vectors of two blocks. For two blocks with a split
//           q, the high and the low part are multiplied one after the other
// Timeline  K 0 ▓ │ copy K 0 │ K 1 ▓ │ copy K 1 │ softmax ▓▓ │ V 0 ▓ │ copy V 0 │ V 1 ▓ │ copy V 1 │ next tile: K 0 ▓ …
//           three or four of the four parts are in flight at any time; 16 keys: K ▓ │ copy K │ softmax ▓▓ │ V ▓ │ …
// Budget    shared: 8 warps × (16,384 or 12,288 + 16 · kD of q + 4 · 8 · (keys + 4) of bias + 16 + 2 partial results of
//           32 · kD) + 6.5 KiB. An exact q is not in shared memory, and the last partial result is in the ring's memory.
//           Two blocks have twice the biases and partial results. A split q of two blocks of kD 128, or of kD 256, is in
//           the partial result's memory; kD 256 then has 6 warps. Registers: kD / 4 of the output and of q (exact: half
//           as much for a block), ~110 to 150 others
// Bound     memory; the tensor cores are 2 % busy with one block
//
// A lane has the query vector of row fragment_row().
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
// Splits two numbers: `high` is both rounded to 16 bits, `low` is both rounding errors.
HOPWELL_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low, bf16) {
  high = arch::pack_bf16(x, y);
  low = arch::pack_bf16(x - arch::bit_cast<float>(high << 16), y - arch::bit_cast<float>(high & 0xffff0000));
}
HOPWELL_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low, fp16) {
  high = arch::pack_fp16(x, y);
  low = arch::pack_fp16(x - arch::to_float(fp16{uint16_t(high)}), y - arch::to_float(fp16{uint16_t(high >> 16)}));
}

// By default, tiles of two blocks and tiles of a kD other than 64 and 128 have an exact query.
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
  static constexpr bool kHoldsQuery = kExactQuery || kD * kBlocks <= 128;  // q is in registers, else in shared memory
  static constexpr int kKeysOfLookup = 16;                                 // keys that share a page
  // The eighth warp fits only if the partial result of the last segment uses the ring's memory.
  static constexpr bool kStoresResults = kExactQuery;
  static constexpr bool kRegistersAreScarce = kExactQuery && kD * kBlocks >= 256;
  // fp16 cannot represent small probabilities, so they are multiplied by 2^14. With the threshold they stay below 2^15.
  static constexpr float kShift = std::is_same_v<T, fp16> ? 14 : 0;
  static constexpr float kRescaleThreshold =
      std::is_same_v<T, fp16> ? 1 : 8;  // rescale threshold: a logit may exceed the maximum by this

  using Results = WarpPartial<kRows * kD, kRows>;
  struct alignas(128) Partial : Results {};  // before the first tile, holds q in the layout of a stage's keys

  static constexpr bool kInterleavesHeads = true;
  int head = 0;
  // For two blocks with a split q, the low parts follow the high parts.
  uint32_t q[!kHoldsQuery ? 1 : kExactQuery ? kD / 16 : kD / 16 * kBlocks][kExactQuery ? 2 * kBlocks : 4];
  uint32_t q_chunk;                // address of the first chunk of q that this lane reads for ldmatrix
  float out[kBlocks][kD / 16][4];  // transposed
  float scale[kBlocks];            // factor of the products with a split q: the divisor of q + u
  RunningSoftmax softmax[kBlocks];

  HOPWELL_DEVICE explicit MmaTile(const Params&) {}
  // Loads an exact q. A split q is loaded with the first tile.
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
  // Computes a tile, if it exists, and refills each part of its stage after use.
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
        arch::syncwarp();  // the copies of all lanes have arrived
        multiply(half, address, s);
        if (half == kBiasPart) {
          hidden = finish_logits(p, vector, tile_key, stage, s);
          mask(vector, tile_key, stage.pages[0], s);
        }
        arch::syncwarp();  // all lanes have read the part that refill() overwrites
      }
      refill(half);
    }
    if (exists) softmax_tile(p, vector, tile_key, stage, hidden, s, weights);
    HOPWELL_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (exists) {
        arch::cp_async_wait<kParts - 1>();
        arch::syncwarp();  // the copies of all lanes have arrived
        accumulate(half, address + kOffsetV, weights);
        arch::syncwarp();  // all lanes have read the part that refill() overwrites
      }
      refill(kHalves + half);
    }
  }

  HOPWELL_DEVICE void store_partial(const Params&, Partial& to) const {
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const float sum = tile::sum_of_quad(softmax[b].sum);
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i)
        for (int e = 0; e < 4; ++e)
          to.values[(2 * quad + e % 2 + 8 * b) * kD + 16 * i + e / 2 * 8 + tile::fragment_row()] = out[b][i][e];
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
        uint32_t infinite = 0;  // bit i: dimension 8 i + fragment_row()
        HOPWELL_UNROLL
        for (int i = 0; i < kD / 8; ++i) {
          const float value = out[b][i / 2][i % 2 * 2 + e];
          if (8 * i + tile::fragment_row(lane) < p.query.d)
            from_fp32(mean_of(sum, value), row_begin + 8 * i + tile::fragment_row(lane));
          infinite |= value * 0 != 0 ? 1U << i : 0;
        }
        if (tile::fragment_row(lane) == 0 && p.output.lse)
          *lse_at(p.output, segment.sequence, to) = tile::lse_of(maximum, sum, -INFINITY);
        if (!(sum > 0 && sum < INFINITY)) continue;
        HOPWELL_NO_UNROLL
        for (; infinite != 0; infinite &= infinite - 1) {
          const int dimension = 8 * int(arch::bfind(infinite & (0U - infinite))) + tile::fragment_row(lane);
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
  // Loads unconverted query vectors, and their u if `with_u`, into the memory of their low and high parts. All loads
  // are in flight at the same time.
  HOPWELL_DEVICE void load_queries(const Params& p, const QueryVector& vector, bool with_u,
                                   arch::Words4* chunks) const {
    constexpr int kRowsPerLoad = 32 / kChunks;  // rows
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    const auto* u = static_cast<const uint16_t*>(p.query.u) + 8 * chunk;
    RawElements q_raw[kRows / kRowsPerLoad];
    arch::Words4 u_raw[kRows / kRowsPerLoad];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / kRowsPerLoad; ++i) {
      const int of_row = i * kRowsPerLoad + lane / kChunks;
      QueryVector other = vector;
      other.query = arch::shuffle(vector.query, 4 * of_row), other.head = head_of_row(vector, of_row);
      if (of_row < p.schedule.queries) q_raw[i] = load_q<T, 8>(p, other, 8 * chunk);
      u_raw[i] = {};
      if (of_row < p.schedule.queries && with_u && 8 * chunk < p.query.d)
        u_raw[i] = arch::load_vector<arch::Words4>(u + other.head * p.query.u_stride);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / kRowsPerLoad; ++i) {
      const int of_row = i * kRowsPerLoad + lane / kChunks;
      chunks[chunk_index(of_row, chunk)] = u_raw[i], chunks[chunk_index(of_row + kRows, chunk)] = q_raw[i].half[0];
    }
  }
  // Splits q + u into two parts of 16 bits, in the partial result's memory: rows 0 to 7 (two blocks: 15) are the high
  // parts, the following rows the low parts. Each row is scaled so that its largest |q + u| lies between 1 and 2 and T
  // represents it.
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
      // Chunks that this lane has copied or loaded, if the query is aligned.
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
    const int last = p.schedule.queries - 1;  // last row that exists; later rows repeat it
    const int of_row = kBlocks == 1 ? smaller(lane % 8, last) + (lane & 8) : smaller(lane % 16, last);
    q_chunk = arch::shared_address(chunks) + uint32_t(16 * chunk_index(of_row, lane / 16));
    if constexpr (kHoldsQuery) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16 * kBlocks; ++i) load_query(i % (kD / 16), q_chunk + part_offset(i / (kD / 16)), q[i]);
    }
    HOPWELL_UNROLL
    for (int b = 0; b < kBlocks; ++b) scale[b] = partial.stats[smaller(row + 8 * b, last)].maximum;
    arch::syncwarp();  // kept: lanes write the partial result only after many more steps
  }
  // Converts 16-bit biases that have a word for each key (mma_copy.hpp) to fp32, in place. They are rare. Unrolled into
  // the code that uses them, the conversion took a quarter of a kernel's compile time.
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
  // The biases of keys 8 t + 2 quad and 8 t + 2 quad + 1, of block b.
  HOPWELL_DEVICE void load_biases(const PositionBias& of, const Stage& stage, int b, int t, float (&bias)[2]) const {
    const auto* words = reinterpret_cast<const uint32_t*>(stage.bias[row + 8 * b]);
    const int j = 8 * t + 2 * quad;
    if (of.type == Float::fp32 || !of.aligned)
      bias[0] = arch::bit_cast<float>(words[j]), bias[1] = arch::bit_cast<float>(words[j + 1]);
    else
      bias[0] = decode(words[j / 2] & 0xffff, of.type), bias[1] = decode(words[j / 2] >> 16, of.type);
  }
  // The number that is subtracted from the logits, and the difference above which the maximum is raised.
  HOPWELL_DEVICE float base_of(int b) const {
    return softmax[b].maximum == -INFINITY ? 0 : softmax[b].maximum - kShift;
  }
  HOPWELL_DEVICE float limit_of(int b) const {
    return softmax[b].maximum == -INFINITY ? -INFINITY : kRescaleThreshold + kShift;
  }
  // Product of key e % 2 of the lane's keys of eight with the query of block e / 2. Adds the two parts of a split q.
  HOPWELL_DEVICE float product_of(const float (&s)[4], int e) const {
    if constexpr (kExactQuery) return s[e];
    return (kBlocks > 1 ? s[e] : s[e] + s[2 + e]) * scale[e / 2];
  }
  // Turns products into logits minus base_of(b): s[t][2 b + e] is for key 8 t + 2 quad + e and block b. Returns true if
  // a bias of −inf hides a key from any lane's row.
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
  // A bias of −inf hides its key, whatever the product and the factor of the bias are.
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

  // Loads the fragment of 16 dimensions of q, from 16 i on. `rows`: address of the lane's first chunk. Addresses of
  // dimensions e and e + 64 differ by a constant, so few addresses are computed before the first tile.
  static HOPWELL_DEVICE void load_query(int i, uint32_t rows, uint32_t (&of_q)[4]) {
    arch::ldmatrix(of_q, (rows ^ uint32_t(16 * (2 * i % 8))) + uint32_t(16 * (2 * i / 8 * 8)));
  }
  static HOPWELL_DEVICE constexpr uint32_t part_offset(int part) { return uint32_t(16 * kChunks * kRows * part); }
  // S = q k^T for half of the keys, or all: s[t] for keys 8 t to 8 t + 7 and both blocks, or the high and the low part.
  HOPWELL_DEVICE void multiply(int half, uint32_t keys, float (&s)[kKeys / 8][4]) const {
    constexpr int kCount = kKeys / 8 / kHalves;
    const int lane = arch::lane_index();
    // Addresses of this lane's chunks for ldmatrix: key lane % 8 and chunk lane / 8.
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
        float other[4];  // a second sum hides the latency of mma
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
      // Each fragment of q is loaded once for all keys of the half. The shuffle makes the compiler keep a single
      // address and compute the neighbouring addresses in each step.
      const uint32_t rows = arch::shuffle(q_chunk, lane);
      float sums[kCount][2][4] = {};
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 32; ++i) {
        uint32_t of_q[kBlocks][2][4];  // two blocks: the high and the low part
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
      const uint32_t rows[4] = {of_q[0], 0, of_q[1], 0};  // rows 8 to 15 are empty
      mma(s, rows, b0, b1, T{});
    }
  }
  // True if values of keys that this lane's row does not see have been copied, for other rows or as a part of a chunk.
  static HOPWELL_DEVICE bool shares_values(const QueryVector& vector, int tile_key) {
    return tile_key < vector.visible.begin || vector.visible.end < smaller(vector.end, tile_key + kKeys);
  }
  // Turns logits into the weights of the values, split into high and low parts. Clears hidden values that are infinite
  // or NaN, because a weight of 0 does not remove them.
  HOPWELL_DEVICE void softmax_tile(const Params& p, const QueryVector& vector, int tile_key, Stage& stage, bool hidden,
                                   float (&s)[kKeys / 8][4], uint32_t (&weights)[kBlocks][kKeys / 16][4]) {
    if (hidden || ((kVllm || p.query.q_len > 1) && arch::ballot(shares_values(vector, tile_key)) != 0))
      clear_hidden_values(vector, tile_key, s, stage);
    // The maximum is raised only if a logit exceeds it by more than the rescale threshold, which is rare.
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
  // Raises the maximum of block b's rows whose largest logit exceeds the limit, and rescales their sums.
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
  // Adds V^T P^T to out, for half of the keys (layout vllm: half of the dimensions), or all.
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
  // Infinities and NaN have all bits of the exponent set.
  static constexpr uint32_t kExponent = std::is_same_v<T, fp16> ? 0x7c00 : 0x7f80;
  static HOPWELL_DEVICE uint16_t& value_of(Stage& stage, int key, int dimension) {
    if constexpr (kVllm) {
      auto& chunk = stage.v[token_chunk_index(dimension, key / 8)];
      return reinterpret_cast<uint16_t*>(&chunk)[key % 8];
    }
    return reinterpret_cast<uint16_t*>(&stage.v[chunk_index(key, dimension / 8)])[dimension % 8];
  }
  // Clears the values of keys that a row does not see, because they may be infinite or NaN, which a weight of 0 does
  // not remove. If another row does see them, its results become NaN, so that store_infinite computes them again.
  HOPWELL_DEVICE void clear_hidden_values(const QueryVector& vector, int tile_key, const float (&s)[kKeys / 8][4],
                                          Stage& stage) {
    const int lane = arch::lane_index();
    uint32_t hidden[kBlocks] = {};  // bit 2 t + e: key 8 t + 2 quad + e is hidden, and its values have been copied
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2 * kBlocks; ++e)
        hidden[e / 2] |=
            s[t][e] == -INFINITY && tile_key + 8 * t + 2 * quad + e % 2 < vector.end ? 1U << (2 * t + e % 2) : 0;
    uint32_t from_any = hidden[0];  // hidden from any row
    for (int b = 1; b < kBlocks; ++b) from_any |= hidden[b];
    HOPWELL_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) from_any |= arch::shuffle_xor(from_any, mask);
    uint32_t lost[kBlocks][2] = {};  // bit i: query 2 quad + e sees an infinite value of dimension 8 i + fragment_row()
    arch::cp_async_wait<kParts / 2>();
    arch::syncwarp();  // all values have arrived
    HOPWELL_NO_UNROLL
    for (int owner = 0; owner < 4; ++owner) {
      HOPWELL_NO_UNROLL
      for (uint32_t left = arch::shuffle(from_any, owner); left != 0; left &= left - 1) {
        const int bit = int(arch::bfind(left & (0U - left))), key = bit / 2 * 8 + 2 * owner + bit % 2;
        uint32_t rows[kBlocks], any = 0;  // rows that see the key
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
          for (int i = 0; i < kD / 8; ++i) infinite |= is_infinite(8 * i + tile::fragment_row(lane)) ? 1U << i : 0;
          HOPWELL_UNROLL
          for (int b = 0; b < kBlocks; ++b)
            for (int e = 0; e < 2; ++e) lost[b][e] |= rows[b] >> (4 * (2 * quad + e) + owner) & 1 ? infinite : 0;
        }
        arch::syncwarp();  // all lanes have read the values before any lane clears them
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
