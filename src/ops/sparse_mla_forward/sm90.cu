// sparse_mla_forward for Hopper, by wgmma.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    scores in units of log 2, m: reference
//
// Tile      one query, 64 heads, 64 keys a step; d_qk 576 or 512. CTAs are persistent: one for each multiprocessor.
// Roles     warpgroup 0     score    S = Q Kᵀ, softmax, P to shared memory; keeps the reference m and the row sums
//           warpgroups 1, 2 value    O += P V for 256 of the 512 columns each, P as A fragments, O in registers
//           warps 12, 13    gather   one of the two key stages each, by cp.async; warp 14 the queries
// Timeline  step     0                    1                    2
//           gather   K1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   K2 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   K3 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//           score    S0 ▓▓▓▓▓▓│exp│P0     S1 ▓▓▓▓▓▓│exp│P1     S2 ▓▓▓▓▓▓│exp│P2
//           value                         O += P0 V0 ▓▓▓▓▓     O += P1 V1 ▓▓▓▓▓
// Budget    shared: Q 73,728 + K 2 × 73,728 + P 8,192 + 800 = 230,176 B
//           registers: score 32 of S + ~60 (120); value 128 of O + 16 of P + ~25 (184); gather 24
// Softmax   m moves only when a row's maximum passes it by more than 8: then O and the sums are scaled by exp2(m_old − m).
//           P ≤ 2^8, whose bf16 is as exact as that of P ≤ 1.
// Bound     shared memory: 309 KB a step, 2,410 clocks, against 2,176 of the tensor cores; beyond the L2 cache the gather
#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "runtime/launch.hpp"
#include "tile/entries.hpp"
#include "tile/gather.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

using arch::bf16;

struct Config {
  static constexpr int kHeads = 64, kKeys = 64, kStages = 2, kThreads = 512;
  static constexpr int kScoreRegisters = 120, kValueRegisters = 184, kGatherRegisters = 24;
  static constexpr float kSlack = 8;  // log2 of how far a score may pass the reference
};
enum class Warpgroup { score, value_low, value_high, gather };

template <int kDqk>
struct SharedStorage {
  alignas(1024) unsigned char q[Config::kHeads * kDqk * 2];
  alignas(1024) unsigned char keys[Config::kStages][Config::kKeys * kDqk * 2];
  alignas(1024) unsigned char p[Config::kHeads * Config::kKeys * 2];
  float factor[Config::kHeads], scale[Config::kHeads];  // of O: before this step, and in the end
  uint32_t valid[Config::kStages][2];                   // a bit for every key
  arch::mbarrier q_full, q_empty, keys_full[Config::kStages], keys_empty[Config::kStages];
  arch::mbarrier p_full, p_empty, scale_full, scale_empty;
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                                                                  // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* attn_sink;                                                              // [h_q], or null
  bf16* out;                                                                           // [s_q, h_q, 512]
  float *max_logits, *lse;                                                             // [s_q, h_q], or null
  int64_t q_stride_s, q_stride_h, kv_stride, sink_stride, out_stride_s, out_stride_h;  // elements
  int64_t max_stride_s, max_stride_h, lse_stride_s, lse_stride_h;
  int64_t pieces;  // of work: queries × blocks of 64 heads
  int h_q, head_blocks;
  bool aligned;      // rows of q and kv, to 16 bytes
  bool out_aligned;  // rows of out, to 4 bytes
  float scale_log2;  // sm_scale · log2(e)
};

// A piece of work: a query's block of heads. At least one tile of keys, so that there always is a result.
struct Piece {
  int query, first_head, tiles;
  tile::Entries entries;
};

HOPWELL_DEVICE Piece piece_of(const Params& p, int64_t number) {
  const int query = int(number / p.head_blocks);
  const tile::Entries entries = tile::entries_of(p.selection, query);
  const int tiles = (entries.length + Config::kKeys - 1) / Config::kKeys;
  return {query, int(number % p.head_blocks) * Config::kHeads, tiles > 0 ? tiles : 1, entries};
}

#if HOPWELL_HAS_SM90A

// ---- gather ---------------------------------------------------------------------------------------------------------

// The lanes that copied fence what they copied, and only then is it announced.
HOPWELL_DEVICE void announce(arch::mbarrier& full) {
  arch::cp_async_wait_all();
  arch::fence_proxy_async();
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(full);
}

template <int kDqk>
HOPWELL_DEVICE void copy_tile(bool aligned, const void* to, const bf16* data, int64_t stride,
                              tile::RowNumbers numbers) {
  if (aligned)
    tile::gather_rows<kDqk>(arch::shared_address(to), data, stride, numbers);
  else
    tile::copy_rows<kDqk>(arch::shared_address(to), data, stride, numbers);
}

// One warp serves one stage of keys.
template <int kDqk>
HOPWELL_DEVICE void gather_keys(const Params& p, SharedStorage<kDqk>& s, int stage) {
  int skip = stage;  // tiles of the other stage before this one's next
  uint32_t parity = 1;
  for (int64_t number = arch::block_index(); number < p.pieces; number += arch::grid_size()) {
    const Piece piece = piece_of(p, number);
    int tile = skip, i = tile * Config::kKeys + arch::lane_index();
    tile::RowNumbers numbers{piece.entries.at(i), piece.entries.at(i + 32), piece.entries.visible};
    for (; tile < piece.tiles; tile += Config::kStages, parity ^= 1) {
      arch::mbarrier_wait(s.keys_empty[stage], parity);
      copy_tile<kDqk>(p.aligned, s.keys[stage], p.kv, p.kv_stride, numbers);
      const uint32_t low = arch::ballot(piece.entries.counts(numbers.low));
      const uint32_t high = arch::ballot(piece.entries.counts(numbers.high));
      if (arch::lane_index() == 0) s.valid[stage][0] = low, s.valid[stage][1] = high;
      i += Config::kStages * Config::kKeys;
      numbers.low = piece.entries.at(i), numbers.high = piece.entries.at(i + 32);  // under these copies
      announce(s.keys_full[stage]);
    }
    skip = tile - piece.tiles;
  }
}

// Another warp fetches the queries.
template <int kDqk>
HOPWELL_DEVICE void gather_queries(const Params& p, SharedStorage<kDqk>& s) {
  uint32_t parity = 1;
  for (int64_t number = arch::block_index(); number < p.pieces; number += arch::grid_size(), parity ^= 1) {
    const int64_t query = number / p.head_blocks;
    const int head = int(number % p.head_blocks) * Config::kHeads + arch::lane_index();
    arch::mbarrier_wait(s.q_empty, parity);
    copy_tile<kDqk>(p.aligned, s.q, p.q + query * p.q_stride_s, p.q_stride_h, {head, head + 32, unsigned(p.h_q)});
    announce(s.q_full);
  }
}

// ---- score ----------------------------------------------------------------------------------------------------------

// A thread's two rows (heads), lane / 4 and lane / 4 + 8 of its warp's 16: reference and maximum in units of log 2, and the part of the
// sum that its own columns make.
struct Rows {
  float reference[2], max[2], sum[2];
};

// S = Q Kᵀ: 64 heads, 64 keys.
template <int kDqk>
HOPWELL_DEVICE void multiply_scores(const SharedStorage<kDqk>& s, int stage, float (&scores)[32]) {
  constexpr uint64_t kOperand = arch::wgmma_descriptor({arch::Swizzle::bytes128, 16, 1024});
  const uint64_t a = arch::at_address(kOperand, arch::shared_address(s.q));
  const uint64_t b = arch::at_address(kOperand, arch::shared_address(s.keys[stage]));
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < kDqk / 16; ++step) {
    const uint64_t offset = (uint32_t(step / 4) * tile::kPanelBytes + uint32_t(step % 4) * 32) >> 4;
    arch::wgmma_ss(scores, a + offset, b + offset, step > 0);
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
}

// Scales the scores, moves the references where they must, and replaces scores by probabilities. `factor`: what earlier ones shrink by.
HOPWELL_DEVICE void softmax(float scale_log2, const uint32_t (&valid)[2], float (&scores)[32], Rows& rows,
                            float (&factor)[2]) {
  const int column = arch::lane_index() % 4 * 2;
  const uint32_t low = valid[0] >> column,
                 high = valid[1] >> column;  // bits 8 j and 8 j + 1 of either half are this thread's
  float max[2] = {-INFINITY, -INFINITY};
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) {
    const bool counts = ((i < 16 ? low : high) >> (i / 4 % 4 * 8 + i % 2)) & 1;
    scores[i] = counts ? scores[i] * scale_log2 : -INFINITY;
    max[i / 2 % 2] = fmaxf(max[i / 2 % 2], scores[i]);
  }
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    max[r] = fmaxf(max[r], arch::shuffle_xor(max[r], 1));
    max[r] = fmaxf(max[r], arch::shuffle_xor(max[r], 2));
    rows.max[r] = fmaxf(rows.max[r], max[r]);
    const bool moves = max[r] > rows.reference[r] + Config::kSlack;
    factor[r] = moves ? arch::exp2_approx(rows.reference[r] - max[r]) : 1;
    rows.reference[r] = moves ? max[r] : rows.reference[r];
    rows.sum[r] *= factor[r];
  }
  const float shift[2] = {rows.reference[0] == -INFINITY ? 0 : rows.reference[0],
                          rows.reference[1] == -INFINITY ? 0 : rows.reference[1]};
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) {
    scores[i] = arch::exp2_approx(scores[i] - shift[i / 2 % 2]);
    rows.sum[i / 2 % 2] += scores[i];
  }
}

// Probabilities to shared memory, in the swizzled layout from which ldmatrix reads them.
template <int kDqk>
HOPWELL_DEVICE void store_probabilities(SharedStorage<kDqk>& s, const float (&scores)[32], const float (&factor)[2]) {
  const uint32_t lane = uint32_t(arch::lane_index()), first = uint32_t(arch::warp_index() % 4 * 16),
                 row = first + lane % 16;
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    const float* d = scores + 8 * step;
    const uint32_t r[4] = {arch::pack_bf16(d[0], d[1]), arch::pack_bf16(d[2], d[3]), arch::pack_bf16(d[4], d[5]),
                           arch::pack_bf16(d[6], d[7])};
    arch::stmatrix(arch::shared_address(s.p) + tile::swizzled(row, uint32_t(2 * step) + lane / 16), r);
  }
  if (lane % 4 == 0) {
    s.factor[first + lane / 4] = factor[0];
    s.factor[first + lane / 4 + 8] = factor[1];
  }
}

// max_logits and lse, and the scale of this piece's output.
template <int kDqk>
HOPWELL_DEVICE void finish_rows(const Params& p, SharedStorage<kDqk>& s, const Piece& piece, const Rows& rows) {
  constexpr float kLn2 = 0.693147180559945f, kLog2E = 1.44269504088896f;
  const int lane = arch::lane_index(), first = arch::warp_index() % 4 * 16;
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r];
    sum += arch::shuffle_xor(sum, 1);
    sum += arch::shuffle_xor(sum, 2);
    const int row = first + lane / 4 + 8 * r, head = piece.first_head + row;
    const float lse = sum == 0 ? INFINITY : (rows.reference[r] + arch::log2_approx(sum)) * kLn2;
    const float max = sum != sum && rows.max[r] != INFINITY ? sum : rows.max[r];  // fmaxf lost the NaN
    float scale = sum == 0 ? 0 : 1 / sum;
    if (p.attn_sink && sum != 0 && head < p.h_q)
      scale /= 1 + arch::exp2_approx((p.attn_sink[head * p.sink_stride] - lse) * kLog2E);
    const bool writes = lane % 4 == 0 && head < p.h_q;
    if (writes && p.max_logits) p.max_logits[piece.query * p.max_stride_s + head * p.max_stride_h] = max * kLn2;
    if (writes && p.lse) p.lse[piece.query * p.lse_stride_s + head * p.lse_stride_h] = lse;
    if (lane % 4 == 0) s.scale[row] = scale;
  }
}

HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier);
}

template <int kDqk>
HOPWELL_DEVICE void score(const Params& p, SharedStorage<kDqk>& s) {
  int step = 0;         // tiles of keys so far
  uint32_t parity = 0;  // of pieces so far
  HOPWELL_NO_UNROLL
  for (int64_t number = arch::block_index(); number < p.pieces; number += arch::grid_size(), parity ^= 1) {
    const Piece piece = piece_of(p, number);
    Rows rows{{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}, {0, 0}};
    arch::mbarrier_wait(s.q_full, parity);
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < piece.tiles; ++tile, ++step) {
      const int stage = step % Config::kStages;
      float scores[32], factor[2];
      arch::mbarrier_wait(s.keys_full[stage], uint32_t(step / Config::kStages & 1));
      multiply_scores(s, stage, scores);
      if (tile == piece.tiles - 1) arrive_warp(s.q_empty);
      softmax(p.scale_log2, s.valid[stage], scores, rows, factor);
      arch::mbarrier_wait(s.p_empty, uint32_t(step & 1) ^ 1);
      store_probabilities(s, scores, factor);
      arrive_warp(s.p_full);
    }
    arch::mbarrier_wait(s.scale_empty, parity ^ 1);
    finish_rows(p, s, piece, rows);
    arrive_warp(s.scale_full);
  }
}

// ---- value ----------------------------------------------------------------------------------------------------------

// O += P V: 64 heads, 64 keys, 256 columns from panel `panel` of the keys on. Two products of 128 columns for every 16 keys: one of
// 256 needs more registers than the kernel starts with.
template <int kDqk>
HOPWELL_DEVICE void multiply_values(const SharedStorage<kDqk>& s, int stage, int panel,
                                    const uint32_t (&probabilities)[4][4], float (&out)[2][64], bool first) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  constexpr uint64_t kOperand = arch::wgmma_descriptor({arch::Swizzle::bytes128, tile::kPanelBytes, 1024});
  const uint64_t v =
      arch::at_address(kOperand, arch::shared_address(s.keys[stage]) + uint32_t(panel) * tile::kPanelBytes);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    HOPWELL_UNROLL
    for (int part = 0; part < 2; ++part) {
      const uint64_t offset = (uint32_t(step) * 16 * 128 + uint32_t(part) * 2 * tile::kPanelBytes) >> 4;
      arch::wgmma_rs<kOptions>(out[part], probabilities[step], v + offset, !first || step > 0);
    }
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(out[0], out[1]);
}

HOPWELL_DEVICE void store_out(const Params& p, const Piece& piece, int column, const float (&out)[2][64],
                              const float (&scale)[2]) {
  const int lane = arch::lane_index(), first = piece.first_head + arch::warp_index() % 4 * 16;
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int head = first + lane / 4 + 8 * r;
    if (head >= p.h_q) continue;
    bf16* target = p.out + piece.query * p.out_stride_s + head * p.out_stride_h + column + lane % 4 * 2;
    HOPWELL_UNROLL
    for (int n = 0; n < 32; ++n) {
      const float* sums = &out[n / 16][n % 16 * 4 + 2 * r];
      const uint32_t pair = scale[r] == 0 ? 0 : arch::pack_bf16(sums[0] * scale[r], sums[1] * scale[r]);
      if (p.out_aligned)
        *reinterpret_cast<uint32_t*>(target + 8 * n) = pair;
      else
        target[8 * n].bits = uint16_t(pair), target[8 * n + 1].bits = uint16_t(pair >> 16);
    }
  }
}

template <int kDqk>
HOPWELL_DEVICE void value(const Params& p, SharedStorage<kDqk>& s, int half) {
  const uint32_t lane = uint32_t(arch::lane_index()), row = uint32_t(arch::warp_index() % 4 * 16);
  int step = 0;
  uint32_t parity = 0;
  HOPWELL_NO_UNROLL
  for (int64_t number = arch::block_index(); number < p.pieces; number += arch::grid_size(), parity ^= 1) {
    const Piece piece = piece_of(p, number);
    float out[2][64];
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < piece.tiles; ++tile, ++step) {
      const int stage = step % Config::kStages;
      uint32_t probabilities[4][4];
      arch::mbarrier_wait(s.p_full, uint32_t(step & 1));
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i)
        arch::ldmatrix(probabilities[i],
                       arch::shared_address(s.p) + tile::swizzled(row + lane % 16, uint32_t(2 * i) + lane / 16));
      const float factor[2] = {s.factor[row + lane / 4], s.factor[row + lane / 4 + 8]};
      arrive_warp(s.p_empty);
      if (tile > 0 && arch::ballot(factor[0] != 1 || factor[1] != 1) != 0) {
        HOPWELL_UNROLL
        for (int i = 0; i < 128; ++i) out[i / 64][i % 64] *= factor[i / 2 % 2];
      }
      multiply_values(s, stage, 4 * half, probabilities, out, tile == 0);
      arrive_warp(s.keys_empty[stage]);
    }
    arch::mbarrier_wait(s.scale_full, parity);
    const float scale[2] = {s.scale[row + lane / 4], s.scale[row + lane / 4 + 8]};
    arrive_warp(s.scale_empty);
    store_out(p, piece, 256 * half, out, scale);
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDqk>
HOPWELL_DEVICE void initialise(SharedStorage<kDqk>& s) {
  constexpr uint32_t kScoreWarps = 4, kValueWarps = 8;
  arch::mbarrier_init(s.q_full, 1);
  arch::mbarrier_init(s.q_empty, kScoreWarps);
  for (int i = 0; i < Config::kStages; ++i) {
    arch::mbarrier_init(s.keys_full[i], 1);
    arch::mbarrier_init(s.keys_empty[i], kValueWarps);
  }
  arch::mbarrier_init(s.p_full, kScoreWarps);
  arch::mbarrier_init(s.p_empty, kValueWarps);
  arch::mbarrier_init(s.scale_full, kScoreWarps);
  arch::mbarrier_init(s.scale_empty, kValueWarps);
}

#endif

template <int kDqk>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  if (arch::thread_index() == 0) initialise(s);
  arch::syncthreads();
  const auto role = Warpgroup(arch::warpgroup_index());
  if (role == Warpgroup::score) {
    arch::setmaxnreg_dec<Config::kScoreRegisters>();
    score(p, s);
  } else if (role == Warpgroup::gather) {
    arch::setmaxnreg_dec<Config::kGatherRegisters>();
    const int warp = arch::warp_index() % 4;
    if (warp < Config::kStages)
      gather_keys(p, s, warp);
    else if (warp == Config::kStages)
      gather_queries(p, s);
  } else {
    arch::setmaxnreg_inc<Config::kValueRegisters>();
    value(p, s, role == Warpgroup::value_low ? 0 : 1);
  }
#endif
}

runtime::Support supports(const Problem& p) {
  // Proven on the emulator alone so far. Goes once the cases have run on a card.
  if (HOPWELL_ON_DEVICE) return runtime::Support::no("not yet proven on hardware");
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return runtime::Support::no("d_v must be 512");
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 1024;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q >= kLimit)
    return runtime::Support::no("s_q, s_kv, topk and h_q must be below 2^31 - 1024");
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
  p.head_blocks = (p.h_q + Config::kHeads - 1) / Config::kHeads;
  p.pieces = problem.s_q * p.head_blocks;
  p.aligned = tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride) &&
              (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
  p.out_aligned = reinterpret_cast<std::uintptr_t>(p.out) % 4 == 0 && (problem.s_q <= 1 || p.out_stride_s % 2 == 0) &&
                  (problem.h_q <= 1 || p.out_stride_h % 2 == 0);
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <int kDqk>
void start(const Problem& problem, Stream stream) {
  const Params params = params_of(problem);
  const std::int64_t ctas = runtime::multiprocessors(problem.device.device_id);
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(params.pieces < ctas ? params.pieces : ctas)},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("sparse_mla_forward", kernel<kDqk>, shape, stream, params);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0) return;
  problem.d_qk == 576 ? start<576>(problem, stream) : start<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
