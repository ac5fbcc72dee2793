// sparse_mla_backward on Hopper: the small kernels around the main one, all of them bound by memory.
//
//     clear_rows        zeros, before sums are added
//     order_rows        each query's valid keys in ascending order, so that CTAs meet in L2
//     bound_queries,    what no sum of dkv can exceed, for the fixed point of deterministic sums
//     bound_keys
//     arrange_dkv       sums in the output: their columns in order
//     finish_dkv        sums in scratch memory to the output: its dtype, its strides, added to what is there if asked
//     sum_d_sink        the sum over queries, in a fixed order
//
// Fixed point. Every contribution to dkv is turned into a 64-bit integer, in units of 2^-e, and integers are added: in
// any order the same bits. With A = max |d_out|, Q = max |q| and K = max |kv| over what valid entries select, and since
// the probabilities of a query and head sum to at most 1,
//
//     |any sum of contributions to one element| <= s_q h_q A (1 + 2 · 512 K |sm_scale| Q)
//
// which gives the exponent e: integer arithmetic on exponents, so that every thread finds the same. A sum of n
// contributions is off by at most n units, and a unit is at most 2^-58 of the bound: 2^-39 A (1 + …) for s_q 4096 and
// h_q 128. Contributions that are not finite cannot be integers: their key is marked, and its row becomes NaN.
#pragma once

#include <bit>
#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "runtime/launch.hpp"
#include "tile/entries.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

using arch::bf16;
using tile::Entries;

enum class KeyState : uint8_t { unselected, selected, not_finite };

// What the fixed point depends on, found on the device.
struct FixedPoint {
  uint32_t max_d_out, max_q, max_kv;  // bits of the largest finite |x|

  // The exponent e of the unit 2^-e: the largest for which 2^61 exceeds the bound. log2_sums >= log2(s_q h_q).
  HOPWELL_DEVICE int exponent(int log2_sums, float sm_scale) const {
    const auto log2_above = [](uint32_t bits) { return int(bits >> 23) - 126; };
    const int product =
        10 + log2_above(max_kv) + log2_above(max_q) + log2_above(arch::bit_cast<uint32_t>(fabsf(sm_scale)));
    const int e = 61 - (log2_sums + log2_above(max_d_out) + (product > 0 ? product : 0) + 2);
    return e < -126 ? -126 : e > 127 ? 127 : e;
  }
};

HOPWELL_DEVICE float power_of_2(int e) { return arch::bit_cast<float>(uint32_t(e + 127) << 23); }

// Where the main kernel adds column c of a row: of each 16 columns, a lane's four side by side. In fixed point the
// eight lanes that share 32 columns add to eight neighbours at a time.
HOPWELL_DEVICE int sum_position(int c, bool fixed) {
  const int pair = c / 2 % 4, own = (c / 8 % 2) * 2 + c % 2;  // the lane of a quad, and which of its four
  return fixed ? c / 32 * 32 + 8 * own + c / 16 % 2 * 4 + pair : c / 16 * 16 + 4 * pair + own;
}

constexpr int kPassThreads = 288;  // half a row of 576
constexpr int kPassWarps = kPassThreads / 32;

struct ClearParams {
  uint32_t* data;
  int64_t rows, words, stride;  // in words of 4 bytes
};

__global__ void __launch_bounds__(kPassThreads) clear_rows(const __grid_constant__ ClearParams p) {
  for (int64_t row = arch::block_index(); row < p.rows; row += arch::grid_size())
    for (int64_t word = arch::thread_index(); word < p.words; word += kPassThreads) p.data[row * p.stride + word] = 0;
}

// The larger of `most` and the absolute values of two bf16, as bits of fp32; infinities and NaN do not count.
HOPWELL_DEVICE uint32_t larger_magnitude(uint32_t most, uint32_t pair) {
  const uint32_t low = (pair & 0x7fff) << 16, high = pair & 0x7fff0000;
  if (low < 0x7f800000 && low > most) most = low;
  return high < 0x7f800000 && high > most ? high : most;
}

// The largest magnitude among `rows` rows of `width` bf16, by all threads of the CTA; each thread gets that of its
// part.
HOPWELL_DEVICE uint32_t largest_magnitude(const bf16* x, int64_t stride, int rows, int width) {
  uint32_t most = 0;
  for (int row = arch::warp_index(); row < rows; row += kPassWarps)
    for (int chunk = arch::lane_index(); chunk < width / 8; chunk += 32) {
      const arch::Words4 words = arch::load_streaming(x + row * stride + 8 * chunk);
      for (int i = 0; i < 4; ++i) most = larger_magnitude(most, words.w[i]);
    }
  return most;
}

HOPWELL_DEVICE void raise_to(uint32_t* target, uint32_t most) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = arch::shuffle_xor(most, mask);
    most = other > most ? other : most;
  }
  if (arch::lane_index() == 0) arch::red_max(target, most);
}

struct BoundParams {
  tile::SelectionParams selection;
  const bf16 *q, *d_out, *kv;  // [s_q, h_q, d_qk], [s_q, h_q, 512], [s_kv, d_qk]
  int64_t q_stride_s, q_stride_h, d_out_stride_s, d_out_stride_h, kv_stride;
  KeyState* state;  // [s_kv]
  FixedPoint* fixed;
  int h_q, d_qk;
};

// A CTA for one query: marks the keys that it selects; the largest of q and d_out if there is any.
__global__ void __launch_bounds__(kPassThreads) bound_queries(const __grid_constant__ BoundParams p) {
  auto& valid_of_warp = arch::dynamic_smem<uint32_t[kPassWarps]>();
  const int query = arch::block_index(), warp = arch::warp_index();  // by all lanes: it is a shuffle
  const Entries entries = tile::entries_of(p.selection, query);
  bool valid = false;
  for (int i = arch::thread_index(); i < entries.length; i += kPassThreads) {
    const int key = entries.key(i);
    if (key < 0) continue;
    p.state[key] = KeyState::selected;
    valid = true;
  }
  const uint32_t lanes = arch::ballot(valid);
  if (arch::lane_index() == 0) valid_of_warp[warp] = lanes;
  arch::syncthreads();
  uint32_t any = 0;
  for (int w = 0; w < kPassWarps; ++w) any |= valid_of_warp[w];
  if (any == 0) return;
  raise_to(&p.fixed->max_q, largest_magnitude(p.q + query * p.q_stride_s, p.q_stride_h, p.h_q, p.d_qk));
  raise_to(&p.fixed->max_d_out, largest_magnitude(p.d_out + query * p.d_out_stride_s, p.d_out_stride_h, p.h_q, 512));
}

// The largest of the selected rows of kv.
__global__ void __launch_bounds__(kPassThreads) bound_keys(const __grid_constant__ BoundParams p) {
  uint32_t most = 0;
  for (int64_t row = arch::block_index() * kPassWarps + arch::warp_index(); row < p.selection.s_kv;
       row += int64_t{arch::grid_size()} * kPassWarps) {
    if (p.state[row] == KeyState::unselected) continue;
    for (int chunk = arch::lane_index(); chunk < p.d_qk / 8; chunk += 32) {
      const arch::Words4 words = arch::load_streaming(p.kv + row * p.kv_stride + 8 * chunk);
      for (int i = 0; i < 4; ++i) most = larger_magnitude(most, words.w[i]);
    }
  }
  raise_to(&p.fixed->max_kv, most);
}

constexpr int kOrderThreads = 512, kOrderWarps = kOrderThreads / 32, kLongestSorted = 4096;
constexpr int kRounds = kLongestSorted / kOrderThreads, kDigitBits = 4, kDigits = 1 << kDigitBits;

struct OrderStorage {
  int keys[2][kLongestSorted];
  uint16_t places[2][kLongestSorted];
  int counts[kDigits * kOrderWarps];  // by digit, then warp
  int of_warp[kOrderWarps];
};

struct OrderParams {
  tile::SelectionParams selection;
  int* rows;           // [s_q, topk]: the keys of valid entries, ascending; equal ones in the order of their entries
  uint16_t* places;    // [s_q, topk]: the entries that they come from; or null
  int* lengths;        // [s_q]: how many
  uint32_t* progress;  // set to 0
};

// The sum of the CTA's values.
HOPWELL_DEVICE int sum_of_cta(int (&of_warp)[kOrderWarps], int value) {
  const int warp = arch::warp_index();
  for (int mask = 16; mask > 0; mask /= 2) value += arch::shuffle_xor(value, mask);
  arch::syncthreads();
  if (arch::lane_index() == 0) of_warp[warp] = value;
  arch::syncthreads();
  int sum = 0;
  for (int w = 0; w < kOrderWarps; ++w) sum += of_warp[w];
  return sum;
}

// Replaces counts by the sums of all before.
HOPWELL_DEVICE void sum_counts(OrderStorage& s) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  static_assert(kDigits * kOrderWarps <= kOrderThreads);
  const int own = t < kDigits * kOrderWarps ? s.counts[t] : 0;
  int sum = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = arch::shuffle(sum, (lane - distance) & 31);
    if (lane >= distance) sum += before;
  }
  if (lane == 31) s.of_warp[warp] = sum;
  arch::syncthreads();
  for (int w = 0; w < warp; ++w) sum += s.of_warp[w];
  if (t < kDigits * kOrderWarps) s.counts[t] = sum - own;
  arch::syncthreads();
}

// One pass of a radix sort, by the digit at `shift`: each warp ranks its own stretch of the row, and equal digits stay
// in order.
HOPWELL_DEVICE void sort_by_digit(OrderStorage& s, int from, int rounds, int shift) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  const int first = warp * rounds * 32 + lane;
  if (t < kDigits * kOrderWarps) s.counts[t] = 0;
  arch::syncthreads();
  int rank[kRounds];
  HOPWELL_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (r >= rounds) break;
    const int digit = s.keys[from][first + 32 * r] >> shift & (kDigits - 1);
    uint32_t same = 0xffffffff;  // lanes with this digit
    HOPWELL_UNROLL
    for (int bit = 0; bit < kDigitBits; ++bit) {
      const uint32_t set = arch::ballot(digit >> bit & 1);
      same &= digit >> bit & 1 ? set : ~set;
    }
    int& count = s.counts[digit * kOrderWarps + warp];
    const int before = count, lower = std::popcount(same & ((1u << lane) - 1));
    rank[r] = before + lower;
    arch::syncwarp();
    if (lower == 0) count = before + std::popcount(same);
    arch::syncwarp();  // kept: the next round reads the count; rows of up to 512 entries have one round
  }
  arch::syncthreads();
  sum_counts(s);
  HOPWELL_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (r >= rounds) break;
    const int key = s.keys[from][first + 32 * r], digit = key >> shift & (kDigits - 1);
    const int to = s.counts[digit * kOrderWarps + warp] + rank[r];
    if (unsigned(to) >= kLongestSorted) continue;  // were a barrier lost, numbers would be wrong, but not addresses
    s.keys[1 - from][to] = key;
    s.places[1 - from][to] = s.places[from][first + 32 * r];
  }
  arch::syncthreads();
}

// A CTA for one query. Rows that ascend already are only copied. Entries that do not count stand as a key that is larger
// than all.
__global__ void __launch_bounds__(kOrderThreads) order_rows(const __grid_constant__ OrderParams p) {
  auto& s = arch::dynamic_smem<OrderStorage>();
  const int t = arch::thread_index(), query = arch::block_index();
  const Entries entries = tile::entries_of(p.selection, query);
  const int rounds = (entries.length + kOrderThreads - 1) / kOrderThreads;
  int valid = 0;
  for (int i = t; i < rounds * kOrderThreads; i += kOrderThreads) {
    const int key = entries.key(i);
    s.keys[0][i] = key < 0 ? int(entries.visible) : key;
    s.places[0][i] = uint16_t(i);
    valid += key >= 0;
  }
  const int length = sum_of_cta(s.of_warp, valid);
  int descents = 0;
  for (int i = t; i + 1 < rounds * kOrderThreads; i += kOrderThreads) descents += s.keys[0][i] > s.keys[0][i + 1];
  int from = 0;
  if (sum_of_cta(s.of_warp, descents) > 0) {
    for (int shift = 0; shift < 32 && entries.visible >> shift != 0; shift += kDigitBits, from = 1 - from)
      sort_by_digit(s, from, rounds, shift);
  }
  for (int i = t; i < rounds * kOrderThreads && i < length; i += kOrderThreads) {
    p.rows[int64_t{query} * p.selection.topk + i] = s.keys[from][i];
    const int place = s.places[from][i];
    if (p.places) p.places[int64_t{query} * p.selection.topk + i] = uint16_t(place < entries.length ? place : 0);
  }
  if (t != 0) return;
  p.lengths[query] = length;
  if (query == 0) *p.progress = 0;
}

struct FinishParams {
  const float* sums;          // [s_kv, d_qk], columns at sum_position; or null
  const int64_t* fixed_sums;  // the same in fixed point, or null
  const KeyState* state;      // [s_kv], with fixed_sums
  const FixedPoint* fixed;
  float* dkv;      // [s_kv, d_qk], or null
  bf16* dkv_bf16;  // the same, or null
  int64_t stride, s_kv;
  int d_qk, log2_sums;
  float sm_scale;
  bool accumulate;
};

__global__ void __launch_bounds__(kPassThreads) finish_dkv(const __grid_constant__ FinishParams p) {
  double unit = 0;
  if (p.fixed_sums) unit = arch::bit_cast<double>(uint64_t(1023 - p.fixed->exponent(p.log2_sums, p.sm_scale)) << 52);
  for (int64_t row = arch::block_index(); row < p.s_kv; row += arch::grid_size())
    for (int column = arch::thread_index(); column < p.d_qk; column += kPassThreads) {
      float sum;
      if (!p.fixed_sums)
        sum = p.sums[row * p.d_qk + sum_position(column, false)];
      else if (p.state[row] == KeyState::not_finite)
        sum = NAN;
      else
        sum = float(double(p.fixed_sums[row * p.d_qk + sum_position(column, true)]) * unit);
      const int64_t at = row * p.stride + column;
      if (p.dkv_bf16)
        p.dkv_bf16[at] = arch::to_bf16(sum);
      else
        p.dkv[at] = p.accumulate ? p.dkv[at] + sum : sum;
    }
}

struct ArrangeParams {
  float* dkv;  // [s_kv, d_qk], rows 16-byte aligned; columns at sum_position before, in order after
  int64_t stride, s_kv;
  int d_qk;
};

// Four lanes put 16 columns in order.
__global__ void __launch_bounds__(kPassThreads) arrange_dkv(const __grid_constant__ ArrangeParams p) {
  const int chunks = p.d_qk / 4, quad = arch::lane_index() % 4, lane = arch::lane_index() - quad;
  const int64_t count = p.s_kv * chunks, step = int64_t{arch::grid_size()} * kPassThreads;
  for (int64_t i = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); i - arch::lane_index() < count;
       i += step) {
    auto* at = i < count ? reinterpret_cast<arch::Words4*>(p.dkv + i / chunks * p.stride + i % chunks * 4) : nullptr;
    const arch::Words4 sums = at ? *at : arch::Words4{};
    arch::Words4 columns;
    HOPWELL_UNROLL
    for (int c = 0; c < 4; ++c) {  // column 4 quad + c: the lane of its pair, and which of that lane's four
      const int from = lane + (2 * quad + c / 2) % 4;
      const uint32_t low = arch::shuffle(sums.w[c % 2], from), high = arch::shuffle(sums.w[c % 2 + 2], from);
      columns.w[c] = quad < 2 ? low : high;
    }
    if (at) *at = columns;
  }
}

struct SinkParams {
  const float* parts;  // [s_q, h_q]
  float* d_sink;       // [h_q]
  int64_t s_q, stride;
  int h_q;
};
constexpr int kSinkWarps = 32;

// A CTA for 32 heads, one a lane: every warp sums its queries, then warp 0 the warps.
__global__ void __launch_bounds__(32 * kSinkWarps) sum_d_sink(const __grid_constant__ SinkParams p) {
  auto& sum_of_warp = arch::dynamic_smem<float[kSinkWarps][32]>();
  const int lane = arch::lane_index(), warp = arch::warp_index(), head = 32 * arch::block_index() + lane;
  float sum = 0;
  for (int64_t query = warp; query < p.s_q && head < p.h_q; query += kSinkWarps) sum += p.parts[query * p.h_q + head];
  sum_of_warp[warp][lane] = sum;
  arch::syncthreads();
  if (warp != 0 || head >= p.h_q) return;
  for (int other = 1; other < kSinkWarps; ++other) sum += sum_of_warp[other][lane];
  p.d_sink[head * p.stride] = sum;
}

// CTAs for a pass over rows: enough to fill the device, several rows each.
std::uint32_t pass_grid(std::int64_t rows) {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>((rows + 15) / 16, 1, 132 * 8));
}

void clear(uint32_t* data, std::int64_t rows, std::int64_t words, std::int64_t stride, Stream stream) {
  if (rows == 0 || words == 0) return;
  runtime::launch("sparse_mla_backward", clear_rows, {.grid = {pass_grid(rows)}, .threads = kPassThreads}, stream,
                  ClearParams{data, rows, words, stride});
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
