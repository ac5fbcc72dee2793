// nvfp4_linear for more than 16 columns of x on Hopper, by wgmma: weights are decoded where they are multiplied.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      256 or 128 rows × 32, 64, 96 or 128 columns a CTA, by stages of 128 k
// Roles     warpgroups 0 to 3   multiply   64 rows each: weights from shared memory, decoded into wgmma's A registers; where
//                                          a tile has fewer rows, warpgroups with the same rows take stages in turn (`splits`)
//           warp 16             copies     codes (a box of the tensor) and x (as it lies in the workspace), by the copy engine
//           warps 17 to 19      scales     8 bytes a row and stage, by cp.async: they may lie blocked, and end anywhere
// Timeline  arrange    x to the workspace, in the order of wgmma's B: what a stage wants of a tile lies together
//           copies     s0 s1 s2 s3 │ s4 …                a ring of stages that goes on from tile to tile
//           multiply   w0 ▓▓ w1 ▓▓ w2 ▓▓ …               a word of 8 codes is decoded while the products of the last one run,
//                                                        and those of the other three warpgroups
// Sums      in registers to the end. Where there are few tiles, the CTAs of a cluster have a slice of K each; their
//           sums are then exchanged through shared memory, and each adds up some of the columns: always in one order
// Range     as in few_columns.hpp
// Budget    shared: 4 stages × (16,384 codes + 2,048 scales + 256 a column), 8 of 32 columns; at most 204,928 B
//           registers: 128 columns 64 sums + 8 weights + 8 codes + ~25 (112), others 32
// Bound     128 columns: the tensor cores; 32 and 64: decoding, ~25 instructions for a product of 16 k
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/nvfp4/kernels/scaled_weights.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

template <int kColumns>
struct ManyColumnsStage {
  static constexpr int kProductBytes = 32 * kColumns;
  unsigned char
      x[2 * ManyColumnsConfig::kStageK * kColumns];  // [product][eight columns][half of its 16 k][column][8 k]
  unsigned char codes[ManyColumnsConfig::kGroups * ManyColumnsConfig::kCodeBytes];    // [row][128 k]
  unsigned char scales[ManyColumnsConfig::kGroups * ManyColumnsConfig::kScaleBytes];  // [row][8]
};

template <int kColumns>
struct ManyColumnsStorage {
  static constexpr int kStages = ManyColumnsConfig::stages(kColumns);
  // Warpgroups that take stages in turn come to a stage of the ring again one phase later, not two, which they could
  // not tell apart; and each keeps its last stage until it has begun the next.
  static_assert(kStages % ManyColumnsConfig::kGroups == 0 &&
                kStages > ManyColumnsConfig::kGroups / ManyColumnsConfig::kFewestGroups);

  alignas(128) ManyColumnsStage<kColumns> stages[kStages];  // in the end, where shares are exchanged, sums
  tile::RingBarriers<kStages> barriers;
};
static_assert(sizeof(ManyColumnsStorage<32>) == ManyColumnsConfig::shared_bytes(32));
static_assert(sizeof(ManyColumnsStorage<64>) == ManyColumnsConfig::shared_bytes(64));
static_assert(sizeof(ManyColumnsStorage<96>) == ManyColumnsConfig::shared_bytes(96));
static_assert(sizeof(ManyColumnsStorage<128>) == ManyColumnsConfig::shared_bytes(128));

template <int kColumns>
using StageCursor = tile::RingCursor<ManyColumnsStorage<kColumns>::kStages>;

struct ManyColumnsParams {
  arch::TensorMap codes;  // boxes of 64 bytes and all rows of a tile
  Scales scales;
  const unsigned char* x;  // as arranged
  Global factor;
  int rows, k, columns;
  int stages, stages_per_cta;
  int row_tiles, column_tiles;
  int row_groups, splits,
      cluster;  // warpgroups side by side; that share a CTA's stages; CTAs of a cluster, that share K
  bool whole_scales;
};

// ---- x -------------------------------------------------------------------------------------------------------------

template <class T>
struct ArrangeParams {
  const T* x;
  int64_t x_stride;
  unsigned char* to;
  int k, columns, stages, column_tiles;
};

// x in the order of the stages of column tiles. Thread: a column's four vectors of 8 k, 32 apart, which meet the same
// word of codes of four lanes; as pairs (k, k + 4) they make four core matrix rows, two halves of 16 k for each of two
// products.
template <int kColumns, class T>
__global__ void __launch_bounds__(ManyColumnsConfig::kArrangeThreads)
    nvfp4_linear_arrange_x(const __grid_constant__ ArrangeParams<T> p) {
  using Stage = ManyColumnsStage<kColumns>;
  tile::launch_dependents();
  const int thread = arch::block_index() * ManyColumnsConfig::kArrangeThreads + arch::thread_index(),
            word = thread / 8 % 4;
  const int column_of_tile = thread / 32 % (kColumns / 8) * 8 + thread % 8, tile_stage = thread / (4 * kColumns);
  const int stage = tile_stage % p.stages, tile = tile_stage / p.stages;
  if (tile >= p.column_tiles) return;
  tile::wait_for_prior_kernels();
  const int column = tile * kColumns + column_of_tile, k = stage * ManyColumnsConfig::kStageK + 8 * word;
  uint32_t rows[4][4];
  HOPWELL_UNROLL
  for (int lane = 0; lane < 4; ++lane) {
    arch::Words4 v{{0, 0, 0, 0}};
    if (column < p.columns && k + 32 * lane < p.k)
      v = arch::load_vector<arch::Words4>(p.x + column * p.x_stride + k + 32 * lane);
    const arch::Words4 pairs = as_pairs(v);
    HOPWELL_UNROLL
    for (int row = 0; row < 4; ++row) rows[row][lane] = pairs.w[row];
  }
  unsigned char* const to = p.to + int64_t{tile_stage} * int64_t{sizeof(Stage::x)} + 2 * word * Stage::kProductBytes +
                            column_of_tile / 8 * 256 + column_of_tile % 8 * 16;
  HOPWELL_UNROLL
  for (int row = 0; row < 4; ++row) {
    const arch::Words4 words{{rows[row][0], rows[row][1], rows[row][2], rows[row][3]}};
    arch::store_vector(to + row / 2 * Stage::kProductBytes + row % 2 * 128, words);
  }
}

// ---- tiles of a CTA ------------------------------------------------------------------------------------------------

// A CTA's tiles one after another: neighbouring CTAs have neighbouring columns, and the same rows.
struct TileScheduler {
  int tile, rank, begin, end;  // stages of K

  HOPWELL_DEVICE explicit TileScheduler(const ManyColumnsParams& p)
      : tile(arch::block_index() / p.cluster), rank(arch::block_index() % p.cluster), begin(rank * p.stages_per_cta) {
    end = begin + p.stages_per_cta < p.stages ? begin + p.stages_per_cta : p.stages;
  }
  HOPWELL_DEVICE bool more(const ManyColumnsParams& p) const { return tile < p.row_tiles * p.column_tiles; }
  HOPWELL_DEVICE void advance(const ManyColumnsParams& p) { tile += arch::grid_size() / p.cluster; }
  HOPWELL_DEVICE int first_row(const ManyColumnsParams& p) const {
    return tile / p.column_tiles * p.row_groups * ManyColumnsConfig::kRows;
  }
  HOPWELL_DEVICE int column_tile(const ManyColumnsParams& p) const { return tile % p.column_tiles; }
};

// ---- producers -----------------------------------------------------------------------------------------------------

template <int kColumns>
HOPWELL_DEVICE void copy_stages(const ManyColumnsParams& p, ManyColumnsStorage<kColumns>& s) {
  using Stage = ManyColumnsStage<kColumns>;
  if (arch::lane_index() != 0) return;
  const uint32_t bytes = uint32_t(sizeof(Stage::x)) + uint32_t(p.row_groups * ManyColumnsConfig::kCodeBytes);
  StageCursor<kColumns> at{s.barriers};
  for (TileScheduler tiles(p); tiles.more(p); tiles.advance(p)) {
    const unsigned char* x = p.x + (int64_t{tiles.column_tile(p)} * p.stages + tiles.begin) * int64_t{sizeof(Stage::x)};
    HOPWELL_NO_UNROLL
    for (int i = tiles.begin; i < tiles.end; ++i, at.advance(1), x += sizeof(Stage::x)) {
      at.wait_empty();
      arch::mbarrier& full = at.full();
      arch::mbarrier_arrive_expect_tx(full, bytes);
      arch::tma_load<2>(arch::shared_address(s.stages[at.stage()].codes), p.codes,
                        {i * ManyColumnsConfig::kStageK / 2, tiles.first_row(p)}, full);
      arch::bulk_load(arch::shared_address(s.stages[at.stage()].x), x, uint32_t(sizeof(Stage::x)), full);
    }
  }
}

// One of the warps that bring scales: every third 32 rows. Zeros where K has ended; rows beyond the last one are that
// one again.
template <int kColumns>
HOPWELL_DEVICE void copy_scales(const ManyColumnsParams& p, ManyColumnsStorage<kColumns>& s, int number) {
  constexpr int kScales = ManyColumnsConfig::kStageK / kCodesPerBlock;  // of a row
  constexpr int kWarps = ManyColumnsConfig::kScaleWarps,
                kRowsOfLane = (ManyColumnsConfig::kGroups * 2 + kWarps - 1) / kWarps;
  const int first = 32 * number + arch::lane_index(), rows = p.row_groups * ManyColumnsConfig::kRows;
  const int step = p.scales.blocked ? 512 : 4;  // of four scales
  StageCursor<kColumns> at{s.barriers};
  for (TileScheduler tiles(p); tiles.more(p); tiles.advance(p)) {
    const uint8_t* from[kRowsOfLane];
    HOPWELL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = tiles.first_row(p) + first + 32 * kWarps * i;
      from[i] = p.scales.data + p.scales.offset(row < p.rows ? row : p.rows - 1, kScales * tiles.begin, 0);
    }
    HOPWELL_NO_UNROLL
    for (int stage = tiles.begin; stage < tiles.end; ++stage, at.advance(1)) {
      at.wait_empty();
      const int left = p.k / kCodesPerBlock - kScales * stage;
      const uint32_t to = arch::shared_address(s.stages[at.stage()].scales) + uint32_t(kScales * first);
      HOPWELL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        if (first + 32 * kWarps * i >= rows) break;
        if (p.whole_scales && left >= kScales)
          arch::cp_async<8>(to + uint32_t(32 * kWarps * kScales * i), from[i]);
        else
          for (int half = 0; half < 2; ++half)
            arch::cp_async<4>(to + uint32_t(32 * kWarps * kScales * i + 4 * half), from[i] + half * step,
                              clamp_bytes(left - 4 * half, 4));
        from[i] += 2 * step;
      }
      arch::cp_async_mbarrier_arrive_noinc(at.full());
    }
  }
  arch::cp_async_wait_all();
}

// ---- products ------------------------------------------------------------------------------------------------------

// A lane's rows of a fragment, g and g + 8, are these of the warp's 16, and the second after: so the four lanes of a
// column of results have 16 neighbours.
HOPWELL_DEVICE int fragment_row() { return arch::lane_index() / 8 * 4 + arch::lane_index() / 4 % 2; }

// Starts to add the products of 64 rows and a stage's 128 k to d. While one word's products run, the next is decoded;
// those of the last word still run at the end. done_before(): the products of the stage before have been made.
template <int kColumns, class T, class Function>
HOPWELL_DEVICE void multiply_stage(const ManyColumnsStage<kColumns>& stage, int first_row, float (&d)[kColumns / 2],
                                   Function done_before) {
  constexpr arch::WgmmaOptions kOptions{.type =
                                            std::is_same_v<T, bf16> ? arch::WgmmaType::bf16 : arch::WgmmaType::fp16};
  constexpr int kGrouped =
      kColumns > 96 ? 1 : 2;  // products: with two, ptxas has no registers and serialises them (C7512)
  const int offset = 4 * (first_row + fragment_row()) + arch::lane_index() % 4;
  const auto* const codes = reinterpret_cast<const arch::Words4*>(stage.codes) + offset;
  const auto* const scales = reinterpret_cast<const uint16_t*>(stage.scales) + offset;
  const arch::Words4 upper = codes[0], lower = codes[4 * 2];
  const RowPair<T> rows{ScaledWeights<T>(scales[0]), ScaledWeights<T>(scales[4 * 2])};
  const uint64_t x =
      arch::at_address(arch::wgmma_descriptor({arch::Swizzle::none, 128, 256}), arch::shared_address(stage.x));
  uint32_t weights[2][kGrouped][4];
  HOPWELL_UNROLL
  for (int i = 0; i < ManyColumnsConfig::kProducts; i += kGrouped) {
    auto& products = weights[i / kGrouped % 2];
    HOPWELL_UNROLL
    for (int j = 0; j < kGrouped; ++j) {
      const int word = (i + j) / 2, half = (i + j) % 2 * 2;
      uint32_t a[4], b[4];
      rows.decode(word, upper.w[word], lower.w[word], a, b);
      products[j][0] = a[half], products[j][1] = b[half];
      products[j][2] = a[half + 1], products[j][3] = b[half + 1];
    }
    arch::wgmma_fence();
    HOPWELL_UNROLL
    for (int j = 0; j < kGrouped; ++j)
      arch::wgmma_rs<kOptions>(d, products[j], x + uint64_t((i + j) * ManyColumnsStage<kColumns>::kProductBytes >> 4),
                               true);
    arch::wgmma_commit();
    arch::wgmma_wait<1>();  // the next products' weights go where the last ones' were
    if (i == 0) done_before();
  }
}

// ---- results -------------------------------------------------------------------------------------------------------

// Where a warp's 16 rows of results go.
template <class T>
struct Epilogue {
  const Result<T>& result;
  double factor;
  float exact_factor;    // the same, if nothing else is needed
  bool is_exact, whole;  // whole: four rows may be stored at once
  int first, rows, columns;
  double offsets[2];  // of this lane's fragment rows

  HOPWELL_DEVICE Epilogue(const ManyColumnsParams& p, const Result<T>& to, double factor, int first_row)
      : result(to), factor(factor), exact_factor(float(factor)), first(first_row), rows(p.rows), columns(p.columns) {
    is_exact = !to.bias && double(exact_factor) == factor;
    whole = first + 16 <= rows && reinterpret_cast<uintptr_t>(to.y) % 8 == 0 && to.column_stride % 4 == 0;
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first + fragment_row() + 2 * i;
      offsets[i] = to.bias && row < rows ? double(to_fp32(to.bias[row * to.bias_row_stride])) : 0;
    }
  }

  // Eight columns from this one on: fragments' columns 2 t and 2 t + 1 of rows g and g + 8 become four rows of a
  // column.
  HOPWELL_DEVICE void store(int column, float s0, float s1, float s2, float s3) const {
    const int lane = arch::lane_index(), from = lane % 4 * 8 + lane / 8;
    uint32_t four[2] = {pack(s0, s1, 0), pack(s2, s3, 1)};
    HOPWELL_UNROLL
    for (uint32_t& two : four) {
      const uint32_t even = arch::shuffle(two, from), odd = arch::shuffle(two, from + 4);
      two = lane / 4 % 2 == 0 ? arch::permute_bytes<0x5410>(even, odd) : arch::permute_bytes<0x7632>(even, odd);
    }
    column += lane / 4;
    if (column >= columns) return;
    T* const to = result.y + column * result.column_stride + first + lane % 4 * 4;
    if (whole) {
      arch::store_vector(to, arch::Words2{{four[0], four[1]}});
      return;
    }
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)
      if (first + lane % 4 * 4 + i < rows) to[i] = T{uint16_t(four[i / 2] >> 16 * (i % 2))};
  }

 private:
  HOPWELL_DEVICE uint32_t pack(float low, float high, int row) const {
    if (is_exact)
      low *= exact_factor, high *= exact_factor;
    else
      low = float(factor * double(low) + offsets[row]), high = float(factor * double(high) + offsets[row]);
    if constexpr (std::is_same_v<T, bf16>)
      return arch::pack_bf16(low, high);
    else
      return arch::pack_fp16(low, high);
  }
};

// Each split of each CTA of a cluster adds up an equal part of a tile's columns, for its 64 rows. Every warpgroup gives
// each of them its sums: [split][row group][from][register][thread].
template <int kColumns, class T>
HOPWELL_DEVICE void exchange_sums(const ManyColumnsParams& p, const TileScheduler& tiles, const Epilogue<T>& epilogue,
                                  float* sums, int row_group, int split, const float (&d)[kColumns / 2]) {
  const int shares = p.cluster * p.splits, registers = kColumns / 2 / shares, own = tiles.rank * p.splits + split;
  const auto offset = [&](int owner, int from, int number) {
    return (((owner % p.splits * p.row_groups + row_group) * shares + from) * registers + number) * 128 +
           arch::thread_index() % 128;
  };
  const auto sync_all = [&] {
    p.cluster > 1 ? arch::cluster_sync() : arch::barrier_sync(1, 128 * ManyColumnsConfig::kGroups);
  };
  sync_all();  // all have read all stages; warps that bring them have ended, and are not waited for
  HOPWELL_UNROLL
  for (int j = 0; j < kColumns / 2; j += 4) {
    const int owner = j / registers;
    const uint32_t here = arch::shared_address(sums + offset(owner, own, j - owner * registers));
    const uint32_t to = arch::map_to_rank(here, uint32_t(owner / p.splits));
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) arch::store_cluster(to + uint32_t(512 * i), arch::bit_cast<uint32_t>(d[j + i]));
  }
  sync_all();
  for (int number = 0; number < registers; number += 4) {
    float all[4] = {};
    for (int from = 0; from < shares; ++from) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) all[i] += sums[offset(own, from, number + i)];
    }
    epilogue.store(tiles.column_tile(p) * kColumns + 2 * (own * registers + number), all[0], all[1], all[2], all[3]);
  }
}

// This warp's first row of a tile. Found from the thread's number each time: no register holds it while products run.
HOPWELL_DEVICE int row_of_warp(const ManyColumnsParams& p) {
  const int warp = arch::thread_index_anew() / 32;
  return warp / 4 % p.row_groups * ManyColumnsConfig::kRows + warp % 4 * 16;
}

template <int kColumns, class T>
HOPWELL_DEVICE void multiply(const ManyColumnsParams& p, const Result<T>& result, ManyColumnsStorage<kColumns>& s,
                             int warpgroup) {
  const int row_group = warpgroup % p.row_groups, split = warpgroup / p.row_groups;
  const int row_of_tile = row_of_warp(p);
  const Global global = p.factor.loaded();
  StageCursor<kColumns> at{s.barriers, split};
  for (TileScheduler tiles(p); tiles.more(p); tiles.advance(p)) {
    float d[kColumns / 2] = {};
    int last = -1;  // of the ring
    const auto release = [&] {
      arch::syncwarp();
      if (arch::lane_index() == 0 && last >= 0) arch::mbarrier_arrive(s.barriers.empty[last]);
    };
    HOPWELL_NO_UNROLL
    for (int i = tiles.begin + split; i < tiles.end; i += p.splits, at.advance(p.splits)) {
      at.wait_full();
      multiply_stage<kColumns, T>(s.stages[at.stage()], row_of_tile, d, release);
      last = at.stage();
    }
    arch::wgmma_wait<0>(d);
    release();
    const Epilogue<T> epilogue(p, result, global.get() * ScaledWeights<T>::kUnit, tiles.first_row(p) + row_of_warp(p));
    if (p.cluster * p.splits > 1)
      return exchange_sums<kColumns>(p, tiles, epilogue, reinterpret_cast<float*>(s.stages), row_group, split, d);
    HOPWELL_UNROLL
    for (int j = 0; j < kColumns / 2; j += 4)
      epilogue.store(tiles.column_tile(p) * kColumns + 2 * j, d[j], d[j + 1], d[j + 2], d[j + 3]);
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <int kColumns, class T>
__global__ void __launch_bounds__(ManyColumnsConfig::kThreads, 1)
    nvfp4_linear_many_columns(const __grid_constant__ ManyColumnsParams p, const __grid_constant__ Result<T> result) {
  auto& s = arch::dynamic_smem<ManyColumnsStorage<kColumns>>();
  const int warpgroup = arch::warpgroup_index(), warp = arch::warp_index();
  if (arch::thread_index() == 0) {
    s.barriers.init(1 + 32 * ManyColumnsConfig::kScaleWarps, uint32_t(4 * p.row_groups));
    arch::fence_mbarrier_init();
  }
  tile::launch_dependents();
  arch::syncthreads();
  tile::wait_for_prior_kernels();
  if (warpgroup < ManyColumnsConfig::kGroups) {
    arch::setmaxnreg_inc<ManyColumnsConfig::kMathRegisters>();
    multiply<kColumns>(p, result, s, warpgroup);
  } else {
    arch::setmaxnreg_dec<ManyColumnsConfig::kOtherRegisters>();
    if (warp == ManyColumnsConfig::kWarps)
      copy_stages(p, s);
    else
      copy_scales(p, s, warp - ManyColumnsConfig::kWarps - 1);
  }
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
