// nvfp4_gemv on Blackwell's tensor core, which multiplies e2m1 codes and applies their e4m3 scales by itself:
//
//     c[m] = alpha · Σ_k a[m, k] sa[m, k / 16] · b[k] sb[k / 16]                                  for each of L batches
//
// Tile      128 rows of A. The CTAs of a cluster share out its K in turn, 256 a step: rows of 128 bytes. B is one row; the
//           seven that N asks for beside it are zeros.
// Bound     memory: a step brings 18,432 B of A and its scales, for which a multiprocessor's share of 7.2 TB/s takes 690
//           cycles. Its four products take 136, so that it does not matter that seven eighths of them are zeros.
// Roles     warps 0-3   scales     a thread a row: words of four scales, kAhead steps ahead in registers, into the order that
//                                  tcgen05.cp reads. In the end these warps are the epilogue.
//           warp 4      producer   boxes of codes
//           warp 5      issuer     for every 64 of K: two copies of scales to tensor memory, one product
// Timeline  producer │ A 0 B 0 │ A 1 B 1 │ … as stages are free
//           scales   │ load 0 … 3 │ store 0, load 4 │ store 1, load 5 │ …
//           issuer   │           │ cp cp mma (×4) 0 → empty │ cp cp mma (×4) 1 → empty │ … → done
//           epilogue │                                        tensor memory → rank 0 │ cluster barrier │ sum in order → c
// Budget    shared: 5 stages × (16,384 + 1,024 + 2,048 + 2,048) + 4,096 of sums: two CTAs a multiprocessor, 184 KB of A and
//           its scales on their way; tensor memory: D 8, scales 16 + 16 columns, of 64
#pragma once

#include "arch/sm90/cluster.hpp"
#include "arch/sm90/tma.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tcgen05_panel.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

struct BlockScaledConfig {
  static constexpr int kRows = 128, kColumns = 8, kK = 256, kRowBytes = kK / 2;
  static constexpr int kStages = 5, kAhead = 4, kMaxRanks = 8;
  static constexpr int kScaleWarps = 4, kProducerWarp = 4, kIssuerWarp = 5, kThreads = 192;
  static constexpr int kWords = kK / 64;  // of four scales, a row and step
  static constexpr uint32_t kCodeBytes = (kRows + kColumns) * kRowBytes;
};

struct BlockScaledTmem {
  static constexpr int kD = 0, kScaleA = 16, kScaleB = 32, kColumns = 64;  // four columns of scales for every 64 of K
};

/// Scales of 128 rows and 64 of K, as tcgen05.cp.32x128b takes them: those of row r at 16 (r mod 32) + 4 (r / 32).
struct alignas(128) ScaleTile {
  uint8_t bytes[512];
};

struct BlockScaledStorage {
  using Config = BlockScaledConfig;
  struct alignas(1024) Stage {
    uint8_t a[Config::kRows * Config::kRowBytes], b[Config::kColumns * Config::kRowBytes];
  };
  Stage codes[Config::kStages];
  ScaleTile scale_a[Config::kStages][Config::kWords], scale_b[Config::kStages][Config::kWords];
  float sums[Config::kMaxRanks][Config::kRows];  // of each CTA of the cluster, in the first one
  tile::RingBarriers<Config::kStages> ring;      // full: scales
  arch::mbarrier codes_full[Config::kStages], done;
  uint32_t tmem;
};
static_assert(2 * (sizeof(BlockScaledStorage) + 1024) <= 228 * 1024, "two CTAs a multiprocessor");

template <class T>
struct BlockScaledParams {
  arch::TensorMap a, b;  // codes [L][M][K / 2], [L][1][K / 2] bytes
  hopwell::nvfp4::Scales sfa, sfb;
  T* c;                            // [M, L]
  int64_t c_stride_m, c_stride_l;  // elements
  int m, steps;                    // of K, over all ranks
  float alpha;
};

#if HOPWELL_HAS_SM100A

/// A row's scales: words of four, `word_bytes` apart.
struct ScaleRow {
  const uint8_t* at;
  int word_bytes, columns;  // columns: K / 16; 0 for a row that does not exist
  bool aligned;
};

HOPWELL_DEVICE ScaleRow scale_row(const hopwell::nvfp4::Scales& scales, int row, int64_t batch, bool exists) {
  const uint8_t* at = scales.data + scales.offset(row, 0, batch);
  const bool aligned = reinterpret_cast<uintptr_t>(at) % 4 == 0;
  return {at, scales.blocked ? 512 : 4, exists ? int(scales.columns) : 0, aligned};
}

/// Scales 4 word … 4 word + 3. Those beyond K are zeros, whatever lies there: blocked ones may have NaN.
HOPWELL_DEVICE uint32_t load_scales(const ScaleRow& row, int word) {
  const uint8_t* at = row.at + int64_t{word} * row.word_bytes;
  const int left = row.columns - 4 * word;
  if (left >= 4 && row.aligned) return *reinterpret_cast<const uint32_t*>(at);
  uint32_t scales = 0;
  for (int i = 0; i < 4 && i < left; ++i) scales |= uint32_t{at[i]} << 8 * i;
  return scales;
}

/// What a scale thread holds of a step: its row of A, and in the first threads a word of B's row.
struct StepScales {
  uint32_t a[BlockScaledConfig::kWords], b;
};

HOPWELL_DEVICE StepScales load_step(const ScaleRow& a, const ScaleRow& b, int step) {
  constexpr int kWords = BlockScaledConfig::kWords;
  const int thread = arch::thread_index();
  StepScales scales;
  HOPWELL_UNROLL
  for (int i = 0; i < kWords; ++i) scales.a[i] = load_scales(a, step * kWords + i);
  scales.b = thread < kWords ? load_scales(b, step * kWords + thread) : 0;
  return scales;
}

constexpr uint32_t kScaleSigns = 0x80808080, kCodeSigns = 0x88888888;

/// Only B's first row is ever written: the rest of its tiles is zeros from the beginning.
HOPWELL_DEVICE void store_step(BlockScaledStorage& s, int stage, const StepScales& scales) {
  constexpr int kWords = BlockScaledConfig::kWords;
  const int row = arch::thread_index();
  HOPWELL_UNROLL
  for (int i = 0; i < kWords; ++i)
    *reinterpret_cast<uint32_t*>(s.scale_a[stage][i].bytes + row % 32 * 16 + row / 32 * 4) = scales.a[i] & ~kScaleSigns;
  if (row < kWords) *reinterpret_cast<uint32_t*>(s.scale_b[stage][row].bytes) = scales.b & ~kScaleSigns;
}

/// Changes the sign of a row's codes where those of the four scales of word `i` are negative.
HOPWELL_DEVICE void negate_codes(uint8_t* rows, int row, int i, uint32_t scales) {
  for (int j = 0; j < 4; ++j) {
    if (!(scales >> (8 * j + 7) & 1)) continue;
    auto* const codes = reinterpret_cast<uint32_t*>(rows + tile::swizzled(row, 2 * i + j / 2) + j % 2 * 8);
    codes[0] ^= kCodeSigns, codes[1] ^= kCodeSigns;
  }
}

/// The tensor core takes scales without a sign. Negative ones are rare: their codes are negated once they have come.
HOPWELL_DEVICE void apply_signs(BlockScaledStorage& s, const tile::RingSlot<BlockScaledConfig::kStages>& slot,
                                const StepScales& scales) {
  constexpr int kWords = BlockScaledConfig::kWords;
  const int row = arch::thread_index(), stage = slot.stage();
  uint32_t any = row < kWords ? scales.b : 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kWords; ++i) any |= scales.a[i];
  if (!(any & kScaleSigns)) return;
  arch::mbarrier_wait(s.codes_full[stage], slot.parity());
  HOPWELL_UNROLL
  for (int i = 0; i < kWords; ++i) negate_codes(s.codes[stage].a, row, i, scales.a[i]);
  if (row < kWords) negate_codes(s.codes[stage].b, 0, row, scales.b);
}

/// The steps of a CTA: `rank`, rank + ranks, …
struct CtaSteps {
  int rank, ranks, count;
  HOPWELL_DEVICE int step(int i) const { return rank + i * ranks; }
};

HOPWELL_DEVICE void supply_scales(BlockScaledStorage& s, const ScaleRow& a, const ScaleRow& b, const CtaSteps& steps) {
  constexpr int kAhead = BlockScaledConfig::kAhead;
  StepScales ahead[kAhead];
  HOPWELL_UNROLL
  for (int i = 0; i < kAhead; ++i) ahead[i] = load_step(a, b, steps.step(i));
  for (int first = 0; first < steps.count; first += kAhead) {
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= steps.count) break;
      const tile::RingSlot slot{s.ring, first + i};
      slot.wait_empty();
      store_step(s, slot.stage(), ahead[i]);
      apply_signs(s, slot, ahead[i]);
      arch::fence_proxy_async();
      arch::syncwarp();
      if (arch::lane_index() == 0) arch::mbarrier_arrive(slot.full());
      ahead[i] = load_step(a, b, steps.step(first + i + kAhead));
    }
  }
}

template <class T>
HOPWELL_DEVICE void load_codes(const BlockScaledParams<T>& p, BlockScaledStorage& s, int first_row, int batch,
                               const CtaSteps& steps) {
  using Config = BlockScaledConfig;
  for (int i = 0; i < steps.count; ++i) {
    const tile::RingSlot slot{s.ring, i};
    auto& stage = s.codes[slot.stage()];
    const int column = steps.step(i) * Config::kRowBytes;
    arch::mbarrier& full = s.codes_full[slot.stage()];
    slot.wait_empty();
    arch::mbarrier_arrive_expect_tx(full, Config::kCodeBytes);
    arch::tma_load(arch::shared_address(stage.a), p.a, {column, first_row, batch}, full);
    arch::tma_load(arch::shared_address(stage.b), p.b, {column, 0, batch}, full);
  }
}

HOPWELL_DEVICE void multiply(BlockScaledStorage& s, const CtaSteps& steps) {
  using Config = BlockScaledConfig;
  using Tmem = BlockScaledTmem;
  constexpr uint64_t kScales = arch::tcgen05_descriptor({arch::Swizzle::none, 16, 128});
  constexpr uint32_t kInstruction = arch::nvfp4_instruction_descriptor(Config::kRows, Config::kColumns);
  for (int i = 0; i < steps.count; ++i) {
    const tile::RingSlot slot{s.ring, i};
    const int stage = slot.stage();
    slot.wait_full();
    arch::mbarrier_wait(s.codes_full[stage], slot.parity());
    const uint64_t a = arch::at_address(tile::kTcgen05RowsAlongK, arch::shared_address(s.codes[stage].a)),
                   b = arch::at_address(tile::kTcgen05RowsAlongK, arch::shared_address(s.codes[stage].b));
    HOPWELL_UNROLL
    for (int k = 0; k < Config::kWords; ++k) {
      const uint32_t scale_a = arch::tmem_address(s.tmem, 0, Tmem::kScaleA + 4 * k),
                     scale_b = arch::tmem_address(s.tmem, 0, Tmem::kScaleB + 4 * k);
      arch::tcgen05_copy<1, arch::CopyShape::b32x128_x4>(
          scale_a, arch::at_address(kScales, arch::shared_address(&s.scale_a[stage][k])));
      arch::tcgen05_copy<1, arch::CopyShape::b32x128_x4>(
          scale_b, arch::at_address(kScales, arch::shared_address(&s.scale_b[stage][k])));
      arch::tcgen05_mma_nvfp4<1>(arch::tmem_address(s.tmem, 0, Tmem::kD), a + uint64_t(2 * k), b + uint64_t(2 * k),
                                 kInstruction, scale_a, scale_b, i + k > 0);
    }
    arch::tcgen05_commit<1>(slot.empty());
  }
  arch::tcgen05_commit<1>(s.done);
}

/// This thread's row of D, to the first CTA of the cluster.
HOPWELL_DEVICE void give_sum(BlockScaledStorage& s, int rank) {
  const int row = arch::thread_index(), quarter = arch::warp_index() % 4;
  arch::mbarrier_wait(s.done, 0);
  arch::tcgen05_fence_after_thread_sync();
  uint32_t sum[1];
  arch::tmem_load<arch::TmemShape::b32x32>(sum, arch::tmem_address(s.tmem, quarter * 32, BlockScaledTmem::kD));
  arch::tmem_wait_load(sum);
  arch::tcgen05_fence_before_thread_sync();
  arch::store_cluster(arch::map_to_rank(arch::shared_address(&s.sums[rank][row]), 0), sum[0]);
}

template <class T>
HOPWELL_DEVICE void store_row(const BlockScaledParams<T>& p, const BlockScaledStorage& s, int ranks, int first_row,
                              int batch) {
  const int row = arch::thread_index();
  if (first_row + row >= p.m) return;
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += s.sums[rank][row];
  tile::from_fp32(p.alpha * sum, p.c + (first_row + row) * p.c_stride_m + batch * p.c_stride_l);
}

HOPWELL_DEVICE void set_up(BlockScaledStorage& s, int warp) {
  using Config = BlockScaledConfig;
  if (warp == Config::kProducerWarp && arch::elect_one()) {
    s.ring.init(Config::kScaleWarps, 1);
    for (arch::mbarrier& full : s.codes_full) arch::mbarrier_init(full, 1);
    arch::mbarrier_init(s.done, 1);
    arch::fence_mbarrier_init();  // kept: what PTX names for barriers; the fence below is for the zeros
  }
  if (warp == Config::kIssuerWarp) {
    arch::tmem_allocate<1>(s.tmem, BlockScaledTmem::kColumns);
    arch::tmem_relinquish<1>();
  }
  auto* const words = reinterpret_cast<uint32_t*>(s.scale_b);
  for (int i = arch::thread_index(); i < int(sizeof(s.scale_b) / 4); i += Config::kThreads) words[i] = 0;
  arch::fence_proxy_async();
}

#endif

/// Grid [tiles of M · ranks, L], clusters of `ranks` CTAs.
template <class T>
__global__ void __launch_bounds__(BlockScaledConfig::kThreads, 2)
    block_scaled_gemv_kernel(const __grid_constant__ BlockScaledParams<T> p) {
#if HOPWELL_HAS_SM100A
  using Config = BlockScaledConfig;
  auto& s = arch::dynamic_smem<BlockScaledStorage>();
  const int warp = arch::warp_index(), rank = int(arch::cluster_rank()), ranks = int(arch::cluster_size());
  const arch::BlockIndex block = arch::block_index_3d();
  const int first_row = block.x / ranks * Config::kRows, batch = block.y;
  const CtaSteps steps{rank, ranks, (p.steps - rank + ranks - 1) / ranks};
  set_up(s, warp);
  arch::syncthreads();
  arch::cluster_arrive_relaxed();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  if (warp < Config::kScaleWarps) {
    const int row = first_row + arch::thread_index();
    supply_scales(s, scale_row(p.sfa, row, batch, row < p.m), scale_row(p.sfb, 0, batch, true), steps);
  } else if (warp == Config::kProducerWarp) {
    if (arch::elect_one()) load_codes(p, s, first_row, batch, steps);
  } else if (arch::elect_one()) {
    multiply(s, steps);
  }
  arch::syncwarp();      // kept: a lane branched off
  arch::cluster_wait();  // every CTA of the cluster has begun
  if (warp < Config::kScaleWarps) give_sum(s, rank);
  arch::cluster_sync();
  if (warp == Config::kIssuerWarp) {
    arch::tcgen05_fence_after_thread_sync();  // kept: PTX's examples do without
    arch::tmem_deallocate<1>(s.tmem, BlockScaledTmem::kColumns);
  }
  if (rank == 0 && warp < Config::kScaleWarps) store_row(p, s, ranks, first_row, batch);
#endif
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
