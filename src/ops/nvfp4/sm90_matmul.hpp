// nvfp4_linear for more than 16 columns of x on Hopper, by wgmma: weights are decoded where they are multiplied.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      256 or 128 rows × 32, 64, 96 or 128 columns a CTA, by stages of 128 k
// Roles     warpgroups 0 to 3   multiply   64 rows each: weights from shared memory, decoded into wgmma's A registers; where
//                                          a tile has fewer rows, warpgroups with the same rows take stages in turn (`parts`)
//           warp 16             copies     codes (a box of the tensor) and x (as it lies in the workspace), by the copy engine
//           warps 17 to 19      scales     8 bytes a row and stage, by cp.async: they may lie blocked, and end anywhere
// Timeline  arrange    x to the workspace, in the order of wgmma's B: what a stage wants of a tile lies together
//           copies     s0 s1 s2 s3 │ s4 …                a ring of stages that goes on from tile to tile
//           multiply   w0 ▓▓ w1 ▓▓ w2 ▓▓ …               a word of 8 codes is decoded while the products of the last one run,
//                                                        and those of the other three warpgroups
// Sums      in registers to the end. Where there are few tiles, the CTAs of a cluster (`ranks`) have a slice of K each; shares
//           of a tile are then exchanged through shared memory, and each share's owner adds its columns: always in one order
// Range     as in sm80_many.hpp
// Budget    shared: 4 stages × (16,384 codes + 2,048 scales + 256 a column), 8 of 32 columns; at most 204,928 B
//           registers: 128 columns 64 sums + 8 weights + 8 codes + ~25 (112), others 32
// Bound     128 columns: the tensor cores; 32 and 64: decoding, ~25 instructions for a product of 16 k
#pragma once

#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/nvfp4/sm80_weights.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct MatmulConfig {
  static constexpr int kGroups = 4, kFewestGroups = 2, kWarps = 4 * kGroups, kScaleWarps = 3,
                       kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64, kStageK = 128, kProducts = kStageK / 16;  // of a warpgroup
  static constexpr int kCodeBytes = kRows * kStageK / 2, kScaleBytes = kRows * kStageK / kCodesOfBlock;
  static constexpr int kMathRegisters = 112, kOtherRegisters = 32;
};

template <int kColumns>
struct MatmulStage {
  static constexpr int kColumnBytes = 2 * MatmulConfig::kStageK, kProductBytes = 32 * kColumns;
  static constexpr int kStages = kColumns > 32 ? 4 : 8;
  unsigned char x[kColumns * kColumnBytes];  // [product][eight columns][half of its 16 k][column][8 k]
  unsigned char codes[MatmulConfig::kGroups * MatmulConfig::kCodeBytes];    // [row][128 k]
  unsigned char scales[MatmulConfig::kGroups * MatmulConfig::kScaleBytes];  // [row][8]
};

template <int kColumns>
struct MatmulStorage {
  static constexpr int kStages = MatmulStage<kColumns>::kStages;
  // Warpgroups that take stages in turn meet a slot again one phase later, not two, which they could not tell apart; and each
  // keeps its last slot until it has begun the next.
  static_assert(kStages % MatmulConfig::kGroups == 0 && kStages > MatmulConfig::kGroups / MatmulConfig::kFewestGroups);

  alignas(128) MatmulStage<kColumns> stages[kStages];  // in the end, where shares are exchanged, sums
  arch::mbarrier full[kStages], empty[kStages];
};

struct MatmulParams {
  arch::TensorMap codes;  // boxes of 64 bytes and all rows of a tile
  Scales scales;
  const unsigned char* x;  // as arranged
  Factor factor;
  int rows, k, columns;
  int stages, stages_of_rank;
  int row_tiles, column_tiles;
  int groups, parts, ranks;  // warpgroups side by side; that share a CTA's stages; CTAs of a cluster, that share K
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

// x as stages of tiles want it. Thread: a column's four pieces of 8 k, 32 apart, that meet the same word of codes of four
// lanes; as pairs (k, k + 4) they make four pieces of 8 for two products, two halves of 16 k each.
template <int kColumns, class T>
__global__ void __launch_bounds__(256) arrange_kernel(const __grid_constant__ ArrangeParams<T> p) {
  using Stage = MatmulStage<kColumns>;
  tile::launch_dependents();
  const int thread = arch::block_index() * 256 + arch::thread_index(), word = thread / 8 % 4;
  const int column_of_tile = thread / 32 % (kColumns / 8) * 8 + thread % 8, place = thread / (4 * kColumns);
  const int stage = place % p.stages, tile = place / p.stages;
  if (tile >= p.column_tiles) return;
  tile::wait_for_prior_kernels();
  const int column = tile * kColumns + column_of_tile, k = stage * MatmulConfig::kStageK + 8 * word;
  uint32_t pieces[4][4];
  HOPWELL_UNROLL
  for (int lane = 0; lane < 4; ++lane) {
    arch::Words4 v{{0, 0, 0, 0}};
    if (column < p.columns && k + 32 * lane < p.k)
      v = *reinterpret_cast<const arch::Words4*>(p.x + column * p.x_stride + k + 32 * lane);
    const arch::Words4 pairs = as_pairs(v);
    HOPWELL_UNROLL
    for (int piece = 0; piece < 4; ++piece) pieces[piece][lane] = pairs.w[piece];
  }
  unsigned char* const to = p.to + int64_t{place} * int64_t{sizeof(Stage::x)} + 2 * word * Stage::kProductBytes +
                            column_of_tile / 8 * 256 + column_of_tile % 8 * 16;
  HOPWELL_UNROLL
  for (int piece = 0; piece < 4; ++piece) {
    const arch::Words4 words{{pieces[piece][0], pieces[piece][1], pieces[piece][2], pieces[piece][3]}};
    *reinterpret_cast<arch::Words4*>(to + piece / 2 * Stage::kProductBytes + piece % 2 * 128) = words;
  }
}

// ---- what a CTA does -----------------------------------------------------------------------------------------------

// A CTA's tiles one after another: neighbouring CTAs have neighbouring columns, and the same rows.
struct MatmulWalk {
  int tile, rank, begin, end;  // stages of K

  HOPWELL_DEVICE explicit MatmulWalk(const MatmulParams& p)
      : tile(arch::block_index() / p.ranks), rank(arch::block_index() % p.ranks), begin(rank * p.stages_of_rank) {
    end = begin + p.stages_of_rank < p.stages ? begin + p.stages_of_rank : p.stages;
  }
  HOPWELL_DEVICE bool more(const MatmulParams& p) const { return tile < p.row_tiles * p.column_tiles; }
  HOPWELL_DEVICE void advance(const MatmulParams& p) { tile += arch::grid_size() / p.ranks; }
  HOPWELL_DEVICE int first_row(const MatmulParams& p) const {
    return tile / p.column_tiles * p.groups * MatmulConfig::kRows;
  }
  HOPWELL_DEVICE int column_tile(const MatmulParams& p) const { return tile % p.column_tiles; }
};

// Where in the ring.
template <int kColumns>
struct MatmulSlot {
  MatmulStorage<kColumns>& s;
  int slot = 0;
  uint32_t parity = 0;

  HOPWELL_DEVICE MatmulStage<kColumns>& stage() const { return s.stages[slot]; }
  HOPWELL_DEVICE void advance(int count) {
    slot += count;
    if (slot >= MatmulStorage<kColumns>::kStages) slot -= MatmulStorage<kColumns>::kStages, parity ^= 1;
  }
};

// ---- supply --------------------------------------------------------------------------------------------------------

template <int kColumns>
HOPWELL_DEVICE void copy_stages(const MatmulParams& p, MatmulStorage<kColumns>& s) {
  using Stage = MatmulStage<kColumns>;
  if (arch::lane_index() != 0) return;
  const uint32_t bytes = uint32_t(sizeof(Stage::x)) + uint32_t(p.groups * MatmulConfig::kCodeBytes);
  MatmulSlot<kColumns> at{s};
  for (MatmulWalk walk(p); walk.more(p); walk.advance(p)) {
    const unsigned char* x = p.x + (int64_t{walk.column_tile(p)} * p.stages + walk.begin) * int64_t{sizeof(Stage::x)};
    HOPWELL_NO_UNROLL
    for (int i = walk.begin; i < walk.end; ++i, at.advance(1), x += sizeof(Stage::x)) {
      arch::mbarrier_wait(s.empty[at.slot], at.parity ^ 1);
      arch::mbarrier& full = s.full[at.slot];
      arch::mbarrier_arrive_expect_tx(full, bytes);
      arch::tma_load<2>(arch::shared_address(at.stage().codes), p.codes,
                        {i * MatmulConfig::kStageK / 2, walk.first_row(p)}, full);
      arch::bulk_load(arch::shared_address(at.stage().x), x, uint32_t(sizeof(Stage::x)), full);
    }
  }
}

// One of the warps that bring scales: every third 32 rows. Zeros where K has ended; rows beyond the last one are that one again.
template <int kColumns>
HOPWELL_DEVICE void copy_scales(const MatmulParams& p, MatmulStorage<kColumns>& s, int number) {
  constexpr int kScales = MatmulConfig::kStageK / kCodesOfBlock;  // of a row
  constexpr int kWarps = MatmulConfig::kScaleWarps, kRowsOfLane = (MatmulConfig::kGroups * 2 + kWarps - 1) / kWarps;
  const int first = 32 * number + arch::lane_index(), rows = p.groups * MatmulConfig::kRows;
  const int step = p.scales.blocked ? 512 : 4;  // of four scales
  MatmulSlot<kColumns> at{s};
  for (MatmulWalk walk(p); walk.more(p); walk.advance(p)) {
    const uint8_t* from[kRowsOfLane];
    HOPWELL_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = walk.first_row(p) + first + 32 * kWarps * i;
      from[i] = p.scales.data + p.scales.offset(row < p.rows ? row : p.rows - 1, kScales * walk.begin, 0);
    }
    HOPWELL_NO_UNROLL
    for (int stage = walk.begin; stage < walk.end; ++stage, at.advance(1)) {
      arch::mbarrier_wait(s.empty[at.slot], at.parity ^ 1);
      const int left = p.k / kCodesOfBlock - kScales * stage;
      const uint32_t to = arch::shared_address(at.stage().scales) + uint32_t(kScales * first);
      HOPWELL_UNROLL
      for (int i = 0; i < kRowsOfLane; ++i) {
        if (first + 32 * kWarps * i >= rows) break;
        if (p.whole_scales && left >= kScales)
          arch::cp_async<8>(to + uint32_t(32 * kWarps * kScales * i), from[i]);
        else
          for (int half = 0; half < 2; ++half)
            arch::cp_async<4>(to + uint32_t(32 * kWarps * kScales * i + 4 * half), from[i] + half * step,
                              within(left - 4 * half, 4));
        from[i] += 2 * step;
      }
      arch::cp_async_mbarrier_arrive_noinc(s.full[at.slot]);
    }
  }
  arch::cp_async_wait_all();
}

// ---- products ------------------------------------------------------------------------------------------------------

// A lane's rows of a fragment, g and g + 8, are these of the warp's 16, and the second after: so the four lanes of a column of
// results have 16 neighbours.
HOPWELL_DEVICE int upper_row() { return arch::lane_index() / 8 * 4 + arch::lane_index() / 4 % 2; }

// Starts to add the products of 64 rows and a stage's 128 k to d. While one word's products run, the next is decoded; those of
// the last word still run at the end. done_before(): the products of the stage before have been made.
template <int kColumns, class T, class Function>
HOPWELL_DEVICE void multiply_stage(const MatmulStage<kColumns>& stage, int first_row, float (&d)[kColumns / 2],
                                   Function done_before) {
  constexpr arch::WgmmaOptions kOptions{.type = std::is_same_v<T, bf16> ? arch::Half::bf16 : arch::Half::fp16};
  constexpr int kTogether =
      kColumns > 96 ? 1 : 2;  // products: with two, ptxas has no registers and serialises them (C7512)
  const int place = 4 * (first_row + upper_row()) + arch::lane_index() % 4;
  const auto* const codes = reinterpret_cast<const arch::Words4*>(stage.codes) + place;
  const auto* const scales = reinterpret_cast<const uint16_t*>(stage.scales) + place;
  const arch::Words4 upper = codes[0], lower = codes[4 * 2];
  const Weights<T> of_upper(scales[0]), of_lower(scales[4 * 2]);
  const uint64_t x =
      arch::at_address(arch::wgmma_descriptor({arch::Swizzle::none, 128, 256}), arch::shared_address(stage.x));
  uint32_t weights[2][kTogether][4];
  HOPWELL_UNROLL
  for (int i = 0; i < MatmulConfig::kProducts; i += kTogether) {
    auto& products = weights[i / kTogether % 2];
    HOPWELL_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      const int word = (i + j) / 2, half = (i + j) % 2 * 2;
      uint32_t a[4], b[4];
      if (word < 2) {
        of_upper.template decode<false>(upper.w[word], a);
        of_lower.template decode<false>(lower.w[word], b);
      } else {
        of_upper.template decode<true>(upper.w[word], a);
        of_lower.template decode<true>(lower.w[word], b);
      }
      products[j][0] = a[half], products[j][1] = b[half];
      products[j][2] = a[half + 1], products[j][3] = b[half + 1];
    }
    arch::wgmma_fence();
    HOPWELL_UNROLL
    for (int j = 0; j < kTogether; ++j)
      arch::wgmma_rs<kOptions>(d, products[j], x + uint64_t((i + j) * MatmulStage<kColumns>::kProductBytes >> 4), true);
    arch::wgmma_commit();
    arch::wgmma_wait<1>();  // the next products' weights go where the last ones' were
    if (i == 0) done_before();
  }
}

// ---- results -------------------------------------------------------------------------------------------------------

// Where a warp's 16 rows of results go.
template <class T>
struct MatmulRows {
  const Result<T>& result;
  double factor;
  float exact_factor;    // the same, if nothing else is needed
  bool is_exact, whole;  // whole: pieces of four rows may be stored at once
  int first, rows, columns;
  double offsets[2];  // of this lane's fragment rows

  HOPWELL_DEVICE MatmulRows(const MatmulParams& p, const Result<T>& to, double factor, int first_row)
      : result(to), factor(factor), exact_factor(float(factor)), first(first_row), rows(p.rows), columns(p.columns) {
    is_exact = !to.bias && double(exact_factor) == factor;
    whole = first + 16 <= rows && reinterpret_cast<uintptr_t>(to.y) % 8 == 0 && to.column_stride % 4 == 0;
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first + upper_row() + 2 * i;
      offsets[i] = to.bias && row < rows ? double(to_fp32(to.bias[row * to.bias_stride])) : 0;
    }
  }

  // Eight columns from this one on: fragments' columns 2 t and 2 t + 1 of rows g and g + 8 become four rows of a column.
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
      *reinterpret_cast<arch::Words2*>(to) = {{four[0], four[1]}};
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

// Shares of a tile, `ranks` × `parts`: each adds up an equal piece of the columns, for its 64 rows. Every warpgroup gives
// each share its sums: [part][group][from][register][thread].
template <int kColumns, class T>
HOPWELL_DEVICE void exchange(const MatmulParams& p, const MatmulWalk& walk, const MatmulRows<T>& rows, float* sums,
                             int group, int part, const float (&d)[kColumns / 2]) {
  const int shares = p.ranks * p.parts, registers = kColumns / 2 / shares, mine = walk.rank * p.parts + part;
  const auto place = [&](int of, int from, int number) {
    return (((of % p.parts * p.groups + group) * shares + from) * registers + number) * 128 +
           arch::thread_index() % 128;
  };
  const auto meet = [&] { p.ranks > 1 ? arch::cluster_sync() : arch::barrier_sync(1, 128 * MatmulConfig::kGroups); };
  meet();  // all have read all stages; warps that bring them have ended, and are not waited for
  HOPWELL_UNROLL
  for (int j = 0; j < kColumns / 2; j += 4) {
    const int of = j / registers;
    const uint32_t here = arch::shared_address(sums + place(of, mine, j - of * registers));
    const uint32_t to = arch::map_to_rank(here, uint32_t(of / p.parts));
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) arch::store_cluster(to + uint32_t(512 * i), arch::bit_cast<uint32_t>(d[j + i]));
  }
  meet();
  for (int number = 0; number < registers; number += 4) {
    float all[4] = {};
    for (int from = 0; from < shares; ++from) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) all[i] += sums[place(mine, from, number + i)];
    }
    rows.store(walk.column_tile(p) * kColumns + 2 * (mine * registers + number), all[0], all[1], all[2], all[3]);
  }
}

// This warp's first row of a tile. From the thread's number anew: no register holds it while products run.
HOPWELL_DEVICE int row_of_warp(const MatmulParams& p) {
  const int warp = arch::thread_index_anew() / 32;
  return warp / 4 % p.groups * MatmulConfig::kRows + warp % 4 * 16;
}

template <int kColumns, class T>
HOPWELL_DEVICE void multiply(const MatmulParams& p, const Result<T>& result, MatmulStorage<kColumns>& s,
                             int warpgroup) {
  const int group = warpgroup % p.groups, part = warpgroup / p.groups;
  const int row_of_tile = row_of_warp(p);
  const Factor global = p.factor.loaded();
  MatmulSlot<kColumns> at{s, part};
  for (MatmulWalk walk(p); walk.more(p); walk.advance(p)) {
    float d[kColumns / 2] = {};
    int last = -1;  // slot
    const auto release = [&] {
      arch::syncwarp();
      if (arch::lane_index() == 0 && last >= 0) arch::mbarrier_arrive(s.empty[last]);
    };
    HOPWELL_NO_UNROLL
    for (int i = walk.begin + part; i < walk.end; i += p.parts, at.advance(p.parts)) {
      arch::mbarrier_wait(s.full[at.slot], at.parity);
      multiply_stage<kColumns, T>(at.stage(), row_of_tile, d, release);
      last = at.slot;
    }
    arch::wgmma_wait<0>(d);
    release();
    const MatmulRows<T> rows(p, result, global.get() * Weights<T>::kUnit, walk.first_row(p) + row_of_warp(p));
    if (p.ranks * p.parts > 1)
      return exchange<kColumns>(p, walk, rows, reinterpret_cast<float*>(s.stages), group, part, d);
    HOPWELL_UNROLL
    for (int j = 0; j < kColumns / 2; j += 4)
      rows.store(walk.column_tile(p) * kColumns + 2 * j, d[j], d[j + 1], d[j + 2], d[j + 3]);
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <int kColumns, class T>
__global__ void __launch_bounds__(MatmulConfig::kThreads, 1)
    matmul_kernel(const __grid_constant__ MatmulParams p, const __grid_constant__ Result<T> result) {
  auto& s = arch::dynamic_smem<MatmulStorage<kColumns>>();
  const int warpgroup = arch::warpgroup_index(), warp = arch::warp_index();
  if (arch::thread_index() == 0) {
    for (int i = 0; i < MatmulStorage<kColumns>::kStages; ++i) {
      arch::mbarrier_init(s.full[i], 1 + 32 * MatmulConfig::kScaleWarps);
      arch::mbarrier_init(s.empty[i], uint32_t(4 * p.groups));
    }
    arch::fence_mbarrier_init();
  }
  tile::launch_dependents();
  arch::syncthreads();
  tile::wait_for_prior_kernels();
  if (warpgroup < MatmulConfig::kGroups) {
    arch::setmaxnreg_inc<MatmulConfig::kMathRegisters>();
    multiply<kColumns>(p, result, s, warpgroup);
  } else {
    arch::setmaxnreg_dec<MatmulConfig::kOtherRegisters>();
    if (warp == MatmulConfig::kWarps)
      copy_stages(p, s);
    else
      copy_scales(p, s, warp - MatmulConfig::kWarps - 1);
  }
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
