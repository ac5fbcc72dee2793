// Blackwell instructions on the emulator, one by one, against plain arithmetic. (What Hopper has is certified on
// hardware; see certify/.)
#include "harness.hpp"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "arch/emu/numeric.hpp"
#include "arch/sm100/cluster_launch.hpp"
#include "arch/sm100/convert.hpp"
#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm90/make_tensor_map.hpp"

namespace hopwell::arch {
namespace {

using emu::Kind;
using test::expect_clean;

struct Shared {
  alignas(1024) unsigned char a[65536];
  alignas(1024) unsigned char b[65536];
  mbarrier full, done;
  uint32_t tmem;
};
emu::LaunchShape shape(uint32_t threads, uint32_t cluster = 1, uint32_t grid = 0) {
  return {{grid ? grid : cluster, 1, 1}, {threads, 1, 1}, {cluster, 1, 1}, sizeof(Shared)};
}

/// Allocates tensor memory, runs `body(shared)` in all threads, frees it.
template <int kCtaGroup, class Body>
void with_tensor_memory(uint32_t columns, Body body) {
  auto& s = dynamic_smem<Shared>();
  const int warp = thread_index() / 32;
  if (thread_index() == 0) {
    mbarrier_init(s.full, 1);
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 0) tmem_allocate<kCtaGroup>(s.tmem, columns);
  if (kCtaGroup == 2)
    cluster_sync();
  else
    syncthreads();
  body(s);
  tcgen05_fence_before_thread_sync();
  if (kCtaGroup == 2)
    cluster_sync();
  else
    syncthreads();
  if (warp == 0) tmem_deallocate<kCtaGroup>(s.tmem, columns);
}

// ---- loads and stores -----------------------------------------------------------------------------------------------

// Stores a number for every (lane, column) in one shape, loads it in another.
template <TmemShape kShape, int kRegisters, int kSplit>
void store_then_load(std::vector<int>& wrong) {
  with_tensor_memory<1>(256, [&](Shared& s) {
    const int warp = thread_index() / 32, lane = lane_index();
    uint32_t all[128];
    for (int i = 0; i < 128; ++i) all[i] = uint32_t((32 * warp + lane) * 1000 + i);
    tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * warp, 0), all);
    tmem_wait_store();
    for (int half = 0; half < (kShape == TmemShape::b32x32 ? 1 : 2); ++half) {
      uint32_t r[kRegisters];
      tmem_load<kShape, kSplit>(r, tmem_address(s.tmem, 32 * warp + 16 * half, 0));
      tmem_wait_load(r);
      for (int i = 0; i < kRegisters; ++i) {
        const emu::Coord c = emu::tmem_fragment(kShape, lane, i, kSplit);
        wrong[0] += r[i] != uint32_t((32 * warp + 16 * half + c.row) * 1000 + c.col);
        r[i] += 500000;
      }
      tmem_store<kShape, kSplit>(tmem_address(s.tmem, 32 * warp + 16 * half, 128), r);
    }
    tmem_wait_store();
    uint32_t back[64];
    tmem_load<TmemShape::b32x32>(back, tmem_address(s.tmem, 32 * warp, 128));
    tmem_wait_load(back);
    const int columns = std::min(64, emu::tmem_columns(kShape, kRegisters, kSplit));
    for (int i = 0; i < columns; ++i) wrong[0] += back[i] != uint32_t((32 * warp + lane) * 1000 + i + 500000);
  });
}

template <TmemShape kShape, int kRegisters, int kSplit = 0>
void check_shape() {
  std::vector<int> wrong(1);
  expect_clean(shape(128), [&] { store_then_load<kShape, kRegisters, kSplit>(wrong); }, 3);
  EXPECT_EQ(wrong[0], 0) << int(kShape) << " x" << kRegisters;
}

TEST(TensorMemory, EveryShapeOfLoadAndStore) {
  check_shape<TmemShape::b32x32, 64>();
  check_shape<TmemShape::b16x64, 32>();
  check_shape<TmemShape::b16x128, 32>();
  check_shape<TmemShape::b16x256, 32>();
  check_shape<TmemShape::b16x32x2, 32, 32>();
}

TEST(TensorMemory, PoisonUntilTheWait) {
  bool poisoned = true;
  expect_clean(
      shape(128),
      [&] {
        with_tensor_memory<1>(32, [&](Shared& s) {
          uint32_t r[1] = {5};
          tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * (thread_index() / 32), 0), r);
          tmem_wait_store();
          tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * (thread_index() / 32), 0));
          poisoned &= r[0] != 5;
          tmem_wait_load(r);
          poisoned &= r[0] == 5;
        });
      },
      3);
  EXPECT_TRUE(poisoned);
}

TEST(TensorMemory, AllocationWaitsForOthersToFree) {
  expect_clean(shape(64), [] {
    auto& s = dynamic_smem<Shared>();
    auto& address = *reinterpret_cast<uint32_t*>(s.a + 16 * (thread_index() / 32));
    for (int i = 0; i < 3; ++i) {
      tmem_allocate<1>(address, 512);
      const uint32_t mine = address;
      syncwarp();  // before the next allocation overwrites it
      tmem_deallocate<1>(mine, 512);
    }
  });
}

// ---- products -------------------------------------------------------------------------------------------------------

struct Operand {
  Major major;
  int rows;
  // Element (row, k), k < 16, of a 128B-swizzled operand: K-major rows of 64, MN-major panels of 64 rows, 1 KiB each 8
  // of k.
  uint32_t offset(int row, int k) const {
    const uint32_t at =
        major == Major::k ? uint32_t(row * 128 + k * 2) : uint32_t(row / 64 * 8192 + k * 128 + row % 64 * 2);
    return at ^ (at >> 7 & 7) << 4;
  }
  uint64_t descriptor(const void* memory) const {
    const OperandLayout layout =
        major == Major::k ? OperandLayout{Swizzle::bytes128, 16, 1024} : OperandLayout{Swizzle::bytes128, 8192, 1024};
    return at_address(tcgen05_descriptor(layout), shared_address(memory));
  }
};

struct Product {
  int m, n, cta_group = 1;
  bool ws = false, a_in_tmem = false, negate_a = false;
  Half type = Half::bf16;
  Major a_major = Major::k, b_major = Major::k;
};

float element(uint32_t index, Half type) {  // exact in both types
  const float v = float(int(index * 2654435761u >> 24) - 128) * 0x1p-7f;
  return type == Half::bf16 ? emu::from_bf16(emu::to_bf16_bits(v)) : v;
}
uint16_t element_bits(uint32_t index, Half type) {
  return type == Half::bf16 ? emu::to_bf16_bits(element(index, type)) : emu::to_fp16_bits(element(index, type));
}

// D = A B + A B with random operands; returns D as it lies in tensor memory, [cta][lane][column].
template <int kCtaGroup>
void multiply(const Product& p, std::vector<float>& d) {
  with_tensor_memory<kCtaGroup>(512, [&](Shared& s) {
    const int t = thread_index(), warp = t / 32, rank = kCtaGroup == 2 ? int(cluster_rank()) : 0,
              rows = p.m / kCtaGroup, b_rows = p.n / kCtaGroup;
    const Operand a{p.a_major, rows}, b{p.b_major, b_rows};
    for (int i = t; i < rows * 16; i += 128)
      *reinterpret_cast<uint16_t*>(s.a + a.offset(i / 16, i % 16)) =
          element_bits(uint32_t(rank * rows * 16 + i), p.type);
    for (int i = t; i < b_rows * 16; i += 128)
      *reinterpret_cast<uint16_t*>(s.b + b.offset(i / 16, i % 16)) =
          element_bits(uint32_t(9000 + rank * b_rows * 16 + i), p.type);
    if (p.a_in_tmem) {  // row m in the lanes of row m of D, for every segment of N
      const emu::DataPath path = emu::data_path(p.m, kCtaGroup, p.ws);
      uint32_t words[8] = {};
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < p.n; ++n)
          if (emu::accumulator_coord(path, p.n, m, n).row == t)
            for (int k = 0; k < 8; ++k)
              words[k] = uint32_t(element_bits(uint32_t(rank * rows * 16 + m * 16 + 2 * k), p.type)) |
                         uint32_t(element_bits(uint32_t(rank * rows * 16 + m * 16 + 2 * k + 1), p.type)) << 16;
      tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * warp, 256), words);
      tmem_wait_store();
    }
    fence_proxy_async();
    tcgen05_fence_before_thread_sync();
    if (kCtaGroup == 2)
      cluster_sync();
    else
      syncthreads();
    tcgen05_fence_after_thread_sync();
    if (t == 0 && rank == 0) {
      const uint32_t instruction = instruction_descriptor({p.m, p.n, p.type, p.a_major, p.b_major, p.negate_a});
      for (int i = 0; i < 2; ++i) {
        if (p.ws && p.a_in_tmem)
          tcgen05_mma_ws_f16_ts(s.tmem, s.tmem + 256, b.descriptor(s.b), instruction, i);
        else if (p.ws)
          tcgen05_mma_ws_f16(s.tmem, a.descriptor(s.a), b.descriptor(s.b), instruction, i);
        else if (p.a_in_tmem)
          tcgen05_mma_f16_ts<kCtaGroup>(s.tmem, s.tmem + 256, b.descriptor(s.b), instruction, i);
        else
          tcgen05_mma_f16<kCtaGroup>(s.tmem, a.descriptor(s.a), b.descriptor(s.b), instruction, i);
      }
      if constexpr (kCtaGroup == 2)
        tcgen05_commit_multicast<2>(s.done, 3);
      else
        tcgen05_commit<1>(s.done);
    }
    mbarrier_wait(s.done, 0);
    tcgen05_fence_after_thread_sync();
    const emu::DataPath path = emu::data_path(p.m, kCtaGroup, p.ws);
    for (int c = 0; c < emu::accumulator_columns(path, p.n); c += 8) {
      uint32_t r[8];
      if (path == emu::DataPath::half) {  // only 16 lanes of each quarter hold something
        uint32_t half[4];
        tmem_load<TmemShape::b16x256>(half, tmem_address(s.tmem, 32 * warp, c));
        tmem_wait_load(half);
        for (int i = 0; i < 4; ++i) {
          const emu::Coord at = emu::tmem_fragment(TmemShape::b16x256, lane_index(), i);
          d[size_t((32 * warp + at.row) * 512 + c + at.col)] = bit_cast<float>(half[i]);
        }
      } else {
        tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, c));
        tmem_wait_load(r);
        for (int i = 0; i < 8; ++i) d[size_t(rank * 65536 + t * 512 + c + i)] = bit_cast<float>(r[i]);
      }
    }
  });
}

void check_product(const Product& p) {
  std::vector<float> d(size_t(p.cta_group * 65536), NAN);
  expect_clean(
      shape(128, uint32_t(p.cta_group)),
      [&] {
        if (p.cta_group == 2)
          multiply<2>(p, d);
        else
          multiply<1>(p, d);
      },
      3);
  const int rows = p.m / p.cta_group;
  double worst = 0;
  for (int m = 0; m < p.m; ++m)
    for (int n = 0; n < p.n; ++n) {
      double sum = 0;
      for (int k = 0; k < 16; ++k)
        sum += 2 * double(element(uint32_t(m * 16 + k), p.type)) * double(element(uint32_t(9000 + n * 16 + k), p.type));
      const emu::Coord c = emu::accumulator_coord(emu::data_path(p.m, p.cta_group, p.ws), p.n, m % rows, n);
      const double error =
          std::fabs((p.negate_a ? -sum : sum) - double(d[size_t(m / rows * 65536 + c.row * 512 + c.col)]));
      worst = std::isnan(worst) || error <= worst ? worst : error;
    }
  EXPECT_LE(worst, 1e-5) << "M " << p.m << " N " << p.n << " group " << p.cta_group << (p.ws ? " ws" : "")
                         << (p.a_in_tmem ? " ts" : "");
}

TEST(Products, EveryDataPathFromSharedAndTensorMemory) {
  for (bool a_in_tmem : {false, true}) {
    check_product({.m = 128, .n = 64, .a_in_tmem = a_in_tmem});
    check_product({.m = 128, .n = 256, .a_in_tmem = a_in_tmem});
    check_product({.m = 64, .n = 40, .a_in_tmem = a_in_tmem});
    check_product({.m = 128, .n = 128, .ws = true, .a_in_tmem = a_in_tmem});
    check_product({.m = 64, .n = 128, .ws = true, .a_in_tmem = a_in_tmem});
    check_product({.m = 32, .n = 256, .ws = true, .a_in_tmem = a_in_tmem});
    check_product({.m = 256, .n = 64, .cta_group = 2, .a_in_tmem = a_in_tmem});
  }
  check_product({.m = 128, .n = 96, .cta_group = 2});
}

TEST(Products, MajorsTypesAndSigns) {
  for (Half type : {Half::bf16, Half::fp16})
    for (Major a : {Major::k, Major::mn})
      for (Major b : {Major::k, Major::mn})
        check_product({.m = 128, .n = 128, .negate_a = type == Half::fp16, .type = type, .a_major = a, .b_major = b});
  check_product({.m = 256, .n = 128, .cta_group = 2, .a_major = Major::mn, .b_major = Major::mn});
}

TEST(Products, WhatIsNotModelledSaysSo) {
  const emu::Report report = emu::launch(shape(128, 2), {}, [] {
    std::vector<float> d(2 * 65536);
    multiply<2>({.m = 128, .n = 64, .cta_group = 2, .a_in_tmem = true}, d);
  });
  ASSERT_TRUE(report.has(Kind::unsupported)) << report.text();
  EXPECT_NE(report.text().find("tcgen05.mma"), std::string::npos);
  const auto refuses = [](const char* name, auto instruction) {
    const emu::Report of_one = emu::launch(shape(128), {}, [&] { with_tensor_memory<1>(32, instruction); });
    EXPECT_TRUE(of_one.has(Kind::unsupported)) << of_one.text();
    EXPECT_NE(of_one.text().find(name), std::string::npos) << of_one.text();
  };
  refuses("tcgen05.shift", [](Shared& s) { tcgen05_shift<1>(s.tmem); });
  refuses("tcgen05.cp.4x256b",
          [](Shared& s) { tcgen05_copy<1, CopyShape::b4x256>(s.tmem, tcgen05_descriptor({Swizzle::none, 16, 128})); });
}

// A pair multiplies e2m1 operands: each CTA has the scales of its rows of A, and those of all of B.
void check_nvfp4(bool a_in_tmem) {
  std::vector<float> d(2 * 65536, NAN);
  const auto code = [](uint32_t i) { return uint8_t(i * 2654435761u >> 24); };
  const auto scale = [](uint32_t i) { return uint8_t(0x30 + (i * 40503u >> 8) % 16); };
  expect_clean(
      shape(128, 2),
      [&] {
        with_tensor_memory<2>(256, [&](Shared& s) {
          const int t = thread_index(), warp = t / 32, rank = int(cluster_rank());
          for (int i = t; i < 128 * 32; i += 128)
            s.a[(i / 32 * 128 + i % 32) ^ (i / 32 % 8 << 4)] = code(uint32_t(rank * 4096 + i));
          for (int i = t; i < 32 * 32; i += 128)
            s.b[(i / 32 * 128 + i % 32) ^ (i / 32 % 8 << 4)] = code(uint32_t(20000 + rank * 1024 + i));
          for (int i = t; i < 512; i += 128) {  // row, block → its byte of a scale tile
            const int row = i / 4, block = i % 4;
            s.a[32768 + emu::scale_tile_offset(row, block)] = scale(uint32_t(rank * 512 + i));
            s.b[32768 + emu::scale_tile_offset(row, block)] = scale(uint32_t(5000 + i));
          }
          if (a_in_tmem) {  // row t: 32 bytes
            uint32_t words[8] = {};
            for (int i = 0; i < 32; ++i)
              words[i / 4] |= uint32_t{code(uint32_t(rank * 4096 + t * 32 + i))} << i % 4 * 8;
            tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * warp, 64), words);
            tmem_wait_store();
          }
          fence_proxy_async();
          tcgen05_fence_before_thread_sync();
          cluster_sync();
          tcgen05_fence_after_thread_sync();
          if (t == 0 && rank == 0) {
            constexpr uint64_t kScales = tcgen05_descriptor({Swizzle::none, 16, 128});
            tcgen05_copy<2, CopyShape::b32x128_x4>(s.tmem + 128, at_address(kScales, shared_address(s.a + 32768)));
            tcgen05_copy<2, CopyShape::b32x128_x4>(s.tmem + 132, at_address(kScales, shared_address(s.b + 32768)));
            const Operand rows{Major::k, 0};
            constexpr uint32_t kInstruction = nvfp4_instruction_descriptor(256, 64);
            if (a_in_tmem)
              tcgen05_mma_nvfp4_ts<2>(s.tmem, s.tmem + 64, rows.descriptor(s.b), kInstruction, s.tmem + 128,
                                      s.tmem + 132, false);
            else
              tcgen05_mma_nvfp4<2>(s.tmem, rows.descriptor(s.a), rows.descriptor(s.b), kInstruction, s.tmem + 128,
                                   s.tmem + 132, false);
            tcgen05_commit_multicast<2>(s.done, 3);
          }
          mbarrier_wait(s.done, 0);
          tcgen05_fence_after_thread_sync();
          uint32_t r[64];
          tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, 0));
          tmem_wait_load(r);
          for (int i = 0; i < 64; ++i) d[size_t((rank * 128 + t) * 64 + i)] = bit_cast<float>(r[i]);
        });
      },
      6);
  for (int m = 0; m < 256; ++m)
    for (int n = 0; n < 64; ++n) {
      double sum = 0;
      for (int k = 0; k < 64; ++k) {
        const double a = double(emu::from_e2m1(uint8_t(code(uint32_t(m * 32 + k / 2)) >> 4 * (k % 2) & 15))) *
                         double(emu::from_e4m3(scale(uint32_t(m * 4 + k / 16))));
        const double b = double(emu::from_e2m1(uint8_t(code(uint32_t(20000 + n * 32 + k / 2)) >> 4 * (k % 2) & 15))) *
                         double(emu::from_e4m3(scale(uint32_t(5000 + n * 4 + k / 16))));
        sum += a * b;
      }
      ASSERT_NEAR(sum, double(d[size_t(m * 64 + n)]), 1e-4 * (1 + std::fabs(sum))) << m << " " << n;
    }
}

TEST(Products, Nvfp4InACtaPair) {
  check_nvfp4(false);
  check_nvfp4(true);
}

// ---- copies to tensor memory ----------------------------------------------------------------------------------------

template <CopyShape kShape>
void check_copy() {
  std::vector<uint32_t> got(128 * 8);
  expect_clean(
      shape(128),
      [&] {
        with_tensor_memory<1>(32, [&](Shared& s) {
          const int t = thread_index(), warp = t / 32;
          for (int i = t; i < 2048; i += 128) reinterpret_cast<uint32_t*>(s.a)[i] = uint32_t(i);
          fence_proxy_async();
          syncthreads();
          if (t ==
              0) {  // core matrices of 8 rows × 16 bytes: 128 bytes each, the second column of them 2,048 bytes further
            tcgen05_copy<1, kShape>(s.tmem,
                                    at_address(tcgen05_descriptor({Swizzle::none, 2048, 128}), shared_address(s.a)));
            tcgen05_commit<1>(s.done);
          }
          mbarrier_wait(s.done, 0);
          tcgen05_fence_after_thread_sync();
          uint32_t r[4], more[4] = {};
          tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, 0));
          tmem_wait_load(r);
          if constexpr (kShape == CopyShape::b128x256) {
            tmem_load<TmemShape::b32x32>(more, tmem_address(s.tmem, 32 * warp, 4));
            tmem_wait_load(more);
          }
          for (int i = 0; i < 4; ++i) got[size_t(t * 8 + i)] = r[i], got[size_t(t * 8 + 4 + i)] = more[i];
        });
      },
      3);
  for (int row = 0; row < emu::copy_rows(kShape); ++row)
    for (int lane : emu::copy_lanes(kShape, row))
      for (int column = 0; lane >= 0 && column < emu::copy_row_bytes(kShape) / 4; ++column)
        EXPECT_EQ(got[size_t(lane * 8 + column)], uint32_t(row * 4 + column % 4 + column / 4 * 512));
}

TEST(Copies, EveryShapeToTensorMemory) {
  check_copy<CopyShape::b128x256>();
  check_copy<CopyShape::b128x128>();
  check_copy<CopyShape::b64x128_02_13>();
  check_copy<CopyShape::b64x128_01_23>();
  check_copy<CopyShape::b32x128_x4>();
}

TEST(Copies, Gather4AndScatter4) {
  std::vector<float> from(32 * 16), to(32 * 16, -1);
  for (size_t i = 0; i < from.size(); ++i) from[i] = float(i);
  const auto map = [](std::vector<float>& v) {
    return make_tensor_map({.address = v.data(),
                            .element = TensorElement::f32,
                            .rank = 2,
                            .extent = {16, 32},
                            .stride_bytes = {64},
                            .box = {8, 1},
                            .swizzle = Swizzle::bytes32});
  };
  const TensorMap in = map(from), out = map(to);
  expect_clean(shape(32), [&] {
    auto& s = dynamic_smem<Shared>();
    if (thread_index() == 0) {
      mbarrier_init(s.full, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(s.full, 128);
      tma_gather4<1>(shared_address(s.a), in, 8, {30, 2, -1, 40}, shared_address(&s.full));
      mbarrier_wait(s.full, 0);
      tma_scatter4(out, 0, {5, 6, 7, 99}, shared_address(s.a));
      bulk_commit();
      bulk_wait<0>();
    }
  });
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(to[size_t(5 * 16 + i)], from[size_t(30 * 16 + 8 + i)]);
    EXPECT_EQ(to[size_t(6 * 16 + i)], from[size_t(2 * 16 + 8 + i)]);
    EXPECT_EQ(to[size_t(7 * 16 + i)], 0.f);  // the row that does not exist
    EXPECT_EQ(to[size_t(5 * 16 + 8 + i)], -1.f);
  }
}

// ---- cluster launch control, conversions ----------------------------------------------------------------------------

TEST(ClusterLaunchControl, EveryTileIsDoneOnce) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int> done(12);
    const emu::Report report = emu::launch(shape(32, 2, 12), test::options_for(seed), [&] {
      auto& s = dynamic_smem<Shared>();
      if (thread_index() != 0) return;
      mbarrier_init(s.full, 1);
      fence_mbarrier_init();
      if (cluster_rank() != 0) return void(++done[size_t(block_index())]);  // the second CTA keeps its own tile
      int tile = block_index();
      for (uint32_t parity = 0;; parity ^= 1) {
        ++done[size_t(tile)];
        mbarrier_arrive_expect_tx(s.full, 16);
        clusterlaunchcontrol_try_cancel(shared_address(s.a), s.full);
        mbarrier_wait(s.full, parity);
        const CancelResponse next = clusterlaunchcontrol_query_cancel(load_shared_v4(shared_address(s.a)));
        if (!next.canceled) break;
        tile = next.x;
        ++done[size_t(tile + 1)];
        fence_proxy_async();
      }
    });
    ASSERT_TRUE(report.clean()) << report.text();
    EXPECT_EQ(done, std::vector<int>(12, 1)) << seed;
  }
}

TEST(Conversions, EveryE4m3AndE2m1ValueRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const float value = emu::from_e4m3(uint8_t(code));
    if (std::isnan(value)) continue;
    EXPECT_EQ(pack_e4m3(value, value), code * 257);
    EXPECT_EQ(emu::from_fp16(uint16_t(unpack_e4m3(uint16_t(code)))), value);
  }
  for (int code = 0; code < 16; ++code) {
    const float value = emu::from_e2m1(uint8_t(code));
    EXPECT_EQ(pack_e2m1(value, -value), (code ^ 8) << 4 | code);
    EXPECT_EQ(emu::from_fp16(uint16_t(unpack_e2m1(uint8_t(code)))), value);
  }
}

// Rounding to nearest even against the nearest representable value, found by search.
TEST(Conversions, RoundToNearestEven) {
  std::mt19937 random(5);
  for (int i = 0; i < 20000; ++i) {
    const float x = bit_cast<float>(uint32_t(random() & 0x80ffffff) | uint32_t(120 + random() % 20) << 23);
    const auto nearest = [&](int codes, auto decode) {
      int best = 0;
      for (int c = 0; c < codes; ++c) {
        if (std::isnan(decode(c))) continue;
        const double now = std::fabs(double(decode(c)) - double(x)),
                     before = std::fabs(double(decode(best)) - double(x));
        if (now < before || (now == before && c % 2 == 0 && std::signbit(decode(c)) == std::signbit(x))) best = c;
      }
      return decode(best);
    };
    EXPECT_EQ(emu::from_e4m3(emu::to_e4m3_bits(x)), nearest(256, [](int c) { return emu::from_e4m3(uint8_t(c)); }))
        << x;
    EXPECT_EQ(emu::from_e2m1(emu::to_e2m1_bits(x)), nearest(16, [](int c) { return emu::from_e2m1(uint8_t(c)); })) << x;
  }
}

}  // namespace
}  // namespace hopwell::arch
