// Which elements of a matrix a lane has in its registers for mma.sync and wgmma. PTX ISA: "Matrix Fragments for
// mma.m16n8k16 with floating point type" and, for wgmma, "Register Fragments and Shared Memory Matrix Layouts".
//
// A fragment consists of 8 × 8 matrices. In each, as after ldmatrix, a quad of the warp has a row, and each lane has
// two adjacent columns of it: fragment_column() and the next one, of row fragment_row().
//
//     column     0 1       2 3       4 5       6 7
//     row 0      lane 0    lane 1    lane 2    lane 3
//     row 1      lane 4    lane 5    lane 6    lane 7
//     …
//     row 7      lane 28   lane 29   lane 30   lane 31
//
//     A [16 m][16 k]   a[r]: two elements of 16 bits, 8 (r % 2) rows and 8 (r / 2) columns further on
//     B [8 n][16 k]    b[r]: two elements of 16 bits, 8 r columns further on
//     D [16 m][8 n]    d[i]: an element of 32 bits, 8 (i / 2) rows and i % 2 columns further on
//
// wgmma has 64 rows, 16 for each warp of the warpgroup, and D is wider: d[i] is in row wgmma_row() + 8 (i / 2 % 2) and
// in column fragment_column() + 8 (i / 4) + i % 2.
#pragma once

#include "arch/sm80/threads.hpp"

namespace hopwell::tile {

/// Index of the lane in its quad. The lane may be unsigned, for unsigned addresses.
template <class Int = int>
HOPWELL_DEVICE Int quad_lane(Int lane = arch::lane_index()) {
  return lane % 4;
}
/// The lane's row of an 8 × 8 matrix, and the first of its two columns.
template <class Int = int>
HOPWELL_DEVICE Int fragment_row(Int lane = arch::lane_index()) {
  return lane / 4;
}
HOPWELL_DEVICE int fragment_column(int lane = arch::lane_index()) { return 2 * quad_lane(lane); }

/// The thread's first row of the 64 of a wgmma; the other is 8 rows further on. A whole warp calls it.
HOPWELL_DEVICE int wgmma_row(arch::Site site = arch::Site::current()) {
  return arch::warp_index(site) % 4 * 16 + fragment_row();
}
/// The same for a thread of the CTA, without the shuffle of warp_index().
HOPWELL_DEVICE int wgmma_row_of(int thread) { return thread % 128 / 32 * 16 + fragment_row(thread % 32); }

}  // namespace hopwell::tile
