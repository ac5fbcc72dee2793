// How nvfp4_gemv, nvfp4_linear and nvfp4_matmul share out their work on a GPU: which kernel runs, and what its CTAs take.
// Plain data from a shape and a device, found on the host.
//
// tile      rows of weights × columns of x whose sums lie in registers together
// stage     the k of weights that are copied at a time
// slice     the k that a warp (one column) or a CTA (all others) has of its tiles, in whole stages
// cluster   CTAs with the same tiles, each with a slice of its own; one CTA where K is not split
// split     warpgroups of a CTA with the same rows, which take the stages of its slice in turn
// phase     slices that a CTA takes one after the other, because x of all of them does not fit in shared memory
// round     tiles after which the warps of a CTA add up their sums and store results
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "ops/nvfp4/op.hpp"
#include "runtime/device.hpp"

namespace hopwell::ops::nvfp4 {

// ---- tiles and stages of the kernels -------------------------------------------------------------------------------

// Of all kernels but the one for many columns: a warp's.
struct StageConfig {
  static constexpr int kRows = 16, kStageK = 256;
  static constexpr int kCodeBytes = kRows * kStageK / 2, kScaleBytes = kRows * kStageK / int(hopwell::nvfp4::kBlock);
  static constexpr int kStageBytes = kCodeBytes + kScaleBytes;
};

struct GeneralConfig {
  static constexpr int kThreads = 128, kColumns = 8;
};

struct OneColumnConfig {
  static constexpr int kMaxWarps = 16, kStages = 4, kRingBytes = kStages * StageConfig::kStageBytes;
  static constexpr int kMaxRoundTiles = 16;
};

template <int kColumns>
struct FewColumnsConfig {
  static constexpr int kMaxWarps = 16;
  // Of a ring. Shared memory is taken from the L1 cache, which scales need: 16 bytes of a line at a time.
  static constexpr int kStages = kColumns == 8 ? 3 : 2, kRingBytes = kStages * StageConfig::kStageBytes;
  static constexpr int kTileSums = StageConfig::kRows * kColumns, kXStageBytes = StageConfig::kStageK * 2 * kColumns;
};

template <int kColumns>
struct FewColumnsWgmmaConfig {
  static constexpr int kWarps = 16, kProducers = 4, kThreads = 32 * (kWarps + kProducers);
  static constexpr int kStages = 2, kRingBytes = kStages * StageConfig::kStageBytes;  // of weights, a warp
  static constexpr int kXStages = 8, kTileSums = StageConfig::kRows * kColumns;
  // A stage of x: [half][word of 8 k][product][eight columns][half of its k][column][8 k]. Words lie 32 bytes further
  // apart than they need, so that a warp's stores go to different banks.
  static constexpr int kProductBytes = 32 * kColumns, kWordBytes = 2 * kProductBytes + 32, kHalfBytes = 4 * kWordBytes,
                       kXStageBytes = 2 * kHalfBytes;
  // Barriers, x, rings, and sums of so many tiles.
  static constexpr int kBarrierBytes = kXStages * 16;
  static constexpr int shared_bytes(int tiles, int cluster, int splits) {
    return kBarrierBytes + kXStages * kXStageBytes + kWarps * kRingBytes +
           (tiles + cluster - 1) / cluster * cluster * splits * kTileSums * int(sizeof(float));
  }
};

struct ManyColumnsConfig {
  static constexpr int kGroups = 4, kFewestGroups = 2, kWarps = 4 * kGroups, kScaleWarps = 3,
                       kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64, kStageK = 128, kProducts = kStageK / 16;  // of a warpgroup
  static constexpr int kCodeBytes = kRows * kStageK / 2, kScaleBytes = kRows * kStageK / int(hopwell::nvfp4::kBlock);
  static constexpr int kMathRegisters = 112, kOtherRegisters = 32, kArrangeThreads = 256;
  static constexpr int stages(int columns) { return columns > 32 ? 4 : 8; }
  static constexpr int stage_bytes(int columns) { return 2 * kStageK * columns + kGroups * (kCodeBytes + kScaleBytes); }
  // Stages and their barriers, aligned to 128.
  static constexpr int shared_bytes(int columns) {
    return (stages(columns) * (stage_bytes(columns) + 16) + 127) / 128 * 128;
  }
};

// ---- plans ---------------------------------------------------------------------------------------------------------

struct ProblemShape {
  std::int64_t rows = 0, k = 0, columns = 1, batches = 1;  // columns of x
  bool x_is_16_bit = true;                                 // or codes
  bool can_copy = true;                                    // operands are aligned as asynchronous copies need
};
ProblemShape shape_of(const LinearProblem& p);
ProblemShape shape_of(const GemvProblem& p);

enum class Kernel { kGeneral, kOneColumn, kFewColumns, kFewColumnsWgmma, kManyColumns };

// The kernel that is fastest for a shape, as measured on an H200.
//
//     columns    rows                     with wgmma         without
//     1                                   kOneColumn         kOneColumn
//     2 to 8     up to 4,096              kFewColumnsWgmma   kFewColumns
//                more                     kFewColumns        kFewColumns
//     9 to 16    up to 16,384, or long K  kFewColumnsWgmma   kFewColumns
//                more, K up to 4,096      kFewColumns        kFewColumns: all of x fits beside many rows
//     17 to 32   up to 2,048              kFewColumns        kFewColumns
//     above 16   others                   kManyColumns       kFewColumns: 16 columns at a time
//
// x in fp32 and what cannot be copied go to kGeneral.
Kernel choose_kernel(const ProblemShape& shape, bool has_wgmma);
// The reason why kFewColumns is faster than the kernels with wgmma, or null if it is not.
const char* slower_than_sm80(const ProblemShape& shape);

// Which side of nvfp4_matmul is decoded, as x, where no kernel multiplies codes by codes: b if it has fewer rows than a,
// and at most 16; else a. A row's codes are K / 2 bytes, decoded they are written and read again as 2 K each, so the side
// of fewer rows costs less; the other side's codes are read where they lie, once for all columns of a tile. With more
// than 16 columns products bound, not bytes, and results of neighbouring rows of b lie together, as Hopper's kernel for
// many columns stores them.
bool decodes_b(const MatmulProblem& p);

struct Plan {
  Kernel kernel = Kernel::kGeneral;
  int columns = 0;                      // of a tile
  int row_tiles = 0, column_tiles = 0;  // of the problem
  int lanes_per_row = 0;                // kGeneral: lanes that share a row of weights
  int warps = 0;                        // of a CTA, that multiply
  int cluster = 1, clusters = 0;        // CTAs of a cluster; clusters for each column tile (kManyColumns: in all)
  int slice = 0, phases = 1;
  int larger_warps = 0;             // kOneColumn: those that have all of a slice; the others have a stage less
  int row_groups = 1, splits = 1;   // warpgroups of a CTA: with rows of their own; that share rows
  int round_tiles = 0;              // at most
  std::size_t exchange_offset = 0;  // where in shared memory the CTAs of a cluster put sums for each other
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  std::int64_t cost = 0;  // to compare plans of one kernel, as measured on an H200

  // Neighbouring tiles for each cluster; the first `larger_clusters` have one more.
  [[nodiscard]] int tiles_per_cluster() const { return row_tiles / clusters; }
  [[nodiscard]] int larger_clusters() const { return row_tiles % clusters; }
  [[nodiscard]] int most_tiles() const { return tiles_per_cluster() + (larger_clusters() > 0 ? 1 : 0); }
  [[nodiscard]] bool splits_k() const { return cluster * splits > 1; }
};

// How many clusters of so many CTAs, of a kernel that needs all of a multiprocessor, run at a time.
using ClustersThatFit = std::function<int(int cluster)>;

// Why Hopper's and Blackwell's kernels do not support a problem whose can_copy is false.
inline constexpr const char* kNeedsForCopies =
    "needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at most 65536";

// The chosen kernel's plan; kGeneral where the device has too little shared memory.
Plan make_plan(const ProblemShape& shape, bool has_wgmma, const runtime::Device& device, const ClustersThatFit& fit);

}  // namespace hopwell::ops::nvfp4
