// sparse_mla_forward by mma.sync, for any NVIDIA GPU from Ampere on.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    m: row_max so far
//
// Tile      one query, 16 heads, 32 keys per step; d_qk 576 or 512. With window keys (WindowParams) the first keys of a
//           query are rows of window_kv, so its first steps are full of neighbouring rows
// Roles     four warps. Scores, in units of log 2: warp w computes keys 8 w to 8 w + 7.
//           Output: warp w holds dimensions 128 w to 128 w + 127 in registers.
// Timeline  step     0                                      1
//           copies   keys 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   keys 2 ▓▓▓▓ …
//           warps    wait 0 │ S ▓▓▓▓ │ max │ P │ O += P V ▓▓ │ wait 1 │ S …
// Budget    shared: Q 16 × 1,168 + K 2 × 32 × 1,168 + P 16 × 80 + 512 = 95,232 B (of 101,376 on the smallest GPU)
//           registers: 64 for the output, ~60 others
// Bound     L2: every 16 heads read all selected keys; 128 heads read 8 × topk × 1,152 B per query
#pragma once

#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

struct Config {
  static constexpr int kHeads = 16, kKeys = 32, kDv = 512, kStages = 2, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kDvOfWarp = kDv / kWarps;
  static constexpr int kPitchP = kKeys + 8;  // elements; 80 bytes: rows of eight matrices are in different banks
};

template <int kDqk>
struct SharedStorage {
  static constexpr int kPitch = kDqk + 8;  // an odd number of 16-byte units, for the same reason
  alignas(16) bf16 q[Config::kHeads][kPitch];
  alignas(16) bf16 keys[Config::kStages][Config::kKeys][kPitch];
  alignas(16) bf16 p[Config::kHeads][Config::kPitchP];
  float partial[Config::kWarps][Config::kHeads];  // per warp: maxima over its keys, at the end sums
  int valid[Config::kStages][Config::kKeys];
};
static_assert(sizeof(SharedStorage<576>) <= 99 * 1024);

// Thread `thread` of kThreads starts its copies of a row. An invalid row is filled with zeros without a read.
template <int kDqk, int kThreads>
HOPWELL_DEVICE void copy_row(bf16 (&to)[kDqk + 8], const bf16* row, bool valid, int thread) {
  for (int chunk = thread; chunk < kDqk / 8; chunk += kThreads)
    arch::cp_async(arch::shared_address(to) + uint32_t(16 * chunk), row + 8 * chunk, valid ? 16 : 0);
}

// Starts the copies of 32 entries' keys. Some entries may be invalid.
template <int kDqk, class KernelParams, class Entries>
HOPWELL_DEVICE void gather(const KernelParams& p, SharedStorage<kDqk>& s, const Entries& entries, int step) {
  const int row = arch::thread_index() / 4, thread = arch::thread_index() % 4, stage = step % Config::kStages;
  const int key = entries.key(step * Config::kKeys + row);
  const bool valid = key >= 0;
  copy_row<kDqk, 4>(s.keys[stage][row], valid ? row_of(p, key) : p.kv, valid, thread);
  if (thread == 0) s.valid[stage][row] = valid;
}

template <int kDqk>
HOPWELL_DEVICE void load_q(const Params& p, SharedStorage<kDqk>& s, int query, int first_head) {
  const int row = arch::thread_index() / 8, head = first_head + row;
  const bf16* source = p.q + query * p.q_stride_s + (head < p.h_q ? head : 0) * p.q_stride_h;
  copy_row<kDqk, 8>(s.q[row], source, head < p.h_q, arch::thread_index() % 8);
}

// The maximum; NaN if an operand is NaN.
HOPWELL_DEVICE float larger(float a, float b) { return a != a || a > b ? a : b; }

// The two rows (heads) of a thread, as in the accumulators of mma.
struct SoftmaxState {
  float max[2], sum[2];
};

// Scores of 16 heads and this warp's 8 keys, in units of log 2; −inf if the entry is invalid.
template <int kDqk>
HOPWELL_DEVICE void score(const Params& p, const SharedStorage<kDqk>& s, int stage, float (&d)[4]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const uint32_t q = arch::shared_address(&s.q[lane % 16][lane / 16 * 8]);
  const uint32_t k = arch::shared_address(&s.keys[stage][8 * warp + lane % 8][lane / 8 * 8]);
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) d[i] = 0;
  HOPWELL_UNROLL
  for (int step = 0; step < kDqk / 32; ++step) {
    uint32_t a[4], b[4];
    arch::ldmatrix(b, k + uint32_t(64 * step));
    for (int half = 0; half < 2; ++half) {
      arch::ldmatrix(a, q + uint32_t(64 * step + 32 * half));
      const uint32_t pair[2] = {b[2 * half], b[2 * half + 1]};
      arch::mma_m16n8k16_bf16(d, a, pair);
    }
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i)
    d[i] = s.valid[stage][8 * warp + tile::fragment_column(lane) + i % 2] ? d[i] * p.scale_log2 : -INFINITY;
}

// Converts scores to probabilities in shared memory and updates row_max. `factor`: row_scale of the earlier sums and
// outputs.
template <int kDqk>
HOPWELL_DEVICE void softmax(SharedStorage<kDqk>& s, int stage, float (&d)[4], SoftmaxState& state, float (&factor)[2]) {
  const int warp = arch::warp_index(), column = 8 * warp + tile::fragment_column();
  for (int r = 0; r < 2; ++r) {
    float m = larger(d[2 * r], d[2 * r + 1]);
    m = tile::reduce<1, 2>(m, larger);
    if (tile::quad_lane() == 0) s.partial[warp][tile::fragment_row() + 8 * r] = m;
  }
  arch::syncthreads();
  for (int r = 0; r < 2; ++r) {
    const int row = tile::fragment_row() + 8 * r;
    float m = state.max[r];
    for (int w = 0; w < Config::kWarps; ++w) m = larger(m, s.partial[w][row]);
    const float shift = tile::finite_row_max(m);
    factor[r] = arch::exp2_approx(state.max[r] - shift);
    float e[2];
    for (int i = 0; i < 2; ++i) e[i] = s.valid[stage][column + i] ? arch::exp2_approx(d[2 * r + i] - shift) : 0;
    state.max[r] = m;
    state.sum[r] = state.sum[r] * factor[r] + e[0] + e[1];
    *reinterpret_cast<uint32_t*>(&s.p[row][column]) = arch::pack_bf16(e[0], e[1]);
  }
  arch::syncthreads();
}

// O += P V: this warp's 128 dimensions, 16 accumulators of 16 × 8.
template <int kDqk>
HOPWELL_DEVICE void accumulate(const SharedStorage<kDqk>& s, int stage, const float (&factor)[2], float (&out)[16][4]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  HOPWELL_UNROLL
  for (int n = 0; n < 16; ++n)
    for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
  HOPWELL_UNROLL
  for (int step = 0; step < Config::kKeys / 16; ++step) {
    uint32_t a[4];
    arch::ldmatrix(a, arch::shared_address(&s.p[lane % 16][16 * step + lane / 16 * 8]));
    const uint32_t v =
        arch::shared_address(&s.keys[stage][16 * step + lane % 16][warp * Config::kDvOfWarp + lane / 16 * 8]);
    HOPWELL_UNROLL
    for (int n = 0; n < 16; n += 2) {
      uint32_t b[4];
      arch::ldmatrix<arch::Transpose::yes>(b, v + uint32_t(16 * n));
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      arch::mma_m16n8k16_bf16(out[n], a, left);
      arch::mma_m16n8k16_bf16(out[n + 1], a, right);
    }
  }
}

// Adds the sums over all keys, then stores the outputs of this thread's two rows.
template <int kDqk>
HOPWELL_DEVICE void store(const Params& p, SharedStorage<kDqk>& s, int query, int first_head, const SoftmaxState& state,
                          const float (&out)[16][4]) {
  const int warp = arch::warp_index();
  for (int r = 0; r < 2; ++r) {
    const float sum = tile::sum_of_quad(state.sum[r]);
    if (tile::quad_lane() == 0) s.partial[warp][tile::fragment_row() + 8 * r] = sum;
  }
  arch::syncthreads();
  for (int r = 0; r < 2; ++r) {
    const int row = tile::fragment_row() + 8 * r, head = first_head + row;
    if (head >= p.h_q) continue;
    float sum = 0;
    for (int w = 0; w < Config::kWarps; ++w) sum += s.partial[w][row];
    const float lse = tile::lse_of(state.max[r], sum);
    const float scale = output_scale(p, head, 1, sum, lse);
    bf16* target =
        p.out + query * p.out_stride_s + head * p.out_stride_h + warp * Config::kDvOfWarp + tile::fragment_column();
    HOPWELL_UNROLL
    for (int n = 0; n < 16; ++n)
      *reinterpret_cast<uint32_t*>(target + 8 * n) =
          sum == 0 ? 0 : arch::pack_bf16(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
    if (warp == 0 && tile::quad_lane() == 0) store_statistics(p, query, head, state.max[r], lse);
  }
}

template <int kDqk, class KernelParams>
__global__ void __launch_bounds__(Config::kThreads) sparse_mla_fwd_sm80(const __grid_constant__ KernelParams p) {
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  const arch::BlockIndex block = arch::block_index_3d();
  const int query = block.x, first_head = block.y * Config::kHeads;
  const auto entries = entries_of(p, query);
  const int steps = entries.tiles(Config::kKeys);
  SoftmaxState state{{-INFINITY, -INFINITY}, {0, 0}};
  float out[16][4] = {};
  if (steps > 0) {
    load_q(p, s, query, first_head);
    gather(p, s, entries, 0);
  }
  arch::cp_async_commit();
  for (int step = 0; step < steps; ++step) {
    const int stage = step % Config::kStages;
    if (step + 1 < steps) gather(p, s, entries, step + 1);
    arch::cp_async_commit();
    arch::cp_async_wait<1>();
    arch::syncthreads();
    float d[4], factor[2];
    score(p, s, stage, d);
    softmax(s, stage, d, state, factor);
    accumulate(s, stage, factor, out);
    arch::syncthreads();  // before the next gather overwrites this stage
  }
  store(p, s, query, first_head, state, out);
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
