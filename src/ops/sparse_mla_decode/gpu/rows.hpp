// Rows of a paged cache in shared memory, and the blocks of 64 columns that the warps of the split kernel multiply.
//
//     stage   [key][pitch]: the row's data, then what lies elsewhere in the cache (scales of V4; a rope_cache row)
//     pitch   an odd number of 16-byte units: eight rows have the same column in different banks
//
// A block has 64 codes with one scale or two, or 64 bf16 numbers.
#pragma once

#include "ops/sparse_mla_decode/op.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// The format of rows of bf16.
constexpr mla_cache::Format plain_format(int d) { return {.plain = d, .data_pitch = 2 * d}; }

template <int kTheWidth, mla_cache::Format kTheFormat>
struct Rows {
  static constexpr int kWidth = kTheWidth;  // d_qk
  static constexpr mla_cache::Format kFormat = kTheFormat;
  static constexpr bool kHasCodes = kFormat.codes > 0, kHasPlain = kFormat.plain > 0;
  static constexpr bool kHasScales = kFormat.scale != mla_cache::Scale::none;
  static constexpr bool kHasRope = kWidth > 512;  // columns 512 to 575 of K
  static constexpr bool kRopeIsPlain = kHasPlain;
  // Scales of a block, each for kChunksOfScale chunks of 16 columns.
  static constexpr int kScales = kHasScales && kFormat.tile < 64 ? 64 / kFormat.tile : 1;
  static constexpr int kChunksOfScale = 4 / kScales;

  // Bytes that are copied from the row's address, and from a second one.
  static constexpr bool kScalesLieElsewhere = kFormat.scale_pitch > 0;
  static constexpr int kDataBytes =
      kFormat.codes + 2 * kFormat.plain + (kHasScales && !kScalesLieElsewhere ? kFormat.codes / kFormat.tile * 4 : 0);
  static constexpr int kSecondBytes = kScalesLieElsewhere ? kFormat.scale_pitch : 0;
  static constexpr bool kMayHaveRopeCache = !kHasCodes && kHasRope;
  static constexpr int kUnits = kDataBytes / 16 + (kSecondBytes + 15) / 16;
  static constexpr int kPitch = 16 * (kUnits % 2 == 1 ? kUnits : kUnits + 1);
  static constexpr int kScalesAt = kScalesLieElsewhere ? kDataBytes : kFormat.scales;
  static constexpr int kRopeAt = kHasCodes ? (kRopeIsPlain ? kFormat.plain_at : 512) : 1024;
  static_assert(kDataBytes % 16 == 0 && (!kHasScales || kFormat.scales % 4 == 0));

  /// Whether block `block` has bf16 numbers: columns 448 to 511 of V4.
  static constexpr HOPWELL_HOST_DEVICE bool is_plain(int block) {
    return !kHasCodes || (kFormat.codes < 512 && block >= kFormat.codes / 64);
  }
  static constexpr HOPWELL_HOST_DEVICE int offset_of(int block) { return block * (kHasCodes ? 64 : 128); }

  /// Scale `i` of a block. `scales`: of the row.
  static HOPWELL_DEVICE float scale_among(const unsigned char* scales, int block, int i) {
    if constexpr (kFormat.scale == mla_cache::Scale::fp32)
      return *reinterpret_cast<const float*>(scales + block * 64 / kFormat.tile * 4);
    else if constexpr (kHasScales)
      return mla_cache::ue8m0(scales[block * 64 / kFormat.tile + i]);
    else
      return 1;
  }
  /// The same in a row of the stage.
  static HOPWELL_DEVICE float scale(const unsigned char* row, int block, int i) {
    return scale_among(row + kScalesAt, block, i);
  }
};

using RowsV32 = Rows<576, mla_cache::kV32>;
using RowsV32WithoutRope = Rows<512, mla_cache::kV32WithoutRope>;
using RowsV4 = Rows<512, mla_cache::kV4>;
using RowsV41 = Rows<512, mla_cache::kV41>;
template <int kWidth>
using RowsPerTensor = Rows<kWidth, mla_cache::per_tensor(kWidth)>;
template <int kWidth>
using RowsPlain = Rows<kWidth, plain_format(kWidth)>;

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
