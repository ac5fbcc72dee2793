// The kernels of sparse_mla_decode for Hopper: the dequant warps for rows of a format.
#pragma once

#include "ops/sparse_mla_decode/sm90/copied_rows.hpp"
#include "ops/sparse_mla_decode/sm90/decoded_rows.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

template <class Tile>
HOPWELL_DEVICE void make_panels(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  if constexpr (Tile::kCopiesRows)
    copy_rows<Tile>(p, s, panels);
  else
    decode_rows<Tile>(p, s, panels);
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
