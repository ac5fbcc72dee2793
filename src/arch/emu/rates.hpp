// Throughput of the units of a chip per cycle: all constants of the time model (work.hpp).
//
// B200: not measured by us. Every figure is published or measured by others, inside of a kernel where there is a
// choice. added_passes has no published measurement and is 0. H200: our own measurements, the best throughput reached
// on all 132 SMs at 1.755 GHz.
#pragma once

#include <cstdint>

namespace hopwell::arch::emu {

struct Rates {
  const char* chip;
  double clock;  // GHz, under load
  uint32_t sms;
  double flops;            // bf16 products, per cycle and SM; fp8 and fp4 need the same cycles for 32 bytes of K
  double shared_bytes;     // shared-memory port, shared by operands, copies and threads
  double gather_bytes;     // from L2 into shared memory
  double gather4_cycles;   // cycles of one gather4
  double added_bytes;      // fp32 additions into L2, 16 bytes per lane, full lines of 128 bytes
  double added_scalars;    // the same with 4 bytes per lane
  double added_passes;     // number of times that added bytes pass through the shared-memory port
  double tmem_bytes;       // tcgen05.ld, all warps together
  double tmem_copy_bytes;  // tcgen05.cp
  double exponentials;
  double issue_slots;   // warp instructions
  double memory_bytes;  // HBM, fraction of one SM
};

inline constexpr Rates kB200{"B200", 1.83, 148, 8192, 128, 50, 12, 22, 18, 0, 4 * 57, 57, 16, 4, 26.6};

// 772 TFLOP/s are 0.81 of 4096 flops a cycle. Gathers reach 9.06 TB/s, additions 3.84 and 3.70 TB/s, HBM reads 4.3
// TB/s. In the two backward kernels the shared-memory banks read and wrote 2.05 and 2.40 times the added bytes in
// addition to all other traffic (docs/performance/model.md).
inline constexpr Rates kH200{"H200", 1.755, 132, 4096, 128, 39.1, 0, 16.6, 16, 2, 0, 0, 16, 4, 18.6};

}  // namespace hopwell::arch::emu
