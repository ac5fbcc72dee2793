// Positions of elements in memory and registers: pure functions, from the tables and figures of the PTX manual. Names
// of sections in quotes are from PTX ISA 9.0.
#pragma once

#include <array>
#include <cstdint>

#include "../descriptor.hpp"

namespace hopwell::arch::emu {

/// A position in a matrix, or in tensor memory (row: lane, col: 32-bit column).
struct Coord {
  int row, col;
  friend bool operator==(const Coord&, const Coord&) = default;
};

// ---- shared memory --------------------------------------------------------------------------------------------------

/// Address after swizzling ("Swizzling Modes"): address bits [4, 4+s) are xor-ed with bits [7, 7+s), s = 1, 2, 3 for
/// the 32, 64 and 128-byte mode. An involution; the pattern repeats every 128 << s bytes.
constexpr uint32_t swizzled(uint32_t address, Swizzle mode) {
  return address ^ ((address >> 7 & ((1u << int(mode)) - 1)) << 4);
}

/// Fields of a shared-memory matrix descriptor ("Matrix Descriptor Format", "Shared Memory Descriptor").
struct MatrixDescriptor {
  uint32_t start, leading, stride;  // bytes
  uint32_t base_offset;             // bits 49-51
  Swizzle swizzle;
  const char* error;  // null, or the reason why the bits are malformed
};
MatrixDescriptor decode_wgmma_descriptor(uint64_t bits);
MatrixDescriptor decode_tcgen05_descriptor(uint64_t bits);

/// Byte offset of element (mn, k) of an operand in the shared memory of its CTA ("Canonical Layouts"). For packed 4-bit
/// elements: offset of the byte that contains the element.
inline uint32_t operand_address(const MatrixDescriptor& d, Major major, int element_bits, int mn, int k) {
  const uint32_t width = 16u << int(d.swizzle);  // bytes of one row of the swizzle atom
  const bool swizzle = d.swizzle != Swizzle::none;
  uint32_t address = d.start;
  if (major == Major::k) {
    const uint32_t k_byte = uint32_t(k * element_bits / 8);
    address += uint32_t(mn / 8) * d.stride + uint32_t(mn % 8) * width;
    address += swizzle ? k_byte : k_byte / 16 * d.leading + k_byte % 16;
  } else {
    const uint32_t mn_byte = uint32_t(mn * element_bits / 8), panel = mn_byte / width;
    address += mn_byte % width + uint32_t(k % 8) * width;
    address +=
        swizzle ? panel * d.leading + uint32_t(k / 8) * d.stride : panel * d.stride + uint32_t(k / 8) * d.leading;
  }
  return swizzled(address, d.swizzle);
}

// ---- registers of mma.sync, ldmatrix, stmatrix and wgmma ------------------------------------------------------------

/// mma.m16n8k16, 16-bit inputs ("Matrix Fragments for mma.m16n8k16 with floating point type").
/// Element 0..7 of the 4 registers of A → (m, k); 0..3 of the 2 registers of B → (k, n); 0..3 of D → (m, n).
constexpr Coord mma_a_fragment(int lane, int element) {
  const int reg = element / 2;
  return {lane / 4 + 8 * (reg % 2), 2 * (lane % 4) + 8 * (reg / 2) + element % 2};
}
constexpr Coord mma_b_fragment(int lane, int element) {
  return {2 * (lane % 4) + 8 * (element / 2) + element % 2, lane / 4};
}
constexpr Coord mma_d_fragment(int lane, int element) {
  return {lane / 4 + 8 * (element / 2), 2 * (lane % 4) + element % 2};
}

/// ldmatrix/stmatrix ("ldmatrix"): (row, column) in the 8×8 matrix of the element in half-word `half` of a lane's
/// register.
constexpr Coord ldmatrix_fragment(int lane, int half, bool transposed) {
  const Coord c{lane / 4, 2 * (lane % 4) + half};
  return transposed ? Coord{c.col, c.row} : c;
}

/// wgmma D and register A ("Register Fragments and Shared Memory Matrix Layouts"); thread is 0..127 in the warpgroup.
/// Element 0..N/2-1 of D → (m, n); 0..7 of the 4 registers of A → (m, k).
constexpr Coord wgmma_d_fragment(int thread, int element) {
  const int warp = thread / 32, lane = thread % 32;
  return {16 * warp + lane / 4 + 8 * (element / 2 % 2), 8 * (element / 4) + 2 * (lane % 4) + element % 2};
}
constexpr Coord wgmma_a_fragment(int thread, int element) {
  const Coord c = mma_a_fragment(thread % 32, element);
  return {16 * (thread / 32) + c.row, c.col};
}

/// The same for 8-bit elements: 0..15 of the 4 registers of A of m64nNk32, laid out as in mma.m16n8k32.
constexpr Coord wgmma_a_fragment_8bit(int thread, int element) {
  const int lane = thread % 32, reg = element / 4;
  return {16 * (thread / 32) + lane / 4 + 8 * (reg % 2), 4 * (lane % 4) + 16 * (reg / 2) + element % 4};
}

// ---- tensor memory --------------------------------------------------------------------------------------------------

/// Layout of D [M][N] of a tcgen05.mma in the 128 tensor-memory lanes of one CTA ("Data Path Layout Organization"):
enum class DataPath : uint8_t {
  full,  // layouts A (cta_group::2, M 256) and D (M 128): lane = m
  half,  // layout F (M 64): 16 lanes of each 32
  two,   // layouts B (cta_group::2, M 128) and E (.ws, M 64): the halves of N are stacked in the lanes
  four,  // layout G (.ws, M 32): the quarters of N are stacked
  invalid,
};
DataPath data_path(int m, int cta_group, bool ws);
/// (lane, column) of element (m, n) of this CTA's part of D, relative to the address of D. `n_total` is N.
Coord accumulator_coord(DataPath layout, int n_total, int m, int n);
/// Lane of row m of A in tensor memory, for segment `segment` of N: layouts B and E stack two segments (halves of N) in
/// the lanes, layout G stacks four. `rows`: number of rows of A in this CTA. In layout F, relative to the address of D.
int a_lane(DataPath layout, int rows, int segment, int m);
/// Number of tensor-memory columns of D.
int accumulator_columns(DataPath layout, int n_total);

/// Shapes of tcgen05.ld and tcgen05.st ("Tensor Memory: data movement shape").
enum class TmemShape : uint8_t { b32x32, b16x64, b16x128, b16x256, b16x32x2 };
/// (lane, column) of register `reg` of thread `lane_id`, relative to the address. `split` is immHalfSplitoff of
/// 16x32bx2.
Coord tmem_fragment(TmemShape shape, int lane_id, int reg, int split = 0);
int tmem_lanes(TmemShape shape);
/// Number of columns that `regs` registers per thread span.
int tmem_columns(TmemShape shape, int regs, int split = 0);

/// Shapes of tcgen05.cp. 4x256b is not modelled, because PTX does not say to which lanes its four rows go.
enum class CopyShape : uint8_t { b128x256, b128x128, b64x128_02_13, b64x128_01_23, b32x128_x4, b4x256 };
int copy_rows(CopyShape shape);
int copy_row_bytes(CopyShape shape);
/// Destination lanes of row `row` of the source. Unused entries are -1.
std::array<int, 4> copy_lanes(CopyShape shape, int row);

// ---- block scales ---------------------------------------------------------------------------------------------------

/// Scale factors of kind::mxf4nvf4 block16, K = 64 ("Scale factor layout, scale_vec::4X"). One 32-bit column holds the
/// four one-byte scales of row `row` of A (or of column `row` of B). All four lane quarters must hold a copy.
Coord scale_coord(int row);
/// Byte offset of scale `block` of row `row` in a 512-byte tile of 128 rows × 4 scales. One tcgen05.cp.32x128b.warpx4
/// copies such a tile into that layout.
constexpr uint32_t scale_tile_offset(int row, int block) { return uint32_t(row % 32 * 16 + row / 32 % 4 * 4 + block); }

}  // namespace hopwell::arch::emu
