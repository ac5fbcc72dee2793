// nvfp4_matmul and nvfp4_gemv on Blackwell's tensor core, which multiplies e2m1 codes and applies their e4m3 scales.
//
//     y[row, column] = factor · Σ_k w[row, k] sw[row, k / 16] · x[column, k] sx[column, k / 16] + bias   in each batch
//
// Tile      128 rows of weights × 8, 32 or 128 columns of x for a CTA, or 256 × 256 for a pair of CTAs. nvfp4_gemv has
//           one column. A step is 256 of K: rows of 128 bytes. The steps of a tile alternate between the ranks (CTAs or
//           pairs) of a cluster. Rows and columns that do not exist are zeros
// Pair      products are tcgen05.mma.cta_group::2 with M = 256, issued by the first CTA. Each CTA holds its 128 rows of
//           weights and their sums, the codes of its 128 columns of x, and the scales of all columns
// Bound     up to 128 columns: memory. A step has 18,432 B of weights and scales, which take 690 cycles at a
//           multiprocessor's part of 7.2 TB/s. Its four products take 136 (8 columns) to 256 cycles (128 columns).
//           Pair: copies from L2, 32,768 B of codes a step and CTA, 655 cycles at 50 B per cycle; products take 512
// Roles     warps 0-3   scales     a thread loads the scales of one row of weights, and words of four scales of x, into
//                                  registers, kPrefetchDistance steps ahead. It stores them as tcgen05.cp reads them
//                       epilogue   the same warps, after the last product
//           warp 4      producer   boxes of codes, by TMA
//           warp 5      mma        for every 64 of K: copies of scales to tensor memory, one product
// Timeline  producer │ w 0 x 0 │ w 1 x 1 │ … as stages are free
//           scales   │ load 0 … 3 │ store 0, load 4 │ store 1, load 5 │ …    (pair: also waits for codes)
//           mma      │           │ cp cp mma (×4) 0 → empty │ cp cp mma (×4) 1 → empty │ … → done
//           epilogue │ one rank: tensor memory → y
//                    │ several: cluster barrier │ send the sums of 8 columns each to a rank, where codes were │ cluster
//                    │ barrier │ add in the order of ranks → y
// Budget    shared, a stage: 16,384 + 2,048 of weights, 128 a column of x, 2,048 for every 128 columns:
//           8 columns 5 stages 107,520, 32 columns 4 × 24,576 (two CTAs a multiprocessor); 128 columns 6 × 36,864 =
//           221,184, pair 5 × 38,912 = 194,560 (one). Tensor memory, in columns: D one for each column of x (16
//           at least), scales of weights 16, of x 16 for every 128 columns; allocated 64, 64, 256, pair 512
#pragma once

#include "arch/sm90/cluster.hpp"
#include "arch/sm90/tma.hpp"
#include "ops/nvfp4/kernels/operands.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tcgen05_panel.hpp"
#include "tile/gpu/tensor_memory.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

template <int kColumnsOfTile>
struct BlockScaledConfig {
  static constexpr int kRows = 128, kColumns = kColumnsOfTile, kK = 256, kRowBytes = kK / 2;
  static constexpr int kCtaGroup = kColumns > 128 ? 2 : 1;  // CTAs of a product
  static constexpr int kOwnColumns = kColumns / kCtaGroup;  // columns of x whose codes a CTA holds
  static constexpr int kTileRows = kRows * kCtaGroup;
  static constexpr int kMaxRanks = 8 / kCtaGroup;  // ranks that split K: a cluster has at most eight CTAs
  static constexpr int kStages = kColumns == 32 ? 4 : kColumns == 128 ? 6 : 5, kPrefetchDistance = 4;
  static constexpr int kCtas = kColumns <= 32 ? 2 : 1;  // CTAs of a multiprocessor
  static constexpr int kScaleWarps = 4, kScaleThreads = 32 * kScaleWarps;
  static constexpr int kProducerWarp = 4, kMmaWarp = 5, kThreads = 192;
  static constexpr int kWords = kK / 64;                      // words of four scales, of a row and step
  static constexpr int kScaleTiles = (kColumns + 127) / 128;  // ScaleTiles of x for 64 of K
  static constexpr int kWordsOfX = (kColumns * kWords + kScaleThreads - 1) / kScaleThreads;  // a thread's
  static constexpr int kChunk = 8;                                                           // columns of a store
  static constexpr uint32_t kCodeBytes = (kRows + kOwnColumns) * kRowBytes;
};

template <int kColumns>
struct BlockScaledTmem {  // scales take four columns for every 64 of K and 128 rows
  static constexpr int kD = 0, kScaleW = kColumns < 16 ? 16 : kColumns, kScaleX = kScaleW + 16;
  static constexpr int kAllocated = kColumns <= 32 ? 64 : 2 * kColumns;
  static_assert(kScaleX + 16 * BlockScaledConfig<kColumns>::kScaleTiles <= kAllocated);
};

/// Scales of 128 rows and 64 of K in the layout of tcgen05.cp.32x128b: row r at byte 16 (r mod 32) + 4 (r / 32).
struct alignas(128) ScaleTile {
  uint8_t bytes[512];
};

HOPWELL_DEVICE uint32_t& scales_of_row(ScaleTile& tile, int row) {
  return *reinterpret_cast<uint32_t*>(tile.bytes + row % 32 * 16 + row / 32 * 4);
}

template <int kColumns>
struct BlockScaledStorage {
  using Config = BlockScaledConfig<kColumns>;
  struct alignas(1024) Stage {
    uint8_t w[Config::kRows * Config::kRowBytes], x[Config::kOwnColumns * Config::kRowBytes];
  };
  Stage codes[Config::kStages];  // after the last product: sums [chunk of this CTA][rank][column][row]
  ScaleTile scale_w[Config::kStages][Config::kWords], scale_x[Config::kStages][Config::kWords][Config::kScaleTiles];
  tile::RingBarriers<Config::kStages> ring;  // full: scales
  arch::mbarrier codes_full[Config::kStages], done;
  tile::TensorMemory<BlockScaledTmem<kColumns>::kAllocated, Config::kCtaGroup> tmem;

  /// Sums of rank `from` for chunk `chunk` of the chunks that this CTA adds.
  HOPWELL_DEVICE float* sums(int chunk, int from, int ranks) {
    return reinterpret_cast<float*>(codes) + int64_t{chunk * ranks + from} * Config::kChunk * Config::kRows;
  }
};
template <int kColumns>
inline constexpr bool kBlockScaledFits =
    BlockScaledConfig<kColumns>::kCtas * (sizeof(BlockScaledStorage<kColumns>) + 1024) <= 228 * 1024;
template <int kColumns>
inline constexpr bool kSumsFit =
    (kColumns / BlockScaledConfig<kColumns>::kChunk + BlockScaledConfig<kColumns>::kMaxRanks - 1) *
        BlockScaledConfig<kColumns>::kChunk * BlockScaledConfig<kColumns>::kRows * sizeof(float) <=
    sizeof(BlockScaledStorage<kColumns>::codes);
static_assert(kSumsFit<8> && kSumsFit<32> && kSumsFit<128> && kSumsFit<256>);
static_assert(kBlockScaledFits<8> && kBlockScaledFits<32> && kBlockScaledFits<128> && kBlockScaledFits<256>);

template <class T>
struct BlockScaledParams {
  arch::TensorMap w, x;  // codes [L][rows][K / 2], [L][columns][K / 2] bytes
  Scales w_scales, x_scales;
  Result<T> result;
  int rows, columns, steps;  // steps of K, over all ranks
  double factor;
};

#if HOPWELL_HAS_SM100A

/// A row's scales: words of four scales at a distance of `word_bytes`.
struct ScaleRow {
  const uint8_t* at;
  int word_bytes, columns;  // columns: K / 16; 0 for a row that does not exist
  bool aligned;
};

HOPWELL_DEVICE ScaleRow scale_row(const Scales& scales, int row, int64_t batch, bool exists) {
  const uint8_t* at = scales.data + scales.offset(row, 0, batch);
  const bool aligned = reinterpret_cast<uintptr_t>(at) % 4 == 0;
  return {at, scales.blocked ? 512 : 4, exists ? int(scales.columns) : 0, aligned};
}

/// Scales 4 word … 4 word + 3. Scales beyond K are zeros and are not read, because padding of a blocked layout may be
/// NaN.
HOPWELL_DEVICE uint32_t load_scales(const ScaleRow& row, int word) {
  const uint8_t* at = row.at + int64_t{word} * row.word_bytes;
  const int left = row.columns - 4 * word;
  if (left >= 4 && row.aligned) return *reinterpret_cast<const uint32_t*>(at);
  uint32_t scales = 0;
  for (int i = 0; i < 4 && i < left; ++i) scales |= uint32_t{at[i]} << 8 * i;
  return scales;
}

/// Work of a CTA: its rows of the tile, and steps `rank`, rank + ranks, … of K. `half` is the CTA's index in its pair.
struct BlockScaledWork {
  int first_row, first_column, batch, columns;  // columns: from first_column to the end of x
  int half, rank, ranks, count;
  HOPWELL_DEVICE int step(int i) const { return rank + i * ranks; }
};

// ---- scales --------------------------------------------------------------------------------------------------------

/// Scales that a thread loads: a row of weights, and word thread % kWords of every 32nd column of x.
template <int kColumns>
struct ScaleSource {
  using Config = BlockScaledConfig<kColumns>;
  ScaleRow w, x[Config::kWordsOfX];

  template <class T>
  HOPWELL_DEVICE ScaleSource(const BlockScaledParams<T>& p, const BlockScaledWork& work) {
    const int row = work.first_row + arch::thread_index();
    w = scale_row(p.w_scales, row, work.batch, row < p.rows);
    HOPWELL_UNROLL
    for (int i = 0; i < Config::kWordsOfX; ++i)
      x[i] = scale_row(p.x_scales, work.first_column + column(i), work.batch, column(i) < work.columns);
  }
  HOPWELL_DEVICE static int column(int i) {
    return arch::thread_index() / Config::kWords + i * (Config::kScaleThreads / Config::kWords);
  }
  HOPWELL_DEVICE static int word() { return arch::thread_index() % Config::kWords; }
  HOPWELL_DEVICE static bool has_x() { return column(0) < kColumns; }
};

template <int kColumns>
struct StepScales {
  uint32_t w[BlockScaledConfig<kColumns>::kWords], x[BlockScaledConfig<kColumns>::kWordsOfX];
};

template <int kColumns>
HOPWELL_DEVICE StepScales<kColumns> load_step(const ScaleSource<kColumns>& from, int step) {
  using Config = BlockScaledConfig<kColumns>;
  StepScales<kColumns> scales;
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kWords; ++i) scales.w[i] = load_scales(from.w, step * Config::kWords + i);
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kWordsOfX; ++i)
    scales.x[i] = load_scales(from.x[i], step * Config::kWords + ScaleSource<kColumns>::word());
  return scales;
}

constexpr uint32_t kScaleSigns = 0x80808080, kCodeSigns = 0x88888888;

template <int kColumns>
HOPWELL_DEVICE void store_step(BlockScaledStorage<kColumns>& s, int stage, const StepScales<kColumns>& scales) {
  using Config = BlockScaledConfig<kColumns>;
  using Source = ScaleSource<kColumns>;
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kWords; ++i)
    scales_of_row(s.scale_w[stage][i], arch::thread_index()) = scales.w[i] & ~kScaleSigns;
  if (!Source::has_x()) return;
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kWordsOfX; ++i)
    scales_of_row(s.scale_x[stage][Source::word()][Source::column(i) / 128], Source::column(i) % 128) =
        scales.x[i] & ~kScaleSigns;
}

/// Negates the codes of a row's blocks whose scale, in word `i`, is negative.
HOPWELL_DEVICE void negate_codes(uint8_t* rows, int row, int i, uint32_t scales) {
  for (int j = 0; j < 4; ++j) {
    if (!(scales >> (8 * j + 7) & 1)) continue;
    auto* const codes = reinterpret_cast<uint32_t*>(rows + tile::swizzled(row, 2 * i + j / 2) + j % 2 * 8);
    codes[0] ^= kCodeSigns, codes[1] ^= kCodeSigns;
  }
}

/// The tensor core's scales are unsigned. If a scale is negative, which is rare, apply_signs() negates its codes.
template <int kColumns>
HOPWELL_DEVICE bool any_negative(const StepScales<kColumns>& scales) {
  uint32_t any = 0;
  HOPWELL_UNROLL
  for (const uint32_t word : scales.w) any |= word;
  HOPWELL_UNROLL
  for (const uint32_t word : scales.x) any |= word;
  return any & kScaleSigns;
}
template <int kColumns>
HOPWELL_DEVICE void apply_signs(BlockScaledStorage<kColumns>& s, int stage, const StepScales<kColumns>& scales,
                                int half) {
  using Config = BlockScaledConfig<kColumns>;
  using Source = ScaleSource<kColumns>;
  auto& codes = s.codes[stage];
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kWords; ++i) negate_codes(codes.w, arch::thread_index(), i, scales.w[i]);
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kWordsOfX; ++i) {
    const int own = Source::column(i) - half * Config::kOwnColumns;
    if (own >= 0 && own < Config::kOwnColumns) negate_codes(codes.x, own, Source::word(), scales.x[i]);
  }
}

/// Arrives at the barrier of the mma warp: a stage's scales are stored, and in a pair its codes have arrived.
template <int kColumns, class Slot>
HOPWELL_DEVICE void arrive_at_mma(const Slot& slot) {
  if constexpr (BlockScaledConfig<kColumns>::kCtaGroup == 1)
    arch::mbarrier_arrive(slot.full());
  else
    arch::mbarrier_arrive_cluster(arch::map_to_rank(arch::shared_address(&slot.full()), arch::cluster_rank() & ~1U));
}

template <int kColumns, class T>
HOPWELL_DEVICE void supply_scales(const BlockScaledParams<T>& p, BlockScaledStorage<kColumns>& s,
                                  const BlockScaledWork& work) {
  using Config = BlockScaledConfig<kColumns>;
  constexpr int kPrefetchDistance = Config::kPrefetchDistance;
  const ScaleSource<kColumns> from(p, work);
  StepScales<kColumns> ahead[kPrefetchDistance];
  HOPWELL_UNROLL
  for (int i = 0; i < kPrefetchDistance; ++i) ahead[i] = load_step(from, work.step(i));
  for (int first = 0; first < work.count; first += kPrefetchDistance) {
    HOPWELL_UNROLL
    for (int i = 0; i < kPrefetchDistance; ++i) {
      if (first + i >= work.count) break;
      const tile::RingSlot slot{s.ring, first + i};
      slot.wait_empty();
      store_step(s, slot.stage(), ahead[i]);
      const bool negative = any_negative(ahead[i]);
      // The mma warp of a pair cannot wait for the other CTA's codes, so these threads wait for codes before they
      // arrive.
      if (Config::kCtaGroup == 2 || negative) arch::mbarrier_wait(s.codes_full[slot.stage()], slot.parity());
      if (negative) apply_signs(s, slot.stage(), ahead[i], work.half);
      arch::fence_proxy_async();
      arch::syncwarp();
      if (arch::lane_index() == 0) arrive_at_mma<kColumns>(slot);
      ahead[i] = load_step(from, work.step(first + i + kPrefetchDistance));
    }
  }
}

// ---- codes and products --------------------------------------------------------------------------------------------

template <int kColumns, class T>
HOPWELL_DEVICE void load_codes(const BlockScaledParams<T>& p, BlockScaledStorage<kColumns>& s,
                               const BlockScaledWork& work) {
  using Config = BlockScaledConfig<kColumns>;
  for (int i = 0; i < work.count; ++i) {
    const tile::RingSlot slot{s.ring, i};
    auto& stage = s.codes[slot.stage()];
    const int byte = work.step(i) * Config::kRowBytes;
    arch::mbarrier& full = s.codes_full[slot.stage()];
    slot.wait_empty();
    arch::mbarrier_arrive_expect_tx(full, Config::kCodeBytes);
    arch::tma_load(arch::shared_address(stage.w), p.w, {byte, work.first_row, work.batch}, full);
    arch::tma_load(arch::shared_address(stage.x), p.x,
                   {byte, work.first_column + work.half * Config::kOwnColumns, work.batch}, full);
  }
}

/// Copies the scales of 64 of K and 128 rows to four columns of tensor memory. In a pair, each CTA copies its own
/// scales.
template <int kCtaGroup>
HOPWELL_DEVICE void copy_scales(uint32_t to, const ScaleTile& tile) {
  constexpr uint64_t kScales = arch::tcgen05_descriptor({arch::Swizzle::none, 16, 128});
  arch::tcgen05_copy<kCtaGroup, arch::CopyShape::b32x128_x4>(to,
                                                             arch::at_address(kScales, arch::shared_address(&tile)));
}

/// Commits the products so far to `barrier`, in a pair to the barriers of both CTAs.
template <int kCtaGroup>
HOPWELL_DEVICE void commit(arch::mbarrier& barrier, arch::Site site = arch::Site::current()) {
  if constexpr (kCtaGroup == 1)
    arch::tcgen05_commit<1>(barrier, site);
  else
    arch::tcgen05_commit_multicast<2>(barrier, uint16_t(3 << (arch::cluster_rank() & ~1U)), site);
}

/// Issues all products. One thread calls it, in a pair a thread of the first CTA.
template <int kColumns>
HOPWELL_DEVICE void multiply(BlockScaledStorage<kColumns>& s, const BlockScaledWork& work) {
  using Config = BlockScaledConfig<kColumns>;
  using Tmem = BlockScaledTmem<kColumns>;
  constexpr int kCtaGroup = Config::kCtaGroup;
  constexpr uint32_t kInstruction = arch::nvfp4_instruction_descriptor(Config::kTileRows, kColumns);
  for (int i = 0; i < work.count; ++i) {
    const tile::RingSlot slot{s.ring, i};
    const int stage = slot.stage();
    if constexpr (kCtaGroup == 1) {
      slot.wait_full();
      arch::mbarrier_wait(s.codes_full[stage], slot.parity());
    } else {
      arch::mbarrier_wait_cluster(slot.full(), slot.parity());
    }
    const uint64_t w = arch::at_address(tile::kTcgen05RowsAlongK, arch::shared_address(s.codes[stage].w)),
                   x = arch::at_address(tile::kTcgen05RowsAlongK, arch::shared_address(s.codes[stage].x));
    HOPWELL_UNROLL
    for (int k = 0; k < Config::kWords; ++k) {
      const uint32_t scale_w = arch::tmem_address(s.tmem, 0, Tmem::kScaleW + 4 * k),
                     scale_x = arch::tmem_address(s.tmem, 0, Tmem::kScaleX + 4 * Config::kScaleTiles * k);
      copy_scales<kCtaGroup>(scale_w, s.scale_w[stage][k]);
      HOPWELL_UNROLL
      for (int tile = 0; tile < Config::kScaleTiles; ++tile)
        copy_scales<kCtaGroup>(scale_x + uint32_t(4 * tile), s.scale_x[stage][k][tile]);
      arch::tcgen05_mma_nvfp4<kCtaGroup>(arch::tmem_address(s.tmem, 0, Tmem::kD), w + uint64_t(2 * k),
                                         x + uint64_t(2 * k), kInstruction, scale_w, scale_x, i + k > 0);
    }
    commit<kCtaGroup>(slot.empty());
  }
  commit<kCtaGroup>(s.done);
}

// ---- results -------------------------------------------------------------------------------------------------------

/// Sums of a thread's row in a chunk's columns.
using SumsOfChunk = float[8];

/// Loads a chunk's sums from tensor memory.
template <int kColumns>
HOPWELL_DEVICE void load_sums(const BlockScaledStorage<kColumns>& s, int chunk, SumsOfChunk& sums) {
  uint32_t bits[8];
  const int quarter = arch::warp_index() % 4;
  tile::load_tensor_memory(bits, arch::tmem_address(s.tmem, quarter * 32, BlockScaledTmem<kColumns>::kD + 8 * chunk));
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) sums[i] = arch::bit_cast<float>(bits[i]);
}

template <class T>
HOPWELL_DEVICE void store_chunk(const BlockScaledParams<T>& p, const BlockScaledWork& work, int chunk,
                                const SumsOfChunk& sums) {
  struct alignas(16) Values {
    T of_column[8];
  };
  const int row = work.first_row + arch::thread_index(), column = work.first_column + 8 * chunk;
  const int columns = work.columns - 8 * chunk;
  if (row >= p.rows) return;
  Values values;
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i)
    if (i < columns) values.of_column[i] = p.result.value(row, column + i, p.factor, sums[i]);
  T* const to = p.result.at(row, column, work.batch);
  if (columns >= 8 && p.result.column_stride == 1 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    arch::store_vector(to, values);
    return;
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i)
    if (i < columns) to[i * p.result.column_stride] = values.of_column[i];
}

template <int kColumns, class T>
HOPWELL_DEVICE void store_tile(const BlockScaledParams<T>& p, const BlockScaledStorage<kColumns>& s,
                               const BlockScaledWork& work) {
  for (int chunk = 0; 8 * chunk < work.columns && chunk < kColumns / 8; ++chunk) {
    SumsOfChunk sums;
    load_sums(s, chunk, sums);
    store_chunk(p, work, chunk, sums);
  }
}

/// Sends this CTA's sums to the CTAs that add them. The chunks belong to the ranks alternately.
template <int kColumns>
HOPWELL_DEVICE void send_sums(BlockScaledStorage<kColumns>& s, const BlockScaledWork& work) {
  using Config = BlockScaledConfig<kColumns>;
  for (int chunk = 0; 8 * chunk < work.columns && chunk < kColumns / 8; ++chunk) {
    SumsOfChunk sums;
    load_sums(s, chunk, sums);
    const float* slot = s.sums(chunk / work.ranks, work.rank, work.ranks) + arch::thread_index();
    const int rank = chunk % work.ranks * Config::kCtaGroup + work.half;
    const uint32_t to = arch::map_to_rank(arch::shared_address(slot), uint32_t(rank));
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i)
      if (8 * chunk + i < work.columns)
        arch::store_cluster(to + uint32_t(4 * Config::kRows * i), arch::bit_cast<uint32_t>(sums[i]));
  }
}

template <int kColumns, class T>
HOPWELL_DEVICE void add_sums(const BlockScaledParams<T>& p, BlockScaledStorage<kColumns>& s,
                             const BlockScaledWork& work) {
  using Config = BlockScaledConfig<kColumns>;
  for (int chunk = work.rank; 8 * chunk < work.columns && chunk < kColumns / 8; chunk += work.ranks) {
    SumsOfChunk sums = {};
    for (int from = 0; from < work.ranks; ++from) {
      const float* slot = s.sums(chunk / work.ranks, from, work.ranks) + arch::thread_index();
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i)
        if (8 * chunk + i < work.columns) sums[i] += slot[Config::kRows * i];
    }
    store_chunk(p, work, chunk, sums);
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

/// Barrier of a CTA's threads; with pairs, of the cluster.
template <int kColumns>
HOPWELL_DEVICE void sync_group(arch::Site site = arch::Site::current()) {
  if constexpr (BlockScaledConfig<kColumns>::kCtaGroup == 1)
    arch::syncthreads(site);
  else
    arch::cluster_sync(site);
}

template <int kColumns>
HOPWELL_DEVICE void set_up(BlockScaledStorage<kColumns>& s, int warp) {
  using Config = BlockScaledConfig<kColumns>;
  if (warp == Config::kProducerWarp && arch::elect_one()) {
    s.ring.init(Config::kScaleWarps * Config::kCtaGroup, 1);
    tile::init_barriers(1, s.codes_full, s.done);
    arch::fence_mbarrier_init();  // kept: PTX requires this fence for barriers; the fence below is for the zeros
  }
  if (warp == Config::kMmaWarp) s.tmem.allocate();
  if (kColumns % 128 != 0) {  // tcgen05.cp also copies scales of columns beyond the tile
    auto* const words = reinterpret_cast<uint32_t*>(s.scale_x);
    for (int i = arch::thread_index(); i < int(sizeof(s.scale_x) / 4); i += Config::kThreads) words[i] = 0;
    arch::fence_proxy_async();
  }
}

/// Epilogue. All warps call it, because of its barriers; warps 0-3 have sums.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const BlockScaledParams<T>& p, BlockScaledStorage<kColumns>& s,
                                  const BlockScaledWork& work, bool has_sums) {
  if (has_sums) tile::wait_tensor_memory(s.done, 0);
  if (work.ranks == 1) {
    if (has_sums) store_tile(p, s, work);
  } else {
    arch::cluster_sync();  // all products have read their codes, so sums may overwrite them
    if (has_sums) send_sums(s, work);
    arch::cluster_sync();
    if (has_sums) add_sums(p, s, work);
  }
  arch::tcgen05_fence_before_thread_sync();
  sync_group<kColumns>();
}

#endif

/// Grid [row tiles · CTAs of a cluster, column tiles, L]. A cluster has `ranks` CTAs or pairs.
template <int kColumns, class T>
__global__ void __launch_bounds__(BlockScaledConfig<kColumns>::kThreads, BlockScaledConfig<kColumns>::kCtas)
    nvfp4_matmul_block_scaled(const __grid_constant__ BlockScaledParams<T> p) {
#if HOPWELL_HAS_SM100A
  using Config = BlockScaledConfig<kColumns>;
  auto& s = arch::dynamic_smem<BlockScaledStorage<kColumns>>();
  const int warp = arch::warp_index(), cta = int(arch::cluster_rank()), ctas = int(arch::cluster_size());
  const int half = cta % Config::kCtaGroup, rank = cta / Config::kCtaGroup, ranks = ctas / Config::kCtaGroup;
  const arch::BlockIndex block = arch::block_index_3d();
  const BlockScaledWork work{.first_row = block.x / ctas * Config::kTileRows + half * Config::kRows,
                             .first_column = block.y * kColumns,
                             .batch = block.z,
                             .columns = p.columns - block.y * kColumns,
                             .half = half,
                             .rank = rank,
                             .ranks = ranks,
                             .count = (p.steps - rank + ranks - 1) / ranks};
  set_up(s, warp);
  sync_group<kColumns>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  if (warp < Config::kScaleWarps) {
    supply_scales(p, s, work);
  } else if (warp == Config::kProducerWarp) {
    if (arch::elect_one()) load_codes(p, s, work);
  } else if (half == 0 && arch::elect_one()) {
    multiply(s, work);
  }
  arch::syncwarp();  // kept: a lane branched off
  store_results(p, s, work, warp < Config::kScaleWarps);
  if (warp == Config::kMmaWarp) s.tmem.free();
#endif
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
