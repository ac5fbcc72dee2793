// Blackwell's tensor memory and products on the emulator, one at a time, compared with plain arithmetic. (Hopper's
// instructions are certified on hardware; see certify/.)
#include "sm100_harness.hpp"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "arch/emu/numeric.hpp"
#include "arch/sm100/tcgen05.hpp"

namespace hopwell::arch {
namespace {

// ---- loads and stores -----------------------------------------------------------------------------------------------

// Stores a number for every (lane, column) in one shape, loads it in another shape.
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
  // Offset of element (row, k), k < 16, of a 128B-swizzled operand: K-major rows of 64, MN-major panels of 64 rows, 1
  // KiB per 8 of k.
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
  bool side_by_side = false;  // every half or quarter of the lanes has its own A
  Half type = Half::bf16;
  Major a_major = Major::k, b_major = Major::k;
};

// Number of segments of N that are stacked in the lanes.
int segments_of(const Product& p) {
  const emu::DataPath path = emu::data_path(p.m, p.cta_group, p.ws);
  return path == emu::DataPath::two ? 2 : path == emu::DataPath::four ? 4 : 1;
}
// Index of element (m, 0) of the A for segment `segment` of N.
uint32_t a_index(const Product& p, int m, int segment) {
  return uint32_t(m * 16 + (p.side_by_side ? 40000 * segment : 0));
}

float element(uint32_t index, Half type) {  // exact in both types
  const float v = float(int(index * 2654435761u >> 24) - 128) * 0x1p-7f;
  return type == Half::bf16 ? emu::from_bf16(emu::to_bf16_bits(v)) : v;
}
uint16_t element_bits(uint32_t index, Half type) {
  return type == Half::bf16 ? emu::to_bf16_bits(element(index, type)) : emu::to_fp16_bits(element(index, type));
}

// D = A B + A B with random operands. Returns D in the layout of tensor memory, [cta][lane][column].
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
    if (p.a_in_tmem) {
      const emu::DataPath path = emu::data_path(p.m, kCtaGroup, p.ws);
      uint32_t words[8] = {};
      for (int segment = 0; segment < segments_of(p); ++segment)
        for (int m = 0; m < rows; ++m)
          if (emu::a_lane(path, rows, segment, m) == t)
            for (uint32_t k = 0; k < 8; ++k) {
              const uint32_t index = a_index(p, rank * rows + m, segment) + 2 * k;
              words[k] = uint32_t(element_bits(index, p.type)) | uint32_t(element_bits(index + 1, p.type)) << 16;
            }
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
      if (path == emu::DataPath::half) {  // only 16 lanes of each quarter hold results
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
        sum += 2 * double(element(a_index(p, m, n / (p.n / segments_of(p))) + uint32_t(k), p.type)) *
               double(element(uint32_t(9000 + n * 16 + k), p.type));
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
    check_product({.m = 128, .n = 96, .cta_group = 2, .a_in_tmem = a_in_tmem});
    check_product({.m = 128, .n = 256, .cta_group = 2, .a_in_tmem = a_in_tmem});
  }
}

// The "dual GEMM" of .ws with A in tensor memory: for example, halves of K in the halves of the lanes, to be added
// afterwards.
TEST(Products, SideBySideWithAnAInEveryPartOfTheLanes) {
  for (int n : {64, 128, 256}) {
    check_product({.m = 64, .n = n, .ws = true, .a_in_tmem = true, .side_by_side = true});
    check_product({.m = 32, .n = n, .ws = true, .a_in_tmem = true, .side_by_side = true});
  }
  check_product({.m = 64, .n = 128, .ws = true, .a_in_tmem = true, .side_by_side = true, .b_major = Major::mn});
}

TEST(Products, MajorsTypesAndSigns) {
  for (Half type : {Half::bf16, Half::fp16})
    for (Major a : {Major::k, Major::mn})
      for (Major b : {Major::k, Major::mn})
        check_product({.m = 128, .n = 128, .negate_a = type == Half::fp16, .type = type, .a_major = a, .b_major = b});
  check_product({.m = 256, .n = 128, .cta_group = 2, .a_major = Major::mn, .b_major = Major::mn});
}

TEST(Products, WhatIsNotModelledSaysSo) {
  const auto refuses = [](const char* name, auto instruction) {
    const emu::Report of_one = emu::launch(shape(128), {}, [&] { with_tensor_memory<1>(32, instruction); });
    EXPECT_TRUE(of_one.has(Kind::unsupported)) << of_one.text();
    EXPECT_NE(of_one.text().find(name), std::string::npos) << of_one.text();
  };
  refuses("tcgen05.shift", [](Shared& s) { tcgen05_shift<1>(s.tmem); });
  refuses("tcgen05.cp.4x256b",
          [](Shared& s) { tcgen05_copy<1, CopyShape::b4x256>(s.tmem, tcgen05_descriptor({Swizzle::none, 16, 128})); });
}

// A pair multiplies e2m1 operands: each CTA has the scales of its rows of A and the scales of all of B.
template <int kN>
void check_nvfp4(bool a_in_tmem) {
  constexpr uint32_t kA = 256, kScaleA = 320, kScaleB = 324;  // columns of tensor memory
  constexpr int kTiles = (kN + 127) / 128;                    // of scales of B
  std::vector<float> d(size_t{256 * kN}, NAN);
  const auto code = [](uint32_t i) { return uint8_t(i * 2654435761u >> 24); };
  const auto scale = [](uint32_t i) { return uint8_t(0x30 + (i * 40503u >> 8) % 16); };
  expect_clean(
      shape(128, 2),
      [&] {
        with_tensor_memory<2>(512, [&](Shared& s) {
          const int t = thread_index(), warp = t / 32, rank = int(cluster_rank());
          for (int i = t; i < 128 * 32; i += 128)
            s.a[(i / 32 * 128 + i % 32) ^ (i / 32 % 8 << 4)] = code(uint32_t(rank * 4096 + i));
          for (int i = t; i < kN / 2 * 32; i += 128)
            s.b[(i / 32 * 128 + i % 32) ^ (i / 32 % 8 << 4)] = code(uint32_t(20000 + rank * kN / 2 * 32 + i));
          for (int i = t; i < 512 * kTiles; i += 128) {  // row, block → its byte of a scale tile
            const int row = i / 4 % 128, block = i % 4, at = 32768 + i / 512 * 512;
            if (i < 512) s.a[at + int(emu::scale_tile_offset(row, block))] = scale(uint32_t(rank * 512 + i));
            s.b[at + int(emu::scale_tile_offset(row, block))] = scale(uint32_t(5000 + i));
          }
          if (a_in_tmem) {  // row t: 32 bytes
            uint32_t words[8] = {};
            for (int i = 0; i < 32; ++i)
              words[i / 4] |= uint32_t{code(uint32_t(rank * 4096 + t * 32 + i))} << i % 4 * 8;
            tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * warp, kA), words);
            tmem_wait_store();
          }
          fence_proxy_async();
          tcgen05_fence_before_thread_sync();
          cluster_sync();
          tcgen05_fence_after_thread_sync();
          if (t == 0 && rank == 0) {
            constexpr uint64_t kScales = tcgen05_descriptor({Swizzle::none, 16, 128});
            tcgen05_copy<2, CopyShape::b32x128_x4>(s.tmem + kScaleA, at_address(kScales, shared_address(s.a + 32768)));
            for (uint32_t tile = 0; tile < kTiles; ++tile)
              tcgen05_copy<2, CopyShape::b32x128_x4>(s.tmem + kScaleB + 4 * tile,
                                                     at_address(kScales, shared_address(s.b + 32768) + 512 * tile));
            const Operand rows{Major::k, 0};
            constexpr uint32_t kInstruction = nvfp4_instruction_descriptor(256, kN);
            if (a_in_tmem)
              tcgen05_mma_nvfp4_ts<2>(s.tmem, s.tmem + kA, rows.descriptor(s.b), kInstruction, s.tmem + kScaleA,
                                      s.tmem + kScaleB, false);
            else
              tcgen05_mma_nvfp4<2>(s.tmem, rows.descriptor(s.a), rows.descriptor(s.b), kInstruction, s.tmem + kScaleA,
                                   s.tmem + kScaleB, false);
            tcgen05_commit_multicast<2>(s.done, 3);
          }
          mbarrier_wait(s.done, 0);
          tcgen05_fence_after_thread_sync();
          for (int column = 0; column < kN; column += 16) {
            uint32_t r[16];
            tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, column));
            tmem_wait_load(r);
            for (int i = 0; i < 16; ++i) d[size_t((rank * 128 + t) * kN + column + i)] = bit_cast<float>(r[i]);
          }
        });
      },
      6);
  for (int m = 0; m < 256; ++m)
    for (int n = 0; n < kN; ++n) {
      double sum = 0;
      for (int k = 0; k < 64; ++k) {
        const double a = double(emu::from_e2m1(uint8_t(code(uint32_t(m * 32 + k / 2)) >> 4 * (k % 2) & 15))) *
                         double(emu::from_e4m3(scale(uint32_t(m * 4 + k / 16))));
        const double b = double(emu::from_e2m1(uint8_t(code(uint32_t(20000 + n * 32 + k / 2)) >> 4 * (k % 2) & 15))) *
                         double(emu::from_e4m3(scale(uint32_t(5000 + n * 4 + k / 16))));
        sum += a * b;
      }
      ASSERT_NEAR(sum, double(d[size_t(m * kN + n)]), 1e-4 * (1 + std::fabs(sum))) << m << " " << n;
    }
}

TEST(Products, Nvfp4InACtaPair) {
  for (bool a_in_tmem : {false, true}) {
    check_nvfp4<16>(a_in_tmem);
    check_nvfp4<64>(a_in_tmem);
    check_nvfp4<144>(a_in_tmem);
    check_nvfp4<256>(a_in_tmem);
  }
}

// Two steps of K 64 in one CTA, N from 8 on; scales of B in tiles of 128 rows, for any N.
void check_nvfp4_width(int n) {
  std::vector<float> d(128 * 256, NAN);
  const int tiles = (n + 127) / 128;
  const auto code = [](int row, int byte) { return uint8_t(uint32_t(row * 64 + byte) * 2654435761u >> 24); };
  const auto scale = [](int row, int block) { return uint8_t(0x30 + (uint32_t(row * 8 + block) * 40503u >> 8) % 16); };
  expect_clean(
      shape(128),
      [&] {
        with_tensor_memory<1>(512, [&](Shared& s) {
          const int t = thread_index(), warp = t / 32;
          const auto fill = [&](unsigned char* memory, int rows, int first) {
            for (int i = t; i < rows * 64; i += 128)
              memory[(i / 64 * 128 + i % 64) ^ (i / 64 % 8 << 4)] = code(first + i / 64, i % 64);
          };
          fill(s.a, 128, 0);
          fill(s.b, n, 1000);
          const auto fill_scales = [&](unsigned char* memory, int rows, int first) {
            for (int i = t; i < rows * 8; i += 128)  // row, step, block
              memory[(i / 1024 * 2 + i % 8 / 4) * 512 + int(emu::scale_tile_offset(i / 8 % 128, i % 4))] =
                  scale(first + i / 8, i % 8);
          };
          fill_scales(s.a + 32768, 128, 0);
          fill_scales(s.b + 32768, 128 * tiles, 1000);
          fence_proxy_async();
          syncthreads();
          if (t == 0) {
            constexpr uint64_t kScales = tcgen05_descriptor({Swizzle::none, 16, 128});
            const uint32_t instruction = nvfp4_instruction_descriptor(128, n), a = shared_address(s.a),
                           b = shared_address(s.b), scale_a = s.tmem + 256, scale_b = s.tmem + 260;
            for (uint32_t step = 0; step < 2; ++step) {  // the copies and products of one thread run in order
              tcgen05_copy<1, CopyShape::b32x128_x4>(scale_a, at_address(kScales, a + 32768 + step * 512));
              for (uint32_t tile = 0; tile < uint32_t(tiles); ++tile)
                tcgen05_copy<1, CopyShape::b32x128_x4>(scale_b + 4 * tile,
                                                       at_address(kScales, b + 32768 + (tile * 2 + step) * 512));
              constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
              tcgen05_mma_nvfp4<1>(s.tmem, at_address(kOperand, a + step * 32), at_address(kOperand, b + step * 32),
                                   instruction, scale_a, scale_b, step > 0);
            }
            tcgen05_commit<1>(s.done);
          }
          mbarrier_wait(s.done, 0);
          tcgen05_fence_after_thread_sync();
          for (int c = 0; c < n; c += 8) {
            uint32_t r[8];
            tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, c));
            tmem_wait_load(r);
            for (int i = 0; i < 8; ++i) d[size_t(t * 256 + c + i)] = bit_cast<float>(r[i]);
          }
        });
      },
      3);
  const auto value = [&](int row, int k) {
    return double(emu::from_e2m1(uint8_t(code(row, k / 2) >> 4 * (k % 2) & 15))) *
           double(emu::from_e4m3(scale(row, k / 16)));
  };
  for (int i = 0; i < 128; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = 0, size = 0;
      for (int k = 0; k < 128; ++k) {
        const double product = value(i, k) * value(1000 + j, k);
        sum += product;
        size += std::fabs(product);
      }
      ASSERT_NEAR(sum, double(d[size_t(i * 256 + j)]), 1e-6 * size) << "N " << n << ", " << i << " " << j;
    }
}

TEST(Products, Nvfp4OfEveryWidth) {
  for (int n : {8, 16, 24, 40, 64, 72, 128, 136, 200, 248, 256}) check_nvfp4_width(n);
}

// ---- collector buffers ----------------------------------------------------------------------------------------------

// Products that reuse A, or with .ws B, in a collector buffer. D's first columns: results of the second product.
template <int kCtaGroup, bool kWs, bool kTs>
void check_collectors() {
  constexpr int kRows = kWs ? 64 : 128;
  std::vector<float> first(size_t{kCtaGroup * 128 * 64}, NAN), second = first;
  expect_clean(
      shape(128, kCtaGroup),
      [&] {
        with_tensor_memory<kCtaGroup>(512, [&](Shared& s) {
          const int t = thread_index(), warp = t / 32, rank = kCtaGroup == 2 ? int(cluster_rank()) : 0;
          const Operand a{Major::k, kRows}, b{Major::k, 64};
          for (int i = t; i < kRows * 16; i += 128)
            *reinterpret_cast<uint16_t*>(s.a + a.offset(i / 16, i % 16)) =
                element_bits(uint32_t(rank * 2048 + i), Half::bf16);
          for (int i = t; i < 2 * 64 * 16; i += 128)
            *reinterpret_cast<uint16_t*>(s.b + i / 1024 * 8192 + b.offset(i / 16 % 64, i % 16)) =
                element_bits(uint32_t(9000 + rank * 4096 + i), Half::bf16);
          uint32_t words[8];
          for (uint32_t k = 0; k < 8; ++k) {
            const uint32_t index = uint32_t(rank * 2048 + t % kRows * 16) + 2 * k;
            words[k] = uint32_t(element_bits(index, Half::bf16)) | uint32_t(element_bits(index + 1, Half::bf16)) << 16;
          }
          tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * warp, 256), words);
          tmem_wait_store();
          fence_proxy_async();
          tcgen05_fence_before_thread_sync();
          if (kCtaGroup == 2)
            cluster_sync();
          else
            syncthreads();
          tcgen05_fence_after_thread_sync();
          if (t == 0 && rank == 0) {
            constexpr uint32_t kInstruction = instruction_descriptor({.m = kRows * kCtaGroup, .n = 64 * kCtaGroup});
            const uint64_t left = a.descriptor(s.a), right = b.descriptor(s.b), next = b.descriptor(s.b + 8192);
            const uint32_t d = s.tmem, e = s.tmem + 128, in_tmem = s.tmem + 256;
            using enum CollectorUsage;
            if constexpr (kWs && kTs) {
              tcgen05_mma_ws_f16_ts<fill, 1>(d, in_tmem, right, kInstruction, false);
              tcgen05_mma_ws_f16_ts<fill, 2>(e, in_tmem, next, kInstruction, false);
              tcgen05_mma_ws_f16_ts<use, 1>(d, in_tmem, right, kInstruction, true);
              tcgen05_mma_ws_f16_ts<lastuse, 2>(e, in_tmem, next, kInstruction, true);
            } else if constexpr (kWs) {
              tcgen05_mma_ws_f16<fill, 3>(d, left, right, kInstruction, false);
              tcgen05_mma_ws_f16(e, left, next, kInstruction, false);  // discards b0, leaves b3 intact
              tcgen05_mma_ws_f16<lastuse, 3>(d, left, right, kInstruction, true);
              tcgen05_mma_ws_f16<discard, 3>(e, left, next, kInstruction, true);
            } else if constexpr (kTs) {
              tcgen05_mma_f16_ts<kCtaGroup, fill>(d, in_tmem, right, kInstruction, false);
              tcgen05_mma_f16_ts<kCtaGroup, use>(e, in_tmem, next, kInstruction, false);
              tcgen05_mma_f16_ts<kCtaGroup, use>(d, in_tmem, right, kInstruction, true);
              tcgen05_mma_f16_ts<kCtaGroup, lastuse>(e, in_tmem, next, kInstruction, true);
            } else {
              tcgen05_mma_f16<kCtaGroup, fill>(d, left, right, kInstruction, false);
              tcgen05_mma_f16<kCtaGroup, lastuse>(e, left, next, kInstruction, false);
              tcgen05_mma_f16<kCtaGroup, fill>(d, left, right, kInstruction, true);
              tcgen05_mma_f16<kCtaGroup, use>(e, left, next, kInstruction, true);
            }
            if constexpr (kCtaGroup == 2)
              tcgen05_commit_multicast<2>(s.done, 3);
            else
              tcgen05_commit<1>(s.done);
          }
          mbarrier_wait(s.done, 0);
          tcgen05_fence_after_thread_sync();
          uint32_t r[32], q[32];
          tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, 0));
          tmem_load<TmemShape::b32x32>(q, tmem_address(s.tmem, 32 * warp, 128));
          tmem_wait_load();
          for (int i = 0; i < 32; ++i) {
            first[size_t((rank * 128 + t) * 64 + i)] = bit_cast<float>(r[i]);
            second[size_t((rank * 128 + t) * 64 + i)] = bit_cast<float>(q[i]);
          }
        });
      },
      6);
  for (int rank = 0; rank < kCtaGroup; ++rank)
    for (int lane = 0; lane < 128; ++lane)
      for (int column = 0; column < 32; ++column) {
        const int m = lane % kRows, n = kWs ? column + lane / 64 * 32 : column;
        double sums[2] = {};
        for (int k = 0; k < 16; ++k)
          for (int tile = 0; tile < 2; ++tile)
            sums[tile] += 2 * double(element(uint32_t(rank * 2048 + m * 16 + k), Half::bf16)) *
                          double(element(uint32_t(9000 + tile * 1024 + n * 16 + k), Half::bf16));
        const size_t at = size_t((rank * 128 + lane) * 64 + column);
        ASSERT_NEAR(sums[0], double(first[at]), 1e-5) << lane << " " << column;
        ASSERT_NEAR(sums[1], double(second[at]), 1e-5) << lane << " " << column;
      }
}

TEST(Products, OperandsOutOfCollectorBuffers) {
  check_collectors<1, false, false>();
  check_collectors<1, false, true>();
  check_collectors<1, true, false>();
  check_collectors<1, true, true>();
  check_collectors<2, false, false>();
  check_collectors<2, false, true>();
}

}  // namespace
}  // namespace hopwell::arch
