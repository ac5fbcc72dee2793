// sparse_mla_decode on GPUs: attention of one split of a query's keys for 64 heads, by mma.sync, for rows with codes. A
// head has the bits that it has in a smaller tile (split.hpp).
//
//     S = Q Kᵀ        O = P V        heads are the 16 rows of a product, keys or output columns its 8 columns
//
// Tile      one query, 64 heads, one split of its entries; 32 keys per step
// Roles     eight warps. Decode: warp w has columns 64 w to 64 w + 63 of all keys. Scores: a warp has 16 heads and half
//           of the columns, a block of 64 columns at a time. Softmax: four lanes have a head, eight keys each. Output:
//           warp w has columns 64 w to 64 w + 63 of all heads
// Timeline  step     0                                                            1
//           copies              keys 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓    keys 2 …
//           warps    wait 0 │ decode ▓ │ S ▓▓▓▓▓ │ softmax ▓ │ O += P V ▓▓▓▓▓     │ wait 1 │ decode …
// Codes     Each is decoded once for all heads and both products, to fp16 in shared memory: in each 16 columns the even
//           ones come first, so that two codes of a word need no permutation of bytes. Q and the output have the same
//           order. Scales act as in split.hpp. A block with other scales is decoded to bf16(code · scale) instead
// Budget    V3.2 rows: shared: raw keys 20,992 + decoded keys 37,376 + S 18,432 + P 5,120 + sums 8,192 + scales and
//           factors 1,536 + rows 2,048 + 768 = 94,464 B (of 101,376 on the smallest GPU)
//           registers: Q 72 + O 128 + ~50, of 255
// Bound     as the forward's kernel (sparse_mla_forward/sm80/attention.hpp): the four parts of a step follow each other.
//           Decoding adds 280 issue slots of an SM's quarter to its 2,176 clocks of tensor cores
#pragma once

#include "ops/sparse_mla_decode/sm80/many_heads_output.hpp"
#include "ops/sparse_mla_decode/sm80/many_heads_scores.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_decode_many_heads(const __grid_constant__ SplitParams p) {
  auto& s = arch::dynamic_smem<ManyHeadsStorage<Config>>();
  OutputOfHeads<Config> out = {};
  QueryOfHalf<Config> q{};
  Copies<Config> copies{p, s, 0, Entries(p, work_of<Config>(p)).count};
  q.load(p, s);  // in flight while the entries are listed
  auto next = copies.next_step(0);
  copies.start(next, 0), copies.start(next, 1);
  const bool empty = !next.exists;
  if (!empty) begin_softmax(p, s, q);
  HOPWELL_NO_UNROLL
  while (next.exists) {
    arch::cp_async_wait_all();
    arch::syncthreads();
    if (arch::thread_index() == 0) s.keys_of_step = s.keys[0];
    decode(s);
    arch::syncthreads();
    next = copies.next_step(0);
    multiply_keys(p, s, q, copies, next);
    arch::syncthreads();
    softmax(s);
    arch::syncthreads();
    accumulate(s, out);
  }
  tile::launch_dependents();
  const Stats stats = empty ? Stats{} : stats_of(s);
  if (p.splits == 1)
    store_results(p, s, stats, out);
  else
    store_partial<Config>(p, stats, out, empty);
}

// ---- on the host ------------------------------------------------------------------------------------------------------

template <class RowsOfFormat>
SplitKernel many_heads_kernel() {
  using Config = ManyHeadsConfig<RowsOfFormat>;
  static_assert(sizeof(ManyHeadsStorage<Config>) <= 99 * 1024);
  return {sparse_mla_decode_many_heads<Config>, Config::kThreads, sizeof(ManyHeadsStorage<Config>)};
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
