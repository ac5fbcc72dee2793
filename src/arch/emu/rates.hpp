// What the units of a chip do in a cycle: the constants of the model of time (work.hpp), all in one place.
//
// None of the B200's was measured by us; every figure is published or measured by others, in a kernel where there is a
// choice, and what nobody measured, passes of added bytes, is left out. The H200's are ours: what was reached on all 132
// SMs at 1.755 GHz.
#pragma once

#include <cstdint>

namespace hopwell::arch::emu {

struct Rates {
  const char* chip;
  double clock;  // GHz, under load
  uint32_t sms;
  double flops;            // of bf16 products, a cycle and SM; fp8 and fp4 take the same cycles for 32 bytes of K
  double shared_bytes;     // of the port of shared memory: operands, copies and threads share it
  double gather_bytes;     // from L2 into shared memory
  double gather4_cycles;   // of one gather4
  double added_bytes;      // fp32 additions into L2, 16 bytes a lane and full lines of 128 bytes
  double added_scalars;    // the same, bytes of 4 a lane
  double added_passes;     // how often added bytes pass through the port of shared memory on their way
  double tmem_bytes;       // tcgen05.ld of all warps together
  double tmem_copy_bytes;  // tcgen05.cp
  double exponentials;
  double issue_slots;   // warp instructions
  double memory_bytes;  // HBM, an SM's share
};

inline constexpr Rates kB200{"B200", 1.83, 148, 8192, 128, 50, 12, 22, 18, 0, 4 * 57, 57, 16, 4, 26.6};

// 772 TFLOP/s are 0.81 of 4096 flops a cycle; 9.06 TB/s gathered, 3.84 and 3.70 added, 4.3 read. Shared memory's banks read
// and wrote 2.05 and 2.40 times the added bytes beside all else in the two backward kernels (docs/performance/model.md).
inline constexpr Rates kH200{"H200", 1.755, 132, 4096, 128, 39.1, 0, 16.6, 16, 2, 0, 0, 16, 4, 18.6};

}  // namespace hopwell::arch::emu
