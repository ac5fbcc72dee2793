// sparse_mla_forward by mma.sync, for any NVIDIA GPU from Ampere on.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    m: row_max so far
//
// Tile      one query, 16, 32 or 64 heads, 32 keys per step; d_qk 576 or 512. With window keys (WindowParams) the first
//           keys of a query are rows of window_kv, so its first steps are full of neighbouring rows
// Roles     eight warps. Scores: a warp has 16 heads and half of the columns; if there are fewer than 64 heads, the
//           warps share out the keys, too. Q comes through the space of the keys, and stays in registers. Softmax: 4, 8
//           or 16 lanes have a head, and add its two halves. Output: warp w has columns 64 w to 64 w + 63 of all heads
// Timeline  step     0                                       1
//           copies   keys 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓    keys 2 ▓▓▓▓ …
//           warps    wait 0 │ S ▓▓▓▓ │ softmax │ O += P V ▓▓ │ wait 1 │ S …
// Bits      of a head do not depend on the tile: the halves of scores, and the keys of a step, are added in one order
// Budget    64 heads: shared: K 2 × 32 × 1,168 + S 2 × 10,240 + P 5,120 + 64 = 100,416 B and the entries (of 101,376 on
//           the smallest GPU); registers: Q 72 + O 128 + ~50, of 255
// Bound     the phases of a step follow each other: shared memory for S, latency for the softmax, tensor cores for O. A
//           step of 64 heads, d_qk 576, takes 2,176 clocks of tensor cores, 2,100 clocks of shared memory (S: 1,150),
//           and 36,864 B from L2 (an A100's SM)
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "runtime/launch.hpp"
#include "runtime/with_constant.hpp"
#include "tile/ceil_div.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

template <int kTheDqk, int kTheHeads>
struct Tile {
  static constexpr int kDqk = kTheDqk, kHeads = kTheHeads, kKeys = 32, kStages = 2, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kHeadGroups = kHeads / 16;
  static constexpr int kHalves = 2, kScoreKeys = 8 * kHeadGroups;          // of the columns; keys of a warp in S
  static constexpr int kColumns = kDqk / kHalves, kSteps = kColumns / 16;  // of a warp in S
  static constexpr int kLanesOfHead = kThreads / kHeads;                   // in the softmax
  static constexpr int kPairs = kKeys / 2 / kLanesOfHead;                  // of adjacent keys, per lane
  static constexpr int kColumnsOfWarp = 512 / kWarps;                      // of the output
  // Rows in elements. Eight rows have the same column in different banks.
  static constexpr int kPitch = kDqk + 8, kPitchP = kKeys + 8;
};

template <class KernelParams>
using EntriesOf = decltype(entries_of(std::declval<const KernelParams&>(), 0));

// Scores of a head in a step, over half of the columns. The padding that keeps rows in different banks has the head's
// softmax.
struct HeadRow {
  float scores[32];
  float row_max[2];   // [stage]: before the step in that stage. The last step is in stage 1 and writes row_max[0]
  float sum, factor;  // factor: row_scale of a step; at the end the output's factor
  float unused[4];
};

template <class T>
struct SharedStorage {
  alignas(16) bf16 keys[T::kStages][T::kKeys][T::kPitch];
  alignas(16) HeadRow heads[T::kHalves][T::kHeads];  // the softmax is in heads[0]
  alignas(16) bf16 p[T::kHeads][T::kPitchP];
  uint8_t valid[T::kStages][T::kKeys];
};

// With the query's entries, which would need registers through all steps.
template <class T, class KernelParams>
struct StorageWithEntries : SharedStorage<T> {
  EntriesOf<KernelParams> entries;
};

// The query and the heads of a CTA. Computed again where it is needed, to save registers.
template <class T>
struct Work {
  int query, first_head;

  HOPWELL_DEVICE explicit Work(const Params& p)
      : query(arch::block_index() / p.head_tiles), first_head(arch::block_index() % p.head_tiles * T::kHeads) {}
};

// ---- keys and Q -----------------------------------------------------------------------------------------------------

// Threads that copy a row.
template <class T>
constexpr int kCopiersOfKey = T::kThreads / T::kKeys;

// The entry of this thread's row, `left` steps before the end.
template <class T, class Entries>
HOPWELL_DEVICE int entry_at(const Entries& entries, int left) {
  return (entries.tiles(T::kKeys) - left) * T::kKeys + arch::thread_index_anew() / kCopiersOfKey<T>;
}

// The copies of a thread: kChunks chunks of 16 bytes of a key's row. Invalid rows are filled with zeros without a read.
template <class T>
struct Copies {
  static constexpr int kChunks = T::kDqk / 8 / kCopiersOfKey<T>;
  const bf16* from;
  uint32_t to, bytes;

  template <class KernelParams>
  HOPWELL_DEVICE Copies(const KernelParams& p, SharedStorage<T>& s, int key, int stage) : bytes(key >= 0 ? 16 : 0) {
    const int t = arch::thread_index_anew(), row = t / kCopiersOfKey<T>, column = t % kCopiersOfKey<T> * 8;
    from = (key >= 0 ? row_of(p, key) : p.kv) + column;
    to = arch::shared_address(&s.keys[stage][row][column]);
    if (column == 0) s.valid[stage][row] = key >= 0;
  }
  HOPWELL_DEVICE void issue(int chunk) const {
    constexpr int kColumns = 8 * kCopiersOfKey<T>;
    arch::cp_async(to + uint32_t(2 * kColumns * chunk), from + kColumns * chunk, bytes);
  }
};

// The part of S that a warp computes.
template <class T>
struct ScoreTile {
  int half, first_head, first_key;

  HOPWELL_DEVICE explicit ScoreTile(int warp)
      : half(warp / 4), first_head(warp % T::kHeadGroups * 16), first_key(warp % 4 / T::kHeadGroups * T::kScoreKeys) {}
};

// Starts the copies of Q to the space of the keys. Padding heads are filled with zeros.
template <class T>
HOPWELL_DEVICE void copy_query(const Params& p, SharedStorage<T>& s) {
  constexpr int kChunks = T::kDqk / 8;
  const Work<T> work(p);
  const bf16* q = p.q + work.query * p.q_stride_s;
  const uint32_t rows = arch::shared_address(s.keys);
  HOPWELL_NO_UNROLL
  for (int e = arch::thread_index(); e < T::kHeads * kChunks; e += T::kThreads) {
    const int row = e / kChunks, chunk = e % kChunks, head = work.first_head + row;
    const bool exists = head < p.h_q;
    arch::cp_async(rows + uint32_t(2 * T::kPitch * row + 16 * chunk),
                   q + (exists ? head : 0) * p.q_stride_h + 8 * chunk, exists ? 16 : 0);
  }
}

// A warp's 16 heads and half of the columns of Q, as operand A.
template <class T>
struct Query {
  uint32_t words[T::kSteps][4];

  HOPWELL_DEVICE void load(const SharedStorage<T>& s) {
    const int lane = arch::lane_index();
    const ScoreTile<T> tile(arch::warp_index());
    const uint32_t from = arch::shared_address(s.keys) + uint32_t(2 * T::kPitch * (tile.first_head + lane % 16) +
                                                                  2 * T::kColumns * tile.half + lane / 16 * 16);
    HOPWELL_UNROLL
    for (int step = 0; step < T::kSteps; ++step) arch::ldmatrix(words[step], from + uint32_t(32 * step));
  }
};

// ---- S = Q Kᵀ and softmax -------------------------------------------------------------------------------------------

struct Scores {
  float x[2];
};

// Writes a warp's part of S. In between it issues the next step's copies: all at once would fill the queue of the
// load-store unit, and the warps would wait for it.
template <class T>
HOPWELL_DEVICE void multiply_scores(SharedStorage<T>& s, int stage, const Query<T>& q, const Copies<T>& next) {
  const int t = arch::thread_index_anew(), lane = t % 32;
  const ScoreTile<T> tile(t / 32);
  const uint32_t keys =
      arch::shared_address(&s.keys[stage][tile.first_key + lane % 8][tile.half * T::kColumns + lane / 8 * 8]);
  float acc[T::kScoreKeys / 8][4] = {};
  static_assert(Copies<T>::kChunks == T::kSteps / 2);
  HOPWELL_UNROLL
  for (int step = 0; step < T::kSteps; step += 2) {
    next.issue(step / 2);
    HOPWELL_UNROLL
    for (int n = 0; n < T::kScoreKeys / 8; ++n) {
      uint32_t b[4];
      arch::ldmatrix(b, keys + uint32_t(n * 8 * T::kPitch * 2 + 32 * step));
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair[2] = {b[2 * i], b[2 * i + 1]};
        arch::mma_m16n8k16_bf16(acc[n], q.words[step + i], pair);
      }
    }
  }
  HOPWELL_UNROLL
  for (int n = 0; n < T::kScoreKeys / 8; ++n) {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int head = tile.first_head + tile::fragment_row(lane) + 8 * i;
      float* to = &s.heads[tile.half][head].scores[tile.first_key + 8 * n + tile::fragment_column(lane)];
      arch::store_vector(to, arch::bit_cast<arch::Words2>(Scores{acc[n][2 * i], acc[n][2 * i + 1]}));
    }
  }
}

// The maximum; NaN if an operand is NaN.
HOPWELL_DEVICE float larger(float a, float b) { return a != a || a > b ? a : b; }

// Converts the scores of a step to P, updates the softmax, and writes row_scale of the earlier sums and outputs.
// kLanesOfHead lanes have a head, and kPairs pairs of adjacent keys each.
template <class T>
HOPWELL_DEVICE void softmax(SharedStorage<T>& s, int stage, float scale_log2) {
  const int t = arch::thread_index_anew(), head = t / T::kLanesOfHead, first = t % T::kLanesOfHead * 2;
  HeadRow& of = s.heads[0][head];
  const float before = of.row_max[stage];
  float x[T::kPairs][2], maximum = before;
  HOPWELL_UNROLL
  for (int n = 0; n < 2 * T::kPairs; ++n) {
    const int key = first + n / 2 * 2 * T::kLanesOfHead + n % 2;
    const float score = (of.scores[key] + s.heads[1][head].scores[key]) * scale_log2;
    x[n / 2][n % 2] = s.valid[stage][key] ? score : -INFINITY;
    maximum = larger(maximum, x[n / 2][n % 2]);
  }
  maximum = tile::reduce<1, T::kLanesOfHead / 2>(maximum, larger);
  const float base = tile::finite_row_max(maximum);
  float sums[T::kPairs];
  HOPWELL_UNROLL
  for (int i = 0; i < T::kPairs; ++i) {
    const float e[2] = {arch::exp2_approx(x[i][0] - base), arch::exp2_approx(x[i][1] - base)};
    sums[i] = e[0] + e[1];
    *reinterpret_cast<uint32_t*>(&s.p[head][first + 2 * T::kLanesOfHead * i]) = arch::pack_bf16(e[0], e[1]);
  }
  // The order of sums is the same in every tile.
  HOPWELL_UNROLL
  for (int distance = T::kPairs / 2; distance > 0; distance /= 2) {
    HOPWELL_UNROLL
    for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
  }
  const float sum = tile::reduce<T::kLanesOfHead / 2, 1>(sums[0], tile::Plus{});
  if (first == 0) {
    const float factor = arch::exp2_approx(before - base);
    of.row_max[stage ^ 1] = maximum, of.sum = fmaf(of.sum, factor, sum), of.factor = factor;
  }
}

// ---- O += P V -------------------------------------------------------------------------------------------------------

// A warp's columns of the output, as accumulators: eight columns for each n.
template <class T>
using Output = float[T::kHeadGroups][T::kColumnsOfWarp / 8][4];

template <class T>
HOPWELL_DEVICE void rescale(Output<T>& out, const SharedStorage<T>& s, int lane) {
  HOPWELL_UNROLL
  for (int m = 0; m < T::kHeadGroups; ++m) {
    const int head = 16 * m + tile::fragment_row(lane);
    const float factor[2] = {s.heads[0][head].factor, s.heads[0][head + 8].factor};
    if (arch::ballot(factor[0] != 1 || factor[1] != 1) == 0) continue;
    HOPWELL_UNROLL
    for (int n = 0; n < T::kColumnsOfWarp / 8; ++n) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) out[m][n][i] *= factor[i / 2];
    }
  }
}

template <class T>
HOPWELL_DEVICE void accumulate(const SharedStorage<T>& s, int stage, Output<T>& out) {
  const int t = arch::thread_index_anew(), lane = t % 32, column = t / 32 * T::kColumnsOfWarp;
  rescale<T>(out, s, lane);
  HOPWELL_UNROLL
  for (int key = 0; key < T::kKeys; key += 16) {
    uint32_t a[T::kHeadGroups][4];
    HOPWELL_UNROLL
    for (int m = 0; m < T::kHeadGroups; ++m)
      arch::ldmatrix(a[m], arch::shared_address(&s.p[16 * m + lane % 16][key + lane / 16 * 8]));
    const uint32_t v = arch::shared_address(&s.keys[stage][key + lane % 16][column + lane / 16 * 8]);
    HOPWELL_UNROLL
    for (int n = 0; n < T::kColumnsOfWarp / 8; n += 2) {
      uint32_t b[4];
      arch::ldmatrix<arch::Transpose::yes>(b, v + uint32_t(16 * n));
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      HOPWELL_UNROLL
      for (int m = 0; m < T::kHeadGroups; ++m) {
        arch::mma_m16n8k16_bf16(out[m][n], a[m], left);
        arch::mma_m16n8k16_bf16(out[m][n + 1], a[m], right);
      }
    }
  }
}

// Stores the statistics of the tile's heads, and the output, which passes through the space of the keys.
template <class T>
HOPWELL_DEVICE void store(const Params& p, SharedStorage<T>& s, const Output<T>& out) {
  constexpr int kPitch = 512 + 8;
  const Work<T> work(p);
  const int lane = arch::lane_index(), column = arch::warp_index() * T::kColumnsOfWarp + tile::fragment_column(lane);
  arch::cp_async_wait_all();
  arch::syncthreads();  // all warps have read the last keys and factors
  if (const int row = arch::thread_index(); row < T::kHeads) {
    const int head = work.first_head + row;
    HeadRow& of = s.heads[0][row];
    const float lse = tile::lse_of(of.row_max[0], of.sum);
    of.factor = output_scale(p, head, 1, of.sum, lse);
    if (head < p.h_q) store_statistics(p, work.query, head, of.row_max[0], lse);
  }
  arch::syncthreads();
  bf16* rows = &s.keys[0][0][0];
  HOPWELL_UNROLL
  for (int m = 0; m < 2 * T::kHeadGroups; ++m) {
    const int row = 8 * m + tile::fragment_row(lane);
    const float factor = s.heads[0][row].factor;
    HOPWELL_UNROLL
    for (int n = 0; n < T::kColumnsOfWarp / 8; ++n) {
      const float* x = &out[m / 2][n][m % 2 * 2];
      *reinterpret_cast<uint32_t*>(rows + row * kPitch + column + 8 * n) =
          factor == 0 ? 0 : arch::pack_bf16(x[0] * factor, x[1] * factor);
    }
  }
  arch::syncthreads();
  HOPWELL_NO_UNROLL
  for (int e = arch::thread_index(); e < T::kHeads * 64; e += T::kThreads) {
    const int row = e / 64, chunk = e % 64, head = work.first_head + row;
    if (head >= p.h_q) break;
    store_columns(p, p.out + work.query * p.out_stride_s + head * p.out_stride_h + 8 * chunk,
                  arch::load_vector<arch::Words4>(rows + row * kPitch + 8 * chunk));
  }
}

// Two, if 128 registers are enough.
template <class T, class KernelParams>
constexpr int kCtasOfSm = T::kHeads == 16 && (T::kDqk == 512 || !std::is_same_v<KernelParams, WindowParams>) ? 2 : 1;

template <class T, class KernelParams>
__global__ void __launch_bounds__(T::kThreads, (kCtasOfSm<T, KernelParams>))
    sparse_mla_fwd_sm80(const __grid_constant__ KernelParams p) {
  auto& s = arch::dynamic_smem<StorageWithEntries<T, KernelParams>>();
  copy_query<T>(p, s);
  const auto entries = entries_of(p, Work<T>(p).query);
  if (arch::thread_index() == 0) s.entries = entries;
  if (const int row = arch::thread_index(); row < T::kHeads)
    s.heads[0][row].row_max[0] = s.heads[0][row].row_max[1] = -INFINITY, s.heads[0][row].sum = 0;
  int left = entries.tiles(T::kKeys);
  int entry = entries.at(entry_at<T>(entries, left));
  Output<T> out = {};
  Query<T> q;
  arch::cp_async_wait_all();
  arch::syncthreads();
  q.load(s);
  arch::syncthreads();
  const Copies<T> first(p, s, s.entries.key(entry_at<T>(s.entries, left), entry), left % 2);
  HOPWELL_UNROLL
  for (int i = 0; i < Copies<T>::kChunks; ++i) first.issue(i);
  entry = s.entries.at(entry_at<T>(s.entries, left - 1));
  HOPWELL_NO_UNROLL
  for (; left > 0; --left) {
    const int stage = left % 2;
    arch::cp_async_wait_all();
    arch::syncthreads();
    const int key = s.entries.key(entry_at<T>(s.entries, left - 1), entry);  // -1 after the last step: zeros
    multiply_scores<T>(s, stage, q, Copies<T>(p, s, key, stage ^ 1));
    arch::syncthreads();
    softmax<T>(s, stage, p.scale_log2);
    arch::syncthreads();
    entry = s.entries.at(entry_at<T>(s.entries, left - 2));
    accumulate<T>(s, stage, out);
  }
  store<T>(p, s, out);
}

// ---- on the host ----------------------------------------------------------------------------------------------------

inline int heads_of_tile(std::int64_t h_q) { return h_q <= 16 ? 16 : h_q <= 32 ? 32 : 64; }
inline std::int64_t head_tiles(std::int64_t h_q) { return tile::ceil_div(h_q, heads_of_tile(h_q)); }

template <class KernelParams>
void launch_attention(const char* name, const Problem& problem, KernelParams p, Stream stream) {
  p.head_tiles = static_cast<int>(head_tiles(problem.h_q));
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    runtime::with_constant<16, 32, 64>(heads_of_tile(problem.h_q), [&]<int kHeads>() {
      using T = Tile<kDqk, kHeads>;
      constexpr std::size_t kShared = sizeof(StorageWithEntries<T, KernelParams>);
      static_assert(kShared <= 99 * 1024);
      runtime::launch(name, sparse_mla_fwd_sm80<T, KernelParams>,
                      runtime::shape_of_ctas(problem.s_q * p.head_tiles, T::kThreads, kShared), stream, p);
    });
  });
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
