// The kernels of sparse_mla_decode for Hopper: Q in shared memory.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

// Copies the heads of a query to panels of 64 columns at address `to`, executed by the CTA's first kReaders threads. Heads
// past the last one are zeros.
template <class Config>
HOPWELL_DEVICE void load_query(const SplitParams& p, uint32_t to) {
  constexpr int kChunks = Config::kDqk / 8;
  const Work work(p, Config::kHeads);
  const bf16* const of_query = query_of(p, work.query);
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index(); i < Config::kHeads * kChunks; i += Config::kReaders) {
    const int row = i / kChunks, chunk = i % kChunks, head = work.first_head + row;
    const bool valid = head < p.h_q;
    const bf16* from = of_query + (valid ? head : 0) * p.q_stride[2] + 8 * chunk;
    const uint32_t at = to + uint32_t(chunk / 8 * Config::kHeads * 128) + tile::swizzled(row, chunk % 8);
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      arch::cp_async(at, from, valid ? 16 : 0);
    } else {
      HOPWELL_UNROLL
      for (int word = 0; word < 4; ++word) arch::cp_async<4>(at + uint32_t(4 * word), from + 2 * word, valid ? 4 : 0);
    }
  }
  arch::cp_async_wait_all();
  arch::fence_proxy_async();
  arch::barrier_sync(kReaderBarrier, Config::kReaders);
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
