// The kernels of sparse_mla_decode for Hopper: Q in shared memory.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

// Copies the heads of a query to panels of 64 columns at address `to`, executed by the CTA's first kReaders threads.
// Heads past the last one are zeros. With kEvenOdd a warp then puts the columns of its heads in order. The caller
// executes a barrier.
template <class Config>
HOPWELL_DEVICE void load_query(const SplitParams& p, uint32_t to) {
  constexpr int kChunks = Config::kDqk / 8, kWarps = Config::kReaders / 32;  // chunks of a head
  const Work work(p, Config::kHeads);
  const bf16* const of_query = query_of(p, work.query);
  const int warp = arch::thread_index() / 32, lane = arch::lane_index();
  const auto address_of = [&](int row, int chunk) {
    return to + uint32_t(chunk / 8 * Config::kHeads * 128) + tile::swizzled(row, chunk % 8);
  };
  HOPWELL_NO_UNROLL
  for (int row = warp; row < Config::kHeads; row += kWarps) {
    const int head = work.first_head + row;
    const bool valid = head < p.h_q;
    const bf16* const of_head = of_query + (valid ? head : 0) * p.q_stride[2];
    const bool aligned = reinterpret_cast<uintptr_t>(of_head) % 16 == 0;
    HOPWELL_UNROLL
    for (int chunk = lane; chunk < kChunks; chunk += 32) {
      const bf16* const from = of_head + 8 * chunk;
      const uint32_t at = address_of(row, chunk);
      if (aligned) {
        arch::cp_async(at, from, valid ? 16 : 0);
      } else {
        HOPWELL_UNROLL
        for (int word = 0; word < 4; ++word) arch::cp_async<4>(at + uint32_t(4 * word), from + 2 * word, valid ? 4 : 0);
      }
    }
  }
  arch::cp_async_wait_all();
  if constexpr (Config::kEvenOdd) {
    arch::syncwarp();
    HOPWELL_NO_UNROLL
    for (int row = warp; row < Config::kHeads; row += kWarps) {
      HOPWELL_UNROLL
      for (int group = lane; group < kChunks / 2; group += 32) {
        const uint32_t at = address_of(row, 2 * group);
        const EvenOdd columns(arch::load_shared_v4(at), arch::load_shared_v4(at ^ 16));
        arch::store_shared_v4(at, columns.even);
        arch::store_shared_v4(at ^ 16, columns.odd);
      }
    }
  }
  arch::fence_proxy_async();
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
