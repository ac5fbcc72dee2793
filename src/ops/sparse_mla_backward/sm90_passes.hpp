// sparse_mla_backward on Hopper: the small kernels around the main one, all of them bound by memory.
//
//     clear_rows        zeros, before sums are added
//     order_rows        each query's valid keys by ranges of keys, ascending, so that CTAs meet in L2; and those zeros
//     sum_dq            dQ of queries whose keys were cut into slices
//     arrange_dkv       sums in the output: their columns in order
//     arrange_attn      attn in the output: from the order of keys back to that of the entries
//     finish_dkv        sums in scratch memory to the output: its dtype, its strides, added to what is there if asked
//     sum_d_sink        the sum over queries, in a fixed order
#pragma once

#include <bit>
#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

using arch::bf16;
using tile::Entries;

// Where the main kernel adds column c of a row: of each 16 columns, a lane's four side by side.
HOPWELL_DEVICE int sum_position(int c) { return c / 16 * 16 + c / 2 % 4 * 4 + c / 8 % 2 * 2 + c % 2; }

// A lane's part of the dot product of 512 columns of two rows, and the sum over a warp.
HOPWELL_DEVICE float part_of_dot(const bf16* x, const bf16* y) {
  float sum = 0;
  for (int chunk = arch::lane_index(); chunk < 512 / 8; chunk += 32) {
    const arch::Words4 a = arch::load_streaming(x + 8 * chunk), b = arch::load_streaming(y + 8 * chunk);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      sum += arch::bit_cast<float>(a.w[i] << 16) * arch::bit_cast<float>(b.w[i] << 16);
      sum += arch::bit_cast<float>(a.w[i] & 0xffff0000) * arch::bit_cast<float>(b.w[i] & 0xffff0000);
    }
  }
  return sum;
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

constexpr int kOrderThreads = 512, kOrderWarps = kOrderThreads / 32, kLongestSorted = 4096;
constexpr int kRounds = kLongestSorted / kOrderThreads, kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int kSortedBits = 2 * kDigitBits;  // the highest, one of which tells invalid entries: 128 ranges of keys

struct OrderStorage {
  uint32_t keys[2][kLongestSorted];
  uint16_t places[2][kLongestSorted];
  int counts[kDigits * kOrderWarps];  // by digit, then warp
  int of_warp[kOrderWarps];
};

struct OrderParams {
  tile::SelectionParams selection;
  int* rows;         // [s_q, topk]: the keys of valid entries by ranges; within one in the order of their entries
  uint16_t* places;  // [s_q, topk]: the entries that they come from; or null
  int* lengths;      // [s_q]: how many
  ClearParams sums;  // zeros, 16 bytes at a time: memory has little to do while rows are put in order
  ClearParams attn;  // the same; a row for each query; or no rows
};

// A CTA's share of the rows.
HOPWELL_DEVICE void clear_share(const ClearParams& p) {
  const int64_t rows = (p.rows + arch::grid_size() - 1) / arch::grid_size(), first = rows * arch::block_index();
  const int chunks = int(p.words / 4);
  for (int i = arch::thread_index(); i < rows * chunks; i += kOrderThreads)
    if (first + i / chunks < p.rows)
      *reinterpret_cast<arch::Words4*>(p.data + (first + i / chunks) * p.stride + i % chunks * 4) = {};
}

// The sum of the CTA's values.
HOPWELL_DEVICE int sum_of_cta(int (&of_warp)[kOrderWarps], int value) {
  const int warp = arch::warp_index();
  value = tile::sum_of_warp(value);
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
    const auto digit = int(s.keys[from][first + 32 * r] >> shift & (kDigits - 1));
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
    const uint32_t key = s.keys[from][first + 32 * r];
    const int to = s.counts[int(key >> shift & (kDigits - 1)) * kOrderWarps + warp] + rank[r];
    if (unsigned(to) >= kLongestSorted) continue;  // were a barrier lost, numbers would be wrong, but not addresses
    s.keys[1 - from][to] = key;
    s.places[1 - from][to] = s.places[from][first + 32 * r];
  }
  arch::syncthreads();
}

// A CTA for one query. Rows that ascend already are only copied. Entries that do not count stand as a key with a bit
// above those of all others.
__global__ void __launch_bounds__(kOrderThreads) order_rows(const __grid_constant__ OrderParams p) {
  auto& s = arch::dynamic_smem<OrderStorage>();
  const int t = arch::thread_index(), query = arch::block_index();
  clear_share(p.sums);
  for (int64_t i = t; i < p.attn.words && query < p.attn.rows; i += kOrderThreads)
    p.attn.data[query * p.attn.stride + i] = 0;
  const Entries entries = tile::entries_of(p.selection, query);
  const int rounds = (entries.length + kOrderThreads - 1) / kOrderThreads, bits = std::bit_width(entries.visible);
  int valid = 0;
  for (int i = t; i < rounds * kOrderThreads; i += kOrderThreads) {
    const int key = entries.key(i);
    s.keys[0][i] = key < 0 ? 1u << bits : uint32_t(key);
    s.places[0][i] = uint16_t(i);
    valid += key >= 0;
  }
  const int length = sum_of_cta(s.of_warp, valid);
  int descents = 0;
  for (int i = t; i + 1 < rounds * kOrderThreads; i += kOrderThreads) descents += s.keys[0][i] > s.keys[0][i + 1];
  int from = 0;
  if (sum_of_cta(s.of_warp, descents) > 0) {
    const int lowest = bits + 1 > kSortedBits ? bits + 1 - kSortedBits : 0;
    for (int shift = lowest; shift <= bits; shift += kDigitBits, from = 1 - from) sort_by_digit(s, from, rounds, shift);
  }
  for (int i = t; i < entries.length && i < length; i += kOrderThreads) {
    p.rows[int64_t{query} * p.selection.topk + i] = int(s.keys[from][i]);
    const int place = s.places[from][i];
    if (p.places) p.places[int64_t{query} * p.selection.topk + i] = uint16_t(place < entries.length ? place : 0);
  }
  if (t == 0) p.lengths[query] = length;
}

struct FinishParams {
  const float* sums;  // [s_kv, d_qk], columns at sum_position
  float* dkv;         // [s_kv, d_qk], or null
  bf16* dkv_bf16;     // the same, or null
  int64_t stride, s_kv;
  int d_qk;
  bool accumulate;
};

HOPWELL_DEVICE void store_sum(const FinishParams& p, int64_t row, int column, float sum) {
  const int64_t at = row * p.stride + column;
  if (p.dkv_bf16)
    p.dkv_bf16[at] = arch::to_bf16(sum);
  else
    p.dkv[at] = p.accumulate ? p.dkv[at] + sum : sum;
}

__global__ void __launch_bounds__(kPassThreads) finish_dkv(const __grid_constant__ FinishParams p) {
  for (int64_t row = arch::block_index(); row < p.s_kv; row += arch::grid_size())
    for (int column = arch::thread_index(); column < p.d_qk; column += kPassThreads)
      store_sum(p, row, column, p.sums[row * p.d_qk + sum_position(column)]);
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

struct SumDqParams {
  const float* slices;  // [pieces, slices, heads of a piece, d_qk]
  bf16* dq;             // [s_q, h_q, d_qk]
  int64_t stride_s, stride_h;
  int first_piece, first_head, head_blocks, heads;  // head_blocks: pieces of a query, of so many heads each
  int count, h_q, d_qk;                             // count: slices of a piece
};

// A CTA for a piece and a head: the sum over slices, in their order.
__global__ void __launch_bounds__(kPassThreads) sum_dq(const __grid_constant__ SumDqParams p) {
  const int at = arch::block_index() / p.heads, row = arch::block_index() % p.heads, piece = p.first_piece + at;
  const int head = p.first_head + piece % p.head_blocks * p.heads + row;
  if (head >= p.h_q) return;
  bf16* target = p.dq + piece / p.head_blocks * p.stride_s + head * p.stride_h;
  for (int column = arch::thread_index(); column < p.d_qk; column += kPassThreads) {
    float sum = 0;
    for (int slice = 0; slice < p.count; ++slice)
      sum += p.slices[((int64_t{at} * p.count + slice) * p.heads + row) * p.d_qk + column];
    target[column] = arch::to_bf16(sum);
  }
}

struct ArrangeAttnParams {
  float* attn;             // [s_q, topk]: the sums of a row's keys in their order before, at their entries after
  const uint16_t* places;  // [s_q, topk], lengths [s_q]: as order_rows gives them
  const int* lengths;
  int64_t stride;
  int topk;
};

// A CTA for one query.
__global__ void __launch_bounds__(kOrderThreads) arrange_attn(const __grid_constant__ ArrangeAttnParams p) {
  auto& row = arch::dynamic_smem<float[kLongestSorted]>();
  const int t = arch::thread_index(), query = arch::block_index(), length = p.lengths[query];
  float* attn = p.attn + query * p.stride;
  for (int i = t; i < p.topk; i += kOrderThreads) row[i] = 0;
  arch::syncthreads();
  for (int i = t; i < length && i < p.topk; i += kOrderThreads) {
    const int place = p.places[int64_t{query} * p.topk + i];
    if (place < p.topk) row[place] = attn[i];  // always; were a barrier of order_rows lost, addresses would be right
  }
  arch::syncthreads();
  for (int i = t; i < p.topk; i += kOrderThreads) attn[i] = row[i];
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
std::uint32_t pass_grid(std::int64_t rows, const runtime::Device& device) {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>((rows + 15) / 16, 1, std::int64_t{8} * device.sms));
}

void clear(const ClearParams& p, const runtime::Device& device, Stream stream) {
  if (p.rows == 0 || p.words == 0) return;
  runtime::launch("sparse_mla_backward", clear_rows, {.grid = {pass_grid(p.rows, device)}, .threads = kPassThreads},
                  stream, p);
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
