// Plans of nvfp4_gemv, nvfp4_linear and nvfp4_matmul on a GPU: the kernel, its tiles, and its split of K. Plain data,
// computed on the host from a shape and a device.
//
// tile      rows of weights × columns of x whose sums are in registers at the same time
// stage     number of k that one copy of weights covers: a slot of a ring in shared memory
// slice     range of k of a warp (one column) or of a CTA (other kernels), a whole number of stages
// cluster   CTAs with the same tiles and different slices; one CTA if K is not split over CTAs
// split     warpgroups of a CTA with the same rows; the stages of a slice alternate between them
// phase     a CTA has several slices, one after the other, if x of all of them does not fit in shared memory
// round     number of tiles after which the warps of a CTA add their sums and store results
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "ops/nvfp4/op.hpp"
#include "runtime/device.hpp"

namespace hopwell::ops::nvfp4 {

// ---- tiles and stages of the kernels -------------------------------------------------------------------------------

// A stage of one warp, in all kernels except the kernel for many columns.
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
  // Stages of a ring. The rest of shared memory stays L1 cache, because a copy uses only 16 bytes of a line of scales.
  static constexpr int kStages = kColumns == 8 ? 3 : 2, kRingBytes = kStages * StageConfig::kStageBytes;
  static constexpr int kTileSums = StageConfig::kRows * kColumns, kXStageBytes = StageConfig::kStageK * 2 * kColumns;
};

template <int kColumns>
struct FewColumnsWgmmaConfig {
  static constexpr int kWarps = 16, kProducers = 4, kThreads = 32 * (kWarps + kProducers);
  static constexpr int kStages = 2, kRingBytes = kStages * StageConfig::kStageBytes;  // a warp's ring of weights
  static constexpr int kXStages = 8, kTileSums = StageConfig::kRows * kColumns;
  // A stage of x: [half][word of 8 k][product][8 columns][half of the product's k][column][8 k]. Each word has 32 bytes
  // of padding, so that a warp's stores go to different banks.
  static constexpr int kProductBytes = 32 * kColumns, kWordBytes = 2 * kProductBytes + 32, kHalfBytes = 4 * kWordBytes,
                       kXStageBytes = 2 * kHalfBytes;
  // Barriers, x, rings, and the sums of `tiles` tiles.
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
  bool x_is_16_bit = true;                                 // true for codes as well
  bool can_copy = true;                                    // cp.async can copy the operands: kNeedsForCopies
};
ProblemShape shape_of(const LinearProblem& p);
ProblemShape shape_of(const GemvProblem& p);

enum class Kernel { kGeneral, kOneColumn, kFewColumns, kFewColumnsWgmma, kManyColumns };

// The fastest kernel for a shape, measured on an H200:
//
//     columns    rows                     with wgmma         without
//     1                                   kOneColumn         kOneColumn
//     2 to 8     up to 4,096              kFewColumnsWgmma   kFewColumns
//                more                     kFewColumns        kFewColumns
//     9 to 16    up to 16,384, or long K  kFewColumnsWgmma   kFewColumns
//                more, K up to 4,096      kFewColumns        kFewColumns: all of x fits in shared memory
//     17 to 32   up to 2,048              kFewColumns        kFewColumns
//     above 16   others                   kManyColumns       kFewColumns: 16 columns at a time
//
// kGeneral takes fp32 x, and operands that cp.async cannot copy.
Kernel choose_kernel(const ProblemShape& shape, bool has_wgmma);
// The reason for explain() if kFewColumns is faster than the kernels with wgmma; otherwise null.
const char* slower_than_sm80(const ProblemShape& shape);

// True if nvfp4_matmul decodes b on GPUs whose tensor cores do not multiply codes; it then becomes x. Otherwise a is x.
//
//     rows of b                      x   reason
//     fewer than a's, at most 16     b   memory bounds: a decoded row is 2 K bytes, written and read; codes are K / 2
//                                        bytes
//     others                         a   products bound, and results of neighbouring rows of b are contiguous, as the
//                                        kernel for many columns stores them
bool decodes_b(const MatmulProblem& p);

struct Plan {
  Kernel kernel = Kernel::kGeneral;
  int columns = 0;                      // of a tile
  int row_tiles = 0, column_tiles = 0;  // of the problem
  int lanes_per_row = 0;                // kGeneral: lanes that share a row of weights
  int warps = 0;                        // multiplying warps of a CTA
  int cluster = 1, clusters = 0;        // CTAs of a cluster; clusters of a column tile (kManyColumns: of the grid)
  int slice = 0, phases = 1;
  int larger_warps = 0;             // kOneColumn: warps with a whole slice; the others have one stage less
  int row_groups = 1, splits = 1;   // warpgroups of a CTA with different rows; warpgroups with the same rows
  int round_tiles = 0;              // most tiles of a round
  std::size_t exchange_offset = 0;  // of the sums that the CTAs of a cluster exchange, in shared memory
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  std::int64_t cost = 0;  // estimate, comparable between plans of one kernel

  // A cluster has this many consecutive tiles. The first `larger_clusters()` clusters have one more.
  [[nodiscard]] int tiles_per_cluster() const { return row_tiles / clusters; }
  [[nodiscard]] int larger_clusters() const { return row_tiles % clusters; }
  [[nodiscard]] int most_tiles() const { return tiles_per_cluster() + (larger_clusters() > 0 ? 1 : 0); }
  [[nodiscard]] bool splits_k() const { return cluster * splits > 1; }
};

// Number of clusters of `cluster` CTAs that run at the same time, for a kernel with one CTA per multiprocessor.
using ClustersThatFit = std::function<int(int cluster)>;

// The reason for explain() if can_copy is false, on Hopper and Blackwell.
inline constexpr const char* kNeedsForCopies =
    "needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at most 65536";

// The plan of the kernel that choose_kernel() returns; kGeneral if the device has too little shared memory for it.
Plan make_plan(const ProblemShape& shape, bool has_wgmma, const runtime::Device& device, const ClustersThatFit& fit);

}  // namespace hopwell::ops::nvfp4
