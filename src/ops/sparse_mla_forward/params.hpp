// sparse_mla_forward on GPUs: kernel parameters, and the final values from a head's sum and maximum.
#pragma once

#include "arch/sm80/memory.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/softmax.hpp"
#include "tile/gpu/views.hpp"
#include "tile/gpu/window.hpp"
#include "tile/log2_scale.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

using arch::bf16;

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                                        // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* attn_sink;                                    // [h_q], or null
  bf16* out;                                                 // [s_q, h_q, 512]
  float *max_logits, *lse;                                   // [s_q, h_q], or null
  int64_t q_stride_s, q_stride_h, kv_stride_s, sink_stride;  // elements
  int64_t out_stride_s, out_stride_h, max_stride_s, max_stride_h, lse_stride_s, lse_stride_h;
  uint32_t work_tiles;  // of all queries; persistent kernels only
  int h_q, head_tiles;  // head tiles per query
  int queries_at_once;  // per CTA; in the kernel for few heads on Hopper
  bool aligned;         // rows of q and kv are 16-byte aligned
  bool out_aligned;     // rows of out are 16-byte aligned
  float scale_log2;     // sm_scale · log2(e)
};

// `selection`: the problem's, or the same with row lengths from trim_rows.
inline Params params_of(const Problem& problem, const tile::SelectionParams& selection) {
  Params p{};
  p.selection = selection;
  p.q = problem.q.as<const bf16>();
  p.kv = problem.kv.as<const bf16>();
  p.attn_sink = problem.attn_sink.as<const float>();
  p.out = problem.out.as<bf16>();
  p.max_logits = problem.max_logits.as<float>();
  p.lse = problem.lse.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride_s = problem.kv.stride[0];
  p.sink_stride = problem.attn_sink.stride[0];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.max_stride_s = problem.max_logits.stride[0], p.max_stride_h = problem.max_logits.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.h_q = static_cast<int>(problem.h_q);
  p.aligned = tile::rows_aligned(problem.q, 2) && tile::rows_aligned(problem.kv, 1);
  p.out_aligned = tile::rows_aligned(problem.out, 2);
  p.scale_log2 = tile::log2_scale(problem.sm_scale);
  return p;
}

// Parameters with window keys, for kernels of their own.
struct WindowParams : Params {
  Window window;
  const bf16* window_kv;       // [s_w, d_qk]
  int64_t window_kv_stride_s;  // elements
};

inline WindowParams params_with_window(const Problem& problem, const tile::SelectionParams& selection) {
  WindowParams p{params_of(problem, selection), problem.window, problem.window_kv.as<const bf16>(),
                 problem.window_kv.stride[0]};
  p.aligned = p.aligned && tile::rows_aligned(problem.window_kv, 1);
  return p;
}

// The entries of a query.
HOPWELL_DEVICE tile::Entries entries_of(const Params& p, int query) { return tile::entries_of(p.selection, query); }
HOPWELL_DEVICE tile::WindowEntries entries_of(const WindowParams& p, int query) {
  return tile::entries_of(p.selection, p.window, query);
}

// The row of a key number.
HOPWELL_DEVICE const bf16* row_of(const Params& p, int key) { return p.kv + key * p.kv_stride_s; }
HOPWELL_DEVICE const bf16* row_of(const WindowParams& p, int key) {
  const bool of_window = key >= p.selection.s_kv;
  const int row = of_window ? key - p.selection.s_kv : key;
  return (of_window ? p.window_kv : p.kv) + row * (of_window ? p.window_kv_stride_s : p.kv_stride_s);
}

// Final scale of a head's output: 1 / sum, smaller with a sink; 0 if there is no valid key. `weight`: factor that
// converts the output to the row_max of the sum.
HOPWELL_DEVICE float output_scale(const Params& p, int head, float weight, float sum, float lse) {
  float scale = sum == 0 ? 0 : weight / sum;
  if (p.attn_sink && sum != 0 && head < p.h_q) scale /= tile::sink_divisor(p.attn_sink[head * p.sink_stride], lse);
  return scale;
}

// Stores eight columns of an output row.
HOPWELL_DEVICE void store_columns(const Params& p, bf16* to, const arch::Words4& words) {
  if (p.out_aligned) {
    arch::store_streaming(to, words);
  } else {
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) to[i].bits = uint16_t(words.w[i / 2] >> 16 * (i % 2));
  }
}

// `max` is in units of log 2.
HOPWELL_DEVICE void store_statistics(const Params& p, int query, int head, float max, float lse) {
  if (p.max_logits) p.max_logits[query * p.max_stride_s + head * p.max_stride_h] = max * tile::kLn2;
  if (p.lse) p.lse[query * p.lse_stride_s + head * p.lse_stride_h] = lse;
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
