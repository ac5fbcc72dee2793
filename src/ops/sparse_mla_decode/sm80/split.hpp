// sparse_mla_decode on GPUs: attention of one split of a query's keys, by mma.sync, for rows of every format.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ        keys and output columns are the 16 rows of a product, heads its 8 columns
//
// Tile      one query, 8 or 16 heads, or 32 for rows with codes, one split of its entries; 32 keys per step
// Roles     eight warps. K: warp w has columns 64 w to 64 w + 63 of all keys, and warps 0 to 3 have 16 columns of RoPE
//           each. Every warp writes partial scores. Softmax: a warp has one, two or four heads, and adds the scores of
//           the eight warps in order. Output: warp w has columns 64 w to 64 w + 63
// Timeline  step     0                                                  1
//           copies   keys 2 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓  keys 3 ▓▓▓▓ …      half before each half of S
//           warps    wait 0 │ S ▓▓▓▓▓ │ softmax ▓ │ O += P V ▓▓▓▓▓     │ wait 1 │ S …
//           with 3 stages: rows with codes and up to 16 heads. With 2 stages, step 0 copies keys 1
// Codes     Both products read the raw codes by ldmatrix and decode them in registers to fp16, which has every e4m3
//           number. Seen as 16-bit elements, ldmatrix.trans gives two columns of two keys in a word. Q is fp16 too,
//           divided by a power of two for each head so that its largest element is within 2^14 … 2^15. A block's scale
//           multiplies its partial scores in fp32, and P in fp16. fp16 has all scales that are powers of two from 2^-13
//           to 2^7, and rounds their products with P (error bound: is_exact_scale). If a step has other scales, its
//           blocks are decoded to bf16(fp32(code · scale)) in fp32, as the operator defines them, and multiplied as
//           bf16. A NaN code makes the key's scores NaN
// Entries   256 at a time. The rows of valid entries are listed in order, so all steps of a list but the last are full,
//           and invalid entries cost no step. Rows past the last one are filled with zeros and masked
// Budget    16 heads, V3.2 rows: shared: keys 3 × 20,992 + S 18,432 + P 1,280 + rows 2,048 + 1,152 = 85,888 B
//           registers: Q 20 + O 32 + ~76, of 128, for two CTAs per SM; 16 heads of V4, and 32 heads: one. Hopper's SM
//           has shared memory for both. An A100's, with 164 KB, has room for one CTA with 16 heads of V3.2 rows with
//           RoPE, with 16 heads of bf16 rows, or with 8 heads of bf16 rows of d_qk 576
// Bound     memory; then issue slots: about 130 instructions of a warp per key for 16 heads
#pragma once

#include "ops/sparse_mla_decode/sm80/split_output.hpp"
#include "ops/sparse_mla_decode/sm80/split_scores.hpp"
#include "runtime/with_constant.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasOfSm)
    sparse_mla_decode_split(const __grid_constant__ SplitParams p) {
  auto& s = arch::dynamic_smem<SplitStorage<Config>>();
  SoftmaxOfHead<Config> of{arch::warp_index() * Config::kHeadBlocks + arch::lane_index() / Config::kLanesOfHead, 1};
  Output<Config> out = {};
  Query<Config> q{};
  float scale_log2 = 0;
  Copies<Config> copies{p, s, 0, Entries(p, work_of<Config>(p)).count};
  const auto after = [](int stage) { return stage == Config::kStages - 1 ? 0 : stage + 1; };
  q.load(p, s, work_of<Config>(p));  // for rows of bf16 in flight while the entries are listed
  // The steps before step 0 only start copies, so that the code for lists exists once.
  HOPWELL_NO_UNROLL
  for (int step = 1 - Config::kStages, stage = 0, free = 0; step < 0 || step < copies.steps; ++step) {
    if (step >= 0) {
      arch::cp_async_wait<Config::kStages - 2>();
      arch::syncthreads();
    }
    const auto later = copies.next_step(free);
    free = after(free);
    if (step < 0) {
      copies.start(later, 0), copies.start(later, 1);
      arch::cp_async_commit();
      if (step < -1) continue;
      if (copies.steps == 0) break;
      if constexpr (Config::kFp16) {
        q.convert(s);
        of.up = Query<Config>::unit_of(s, of.head).up / kScoreUnit<Config>;
      }
      scale_log2 = p.scale_log2 * p.kv_scale_factor();
      continue;
    }
    const bool exact = multiply_keys(p, s, stage, q, copies, later);
    arch::cp_async_commit();
    arch::syncthreads();
    softmax(s, stage, scale_log2, of);
    arch::syncthreads();
    accumulate(s, stage, exact, out);
    stage = after(stage);
  }
  tile::launch_dependents();
  const Stats stats = of.stats();
  if (p.splits == 1) {
    arch::syncthreads();  // before factors are written again
    store_results(p, s, of.head, stats, out);
  } else {
    store_partial<Config>(p, of.head, stats, out, copies.steps == 0);
  }
}

// ---- on the host ----------------------------------------------------------------------------------------------------

template <class RowsOfFormat>
SplitKernel split_kernel(int heads) {
  const auto kernel = [&]<int kHeads>() -> SplitKernel {
    using Config = SplitConfig<RowsOfFormat, kHeads>;
    static_assert(sizeof(SplitStorage<Config>) <= 99 * 1024);
    return {sparse_mla_decode_split<Config>, Config::kThreads, sizeof(SplitStorage<Config>)};
  };
  if constexpr (RowsOfFormat::kHasCodes)
    return runtime::with_constant<8, 16, 32>(heads, kernel);
  else
    return runtime::with_constant<8, 16>(heads, kernel);
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
