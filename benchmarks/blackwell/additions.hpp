// fp32 additions to rows of 576 in global memory: which form adds how fast, and how that falls with the number of rows.
//
//   lines    red.v4, an instruction covers 128 bytes of each of four rows
//   keys     red.v4, each lane has a row of its own: 16 bytes of each of 32
//   scalar   red, an instruction covers 128 bytes of one row
//   bulk     cp.reduce.async.bulk of whole rows out of shared memory, one for each lane
//   drain    what the backward's kernel does: accumulators out of tensor memory, neighbouring quads of lanes trade, red.v4
#pragma once

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm90/bulk_copy.hpp"
#include "measure.hpp"
#include "ops/sparse_mla_backward/add_dkv.hpp"

namespace hopwell::blackwell {

enum class Addition : uint8_t { lines, keys, scalar, bulk, drain };
inline constexpr const char* kAdditionNames[] = {"lines", "keys", "scalar", "bulk", "drain"};

inline constexpr int kWidth = 576, kAddingWarps = 8, kRowsARepeat = 32;  // of a warp

struct AdditionParams {
  float* sums;  // [rows][576], each addition adds 1
  uint32_t rows;
  int repeats;
  uint64_t* cycles;  // [CTAs]
};
struct AdditionStorage {
  alignas(128) float ones[kWidth];
  int keys[kAddingWarps][64];
  uint32_t tmem;
};

/// Row `i` of those that a warp adds to in one repeat.
HOPWELL_HOST_DEVICE uint32_t added_row(int cta, int warp, int repeat, int repeats, int i, uint32_t rows) {
  return mixed(uint32_t(((cta * kAddingWarps + warp) * repeats + repeat) * kRowsARepeat + i)) % rows;
}

HOPWELL_DEVICE float* row_of(const AdditionParams& p, int warp, int repeat, int i) {
  return p.sums + int64_t{kWidth} * added_row(block_index(), warp, repeat, p.repeats, i, p.rows);
}

#if HOPWELL_HAS_SM100A

template <Addition kForm>
HOPWELL_DEVICE void add_rows(const AdditionParams& p, const AdditionStorage& s, int warp, int repeat) {
  const int lane = lane_index();
  if constexpr (kForm == Addition::lines) {
    for (int row = 0; row < kRowsARepeat; row += 4) {
      float* const to = row_of(p, warp, repeat, row + lane / 8) + lane % 8 * 4;
      HOPWELL_UNROLL
      for (int c = 0; c < kWidth; c += 32) red_add_v4(to + c, 1, 1, 1, 1);
    }
  } else if constexpr (kForm == Addition::keys) {
    float* const to = row_of(p, warp, repeat, lane);
    for (int c = 0; c < kWidth; c += 4) red_add_v4(to + c, 1, 1, 1, 1);
  } else if constexpr (kForm == Addition::scalar) {
    for (int row = 0; row < kRowsARepeat; ++row) {
      float* const to = row_of(p, warp, repeat, row) + lane;
      HOPWELL_UNROLL
      for (int c = 0; c < kWidth; c += 32) red_add(to + c, 1);
    }
  } else {
    bulk_reduce_add(row_of(p, warp, repeat, lane), shared_address(s.ones), kWidth * 4);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

template <Addition kForm>
__global__ void __launch_bounds__(32 * kAddingWarps, 1) addition_kernel(const __grid_constant__ AdditionParams p) {
  auto& s = dynamic_smem<AdditionStorage>();
  for (int i = thread_index(); i < kWidth; i += 32 * kAddingWarps) s.ones[i] = 1;
  fence_proxy_async();
  timed(p.cycles, [&] {
    for (int repeat = 0; repeat < p.repeats; ++repeat) add_rows<kForm>(p, s, warp_index(), repeat);
    if constexpr (kForm == Addition::bulk) bulk_wait<0>();
  });
}

// Ones in tensor memory, 32 lanes by 64 columns for each warp; a repeat adds them to 32 rows, panel by panel.
__global__ void __launch_bounds__(32 * kAddingWarps, 1) drain_kernel(const __grid_constant__ AdditionParams p) {
  namespace backward = ops::sparse_mla_backward::HOPWELL_TARGET;
  auto& s = dynamic_smem<AdditionStorage>();
  const int warp = warp_index(), lane = lane_index(), t = thread_index();
  if (warp == 0) tmem_allocate<1>(s.tmem, 128);
  syncthreads();
  const uint32_t own = tmem_address(s.tmem, warp % 4 * 32, warp / 4 * 64);
  uint32_t ones[64];
  HOPWELL_UNROLL
  for (uint32_t& word : ones) word = bit_cast<uint32_t>(1.0F);
  tmem_store<TmemShape::b32x32>(own, ones);
  tmem_wait_store();
  backward::Params to{};
  to.dkv = p.sums;
  to.dkv_stride = kWidth;
  timed(p.cycles, [&] {
    for (int repeat = 0; repeat < p.repeats; ++repeat) {
      syncwarp();
      s.keys[warp][lane] = int(added_row(block_index(), warp, repeat, p.repeats, lane, p.rows));
      syncwarp();
      const auto low = backward::load_sum_rows<kWidth, false>(to, s.keys[warp], t % 32),
                 high = backward::load_sum_rows<kWidth, false>(to, s.keys[warp] + 16, t % 32);
      for (int column = 0; column < kWidth; column += 64) {
        uint32_t loaded[2][32];
        tmem_load<TmemShape::b16x256>(loaded[0], own);
        tmem_load<TmemShape::b16x256>(loaded[1], tmem_address(own, 16, 0));
        tmem_wait_load(loaded[0]);
        pin_registers(loaded[1]);
        float acc[2][32];
        HOPWELL_UNROLL
        for (int i = 0; i < 64; ++i) acc[i / 32][i % 32] = bit_cast<float>(loaded[i / 32][i % 32]);
        backward::add_panel(to, acc[0], column, low);
        backward::add_panel(to, acc[1], column, high);
      }
    }
    tcgen05_fence_before_thread_sync();
  });
  if (warp == 0) tmem_deallocate<1>(s.tmem, 128);
}

#endif

inline bool sums_are_right(const AdditionParams& p, const std::vector<float>& sums, int ctas) {
  std::vector<float> expected(p.rows);
  for (int cta = 0; cta < ctas; ++cta)
    for (int warp = 0; warp < kAddingWarps; ++warp)
      for (int repeat = 0; repeat < p.repeats; ++repeat)
        for (int i = 0; i < kRowsARepeat; ++i)
          expected[added_row(cta, warp, repeat, p.repeats, i, p.rows)] += kLaunches;
  for (size_t i = 0; i < sums.size(); ++i)
    if (sums[i] != expected[i / kWidth]) return false;
  return true;
}

inline void measure_additions(const Sizes& sizes, std::vector<Measurement>& all) {
  constexpr void (*kKernels[])(AdditionParams) = {addition_kernel<Addition::lines>, addition_kernel<Addition::keys>,
                                                  addition_kernel<Addition::scalar>, addition_kernel<Addition::bulk>,
                                                  drain_kernel};
  for (const uint32_t rows : sizes.rows)
    for (int form = 0; form < 5; ++form) {
      const Memory<float> sums(size_t{rows} * kWidth);
      const Memory<uint64_t> cycles(size_t(sizes.ctas));
      const AdditionParams p{sums.data(), rows, sizes.repeats, cycles.data()};
      run(kKernels[form], {{uint32_t(sizes.ctas)}, 32 * kAddingWarps, 1, sizeof(AdditionStorage)}, p);
      all.push_back({std::string("additions ") + kAdditionNames[form] + ", " + std::to_string(rows) + " rows", "B",
                     4.0 * kWidth * kRowsARepeat * kAddingWarps * sizes.repeats, cycles.values(),
                     sums_are_right(p, sums.values(), sizes.ctas)});
    }
}

}  // namespace hopwell::blackwell
