// sparse_mla_decode for Hopper, tiles of 64 heads: attention of some splits of a query's keys, for rows of every format.
//
//     O[h,:] = Σ_i exp2(score[h,i] − m) · K[i, :512]        scores in units of log 2, m: row_max
//
// Tile      one query, 64 heads, one or more splits of its entries; 64 keys at a time
// Roles     warpgroup 0  low       S = Q Kᵀ, the softmax, and O += P V for columns 0 to 255
//           warpgroup 1  high      O += P V for columns 256 to 511
//           warpgroup 2  gather    finds the rows of valid entries, and copies rows of codes to the stages: gather.hpp
//           3 and 4      dequant   decode the rows to bf16 and store them to panels for wgmma: decoded_rows.hpp; or
//                                  copy rows of bf16: copied_rows.hpp
// Timeline  gather   rows 2 │························│rows 3 │························│rows 4 │
//           dequant  ········│part 0 ▒▒▒▒│part 1 ▒▒▒▒▒│······│part 0 ▒▒▒▒│part 1 ▒▒▒▒▒│
//           low      S 1 ▓▓▓▓▓▓│exp ░░░│O += P 1 V ▓▓▓│S 2 ▓▓▓▓▓▓▓▓▓▓▓▓│exp ░░░│O += P 2 V ▓▓▓│
//           high     ▓ P 0 V│··········│O += P 1 V ▓▓▓│················│·······│O += P 2 V ▓▓▓│
// Panels    A tile becomes full in two parts; S of a part is multiplied as soon as that part is full: key_tiles.hpp
// Codes     bf16(code · scale) by a shift and one product of bf16. It is correctly rounded if the scale is 0 or a bf16
//           number from 2^-124 to below 2^8. A thread that meets another scale or a NaN code decodes again in fp32, as
//           the operator defines the value.
// Splits    A CTA stores a partial result of each of its splits: registers and shared memory have no room for a second O
// Softmax   row_max m changes only when a row's maximum exceeds it by more than 8, in units of log 2
//           (tile/gpu/softmax.hpp). Sums of even and of odd tiles are added separately. So sparse_mla_forward has the
//           same bits if it has the same keys in the same tiles.
// Budget    shared: Q 73,728 + K 2 × 74,752 + P 8,192 + ~980: 48 B less than a CTA can have
//           registers: low 128 for O + 32 for S + 16 for P + ~16 (192); high 128 for O + ~32 (160); gather 32;
//           dequant 16 for codes + ~32 (48)
// Bound     per key: 34 clocks of the tensor cores; shared memory about 48: 28 for the products, 10 for unmodified
//           rows, 9 for decoded rows; 35 clocks of DRAM on an H200 (656-byte rows). Measured: 73. A stage takes about
//           9,200 clocks from one tile to the next: 2,400 until its rows are there, 2,600 to decode them, 700 until the
//           last scores, 850 for the softmax, 1,250 for O, and the waits between them. There are two stages
#pragma once

#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_decode/sm90/gather.hpp"
#include "ops/sparse_mla_decode/sm90/panels.hpp"
#include "ops/sparse_mla_decode/sm90/query.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {
namespace many_heads {

enum class Role { low, high, gather, dequant };  // of the warpgroups; the last two are dequant

template <class TheRow>
struct Config : KeyTile<TheRow, 256> {
  static constexpr int kHeads = 64;
  static constexpr int kLowRegisters = 192, kHighRegisters = 160, kGatherRegisters = 32, kDequantRegisters = 48;
};

template <class Config>
struct Storage {
  alignas(1024) unsigned char q[Config::kPanels * tile::kPanelBytes];
  alignas(1024) KeyPanels<Config> panels;
  alignas(1024) unsigned char p[tile::kPanelBytes];
  KeyTiles<Config> tiles;
  float row_factor[Config::kHeads];  // row_scale of O before a tile; after the last tile the factor of O
  float scale_log2;                  // sm_scale · kv_scale, in units of log 2. Here to save a register
  tile::RingBarriers<1> p_ring;      // P and row_factor

  // Executed by one thread, before a barrier of the CTA.
  HOPWELL_DEVICE void initialise() {
    tiles.initialise();
    p_ring.init(Config::kReleasingWarps, Config::kReleasingWarps);
  }
};

#if HOPWELL_HAS_SM90A

// ---- scores ---------------------------------------------------------------------------------------------------------

// S = Q Kᵀ: 64 heads, 64 keys, in the order in which the parts of the tile become full.
template <class Config, class Slot>
HOPWELL_DEVICE void multiply_scores(const Storage<Config>& s, const Slot& slot, float (&scores)[32]) {
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.q));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.panels[slot.stage()]));
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kPanels; ++i) {
    if (i == 0 || i == Config::kPanelsOfPart) {
      slot.wait_full(i == 0 ? 0 : 1);
      if constexpr (Config::kCopiesRows) arch::fence_proxy_async();  // else the dequant warps have executed it
      arch::wgmma_fence();
    }
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step) {
      const uint64_t offset = tile::columns_on(4 * tile::score_panel<Config::kDqk>(i) + step);
      arch::wgmma_ss(scores, a + offset, b + offset, i > 0 || step > 0);
    }
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
}

// Softmax state of a thread's two rows (heads): row_max in units of log 2, and two sums over the thread's columns.
// `sum` is of the tiles with the parity of the present tile, `other_sum` of the others.
struct SoftmaxState {
  float row_max[2], sum[2], other_sum[2];

  /// Returns row_scale of the row's output.
  HOPWELL_DEVICE float update_row_max(int r, float to) {
    const float scale = tile::update_row_max(row_max[r], sum[r], to);
    other_sum[r] = tile::rescaled(other_sum[r], scale);
    return scale;
  }
  HOPWELL_DEVICE void next_tile() {
    HOPWELL_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float of_this = sum[r];
      sum[r] = other_sum[r], other_sum[r] = of_this;
    }
  }
  /// Of all columns.
  HOPWELL_DEVICE Stats stats(int r) const {
    return {row_max[r], tile::sum_of_quad(sum[r]) + tile::sum_of_quad(other_sum[r])};
  }
};

// Converts the scores of a tile to probabilities. row_scale: of O before this tile.
HOPWELL_DEVICE void softmax(float scale_log2, int valid_keys, float (&scores)[32], SoftmaxState& state,
                            float (&row_scale)[2]) {
  const auto mask_of = [&](int keys) { return keys >= 32 ? 0xffffffff : keys <= 0 ? 0 : (1U << keys) - 1; };
  const tile::TileMask mask{mask_of(valid_keys), mask_of(valid_keys - 32)};
  float max[2];
  const float unit = tile::tile_row_max<false>(scale_log2, mask, scores, max);
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) row_scale[r] = state.update_row_max(r, tile::next_row_max(state.row_max[r], max[r]));
  tile::exponentiate(unit, state.row_max, scores, state.sum);
}

// ---- values ---------------------------------------------------------------------------------------------------------

// O of a warpgroup: 64 heads, blocks of 128 columns. In a CTA of 640 threads ptxas refuses a product with 256 columns.
constexpr int kBlocks = 2;  // of a warpgroup
using Output = float[kBlocks][64];

// O = O · row_scale + P V: 64 heads, 64 keys, the 256 columns of part `part` of the tile, which it releases.
// `multiply(out, step, v, accumulate)` multiplies 16 keys and 128 columns; v: their descriptor.
template <class Config, class Slot, class Multiply>
HOPWELL_DEVICE void multiply_values(const Storage<Config>& s, const Slot& slot, int part, const float (&row_scale)[2],
                                    Output& out, bool first, const Multiply& multiply) {
  static_assert(Config::kPanelsOfPart == 4);  // a part has half of the columns
  const uint32_t panels =
      arch::shared_address(s.panels[slot.stage()]) + uint32_t(part * Config::kPanelsOfPart) * tile::kPanelBytes;
  const uint64_t v = arch::at_address(tile::kRowsAcrossK, panels);
  if (!first && arch::ballot(row_scale[0] != 1 || row_scale[1] != 1) != 0) {
    HOPWELL_UNROLL
    for (auto& block : out) {
      HOPWELL_UNROLL
      for (int i = 0; i < 64; ++i) block[i] *= row_scale[i / 2 % 2];
    }
  }
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    HOPWELL_UNROLL
    for (int block = 0; block < kBlocks; ++block)
      multiply(out[block], step, v + ((uint32_t(step) * 16 * 128 + uint32_t(block) * 2 * tile::kPanelBytes) >> 4),
               !first || step > 0);
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>();
  HOPWELL_UNROLL
  for (auto& block : out) arch::pin_registers(block);
  slot.release(part);
}
constexpr arch::WgmmaOptions kValues{.b_major = arch::Major::mn};

// ---- results --------------------------------------------------------------------------------------------------------

// The splits of the CTA. Computed where the number is needed, to save registers.
HOPWELL_DEVICE int splits_of_cta(const SplitParams& p) {
  uint32_t block = uint32_t(arch::block_index());
  arch::pin_registers(block);
  return Work(p, 0, int(block)).splits;
}

// Row (head) `r` of a thread's two. Without warp_index(), because some lanes of a warp call it without the others.
HOPWELL_DEVICE int row_of_thread(int r) { return tile::wgmma_row_of(arch::thread_index()) + 8 * r; }

// A thread's values of a row of O: runs of adjacent columns.
template <bool kEvenOdd>  // key_tiles.hpp
struct Runs {
  static constexpr int kLength = kEvenOdd ? 4 : 2, kRuns = 64 * kBlocks / kLength / 2, kDistance = 4 * kLength;
  static HOPWELL_DEVICE int first_column(int thread) { return kLength * tile::quad_lane(thread); }
  // Column j of run i.
  static HOPWELL_DEVICE float value(const Output& out, int r, int i, int j) {
    const int block = kEvenOdd ? 2 * i + j % 2 : i;  // of 8 columns
    return out[block / 16][4 * (block % 16) + 2 * r + (kEvenOdd ? j / 2 : j)];
  }
};

// Stores this warpgroup's columns from first_column on: of a partial result, or, times `factor`, of the final result.
template <class Config>
HOPWELL_DEVICE void store_columns(const SplitParams& p, int split, int first_column, const Output& out,
                                  const float (&factor)[2]) {
  using Of = Runs<Config::kEvenOdd>;
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    uint32_t block = uint32_t(arch::block_index()), thread = uint32_t(arch::thread_index());
    arch::pin_registers(block), arch::pin_registers(thread);  // addresses are computed row by row, to save registers
    const Work work(p, Config::kHeads, int(block));
    const int head = work.first_head + tile::wgmma_row_of(int(thread)) + 8 * r,
              column = first_column + Of::first_column(int(thread));
    if (head >= p.h_q) continue;
    const auto final = [&](int i, int j) { return final_value(Of::value(out, r, i, j), factor[r]); };
    const auto final_pair = [&](int i, int j) { return arch::pack_bf16(final(i, j), final(i, j + 1)); };
    const int64_t row = row_of_out(p, work.query, head) + column;
    bf16* const to = static_cast<bf16*>(p.out) + row;
    if (p.splits > 1) {
      float* const partial = p.partial_out + (partial_row(p, work.query, work.split + split) + head) * kDv + column;
      HOPWELL_UNROLL
      for (int i = 0; i < Of::kRuns; ++i) {
        std::conditional_t<Of::kLength == 4, arch::Words4, arch::Words2> words;
        HOPWELL_UNROLL
        for (int j = 0; j < Of::kLength; ++j) words.w[j] = arch::bit_cast<uint32_t>(Of::value(out, r, i, j));
        arch::store_vector(partial + Of::kDistance * i, words);
      }
    } else if (p.out_is_fp32) {
      HOPWELL_UNROLL
      for (int i = 0; i < Of::kRuns; ++i) {
        HOPWELL_UNROLL
        for (int j = 0; j < Of::kLength; ++j) static_cast<float*>(p.out)[row + Of::kDistance * i + j] = final(i, j);
      }
    } else if (Of::kLength == 4 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
      HOPWELL_UNROLL
      for (int i = 0; i < Of::kRuns; ++i)
        arch::store_vector(to + Of::kDistance * i, arch::Words2{final_pair(i, 0), final_pair(i, Of::kLength - 2)});
    } else {
      HOPWELL_UNROLL
      for (int i = 0; i < Of::kRuns; ++i) {
        HOPWELL_UNROLL
        for (int j = 0; j < Of::kLength; j += 2)
          *reinterpret_cast<uint32_t*>(to + Of::kDistance * i + j) = final_pair(i, j);
      }
    }
  }
}

// Stores the statistics of a partial result, or the lse of the final one. Returns the factors of O.
template <class Config>
HOPWELL_DEVICE void store_statistics(const SplitParams& p, int split, const Stats (&stats)[2], float (&factor)[2]) {
  const Work work(p, Config::kHeads);
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int head = work.first_head + row_of_thread(r);
    const bool stores = tile::quad_lane() == 0;
    factor[r] = 0;
    if (head >= p.h_q) continue;
    if (p.splits == 1)
      factor[r] = finish_head(p, work.query, head, stats[r], stores);
    else if (stores)
      p.partial_stats[partial_row(p, work.query, work.split + split) + head] = arch::bit_cast<arch::Words2>(stats[r]);
  }
}

// ---- roles ----------------------------------------------------------------------------------------------------------

template <class Config>
HOPWELL_DEVICE void low(const SplitParams& p, Storage<Config>& s) {
  if (arch::thread_index() == 0) s.scale_log2 = p.scale_log2 * p.kv_scale_factor();
  load_query<Config>(p, arch::shared_address(s.q));
  arch::barrier_sync(kReaderBarrier, Config::kReaders);
  const float scale_log2 = s.scale_log2;
  int tile = 0;
  const auto p_slot = [&] { return tile::ring_stage(s.p_ring, 0, uint32_t(tile % 2)); };
  const auto store_of_rows = [&](const float (&x)[2]) {
    if (tile::quad_lane() != 0) return;
    HOPWELL_UNROLL
    for (int r = 0; r < 2; ++r) s.row_factor[row_of_thread(r)] = x[r];
  };
  HOPWELL_NO_UNROLL
  for (int split = 0; split < splits_of_cta(p); ++split) {
    SoftmaxState state{{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
    Output out = {};
    TileInfo info{};
    bool first = true;
    HOPWELL_NO_UNROLL
    for (; !info.is_last; ++tile, first = false) {
      const auto slot = tile::ring_stage(s.tiles.ring, tile % 2, uint32_t(tile / 2 % 2));
      slot.wait_full(0);
      info = s.tiles.info[slot.stage()];
      float scores[32], row_scale[2];
      multiply_scores(s, slot, scores);
      softmax(scale_log2, info.keys, scores, state, row_scale);
      tile::Probabilities probabilities;
      p_slot().wait_empty();
      probabilities.round_and_store(scores, arch::shared_address(s.p));
      store_of_rows(row_scale);
      arch::fence_proxy_async();
      p_slot().commit();
      multiply_values(s, slot, 0, row_scale, out, first, [&](auto& of_half, int step, uint64_t v, bool accumulate) {
        arch::wgmma_rs<kValues>(of_half, probabilities.fragment[step], v, accumulate);
      });
      state.next_tile();
    }
    if (split == splits_of_cta(p) - 1) tile::launch_dependents();
    const Stats stats[2] = {state.stats(0), state.stats(1)};
    float factor[2];
    store_statistics<Config>(p, split, stats, factor);
    if (p.splits == 1) {
      p_slot().wait_empty();
      store_of_rows(factor);
      p_slot().commit();
    }
    if (info.keys > 0 || p.splits == 1) store_columns<Config>(p, split, 0, out, factor);
  }
}

template <class Config>
HOPWELL_DEVICE void high(const SplitParams& p, Storage<Config>& s) {
  load_query<Config>(p, arch::shared_address(s.q));
  arch::barrier_sync(kReaderBarrier, Config::kReaders);
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.p));
  int tile = 0;
  const auto p_slot = [&] { return tile::ring_stage(s.p_ring, 0, uint32_t(tile % 2)); };
  const auto load_of_rows = [&](float (&x)[2]) {
    p_slot().wait_full();
    HOPWELL_UNROLL
    for (int r = 0; r < 2; ++r) x[r] = s.row_factor[row_of_thread(r)];
  };
  HOPWELL_NO_UNROLL
  for (int split = 0; split < splits_of_cta(p); ++split) {
    Output out = {};
    TileInfo info{};
    bool first = true;
    HOPWELL_NO_UNROLL
    for (; !info.is_last; ++tile, first = false) {
      const auto slot = tile::ring_stage(s.tiles.ring, tile % 2, uint32_t(tile / 2 % 2));
      float row_scale[2];
      load_of_rows(row_scale);
      info = s.tiles.info[slot.stage()];
      multiply_values(s, slot, 1, row_scale, out, first, [&](auto& of_half, int step, uint64_t v, bool accumulate) {
        arch::wgmma_ss<kValues>(of_half, a + tile::columns_on(step), v, accumulate);
      });
      p_slot().release();
    }
    float factor[2] = {0, 0};
    if (p.splits == 1) load_of_rows(factor);
    if (info.keys > 0 || p.splits == 1) store_columns<Config>(p, split, kBlocks * 128, out, factor);
  }
}

#endif

}  // namespace many_heads

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_decode_sm90_many_heads(const __grid_constant__ SplitParams p) {
#if HOPWELL_HAS_SM90A
  using many_heads::Role;
  auto& s = arch::dynamic_smem<many_heads::Storage<Config>>();
  if (arch::thread_index() == 0) s.initialise();
  arch::syncthreads();
  const int group = arch::warpgroup_index();
  const Role role = group < 3 ? Role{group} : Role::dequant;
  if (role == Role::gather) {
    arch::setmaxnreg_dec<Config::kGatherRegisters>();
    gather<Config>(p, s.tiles, s.panels);
  } else if (role == Role::dequant) {
    arch::setmaxnreg_dec<Config::kDequantRegisters>();
    make_panels<Config>(p, s.tiles, s.panels);
  } else if (role == Role::low) {
    arch::setmaxnreg_inc<Config::kLowRegisters>();
    many_heads::low(p, s);
  } else {
    arch::setmaxnreg_inc<Config::kHighRegisters>();
    many_heads::high(p, s);
  }
#endif
}

// ---- on the host ----------------------------------------------------------------------------------------------------

template <class RowsOfFormat>
SplitKernel many_heads_kernel() {
  using Config = many_heads::Config<RowsOfFormat>;
  static_assert(sizeof(many_heads::Storage<Config>) <= arch::sm90::kMaxSharedBytes);
  return {.kernel = sparse_mla_decode_sm90_many_heads<Config>,
          .threads = Config::kThreads,
          .shared_bytes = sizeof(many_heads::Storage<Config>),
          .clocks = Clocks{.of_cta = 8'000, .of_tile = 4'500}};  // H200, V3.2 rows
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
