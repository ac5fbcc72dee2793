// Geometry compared with the tables of the PTX manual, exhaustively. The expected values use the manual's own terms
// (figures as tables, canonical layouts as shape:stride lists, fragment formulas by case), not the terms of the code.
#include "arch/emu/geometry.hpp"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace hopwell::arch::emu {
namespace {

// "Swizzling Modes": 16-byte chunk in column c of row r of the 128-byte pattern (8 rows × 8 chunks).
TEST(Swizzle, Bytes128MatchesTheFigure) {
  const int pattern[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5},
                             {3, 2, 1, 0, 7, 6, 5, 4}, {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2},
                             {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};
  for (uint32_t row = 0; row < 8; ++row)
    for (uint32_t chunk = 0; chunk < 8; ++chunk)
      EXPECT_EQ(swizzled(row * 128 + chunk * 16, Swizzle::bytes128), row * 128 + uint32_t(pattern[row][chunk]) * 16);
}

// 64-byte mode: rows of 64 bytes, the chunk of a row is xor-ed with (row / 2) % 4; 32-byte mode: with (row / 4) % 2.
TEST(Swizzle, Bytes64AndBytes32MatchTheFigures) {
  const int rows64[4][4] = {{0, 1, 2, 3}, {1, 0, 3, 2}, {2, 3, 0, 1}, {3, 2, 1, 0}};
  for (uint32_t row = 0; row < 8; ++row)
    for (uint32_t chunk = 0; chunk < 4; ++chunk)
      EXPECT_EQ(swizzled(row * 64 + chunk * 16, Swizzle::bytes64), row * 64 + uint32_t(rows64[row / 2][chunk]) * 16);
  for (uint32_t row = 0; row < 8; ++row)
    for (uint32_t chunk = 0; chunk < 2; ++chunk)
      EXPECT_EQ(swizzled(row * 32 + chunk * 16, Swizzle::bytes32), row * 32 + (chunk ^ (row / 4)) * 16);
}

TEST(Swizzle, IsAnInvolutionInsideItsPattern) {
  for (Swizzle mode : {Swizzle::none, Swizzle::bytes32, Swizzle::bytes64, Swizzle::bytes128})
    for (uint32_t a = 0; a < 1 << 16; ++a) {
      EXPECT_EQ(swizzled(swizzled(a, mode), mode), a);
      EXPECT_EQ(swizzled(a, mode) & ~0x70u, a & ~0x70u);
      EXPECT_EQ(swizzled(a + 1024, mode), swizzled(a, mode) + 1024);
    }
}

TEST(Descriptor, RoundTrip) {
  for (Swizzle mode : {Swizzle::none, Swizzle::bytes32, Swizzle::bytes64, Swizzle::bytes128})
    for (uint32_t address : {0u, 16u, 1024u, 0x1002400u, 0x38000u}) {
      for (bool wgmma : {true, false}) {
        const OperandLayout layout{mode, 4096, 1024};
        const uint64_t bits = at_address(wgmma ? wgmma_descriptor(layout) : tcgen05_descriptor(layout), address);
        const MatrixDescriptor d = wgmma ? decode_wgmma_descriptor(bits) : decode_tcgen05_descriptor(bits);
        EXPECT_EQ(d.error, nullptr);
        EXPECT_EQ(d.start, address & 0x3ffff);
        EXPECT_EQ(d.leading, 4096u);
        EXPECT_EQ(d.stride, 1024u);
        EXPECT_EQ(d.swizzle, mode);
        EXPECT_EQ(d.base_offset, 0u);
      }
    }
}

// Table "Shared memory descriptor layout": the values of bits 61-63 (tcgen05) and 62-63 (wgmma), and reserved bits.
TEST(Descriptor, LayoutTypesAndReservedBits) {
  EXPECT_EQ(tcgen05_descriptor({Swizzle::bytes128, 0, 0}) >> 61, 2u);
  EXPECT_EQ(tcgen05_descriptor({Swizzle::bytes64, 0, 0}) >> 61, 4u);
  EXPECT_EQ(tcgen05_descriptor({Swizzle::bytes32, 0, 0}) >> 61, 6u);
  EXPECT_EQ(wgmma_descriptor({Swizzle::bytes128, 0, 0}) >> 62, 1u);
  EXPECT_EQ(wgmma_descriptor({Swizzle::bytes64, 0, 0}) >> 62, 2u);
  EXPECT_EQ(wgmma_descriptor({Swizzle::bytes32, 0, 0}) >> 62, 3u);
  const uint64_t good = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
  for (int bit : {14, 15, 30, 31, 46, 47, 48, 52, 53, 60})
    EXPECT_NE(decode_tcgen05_descriptor(good ^ uint64_t{1} << bit).error, nullptr) << bit;
  for (uint64_t type : {1u, 3u, 5u, 7u})
    EXPECT_NE(decode_tcgen05_descriptor((good & ~(uint64_t{7} << 61)) | type << 61).error, nullptr);
  for (int bit : {14, 30, 46, 47, 48, 52, 61})
    EXPECT_NE(decode_wgmma_descriptor(wgmma_descriptor({Swizzle::bytes128, 16, 1024}) ^ uint64_t{1} << bit).error,
              nullptr)
        << bit;
}

// A layout in the manual's notation: index → digits by shape (first fastest) → sum of digit × stride.
int evaluate(int index, const std::vector<int>& shape, const std::vector<int>& stride) {
  int sum = 0;
  for (size_t i = 0; i < shape.size(); ++i) {
    const int digit = i + 1 == shape.size() ? index : index % shape[i];
    index /= shape[i];
    sum += digit * stride[i];
  }
  return sum;
}

// "Canonical Layouts", units of T = 128 bits / element size; strides of the table are in elements.
//   K-major   none   ((8,m),(T,2k)) : ((1T,SBO),(1,LBO))      MN-major  none   ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO))
//             32B    ((8,m),(T,2k)) : ((2T,SBO),(1,T))                  32B    ((T,2,m),(8,k)) : ((1,T,LBO),(2T,SBO))
//             64B    ((8,m),(T,2k)) : ((4T,SBO),(1,T))                  64B    ((T,4,m),(8,k)) : ((1,T,LBO),(4T,SBO))
//             128B   ((8,m),(T,2k)) : ((8T,SBO),(1,T))                  128B   ((T,8,m),(8,k)) : ((1,T,LBO),(8T,SBO))
TEST(CanonicalLayout, EveryModeMajorAndElementSize) {
  for (int bits : {4, 8, 16, 32})
    for (int mode = 0; mode < 4; ++mode)
      for (Major major : {Major::k, Major::mn}) {
        if (major == Major::mn && bits == 4) continue;  // packed 4-bit operands are K-major only
        const int t = 128 / bits, wide = 1 << mode;
        const uint32_t leading = 8192, stride = 2048, start = 1024;
        const int lbo = int(leading) * 8 / bits, sbo = int(stride) * 8 / bits;
        const MatrixDescriptor d{start, leading, stride, 0, Swizzle(mode), nullptr};
        for (int mn = 0; mn < 256; ++mn)
          for (int k = 0; k < 256 / bits; ++k) {
            int element;
            if (major == Major::k)
              element = evaluate(mn, {8, 32}, {wide * t, sbo}) + evaluate(k, {t, 2}, {1, mode ? t : lbo});
            else if (mode == 0)
              element = evaluate(mn, {t, 32}, {1, sbo}) + evaluate(k, {8, 8}, {t, lbo});
            else
              element = evaluate(mn, {t, wide, 32}, {1, t, lbo}) + evaluate(k, {8, 8}, {wide * t, sbo});
            const uint32_t byte = swizzled(start + uint32_t(element * bits / 8), Swizzle(mode));
            ASSERT_EQ(operand_address(d, major, bits, mn, k), byte)
                << bits << " bits, mode " << mode << ", mn " << mn << ", k " << k;
          }
      }
}

// A map (lane, element) → coordinate must cover every coordinate of its matrix exactly once.
template <class Map>
void expect_bijection(int lanes, int elements, int rows, int cols, Map map) {
  std::set<std::pair<int, int>> seen;
  for (int lane = 0; lane < lanes; ++lane)
    for (int e = 0; e < elements; ++e) {
      const Coord c = map(lane, e);
      ASSERT_TRUE(c.row >= 0 && c.row < rows && c.col >= 0 && c.col < cols) << lane << " " << e;
      ASSERT_TRUE(seen.insert({c.row, c.col}).second) << "twice: " << c.row << " " << c.col;
    }
  EXPECT_EQ(int(seen.size()), rows * cols);
}

// "Matrix Fragments for mma.m16n8k16": groupID = lane >> 2, threadID_in_group = lane % 4.
TEST(Fragments, MmaM16n8k16) {
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
      const int col = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      EXPECT_EQ(mma_a_fragment(lane, i), (Coord{row, col}));
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(mma_b_fragment(lane, i), (Coord{in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0), group}));
      EXPECT_EQ(mma_d_fragment(lane, i), (Coord{i < 2 ? group : group + 8, in_group * 2 + (i & 1)}));
    }
  }
  expect_bijection(32, 8, 16, 16, mma_a_fragment);
  expect_bijection(32, 4, 16, 8, mma_b_fragment);
  expect_bijection(32, 4, 16, 8, mma_d_fragment);
}

TEST(Fragments, Ldmatrix) {
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < 2; ++half) {
      EXPECT_EQ(ldmatrix_fragment(lane, half, false), (Coord{lane / 4, lane % 4 * 2 + half}));
      EXPECT_EQ(ldmatrix_fragment(lane, half, true), (Coord{lane % 4 * 2 + half, lane / 4}));
    }
}

// "Register Fragments … wgmma.mma_async.m64nNk16": row = 16·warp + lane/4 (+8), columns in pairs of 8-wide blocks.
TEST(Fragments, Wgmma) {
  for (int n = 8; n <= 256; n += 8) expect_bijection(128, n / 2, 64, n, wgmma_d_fragment);
  expect_bijection(128, 8, 64, 16, wgmma_a_fragment);
  expect_bijection(128, 16, 64, 32, wgmma_a_fragment_8bit);
  EXPECT_EQ(wgmma_a_fragment_8bit(1, 3), (Coord{0, 7}));
  EXPECT_EQ(wgmma_a_fragment_8bit(0, 4), (Coord{8, 0}));
  EXPECT_EQ(wgmma_a_fragment_8bit(32, 8), (Coord{16, 16}));
  EXPECT_EQ(wgmma_d_fragment(0, 0), (Coord{0, 0}));
  EXPECT_EQ(wgmma_d_fragment(0, 2), (Coord{8, 0}));
  EXPECT_EQ(wgmma_d_fragment(0, 4), (Coord{0, 8}));
  EXPECT_EQ(wgmma_d_fragment(1, 1), (Coord{0, 3}));
  EXPECT_EQ(wgmma_d_fragment(127, 127), (Coord{63, 255}));
}

// "Data Path Layout Organization": layouts A, B, D, E, F, G.
TEST(TensorMemory, DataPaths) {
  EXPECT_EQ(data_path(256, 2, false), DataPath::full);  // A
  EXPECT_EQ(data_path(128, 2, false), DataPath::two);   // B
  EXPECT_EQ(data_path(128, 1, false), DataPath::full);  // D
  EXPECT_EQ(data_path(128, 1, true), DataPath::full);
  EXPECT_EQ(data_path(64, 1, true), DataPath::two);    // E
  EXPECT_EQ(data_path(64, 1, false), DataPath::half);  // F
  EXPECT_EQ(data_path(32, 1, true), DataPath::four);   // G
  EXPECT_EQ(data_path(64, 2, false), DataPath::invalid);
  EXPECT_EQ(data_path(256, 1, false), DataPath::invalid);
  const struct {
    DataPath path;
    int m;
  } layouts[] = {{DataPath::full, 128}, {DataPath::half, 64}, {DataPath::two, 64}, {DataPath::four, 32}};
  for (auto [path, m_count] : layouts)
    for (int n_total : {64, 128, 256}) {
      std::set<std::pair<int, int>> seen;
      for (int m = 0; m < m_count; ++m)
        for (int n = 0; n < n_total; ++n) {
          const Coord c = accumulator_coord(path, n_total, m, n);
          ASSERT_LT(c.row, 128);
          ASSERT_LT(c.col, accumulator_columns(path, n_total));
          ASSERT_TRUE(seen.insert({c.row, c.col}).second);
        }
    }
  EXPECT_EQ(accumulator_coord(DataPath::half, 64, 17, 5), (Coord{33, 5}));  // F: row 17 is lane 1 of the second quarter
  EXPECT_EQ(accumulator_coord(DataPath::two, 128, 3, 64), (Coord{67, 0}));  // E: second half of N from lane 64
  EXPECT_EQ(accumulator_coord(DataPath::four, 128, 3, 97), (Coord{99, 1}));  // G: last quarter of N from lane 96
}

// Row m of A is in the lane of row m of D, in every part of the lanes that holds a part of N.
TEST(TensorMemory, LanesOfA) {
  const struct {
    DataPath path;
    int m, segments;
  } layouts[] = {{DataPath::full, 128, 1}, {DataPath::half, 64, 1}, {DataPath::two, 64, 2}, {DataPath::four, 32, 4}};
  for (auto [path, m_count, segments] : layouts)
    for (int segment = 0; segment < segments; ++segment)
      for (int m = 0; m < m_count; ++m)
        for (int n = segment * (128 / segments); n < (segment + 1) * (128 / segments); ++n)
          ASSERT_EQ(a_lane(path, m_count, segment, m), accumulator_coord(path, 128, m, n).row);
  // B: the lanes that tcgen05.cp.64x128b.warpx2::02_13 writes for row m.
  for (int m = 0; m < 64; ++m)
    for (int segment = 0; segment < 2; ++segment)
      EXPECT_EQ(a_lane(DataPath::two, 64, segment, m), copy_lanes(CopyShape::b64x128_02_13, m)[size_t(segment)]);
}

TEST(TensorMemory, LoadAndStoreShapesCoverTheirBlockOnce) {
  for (int num : {1, 2, 4, 8, 16, 32, 64, 128}) {
    const auto map = [](TmemShape s, int split) {
      return [s, split](int lane, int reg) { return tmem_fragment(s, lane, reg, split); };
    };
    expect_bijection(32, num, 32, num, map(TmemShape::b32x32, 0));
    expect_bijection(32, num, 16, 2 * num, map(TmemShape::b16x64, 0));
    expect_bijection(32, num, 16, 2 * num, map(TmemShape::b16x32x2, num));
    if (num >= 2) expect_bijection(32, num, 16, 2 * num, map(TmemShape::b16x128, 0));
    if (num >= 4) expect_bijection(32, num, 16, 2 * num, map(TmemShape::b16x256, 0));
  }
}

// Figures of "Data Movement Shape": the threads that hold the first words of each shape.
TEST(TensorMemory, LoadAndStoreShapesMatchTheFigures) {
  EXPECT_EQ(tmem_fragment(TmemShape::b32x32, 17, 3), (Coord{17, 3}));
  EXPECT_EQ(tmem_fragment(TmemShape::b16x64, 1, 0), (Coord{8, 0}));  // .16x64b: T0 row 0, T1 row 8, T2 row 0 column 1
  EXPECT_EQ(tmem_fragment(TmemShape::b16x64, 2, 0), (Coord{0, 1}));
  EXPECT_EQ(tmem_fragment(TmemShape::b16x64, 4, 1), (Coord{1, 2}));
  EXPECT_EQ(tmem_fragment(TmemShape::b16x128, 3, 0), (Coord{0, 3}));  // .16x128b: T0-T3 row 0, register 1 is row 8
  EXPECT_EQ(tmem_fragment(TmemShape::b16x128, 3, 1), (Coord{8, 3}));
  EXPECT_EQ(tmem_fragment(TmemShape::b16x256, 1, 1), (Coord{0, 3}));  // .16x256b: the form of an mma accumulator
  EXPECT_EQ(tmem_fragment(TmemShape::b16x256, 1, 2), (Coord{8, 2}));
  EXPECT_EQ(tmem_fragment(TmemShape::b16x32x2, 16, 0, 4), (Coord{0, 4}));
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) EXPECT_EQ(tmem_fragment(TmemShape::b16x256, lane, i), mma_d_fragment(lane, i));
}

TEST(TensorMemory, CopyShapes) {
  for (CopyShape shape : {CopyShape::b128x256, CopyShape::b128x128, CopyShape::b64x128_02_13, CopyShape::b64x128_01_23,
                          CopyShape::b32x128_x4}) {
    std::set<int> lanes;
    for (int row = 0; row < copy_rows(shape); ++row)
      for (int lane : copy_lanes(shape, row))
        if (lane >= 0) {
          EXPECT_TRUE(lanes.insert(lane).second);
        }
    EXPECT_EQ(lanes.size(), 128u);
  }
  EXPECT_EQ(copy_lanes(CopyShape::b64x128_02_13, 40), (std::array<int, 4>{40, 104, -1, -1}));  // quarters 1 and 3
  EXPECT_EQ(copy_lanes(CopyShape::b64x128_01_23, 40), (std::array<int, 4>{72, 104, -1, -1}));  // quarters 2 and 3
}

// One 32x128b.warpx4 copy of a 512-byte tile moves every scale to the position where the instruction reads it.
TEST(TensorMemory, ScaleTileAndScaleCoordinatesAgree) {
  for (int row = 0; row < 128; ++row)
    for (int block = 0; block < 4; ++block) {
      const uint32_t offset = scale_tile_offset(row, block);
      EXPECT_EQ(scale_coord(row), (Coord{int(offset / 16), int(offset % 16 / 4)}));
      EXPECT_EQ(int(offset % 4), block);
    }
}

// Table "Instruction descriptor": positions of the fields of kind::f16 and of kind::mxf4nvf4.
TEST(InstructionDescriptor, Fields) {
  const uint32_t d = instruction_descriptor({.m = 128, .n = 256, .type = Half::bf16, .b_major = Major::mn});
  EXPECT_EQ(d >> 4 & 3, 1u);   // accumulator F32
  EXPECT_EQ(d >> 7 & 7, 1u);   // A BF16
  EXPECT_EQ(d >> 10 & 7, 1u);  // B BF16
  EXPECT_EQ(d >> 15 & 1, 0u);
  EXPECT_EQ(d >> 16 & 1, 1u);
  EXPECT_EQ(d >> 17 & 63, 32u);
  EXPECT_EQ(d >> 24 & 31, 8u);
  const uint32_t f = nvfp4_instruction_descriptor(256, 64);
  EXPECT_EQ(f >> 7 & 7, 1u);  // E2M1
  EXPECT_EQ(f >> 10 & 3, 1u);
  EXPECT_EQ(f >> 17 & 63, 8u);
  EXPECT_EQ(f >> 23 & 1, 0u);  // UE4M3
  EXPECT_EQ(f >> 27 & 3, 2u);  // M >> 7
}

}  // namespace
}  // namespace hopwell::arch::emu
