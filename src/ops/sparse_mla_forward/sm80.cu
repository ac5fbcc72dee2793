// sparse_mla_forward by mma.sync, for any NVIDIA GPU from Ampere on.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    running maximum m
//
// Tile      one query, 16 heads, 32 keys a step; d_qk 576 or 512
// Roles     four warps. Scores, in units of log 2: warp w has keys 8 w to 8 w + 7.
//           Output: warp w has dimensions 128 w to 128 w + 127, in registers.
// Timeline  step     0                                      1
//           copies   keys 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   keys 2 ▓▓▓▓ …
//           warps    wait 0 │ S ▓▓▓▓ │ max │ P │ O += P V ▓▓ │ wait 1 │ S …
// Budget    shared: Q 16 × 1,168 + K 2 × 32 × 1,168 + P 16 × 80 + 512 = 95,232 B (of 101,376 on the smallest GPU)
//           registers: 64 of the output, ~60 others
// Bound     each 16 heads read all selected keys through L2: with 128 heads 8 × topk × 1,152 B a query
#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/softmax.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

using arch::bf16;
using tile::Entries;

struct Config {
  static constexpr int kHeads = 16, kKeys = 32, kDv = 512, kStages = 2, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kDvOfWarp = kDv / kWarps;
  static constexpr int kPitchP = kKeys + 8;  // elements; 80 bytes: rows of eight matrices fall into different banks
};

template <int kDqk>
struct SharedStorage {
  static constexpr int kPitch = kDqk + 8;  // an odd number of 16-byte units, for the same reason
  alignas(16) bf16 q[Config::kHeads][kPitch];
  alignas(16) bf16 keys[Config::kStages][Config::kKeys][kPitch];
  alignas(16) bf16 p[Config::kHeads][Config::kPitchP];
  float partial[Config::kWarps][Config::kHeads];  // of each warp's keys: maxima, at the end sums
  int valid[Config::kStages][Config::kKeys];
};
static_assert(sizeof(SharedStorage<576>) <= 99 * 1024);

struct Params {
  const bf16 *q, *kv;  // [s_q, h_q, d_qk], [s_kv, d_qk]
  tile::SelectionParams selection;
  const float* attn_sink;                                  // [h_q], or null
  bf16* out;                                               // [s_q, h_q, 512]
  float *max_logits, *lse;                                 // [s_q, h_q], or null
  int64_t q_stride_s, q_stride_h, kv_stride, sink_stride;  // elements
  int64_t out_stride_s, out_stride_h, max_stride_s, max_stride_h, lse_stride_s, lse_stride_h;
  int h_q;
  float scale_log2;  // sm_scale · log2(e)
};

// Starts the copies of 32 keys: four threads a row. Rows of invalid entries become zeros and are never read.
template <int kDqk>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, const Entries& entries, int step) {
  const int row = arch::thread_index() / 4, part = arch::thread_index() % 4, stage = step % Config::kStages;
  const int key = entries.key(step * Config::kKeys + row);
  const bool valid = key >= 0;
  const bf16* source = valid ? p.kv + key * p.kv_stride : p.kv;
  const uint32_t destination = arch::shared_address(s.keys[stage][row]);
  for (int chunk = part; chunk < kDqk / 8; chunk += 4)
    arch::cp_async(destination + uint32_t(16 * chunk), source + 8 * chunk, valid ? 16 : 0);
  if (part == 0) s.valid[stage][row] = valid;
}

template <int kDqk>
HOPWELL_DEVICE void load_q(const Params& p, SharedStorage<kDqk>& s, int query, int first_head) {
  const int row = arch::thread_index() / 8, head = first_head + row;
  const bf16* source = p.q + query * p.q_stride_s + (head < p.h_q ? head : 0) * p.q_stride_h;
  for (int chunk = arch::thread_index() % 8; chunk < kDqk / 8; chunk += 8)
    arch::cp_async(arch::shared_address(s.q[row]) + uint32_t(16 * chunk), source + 8 * chunk, head < p.h_q ? 16 : 0);
}

// The larger; a NaN stays.
HOPWELL_DEVICE float larger(float a, float b) { return a != a || a > b ? a : b; }

// A thread's view of two rows (heads): r = lane / 4 and r + 8, as in the accumulators of mma.
struct Rows {
  float max[2], sum[2];
};

// Scores of 16 heads against this warp's 8 keys, in units of log 2, −inf where the entry is invalid.
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
  for (int i = 0; i < 4; ++i) d[i] = s.valid[stage][8 * warp + lane % 4 * 2 + i % 2] ? d[i] * p.scale_log2 : -INFINITY;
}

// Scores to probabilities, in shared memory; raises the running maxima. `factor`: what earlier sums and outputs shrink
// by.
template <int kDqk>
HOPWELL_DEVICE void softmax(SharedStorage<kDqk>& s, int stage, float (&d)[4], Rows& rows, float (&factor)[2]) {
  const int lane = arch::lane_index(), warp = arch::warp_index(), column = 8 * warp + lane % 4 * 2;
  for (int r = 0; r < 2; ++r) {
    float m = larger(d[2 * r], d[2 * r + 1]);
    m = tile::reduce<1, 2>(m, larger);
    if (lane % 4 == 0) s.partial[warp][lane / 4 + 8 * r] = m;
  }
  arch::syncthreads();
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float m = rows.max[r];
    for (int w = 0; w < Config::kWarps; ++w) m = larger(m, s.partial[w][row]);
    const float shift = m == -INFINITY ? 0 : m;  // no valid entry so far
    factor[r] = arch::exp2_approx(rows.max[r] - shift);
    float e[2];
    for (int i = 0; i < 2; ++i) e[i] = s.valid[stage][column + i] ? arch::exp2_approx(d[2 * r + i] - shift) : 0;
    rows.max[r] = m;
    rows.sum[r] = rows.sum[r] * factor[r] + e[0] + e[1];
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

// Sums over all keys, then the outputs of this thread's two rows.
template <int kDqk>
HOPWELL_DEVICE void store(const Params& p, SharedStorage<kDqk>& s, int query, int first_head, const Rows& rows,
                          const float (&out)[16][4]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  for (int r = 0; r < 2; ++r) {
    const float sum = tile::sum_of_quad(rows.sum[r]);
    if (lane % 4 == 0) s.partial[warp][lane / 4 + 8 * r] = sum;
  }
  arch::syncthreads();
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r, head = first_head + row;
    if (head >= p.h_q) continue;
    float sum = 0;
    for (int w = 0; w < Config::kWarps; ++w) sum += s.partial[w][row];
    const float lse = tile::lse_of(rows.max[r], sum);
    float scale = sum == 0 ? 0 : 1 / sum;
    if (p.attn_sink && sum != 0) scale /= tile::sink_divisor(p.attn_sink[head * p.sink_stride], lse);
    bf16* target = p.out + query * p.out_stride_s + head * p.out_stride_h + warp * Config::kDvOfWarp + lane % 4 * 2;
    HOPWELL_UNROLL
    for (int n = 0; n < 16; ++n)
      *reinterpret_cast<uint32_t*>(target + 8 * n) =
          sum == 0 ? 0 : arch::pack_bf16(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
    if (warp == 0 && lane % 4 == 0) {
      if (p.max_logits) p.max_logits[query * p.max_stride_s + head * p.max_stride_h] = rows.max[r] * tile::kLn2;
      if (p.lse) p.lse[query * p.lse_stride_s + head * p.lse_stride_h] = lse;
    }
  }
}

template <int kDqk>
__global__ void __launch_bounds__(Config::kThreads) kernel(const __grid_constant__ Params p) {
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  const arch::BlockIndex block = arch::block_index_3d();
  const int query = block.x, first_head = block.y * Config::kHeads;
  const Entries entries = tile::entries_of(p.selection, query);
  const int steps = (entries.length + Config::kKeys - 1) / Config::kKeys;
  Rows rows{{-INFINITY, -INFINITY}, {0, 0}};
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
    softmax(s, stage, d, rows, factor);
    accumulate(s, stage, factor, out);
    arch::syncthreads();  // before the next gather overwrites this stage
  }
  store(p, s, query, first_head, rows, out);
}

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return runtime::Support::no("d_v must be 512");
  const auto aligned = [](const View& v, int dims, std::int64_t elements) {
    bool ok = reinterpret_cast<std::uintptr_t>(v.data) % static_cast<std::uintptr_t>(2 * elements) == 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(dims); ++i)
      ok &= v.shape[i] <= 1 || v.stride[i] % elements == 0;
    return ok;
  };
  if (!aligned(p.q, 2, 8) || !aligned(p.kv, 1, 8))
    return runtime::Support::no("rows of q and kv must be 16-byte aligned");
  if (!aligned(p.out, 2, 2)) return runtime::Support::no("rows of out must be 4-byte aligned");
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q > 16 * 65535)
    return runtime::Support::no("s_q, s_kv and topk must be below 2^31, h_q at most 1048560");
  return {};
}

Params params_of(const Problem& problem) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>();
  p.kv = problem.kv.as<const bf16>();
  p.attn_sink = problem.attn_sink.as<const float>();
  p.out = problem.out.as<bf16>();
  p.max_logits = problem.max_logits.as<float>();
  p.lse = problem.lse.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride = problem.kv.stride[0];
  p.sink_stride = problem.attn_sink.stride[0];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.max_stride_s = problem.max_logits.stride[0], p.max_stride_h = problem.max_logits.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.h_q = static_cast<int>(problem.h_q);
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <int kDqk>
void start(const Problem& problem, Stream stream) {
  const arch::LaunchShape shape{
      .grid = {static_cast<std::uint32_t>(problem.s_q),
               static_cast<std::uint32_t>((problem.h_q + Config::kHeads - 1) / Config::kHeads)},
      .threads = Config::kThreads,
      .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("sparse_mla_forward", kernel<kDqk>, shape, stream, params_of(problem));
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.h_q == 0) return;
  if (problem.d_qk == 576)
    start<576>(problem, stream);
  else
    start<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
