// nvfp4_linear for more than 16 columns of x on Hopper, by wgmma: the mma warpgroups decode the weights.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      256 or 128 rows × 32, 64, 96 or 128 columns for a CTA; stages of 128 k
// Roles     warpgroups 0 to 3   mma                 64 rows each: decode weights from shared memory into wgmma's A
//                                                   registers. With 128 rows, two warpgroups have the same rows, and
//                                                   stages alternate between them (`splits`)
//           warp 16             producer (TMA)      codes, a box of the tensor, and x, contiguous in the workspace
//           warps 17 to 19      producer (scales)   8 bytes a row and stage, by cp.async, because scales may be blocked
//                                                   and K may end anywhere
// Timeline  a kernel before    arranges x in the workspace in the order of wgmma's B: a stage of a column tile is
//                              contiguous
//           producers          s0 s1 s2 s3 │ s4 …        a ring of stages that continues from tile to tile
//           mma                w0 ▓▓ w1 ▓▓ w2 ▓▓ …       a warpgroup decodes a word of 8 codes while the products of the
//                                                        previous word, and of other warpgroups, run
// Sums      in registers to the end of a tile. If there are few tiles, the CTAs of a cluster split K. They exchange sums
//           through DSMEM, and each CTA adds some of the columns, always in the same order
// Range     as in few_columns.hpp
// Budget    shared: 4 stages × (16,384 codes + 2,048 scales + 256 a column), 32 columns 8 stages; at most 204,928 B
//           registers: mma, 128 columns: 64 sums + 8 weights + 8 codes + ~25 (112); producers 32
// Bound     128 columns: the tensor cores; 32 and 64: decoding, ~25 instructions for a product of 16 k
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/nvfp4/kernels/scaled_weights.hpp"
#include "tile/gpu/fragment.hpp"
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
  // If stages alternate between warpgroups, a warpgroup returns to a stage of the ring after one phase of its barrier,
  // because parity does not distinguish a phase from the phase after the next. A warpgroup holds a stage until it has
  // started the next stage.
  static_assert(kStages % ManyColumnsConfig::kGroups == 0 &&
                kStages > ManyColumnsConfig::kGroups / ManyColumnsConfig::kFewestGroups);

  alignas(128) ManyColumnsStage<kColumns> stages[kStages];  // after the main loop, if K is split: sums
  tile::RingBarriers<kStages> barriers;
};
static_assert(sizeof(ManyColumnsStorage<32>) == ManyColumnsConfig::shared_bytes(32));
static_assert(sizeof(ManyColumnsStorage<64>) == ManyColumnsConfig::shared_bytes(64));
static_assert(sizeof(ManyColumnsStorage<96>) == ManyColumnsConfig::shared_bytes(96));
static_assert(sizeof(ManyColumnsStorage<128>) == ManyColumnsConfig::shared_bytes(128));

template <int kColumns>
using StageCursor = tile::RingCursor<ManyColumnsStorage<kColumns>::kStages>;

struct ManyColumnsParams {
  arch::TensorMap codes;  // boxes: 64 bytes of all rows of a tile
  Scales scales;
  const unsigned char* x;  // arranged by nvfp4_linear_arrange_x
  Global factor;
  int rows, k, columns;
  int stages, stages_per_cta;
  int row_tiles, column_tiles;
  int row_groups, splits,
      cluster;  // warpgroups with different rows; warpgroups with the same rows; CTAs that split K
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

// Writes x in the order of the stages of column tiles, see ManyColumnsStage::x. A thread loads four 8-element vectors
// of a column, at k, k + 32, k + 64 and k + 96. The four lanes of a quad multiply them by the same word of codes.
// Reordered to pairs (k, k + 4) they are four core matrix rows: two products, and two halves of 16 k for each.
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

// Iterates over a CTA's tiles. Consecutive tiles have the same rows and the next columns.
struct TileScheduler {
  int tile, rank, begin, end;  // begin, end: stages of K

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

// A warp that copies scales: 32 rows of every 96, from row 32 · `number` on. Scales beyond the end of K are zeros. Rows
// beyond the matrix repeat its last row.
template <int kColumns>
HOPWELL_DEVICE void copy_scales(const ManyColumnsParams& p, ManyColumnsStorage<kColumns>& s, int number) {
  constexpr int kScales = ManyColumnsConfig::kStageK / kCodesPerBlock;  // of a row and stage
  constexpr int kWarps = ManyColumnsConfig::kScaleWarps,
                kRowsOfLane = (ManyColumnsConfig::kGroups * 2 + kWarps - 1) / kWarps;
  const int first = 32 * number + arch::lane_index(), rows = p.row_groups * ManyColumnsConfig::kRows;
  const int step = p.scales.blocked ? 512 : 4;  // bytes from four scales to the next four
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

// Row, among the warp's 16 rows, that is row g of the lane's fragment; row g + 8 is two rows further. With this order
// the four lanes that store a column have 16 consecutive rows.
HOPWELL_DEVICE int row_of_weights() { return arch::lane_index() / 8 * 4 + arch::lane_index() / 4 % 2; }

// Adds the products of 64 rows over a stage's 128 k to d. Decodes a word while the products of the previous word run.
// The last products still run when the function returns. Calls done_before() when the previous stage's products are
// complete.
template <int kColumns, class T, class Function>
HOPWELL_DEVICE void multiply_stage(const ManyColumnsStage<kColumns>& stage, int first_row, float (&d)[kColumns / 2],
                                   Function done_before) {
  constexpr arch::WgmmaOptions kOptions{.type =
                                            std::is_same_v<T, bf16> ? arch::WgmmaType::bf16 : arch::WgmmaType::fp16};
  constexpr int kGrouped =
      kColumns > 96 ? 1 : 2;  // products a commit; with 2, ptxas runs out of registers and serialises them (C7512)
  const int offset = 4 * (first_row + row_of_weights()) + tile::quad_lane();
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
    arch::wgmma_wait<1>();  // the next weights overwrite the registers of the previous commit
    if (i == 0) done_before();
  }
}

// ---- results -------------------------------------------------------------------------------------------------------

// Stores the results of a warp's 16 rows.
template <class T>
struct Epilogue {
  const Result<T>& result;
  double factor;
  float exact_factor;    // factor, if is_exact: fp32 represents it, and there is no bias
  bool is_exact, whole;  // whole: one store can write four rows
  int first, rows, columns;
  double offsets[2];  // biases of this lane's fragment rows

  HOPWELL_DEVICE Epilogue(const ManyColumnsParams& p, const Result<T>& to, double factor, int first_row)
      : result(to), factor(factor), exact_factor(float(factor)), first(first_row), rows(p.rows), columns(p.columns) {
    is_exact = !to.bias && double(exact_factor) == factor;
    whole = first + 16 <= rows && reinterpret_cast<uintptr_t>(to.y) % 8 == 0 && to.column_stride % 4 == 0;
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first + row_of_weights() + 2 * i;
      offsets[i] = to.bias && row < rows ? double(to_fp32(to.bias[row * to.bias_row_stride])) : 0;
    }
  }

  // Stores 8 columns, from `column` on. Shuffles turn a lane's fragment, columns 2 t and 2 t + 1 of rows g and g + 8,
  // into
  // four rows of one column.
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

// Combines the sums of a split K. Each warpgroup of the cluster adds and stores an equal part of the tile's columns,
// for its 64 rows. It receives the sums of the warpgroups with the same rows, as
// [split][row group][from][register][thread].
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
  sync_all();  // all stages have been read, so sums may overwrite them; the producer warps have exited
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

// First row of this warp in a tile. Each call computes it from the thread index, so that no register holds it during
// the products.
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
    int last = -1;  // the previous stage of the ring
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
