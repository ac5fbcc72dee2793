// sparse_mla_backward on Hopper: sums of dkv whose bits do not depend on the order of the additions.
//
// Every contribution to row k of dkv is rounded to a multiple of a unit 2^-e of that row, and integers are added: in any
// order the same bits. Two neighbouring sums go by one 64-bit addition: low + 2^32 high, both of 32 bits, decoded at the end.
//
// The unit. With A[s,k] = Σ_h exp(score − lse), which attention_distribution gives, and over the heads of a query
//
//     a = max |d_out| + |scale delta| max |q|,    b = |scale| ‖d_out‖ max |q|,    c[s,k] = A[s,k] (a + b ‖v_k‖)
//
// no element of what query s adds to row k exceeds c[s,k] (|dP| <= ‖d_out‖ ‖v_k‖), and no sum exceeds n_k max_s c[s,k], where
// n_k entries select k. e is the largest for which that is below 2^29 units. So a contribution is off by at most 2^-30 of
// the bound, and sums of any order and length stay within 32 bits. Where the bound is infinite or NaN the row becomes NaN.
//
//     measure_keys      ‖v_k‖
//     bound_entries     n_k and max_s c[s,k]
//     choose_units      e
//     finish_fixed_dkv  the sums to the output
#pragma once

#include "ops/sparse_mla_backward/sm90_passes.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

// What is known of a row of dkv, in scratch memory.
struct KeyBounds {
  float* scale;     // [s_kv]: ‖v_k‖, then 2^e, or NaN
  uint32_t* most;   // [s_kv]: the bits of max_s c[s,k]
  uint32_t* count;  // [s_kv]
};

// Where columns lie in 64-bit words: eight lanes that add to 32 columns of a row add to eight neighbours at a time.
HOPWELL_DEVICE int word_of(int c) { return c / 32 * 16 + c / 8 % 2 * 8 + c / 16 % 2 * 4 + c / 2 % 4; }
HOPWELL_DEVICE int64_t word_of_pair(int low, int high) {
  return int64_t((uint64_t(uint32_t(high)) << 32) + uint64_t(int64_t{low}));
}
HOPWELL_DEVICE int sum_in_word(int64_t word, bool high) {
  const int low = int(uint32_t(uint64_t(word)));
  return high ? int(uint32_t((uint64_t(word) - uint64_t(int64_t{low})) >> 32)) : low;
}

// What bounds need of a row of bf16: the largest magnitude and the sum of squares. Each lane of a warp has its part, until
// `whole` adds them up.
struct Magnitude {
  uint32_t most = 0;  // bits; those of infinities and NaN are larger than all
  float squares = 0;

  HOPWELL_DEVICE void add(const arch::Words4& words) {
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = (i % 2 ? words.w[i / 2] & 0x7fff0000 : words.w[i / 2] << 16 & 0x7fff0000);
      most = bits > most ? bits : most;
      squares += arch::bit_cast<float>(bits) * arch::bit_cast<float>(bits);
    }
  }
  HOPWELL_DEVICE void whole() {
    HOPWELL_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint32_t other = arch::shuffle_xor(most, mask);
      most = other > most ? other : most;
      squares += arch::shuffle_xor(squares, mask);
    }
  }
  HOPWELL_DEVICE float largest() const { return arch::bit_cast<float>(most); }
  // At least the norm of up to 512 elements, also where squares leave the range of fp32.
  HOPWELL_DEVICE float norm() const {
    return squares > 1e-30F && squares < 1e38F ? sqrtf(squares) * 1.001F : largest() * 22.7F;
  }
};

// A lane's part.
HOPWELL_DEVICE Magnitude part_of_magnitude(const bf16* row, int width) {
  Magnitude m;
  for (int chunk = arch::lane_index(); chunk < width / 8; chunk += 32) m.add(arch::load_streaming(row + 8 * chunk));
  return m;
}

struct BoundParams {
  tile::SelectionParams selection;
  const bf16 *q, *kv, *out, *d_out;  // [s_q, h_q, d_qk], [s_kv, d_qk], [s_q, h_q, 512] twice
  const float *lse, *attn;           // [s_q, h_q], [s_q, topk]
  int64_t q_stride_s, q_stride_h, kv_stride, out_stride_s, out_stride_h, d_out_stride_s, d_out_stride_h;  // elements
  int64_t lse_stride_s, lse_stride_h, attn_stride;
  KeyBounds keys;
  int h_q, d_qk;
  float sm_scale;
};

// A warp for a key.
__global__ void __launch_bounds__(kPassThreads) measure_keys(const __grid_constant__ BoundParams p) {
  for (int64_t key = int64_t{arch::block_index()} * kPassWarps + arch::warp_index(); key < p.selection.s_kv;
       key += int64_t{arch::grid_size()} * kPassWarps) {
    Magnitude v = part_of_magnitude(p.kv + key * p.kv_stride, 512);
    v.whole();
    if (arch::lane_index() != 0) continue;
    p.keys.scale[key] = v.norm();
    p.keys.most[key] = 0, p.keys.count[key] = 0;
  }
}

// a and b of a query, as bits: the largest of a warp's heads.
struct QueryBound {
  uint32_t a = 0, b = 0;

  HOPWELL_DEVICE void raise(const QueryBound& other) {
    a = other.a > a ? other.a : a;
    b = other.b > b ? other.b : b;
  }
};

// What one head of a query adds to them. Heads that see no key (lse = +inf) add nothing.
HOPWELL_DEVICE QueryBound bound_of(const BoundParams& p, int64_t query, int head) {
  if (p.lse[query * p.lse_stride_s + head * p.lse_stride_h] == INFINITY) return {};
  const bf16* d_out = p.d_out + query * p.d_out_stride_s + head * p.d_out_stride_h;
  Magnitude of_d_out = part_of_magnitude(d_out, 512);
  Magnitude of_q = part_of_magnitude(p.q + query * p.q_stride_s + head * p.q_stride_h, p.d_qk);
  float delta = part_of_dot(p.out + query * p.out_stride_s + head * p.out_stride_h, d_out);
  of_d_out.whole();  // after all loads have been started
  of_q.whole();
  delta = tile::sum_of_warp(delta);
  const float scale = fabsf(p.sm_scale) * of_q.largest();
  const float a = of_d_out.largest() + scale * fabsf(delta), b = scale * of_d_out.norm();
  return {arch::bit_cast<uint32_t>(a) & 0x7fffffff, arch::bit_cast<uint32_t>(b) & 0x7fffffff};
}

// A CTA for a query.
__global__ void __launch_bounds__(kPassThreads) bound_entries(const __grid_constant__ BoundParams p) {
  auto& of_warp = arch::dynamic_smem<QueryBound[kPassWarps]>();
  const int query = arch::block_index(), warp = arch::warp_index();
  QueryBound bound;
  for (int head = warp; head < p.h_q; head += kPassWarps) bound.raise(bound_of(p, query, head));
  if (arch::lane_index() == 0) of_warp[warp] = bound;
  arch::syncthreads();
  for (int w = 0; w < kPassWarps; ++w) bound.raise(of_warp[w]);
  const Entries entries = tile::entries_of(p.selection, query);
  for (int i = arch::thread_index(); i < entries.length; i += kPassThreads) {
    const int key = entries.key(i);
    if (key < 0) continue;
    const float c = p.attn[query * p.attn_stride + i] *
                    (arch::bit_cast<float>(bound.a) + arch::bit_cast<float>(bound.b) * p.keys.scale[key]);
    arch::red_max(p.keys.most + key, arch::bit_cast<uint32_t>(c) & 0x7fffffff);
    arch::red_add(p.keys.count + key, 1u);
  }
}

struct UnitParams {
  KeyBounds keys;
  int64_t s_kv;
};

__global__ void __launch_bounds__(kPassThreads) choose_units(const __grid_constant__ UnitParams p) {
  for (int64_t key = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); key < p.s_kv;
       key += int64_t{arch::grid_size()} * kPassThreads) {
    const float bound = arch::bit_cast<float>(p.keys.most[key]) * float(p.keys.count[key]);
    const int above = int(arch::bit_cast<uint32_t>(bound) >> 23) - 126;  // 2^above > bound
    const int e = 29 - above > 126 ? 126 : 29 - above;
    p.keys.scale[key] = bound < INFINITY ? arch::bit_cast<float>(uint32_t(e + 127) << 23) : NAN;
  }
}

struct FinishFixedParams {
  const int64_t* words;  // [s_kv, d_qk / 2], columns at word_of
  const float* scale;    // [s_kv]
  FinishParams output;   // its sums are not used
};

__global__ void __launch_bounds__(kPassThreads) finish_fixed_dkv(const __grid_constant__ FinishFixedParams p) {
  const int d_qk = p.output.d_qk;
  for (int64_t row = arch::block_index(); row < p.output.s_kv; row += arch::grid_size())
    for (int column = arch::thread_index(); column < d_qk; column += kPassThreads) {
      const int sum = sum_in_word(p.words[row * (d_qk / 2) + word_of(column)], column % 2);
      store_sum(p.output, row, column, float(double(sum) / double(p.scale[row])));
    }
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
