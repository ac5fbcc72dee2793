#include "geometry.hpp"

namespace hopwell::arch::emu {

// ---- shared memory --------------------------------------------------------------------------------------------------

MatrixDescriptor decode_wgmma_descriptor(uint64_t bits) {
  constexpr Swizzle mode[4] = {Swizzle::none, Swizzle::bytes128, Swizzle::bytes64, Swizzle::bytes32};
  MatrixDescriptor d{uint32_t(bits & 0x3fff) << 4,
                     uint32_t(bits >> 16 & 0x3fff) << 4,
                     uint32_t(bits >> 32 & 0x3fff) << 4,
                     uint32_t(bits >> 49 & 7),
                     mode[bits >> 62],
                     nullptr};
  constexpr uint64_t kReserved = uint64_t{3} << 14 | uint64_t{3} << 30 | uint64_t{7} << 46 | uint64_t{0x3ff} << 52;
  if (bits & kReserved) d.error = "bits 14-15, 30-31, 46-48 and 52-61 must be zero";
  return d;
}

MatrixDescriptor decode_tcgen05_descriptor(uint64_t bits) {
  MatrixDescriptor d{uint32_t(bits & 0x3fff) << 4,
                     uint32_t(bits >> 16 & 0x3fff) << 4,
                     uint32_t(bits >> 32 & 0x3fff) << 4,
                     uint32_t(bits >> 49 & 7),
                     Swizzle::none,
                     nullptr};
  switch (bits >> 61) {
    case 0:
      d.swizzle = Swizzle::none;
      break;
    case 2:
      d.swizzle = Swizzle::bytes128;
      break;
    case 4:
      d.swizzle = Swizzle::bytes64;
      break;
    case 6:
      d.swizzle = Swizzle::bytes32;
      break;
    case 1:
      d.error = "the 128-byte swizzle with 32-byte atoms (layout type 1) is not modelled";
      break;
    default:
      d.error = "layout type (bits 61-63) is reserved";
      break;
  }
  constexpr uint64_t kReserved = uint64_t{3} << 14 | uint64_t{3} << 30 | uint64_t{0xff} << 53;
  if ((bits >> 46 & 7) != 1)
    d.error = "bits 46-48 must be 0b001";
  else if (bits >> 52 & 1)
    d.error = "the absolute leading-dimension mode (bit 52) is not modelled";
  else if (bits & kReserved)
    d.error = "bits 14-15, 30-31 and 53-60 must be zero";
  return d;
}

// ---- tensor memory --------------------------------------------------------------------------------------------------

DataPath data_path(int m, int cta_group, bool ws) {
  if (cta_group == 2)
    return ws ? DataPath::invalid : m == 256 ? DataPath::full : m == 128 ? DataPath::two : DataPath::invalid;
  if (m == 128) return DataPath::full;
  if (m == 64) return ws ? DataPath::two : DataPath::half;
  return m == 32 && ws ? DataPath::four : DataPath::invalid;
}

Coord accumulator_coord(DataPath layout, int n_total, int m, int n) {
  switch (layout) {
    case DataPath::half:
      return {m % 16 + 32 * (m / 16), n};
    case DataPath::two:
      return {m + 64 * (n / (n_total / 2)), n % (n_total / 2)};
    case DataPath::four:
      return {m + 32 * (n / (n_total / 4)), n % (n_total / 4)};
    default:
      return {m, n};
  }
}

int a_lane(DataPath layout, int rows, int segment, int m) {
  return layout == DataPath::half ? m % 16 + 32 * (m / 16) : rows * segment + m;
}

int accumulator_columns(DataPath layout, int n_total) {
  return layout == DataPath::two ? n_total / 2 : layout == DataPath::four ? n_total / 4 : n_total;
}

Coord tmem_fragment(TmemShape shape, int lane_id, int reg, int split) {
  const int t = lane_id;
  switch (shape) {
    case TmemShape::b16x64:
      return {t / 4 + 8 * (t % 2), t / 2 % 2 + 2 * reg};
    case TmemShape::b16x128:
      return {t / 4 + 8 * (reg % 2), t % 4 + 4 * (reg / 2)};
    case TmemShape::b16x256:
      return {t / 4 + 8 * (reg / 2 % 2), 2 * (t % 4) + reg % 2 + 8 * (reg / 4)};
    case TmemShape::b16x32x2:
      return {t % 16, reg + split * (t / 16)};
    default:
      return {t, reg};
  }
}

int tmem_lanes(TmemShape shape) { return shape == TmemShape::b32x32 ? 32 : 16; }

int tmem_columns(TmemShape shape, int regs, int split) {
  switch (shape) {
    case TmemShape::b32x32:
      return regs;
    case TmemShape::b16x32x2:
      return regs + split;
    default:
      return 2 * regs;
  }
}

int copy_rows(CopyShape shape) {
  switch (shape) {
    case CopyShape::b128x256:
    case CopyShape::b128x128:
      return 128;
    case CopyShape::b32x128_x4:
      return 32;
    default:
      return 64;
  }
}

int copy_row_bytes(CopyShape shape) { return shape == CopyShape::b128x256 ? 32 : 16; }

std::array<int, 4> copy_lanes(CopyShape shape, int row) {
  switch (shape) {
    case CopyShape::b32x128_x4:
      return {row, row + 32, row + 64, row + 96};
    case CopyShape::b64x128_02_13:
      return {row, row + 64, -1, -1};
    case CopyShape::b64x128_01_23:
      return {row % 32 + 64 * (row / 32), row % 32 + 64 * (row / 32) + 32, -1, -1};
    default:
      return {row, -1, -1, -1};
  }
}

Coord scale_coord(int row) { return {row % 32, row / 32}; }

}  // namespace hopwell::arch::emu
