// sparse_mla_backward on GPUs, postprocess: converts dkv_accum to the outputs, dkv and d_window_kv, with their columns
// in order.
//
//     sparse_mla_bwd_sort_dkv_columns     dkv_accum is the output itself
//     sparse_mla_bwd_convert_fp32_dkv     dkv_accum is fp32 in the workspace: converts it to the dtype and strides of
//                                         the output; with `accumulate` adds it to the output
//     sparse_mla_bwd_convert_fixed_dkv    the same for fixed-point dkv_accum
#pragma once

#include "ops/sparse_mla_backward/add_dkv.hpp"
#include "ops/sparse_mla_backward/passes/pass.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// For dkv, or for d_window_kv in the same members.
struct PostprocessParams {
  const float* sums;  // [s_kv, d_qk], columns at sum_position
  float* dkv;         // [s_kv, d_qk], or null
  bf16* dkv_bf16;     // the same, or null
  int64_t stride, s_kv;
  int d_qk;
  bool accumulate;
};

HOPWELL_DEVICE void store_sum(const PostprocessParams& p, int64_t row, int column, float sum) {
  const int64_t at = row * p.stride + column;
  if (p.dkv_bf16)
    p.dkv_bf16[at] = arch::to_bf16(sum);
  else
    p.dkv[at] = p.accumulate ? p.dkv[at] + sum : sum;
}

__global__ void __launch_bounds__(kPassThreads)
    sparse_mla_bwd_convert_fp32_dkv(const __grid_constant__ PostprocessParams p) {
  for (int64_t row = arch::block_index(); row < p.s_kv; row += arch::grid_size())
    for (int column = arch::thread_index(); column < p.d_qk; column += kPassThreads)
      store_sum(p, row, column, p.sums[row * p.d_qk + sum_position(column)]);
}

struct OrderColumnsParams {
  float* dkv;  // [s_kv, d_qk], rows 16-byte aligned; input: columns at sum_position, output: columns in order
  int64_t stride, s_kv;
  int d_qk;
};

// Four lanes reorder 16 columns.
__global__ void __launch_bounds__(kPassThreads)
    sparse_mla_bwd_sort_dkv_columns(const __grid_constant__ OrderColumnsParams p) {
  const int chunks = p.d_qk / 4, quad = arch::lane_index() % 4, lane = arch::lane_index() - quad;
  const int64_t count = p.s_kv * chunks, step = int64_t{arch::grid_size()} * kPassThreads;
  for (int64_t i = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); i - arch::lane_index() < count;
       i += step) {
    float* const at = i < count ? p.dkv + i / chunks * p.stride + i % chunks * 4 : nullptr;
    const arch::Words4 sums = at ? arch::load_vector<arch::Words4>(at) : arch::Words4{};
    arch::Words4 columns;
    HOPWELL_UNROLL
    for (int c = 0; c < 4; ++c) {  // column 4 quad + c: the lane of its pair, and the index among that lane's four
      const int from = lane + (2 * quad + c / 2) % 4;
      const uint32_t low = arch::shuffle(sums.w[c % 2], from), high = arch::shuffle(sums.w[c % 2 + 2], from);
      columns.w[c] = quad < 2 ? low : high;
    }
    if (at) arch::store_vector(at, columns);
  }
}

struct PostprocessFixedParams {
  const int64_t* words;      // [s_kv, d_qk / 2], columns at sum_word
  const float* scale;        // [s_kv]
  const uint32_t* count;     // [s_kv]: entries
  uint32_t additions;        // per entry: number of head blocks
  PostprocessParams output;  // its `sums` are not used
};

__global__ void __launch_bounds__(kPassThreads)
    sparse_mla_bwd_convert_fixed_dkv(const __grid_constant__ PostprocessFixedParams p) {
  const int d_qk = p.output.d_qk;
  for (int64_t row = arch::block_index(); row < p.output.s_kv; row += arch::grid_size())
    for (int column = arch::thread_index(); column < d_qk; column += kPassThreads) {
      const int64_t word =
          tile::without_fixed_zeros(p.words[row * (d_qk / 2) + sum_word(column)], p.count[row] * p.additions);
      store_sum(p.output, row, column, tile::from_fixed(tile::unpack_pair(word, column % 2), p.scale[row]));
    }
}

// Writes one output from the rows of dkv_accum from `first` on.
inline void postprocess_rows(const Problem& problem, const Plan& plan, void* workspace, const View& output,
                             std::int64_t first, Stream stream) {
  const std::int64_t rows = output.shape[0];
  if (!output || rows == 0) return;
  const arch::LaunchShape shape = shape_over_rows(rows, problem.device);
  const int d_qk = static_cast<int>(problem.d_qk);
  const bool fp32 = output.dtype == DType::kFloat32;
  const PostprocessParams p{runtime::at_offset<float>(workspace, plan.workspace.dkv) + first * d_qk,
                            fp32 ? output.as<float>() : nullptr,
                            fp32 ? nullptr : output.as<bf16>(),
                            output.stride[0],
                            rows,
                            d_qk,
                            problem.accumulate};
  if (plan.dkv_accum == DkvAccum::output)
    runtime::launch(kName, sparse_mla_bwd_sort_dkv_columns, shape, stream,
                    OrderColumnsParams{p.dkv, p.stride, p.s_kv, d_qk});
  else if (plan.dkv_accum == DkvAccum::scratch)
    runtime::launch(kName, sparse_mla_bwd_convert_fp32_dkv, shape, stream, p);
  else
    runtime::launch(
        kName, sparse_mla_bwd_convert_fixed_dkv, shape, stream,
        PostprocessFixedParams{runtime::at_offset<int64_t>(workspace, plan.workspace.dkv) + first * (d_qk / 2),
                               runtime::at_offset<float>(workspace, plan.workspace.scale) + first,
                               runtime::at_offset<uint32_t>(workspace, plan.workspace.count) + first,
                               static_cast<uint32_t>(plan.pairs.head_blocks + plan.singles.head_blocks), p});
}

inline void postprocess_dkv(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  postprocess_rows(problem, plan, workspace, problem.dkv, 0, stream);
  postprocess_rows(problem, plan, workspace, problem.d_window_kv, problem.s_kv, stream);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
