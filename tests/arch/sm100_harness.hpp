// Shared by the tests of Blackwell's instructions.
#pragma once

#include "harness.hpp"

#include "arch/sm100/tensor_memory.hpp"
#include "arch/sm90/mbarrier.hpp"

namespace hopwell::arch {

using emu::Kind;
using test::expect_clean;

struct Shared {
  alignas(1024) unsigned char a[65536];
  alignas(1024) unsigned char b[65536];
  mbarrier full, done;
  uint32_t tmem;
};
inline emu::LaunchShape shape(uint32_t threads, uint32_t cluster = 1, uint32_t grid = 0) {
  return {{grid ? grid : cluster, 1, 1}, {threads, 1, 1}, {cluster, 1, 1}, sizeof(Shared)};
}

/// Allocates tensor memory, runs `body(shared)` in all threads, frees it.
template <int kCtaGroup, class Body>
void with_tensor_memory(uint32_t columns, Body body) {
  auto& s = dynamic_smem<Shared>();
  const int warp = thread_index() / 32;
  if (thread_index() == 0) {
    mbarrier_init(s.full, 1);
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 0) tmem_allocate<kCtaGroup>(s.tmem, columns);
  if (kCtaGroup == 2)
    cluster_sync();
  else
    syncthreads();
  body(s);
  tcgen05_fence_before_thread_sync();
  if (kCtaGroup == 2)
    cluster_sync();
  else
    syncthreads();
  if (warp == 0) tmem_deallocate<kCtaGroup>(s.tmem, columns);
}

}  // namespace hopwell::arch
