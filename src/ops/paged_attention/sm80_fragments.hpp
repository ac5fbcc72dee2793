// paged_attention on the tensor cores, for up to 8 query vectors that share a KV head: GQA groups, several query tokens.
//
// Tile      of a warp: 2,048 / kD keys of one KV head, 4 KiB of K and 4 KiB of V, in rows swizzled for ldmatrix
// Product   mma m16n8k16. 16 rows hold 8 query vectors twice: rows 0–7 carry the high part of an fp32 value, rows 8–15
//           what rounding it to 16 bits has lost, of q + u and of P alike; the two results are added. That costs
//           nothing, since the rows would be empty, and leaves 16 bits of a bf16 product, 22 of an fp16 one.
// Budget    shared: 8 warps × 2 stages × (8,192 + 4 · 8 · keys + 16) + sums 8 × 8 × kD × 4; registers: kD / 2 of the
//           output, kD / 4 of q, ~90 others
// Bound     memory; the tensor cores are 2 % busy
//
// A row's own place in memory, position and visible keys are those of lane / 4, as in the fragments.
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/paged_attention/sm80_ring.hpp"

namespace hopwell::ops::paged_attention {
namespace {

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

template <class T, int kD>
struct Fragments {
  using Type = T;
  static constexpr int kRows = 8, kKeys = 2048 / kD, kChunks = kD / 8, kPages = kKeys / 16;
  // fp16 has no exponents for small probabilities: they are held 2^14 times as large.
  static constexpr float kShift = std::is_same_v<T, fp16> ? 14 : 0;

  struct Stage {
    arch::Words4 k[kKeys * kChunks], v[kKeys * kChunks];
    arch::Words4 bias[kRows][kKeys / 4];  // of a row: whole pieces as they lie in memory, or a word for each key
    uint32_t pages[4];                    // bit i: the page of keys 16 i and following exists
  };
  struct Storage {
    PlanStorage plan;
    alignas(16) float value[kMaxWarps][kRows][kD];
    Stats stats[kMaxWarps][kRows];
  };

  int head_of_strip, first_key, row, quad;
  uint32_t q[kD / 16][4];
  float out[kChunks][4], scale;  // scale: of the products with q, in units of log 2
  Softmax softmax;

  HOPWELL_DEVICE explicit Fragments(const Params& p) : head_of_strip(arch::warp_index() % p.heads) {
    const int lane = arch::lane_index();
    first_key = lane % kPages * 16, row = lane / 4, quad = lane % 4;
  }
  static HOPWELL_DEVICE int first_key_of_warp(const Params& p) { return arch::warp_index() / p.heads * p.tile; }
  static HOPWELL_DEVICE int place_of(int key, int chunk) { return key * kChunks + (chunk ^ (key & 7)); }

  HOPWELL_DEVICE void copy(const Params& p, const Tile& tile, Stage& to) const {
    constexpr int kRowsOfWarp = 32 / kChunks;
    const int lane = arch::lane_index(), key_of_lane = lane / kChunks, chunk = lane % kChunks;
    const Source& from = tile.from;
    const int begin = larger(0, from.position - from.query - p.window + 1);  // what the first query sees
    uint32_t pages = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kPages; ++i) {
      const int page = arch::shuffle(tile.page, i), key = tile.key + 16 * i;
      pages |= page >= 0 ? 1U << i : 0;
      const int64_t slot = slot_of(p, key), number = page >= 0 ? page : 0;
      const T* k = static_cast<const T*>(p.k) + number * p.k_at.page + from.kv_head * p.k_at.head + slot * p.k_at.slot;
      const T* v = static_cast<const T*>(p.v) + number * p.v_at.page + from.kv_head * p.v_at.head + slot * p.v_at.slot;
      HOPWELL_UNROLL
      for (int r = 0; r < 16; r += kRowsOfWarp) {
        const int j = r + key_of_lane;
        const bool wanted = page >= 0 && key + j >= begin && key + j < from.end && 8 * chunk < p.d;
        const int at = place_of(16 * i + j, chunk);
        arch::cp_async(arch::shared_address(&to.k[at]), k + (wanted ? j * p.k_at.slot + 8 * chunk : 0),
                       wanted ? 16 : 0);
        arch::cp_async(arch::shared_address(&to.v[at]), v + (wanted ? j * p.v_at.slot + 8 * chunk : 0),
                       wanted ? 16 : 0);
      }
    }
    if (p.bias_kind != Relative::none) copy_bias_of_row(p, from, tile.key, to);
    if (lane == 0) to.pages[0] = pages;
  }

  HOPWELL_DEVICE void fetch_query(const Params&, const Source&) {}
  // The largest |q + u| of a row is scaled to between 1 and 2, so that no type is left.
  HOPWELL_DEVICE void begin(const Params& p, const Source& from) {
    float x[kChunks][2], largest = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      HOPWELL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const RawQuery raw = load_query<T, false>(p, from, 8 * i + 2 * quad + e);
        x[i][e] = query_plus<T>(raw.q, raw.u, p.u_type);
        largest = fmaxf(largest, fabsf(x[i][e]));
        out[i][2 * e] = out[i][2 * e + 1] = 0;
      }
    }
    largest = fmaxf(largest, arch::shuffle_xor(largest, 1));
    largest = fmaxf(largest, arch::shuffle_xor(largest, 2));
    const uint32_t exponent = arch::bit_cast<uint32_t>(largest) >> 23;
    const uint32_t kept = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    const float down = arch::bit_cast<float>((254 - kept) << 23);
    scale = arch::bit_cast<float>(kept << 23) * p.scale_log2;
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i)
      split(x[i][0] * down, x[i][1] * down, q[i / 2][i % 2 * 2], q[i / 2][i % 2 * 2 + 1], T{});
    softmax = {};
  }

  HOPWELL_DEVICE void step(const Params& p, const Source& from, int tile, Stage& stage) {
    arch::syncwarp();  // the other lanes' copies are there
    float s[kKeys / 8][4];
    multiply(stage, s);
    uint32_t seen = 0;    // bit 2 t + e for key 8 t + 2 quad + e
    bool hidden = false;  // any of them, by a bias of −inf
    float maximum = -INFINITY;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int j = 8 * t + 2 * quad + e, key = tile + j;
        float x = (s[t][e] + s[t][2 + e]) * scale;
        if (p.bias_kind != Relative::none) {
          const float bias = bias_at(p, from, stage, key, j);
          x += bias * p.bias_log2;
          if (bias == -INFINITY) x = bias, hidden = true;
        }
        if (p.alibi_slopes) x -= p.alibi_slopes[from.head * p.slopes_stride] * kLog2E * float(from.position - key);
        const bool visible = key >= from.seen.begin && key < from.seen.end && (stage.pages[0] >> (t / 2) & 1);
        s[t][e] = visible ? x : -INFINITY;
        seen |= s[t][e] != -INFINITY ? 1U << (2 * t + e) : 0;
        maximum = fmaxf(maximum, s[t][e]);
      }
    }
    if (p.bias_kind != Relative::none) forget_values(hidden, seen, stage);
    maximum = fmaxf(maximum, arch::shuffle_xor(maximum, 1));
    maximum = fmaxf(maximum, arch::shuffle_xor(maximum, 2));
    const float raised = fmaxf(softmax.maximum, maximum), base = finite_or_zero(raised) - kShift;
    const float factor = arch::exp2_approx(softmax.maximum - finite_or_zero(raised));
    softmax.maximum = raised, softmax.sum *= factor;
    uint32_t weights[kKeys / 16][4];
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      const float x = arch::exp2_approx(s[t][0] - base), y = arch::exp2_approx(s[t][1] - base);
      softmax.sum += x + y;
      split(x, y, weights[t / 2][t % 2 * 2], weights[t / 2][t % 2 * 2 + 1], T{});
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i)
      for (float& sum : out[i]) sum *= factor;
    accumulate(stage, weights);
    arch::syncwarp();  // all have read the stage that is copied to next
  }

  HOPWELL_DEVICE void leave(Storage& s) {
    const int warp = arch::warp_index();
    softmax.sum += arch::shuffle_xor(softmax.sum, 1);
    softmax.sum += arch::shuffle_xor(softmax.sum, 2);
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i)
      for (int e = 0; e < 2; ++e) s.value[warp][row][8 * i + 2 * quad + e] = out[i][e] + out[i][2 + e];
    if (quad == 0) s.stats[warp][row] = {softmax.maximum - kShift, softmax.sum};
  }
  static HOPWELL_DEVICE int states(const Params& p) { return p.warps / p.heads; }
  static HOPWELL_DEVICE Stats stats_of(const Params& p, const Storage& s, int v, int i) {
    return s.stats[i * p.heads + v / kRows][v % kRows];
  }
  static HOPWELL_DEVICE float value_of(const Params& p, const Storage& s, int v, int i, int e) {
    return s.value[i * p.heads + v / kRows][v % kRows][e];
  }

 private:
  // Whole pieces where the rows of the bias allow it, else a word for each key.
  HOPWELL_DEVICE void copy_bias_of_row(const Params& p, const Source& from, int key, Stage& to) const {
    if (!p.bias_in_pieces) {
      auto* words = reinterpret_cast<uint32_t*>(to.bias[row]);
      HOPWELL_UNROLL
      for (int j = quad; j < kKeys; j += 4)
        copy_bias(p, from, key + j, key + j <= from.position && from.seen.begin < from.seen.end, words + j);
      return;
    }
    const int size = p.bias_type == Float::fp32 ? 4 : 2, elements = 16 / size;
    const int64_t at = from.sequence * p.bias_stride[0] + from.query * p.bias_stride[1] + from.head * p.bias_stride[2];
    for (int piece = quad; piece < kKeys / elements; piece += 4) {
      const int column = key + piece * elements, columns = larger(0, smaller(p.extent - column, elements));
      arch::cp_async(arch::shared_address(&to.bias[row][piece]),
                     static_cast<const char*>(p.bias) + (at + (columns ? column : 0)) * size, columns * size);
    }
  }
  HOPWELL_DEVICE float bias_at(const Params& p, const Source& from, const Stage& stage, int key, int j) const {
    const auto* words = reinterpret_cast<const uint32_t*>(stage.bias[row]);
    if (p.bias_type == Float::fp32) return arch::bit_cast<float>(words[j]);
    if (p.bias_in_pieces) return meaning(words[j / 2] >> (16 * (j % 2)) & 0xffff, p.bias_type);
    return bias_of(p, words[j], half_of_bias(p, column_of(p, from, key)));
  }

  // S = q k^T: s[t] for keys 8 t to 8 t + 7, high parts and low parts.
  HOPWELL_DEVICE void multiply(const Stage& stage, float (&s)[kKeys / 8][4]) const {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      for (float& x : s[t]) x = 0;
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 32; ++i) {
        uint32_t b[4];
        arch::ldmatrix(b, arch::shared_address(&stage.k[place_of(8 * t + lane % 8, 4 * i + lane / 8)]));
        mma(s[t], q[2 * i], b[0], b[1], T{});
        mma(s[t], q[2 * i + 1], b[2], b[3], T{});
      }
    }
  }
  HOPWELL_DEVICE void accumulate(const Stage& stage, const uint32_t (&weights)[kKeys / 16][4]) {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 16; ++t) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i) {
        uint32_t b[4];
        arch::ldmatrix<arch::Transpose::yes>(
            b, arch::shared_address(&stage.v[place_of(16 * t + lane % 16, 2 * i + lane / 16)]));
        mma(out[2 * i], weights[t], b[0], b[1], T{});
        mma(out[2 * i + 1], weights[t], b[2], b[3], T{});
      }
    }
  }
  // Values of keys that a bias of −inf hides from every row may be NaN, which a weight of 0 does not remove.
  HOPWELL_DEVICE void forget_values(bool hidden, uint32_t seen, Stage& stage) const {
    if (arch::ballot(hidden) == 0) return;
    const int lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const bool sees = quad == j % 8 / 2 && (seen >> (j / 8 * 2 + j % 2) & 1);
      if (arch::ballot(sees) == 0 && lane < kChunks) stage.v[place_of(j, lane)] = {};
    }
    arch::syncwarp();
  }
};

}  // namespace
}  // namespace hopwell::ops::paged_attention
