// sparse_mla_backward on GPUs, preprocess of deterministic calls: computes the unit of each row's fixed-point sums
// (tile/gpu/fixed_point.hpp).
//
// A contribution to row k of dkv is the sum that one entry adds for all heads of query s. With A[s,k] = Σ_h P[h,s,k] =
// Σ_h exp(score − lse'), which attention_distribution computes, and over the heads of the query
//
//     a = max |d_out| + |scale delta| max |q|,    b = |scale| ‖d_out‖ max |q|,    c[s,k] = A[s,k] (a + b ‖v_k‖)
//
// no element of the contribution exceeds c[s,k]: it is a sum over heads of P d_out and P (dP − delta) scale q, and |dP|
// <= ‖d_out‖ ‖v_k‖. a and b leave out the heads whose P the sink makes 0 in every entry: vanishes().
//
//     sparse_mla_bwd_measure_keys    ‖v_k‖
//     sparse_mla_bwd_bound_entries   a and b of each query, then c[s,k] of every entry, to the bounds of its row.
//                                    Stores delta for the main kernels, so that they do not read out
//     sparse_mla_bwd_choose_units    2^e
//
// Rows of window_kv are bounded in the same way, by the same a and b. sparse_mla_bwd_list_window_rows writes an index
// row of window keys for each query. attention_distribution computes A from these rows.
#pragma once

#include "ops/sparse_mla_backward/passes/pass.hpp"
#include "ops/sparse_mla_backward/prologue.hpp"
#include "tile/gpu/fixed_point.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Largest magnitude and sum of squares of a row of bf16, for the bounds. Each lane of a warp has a partial result until
// `reduce`.
struct Magnitude {
  uint32_t largest_bits = 0;  // as bits; infinities and NaN compare above all numbers
  float squares = 0;

  HOPWELL_DEVICE void add(const arch::Words4& words) {
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = (i % 2 ? words.w[i / 2] & 0x7fff0000 : words.w[i / 2] << 16 & 0x7fff0000);
      largest_bits = bits > largest_bits ? bits : largest_bits;
      squares += arch::bit_cast<float>(bits) * arch::bit_cast<float>(bits);
    }
  }
  HOPWELL_DEVICE void reduce() {
    HOPWELL_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint32_t other = arch::shuffle_xor(largest_bits, mask);
      largest_bits = other > largest_bits ? other : largest_bits;
      squares += arch::shuffle_xor(squares, mask);
    }
  }
  HOPWELL_DEVICE float largest() const { return arch::bit_cast<float>(largest_bits); }
  // An upper bound of the norm of up to 512 elements, even if squares leave the range of fp32.
  HOPWELL_DEVICE float norm() const {
    return squares > 1e-30F && squares < 1e38F ? sqrtf(squares) * 1.001F : largest() * 22.7F;
  }
};

// This lane's part of the magnitude of a row.
HOPWELL_DEVICE Magnitude magnitude_of_lane(const bf16* row, int width) {
  Magnitude m;
  for (int chunk = arch::lane_index(); chunk < width / 8; chunk += 32) m.add(arch::load_streaming(row + 8 * chunk));
  return m;
}

// kv or window_kv, the entries that select its rows, their A, and the bounds of the rows of dkv_accum.
struct BoundedKeys {
  tile::SelectionParams selection;
  const bf16* kv;                    // [s_kv, d_qk]
  const float* attn;                 // [s_q, topk]
  int64_t kv_stride_s, attn_stride;  // elements
  float* scale;                      // [s_kv]: first ‖v_k‖, then 2^e, or NaN
  tile::SumBounds bounds;
};

// One warp per key.
__global__ void __launch_bounds__(kPassThreads) sparse_mla_bwd_measure_keys(const __grid_constant__ BoundedKeys keys) {
  for (int64_t key = int64_t{arch::block_index()} * kPassWarps + arch::warp_index(); key < keys.selection.s_kv;
       key += int64_t{arch::grid_size()} * kPassWarps) {
    Magnitude v = magnitude_of_lane(keys.kv + key * keys.kv_stride_s, 512);
    v.reduce();
    if (arch::lane_index() != 0) continue;
    keys.scale[key] = v.norm();
    keys.bounds.largest[key] = 0, keys.bounds.count[key] = 0;
  }
}

struct BoundParams {
  BoundedKeys keys[2];          // the first `key_sets` of them have entries
  const bf16 *q, *out, *d_out;  // [s_q, h_q, d_qk], [s_q, h_q, 512] twice
  const float *lse, *sink;      // [s_q, h_q], [h_q] or null
  float* delta;                 // [s_q, h_q]
  int64_t q_stride_s, q_stride_h, out_stride_s, out_stride_h, d_out_stride_s, d_out_stride_h, lse_stride_s,
      lse_stride_h, sink_stride;  // elements
  int key_sets, h_q, d_qk;
  float sm_scale;
};

// a and b, as bits: the maximum over heads.
struct QueryBound {
  uint32_t a = 0, b = 0;

  HOPWELL_DEVICE void raise(const QueryBound& other) {
    a = other.a > a ? other.a : a;
    b = other.b > b ? other.b : b;
  }
};

// Whether the sink leaves a head nothing: P is 0 in every entry. A score exceeds lse by at most 44 (declaration.py), and
// lse' is at least the sink. So log2 P <= 64 − 256, and ex2.approx.ftz of that is 0.
HOPWELL_DEVICE bool vanishes(float lse, float sink) { return (sink - lse) * tile::kLog2E > 256; }

// a and b of one head of a query, by one warp, which also stores the head's delta. All three are 0 if the head sees no
// key (lse = +inf). All loads are issued before the first result is used.
HOPWELL_DEVICE QueryBound bound_of(const BoundParams& p, int64_t query, int head) {
  const float lse = p.lse[query * p.lse_stride_s + head * p.lse_stride_h],
              sink = p.sink ? p.sink[head * p.sink_stride] : -INFINITY;
  const bool sees_keys = lse != INFINITY;
  const bf16 *of_out = p.out + query * p.out_stride_s + head * p.out_stride_h + 8 * arch::lane_index(),
             *of_d_out = p.d_out + query * p.d_out_stride_s + head * p.d_out_stride_h + 8 * arch::lane_index();
  arch::Words4 out[2], d_out[2];
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    out[half] = arch::load_streaming(of_out + 256 * half);
    d_out[half] = arch::load_streaming(of_d_out + 256 * half);
  }
  Magnitude q = magnitude_of_lane(p.q + query * p.q_stride_s + head * p.q_stride_h, p.d_qk), d;
  d.add(d_out[0]), d.add(d_out[1]);
  q.reduce(), d.reduce();
  const float sum = sum_of_dot(dot(out, d_out)), delta = sees_keys ? sum : 0;
  if (arch::lane_index() == 0) p.delta[query * p.h_q + head] = delta;
  if (!sees_keys) return {};
  const float scale = fabsf(p.sm_scale) * q.largest();
  const float factor = vanishes(lse, sink) ? 0 : 1;  // 0 times infinity or NaN is NaN, as P times them is
  const float a = (d.largest() + scale * fabsf(delta)) * factor, b = scale * d.norm() * factor;
  return {arch::bit_cast<uint32_t>(a) & 0x7fffffff, arch::bit_cast<uint32_t>(b) & 0x7fffffff};
}

// Bounds the contributions of all heads of a query to the rows that its entries select.
HOPWELL_DEVICE void bound_entries(const BoundedKeys& keys, int query, const QueryBound& bound) {
  const Entries entries = tile::entries_of(keys.selection, query);
  for (int i = arch::thread_index(); i < entries.length; i += kPassThreads) {
    const int key = entries.key(i);
    if (key < 0) continue;
    const float c = keys.attn[query * keys.attn_stride + entries.place() + i] *
                    (arch::bit_cast<float>(bound.a) + arch::bit_cast<float>(bound.b) * keys.scale[key]);
    keys.bounds.note(key, c);
  }
}

// One CTA per query.
__global__ void __launch_bounds__(kPassThreads) sparse_mla_bwd_bound_entries(const __grid_constant__ BoundParams p) {
  auto& warp_bounds = arch::dynamic_smem<QueryBound[kPassWarps]>();
  const int query = arch::block_index(), warp = arch::warp_index();
  QueryBound bound;
  for (int head = warp; head < p.h_q; head += kPassWarps) bound.raise(bound_of(p, query, head));
  if (arch::lane_index() == 0) warp_bounds[warp] = bound;
  arch::syncthreads();
  for (int w = 0; w < kPassWarps; ++w) bound.raise(warp_bounds[w]);
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i)
    if (i < p.key_sets) bound_entries(p.keys[i], query, bound);
}

struct UnitParams {
  float* scale;
  tile::SumBounds bounds;
  int64_t rows;
};

__global__ void __launch_bounds__(kPassThreads) sparse_mla_bwd_choose_units(const __grid_constant__ UnitParams p) {
  for (int64_t key = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); key < p.rows;
       key += int64_t{arch::grid_size()} * kPassThreads) {
    p.scale[key] = tile::paired_scale(p.bounds.bound(key), p.bounds.bound_of_one(key));
  }
}

// ---- index rows of window keys

struct WindowRowsParams {
  Window window;
  int* rows;  // [s_q, most]: the rows that a query sees, then -1
  int64_t s_q;
  int most;
};

// One warp per query.
__global__ void __launch_bounds__(kPassThreads)
    sparse_mla_bwd_list_window_rows(const __grid_constant__ WindowRowsParams p) {
  for (int64_t query = int64_t{arch::block_index()} * kPassWarps + arch::warp_index(); query < p.s_q;
       query += int64_t{arch::grid_size()} * kPassWarps) {
    const KeyRange rows = p.window.keys(query);
    for (int i = arch::lane_index(); i < p.most; i += 32)
      p.rows[query * p.most + i] = i < int(rows.count) ? int(rows.first) + i : -1;
  }
}

// ---- launch

// Runs the backend's own attention_distribution, without a workspace: it keeps the order of the rows.
inline void distribute_attention(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (plan.distribution) plan.distribution_call->launch(distribution_problem(problem), nullptr, stream);
  if (plan.bound_distribution)
    plan.bound_distribution_call->launch(bound_distribution_problem(problem, plan, workspace), nullptr, stream);
  if (plan.window_distribution) {
    const WindowRowsParams p{problem.window, runtime::at_offset<int>(workspace, plan.workspace.window_rows),
                             problem.s_q, static_cast<int>(problem.window.most_keys())};
    runtime::launch(kName, sparse_mla_bwd_list_window_rows, shape_over_rows(problem.s_q, problem.device), stream, p);
    plan.window_distribution_call->launch(window_distribution_problem(problem, plan, workspace), nullptr, stream);
  }
}

// The keys of a distribution, whose rows of dkv_accum begin at `first`.
inline BoundedKeys bounded_keys(const Plan& plan, void* workspace, const attention_distribution::Problem& distribution,
                                std::int64_t first) {
  const View &kv = distribution.kv, &attn = distribution.attn;
  return {tile::params_of(distribution.selection),
          kv.as<const bf16>(),
          attn.as<const float>(),
          kv.stride[0],
          attn.stride[0],
          runtime::at_offset<float>(workspace, plan.workspace.scale) + first,
          {runtime::at_offset<uint32_t>(workspace, plan.workspace.largest) + first,
           runtime::at_offset<uint32_t>(workspace, plan.workspace.count) + first}};
}

inline BoundParams bound_params(const Problem& problem, const Plan& plan, void* workspace) {
  BoundParams p{};
  p.q = problem.q.as<const bf16>(), p.out = problem.out.as<const bf16>();
  p.d_out = problem.d_out.as<const bf16>(), p.lse = problem.lse.as<const float>();
  p.sink = problem.attn_sink.as<const float>(), p.sink_stride = problem.attn_sink.stride[0];
  p.delta = runtime::at_offset<float>(workspace, plan.workspace.delta);
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.d_out_stride_s = problem.d_out.stride[0], p.d_out_stride_h = problem.d_out.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.h_q = static_cast<int>(problem.h_q), p.d_qk = static_cast<int>(problem.d_qk);
  p.sm_scale = problem.sm_scale;
  return p;
}

inline void choose_fixed_point_units(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (plan.dkv_accum != DkvAccum::fixed_point) return;
  BoundParams bound = bound_params(problem, plan, workspace);
  const auto measure_keys = [&](const attention_distribution::Problem& distribution, std::int64_t first) {
    if (distribution.s_kv == 0) return;
    const BoundedKeys keys = bounded_keys(plan, workspace, distribution, first);
    runtime::launch(kName, sparse_mla_bwd_measure_keys, shape_over_rows(distribution.s_kv, problem.device), stream,
                    keys);
    if (distribution.topk > 0) bound.keys[bound.key_sets++] = keys;  // without entries nothing contributes
  };
  measure_keys(bound_distribution_problem(problem, plan, workspace), 0);
  if (problem.window) measure_keys(window_distribution_problem(problem, plan, workspace), problem.s_kv);
  // Also if there is no row to bound: the main kernels read delta.
  runtime::launch(kName, sparse_mla_bwd_bound_entries,
                  shape_of_ctas(problem.s_q, kPassThreads, sizeof(QueryBound[kPassWarps])), stream, bound);
  const std::int64_t rows = rows_of_dkv_accum(problem);
  if (rows == 0) return;
  const UnitParams p{runtime::at_offset<float>(workspace, plan.workspace.scale),
                     {runtime::at_offset<uint32_t>(workspace, plan.workspace.largest),
                      runtime::at_offset<uint32_t>(workspace, plan.workspace.count)},
                     rows};
  runtime::launch(kName, sparse_mla_bwd_choose_units, shape_over_rows(rows, problem.device), stream, p);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
