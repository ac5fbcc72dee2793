// x of the kernel for one column: a warp loads the x of its slice of K into shared memory, as fp16.
//
// An item is 8 consecutive k, 16 bytes. Item (stage s, half h, lane t of the quad, word q), k = 256 s + 128 h + 32 t +
// 8 q, lies at 16 · (16 · (2 s + h) + 4 q + t). Its elements are in the order of decoded codes, for the two products
// with word q.
#pragma once

#include "ops/nvfp4/kernels/operands.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

constexpr int kItemsPerStage = StageConfig::kStageK / 8;
HOPWELL_DEVICE uint32_t item_offset(int item) { return uint32_t(item / 16 * 256 + item % 4 * 64 + item / 4 % 4 * 16); }

// Shared memory holds x / unit. `partial`: some elements are left for a later pass.
struct Pass {
  float unit;
  bool partial;
};

HOPWELL_DEVICE float power_of_two(int exponent) { return arch::bit_cast<float>(uint32_t(exponent + 127) << 23); }

constexpr uint32_t kNoCeiling = 0x8000, kInfinity = 0x7f80;  // magnitude bits of bf16

// Calls visit(address, words) for the items of a slice that this lane has loaded.
template <class Visit>
HOPWELL_DEVICE void for_each_item(const Slice& slice, uint32_t shared, Visit visit) {
  HOPWELL_NO_UNROLL
  for (int item = arch::lane_index(); item < slice.stages * kItemsPerStage; item += 32)
    visit(shared + item_offset(item), arch::load_shared_v4(shared + item_offset(item)));
}

// Magnitude bits of the largest finite element below the ceiling.
HOPWELL_DEVICE uint32_t largest_finite(const Slice& slice, uint32_t shared, uint32_t ceiling) {
  uint32_t most = 0;
  const auto accumulate = [&](uint32_t bits) {
    most = bits < kInfinity && bits < ceiling && bits > most ? bits : most;
  };
  for_each_item(slice, shared, [&](uint32_t, const arch::Words4& v) {
    HOPWELL_UNROLL
    for (uint32_t word : v.w) accumulate(word & 0x7fff), accumulate(word >> 16 & 0x7fff);
  });
  return tile::max_of_warp(most);
}

// Scales a slice by a power of two, so that its largest element lies between 2^14 and 2^15, or as high as fp32's
// exponent allows. Scaled elements below 2^-17 would lose bits in fp16: they are left for a later pass.
HOPWELL_DEVICE Pass scale_bf16(const Slice& slice, uint32_t shared, uint32_t& ceiling) {
  uint32_t most = 0, below_least = 0xffffffff;  // largest magnitude bits; smallest nonzero magnitude bits − 1
  for_each_item(slice, shared, [&](uint32_t, const arch::Words4& v) {
    HOPWELL_UNROLL
    for (uint32_t word : v.w) {
      const uint32_t low = word & 0x7fff, high = word >> 16 & 0x7fff;
      most = low > most ? low : most;
      most = high > most ? high : most;
      below_least = low - 1 < below_least ? low - 1 : below_least;
      below_least = high - 1 < below_least ? high - 1 : below_least;
    }
  });
  most = tile::max_of_warp(most);
  if (most >= kInfinity || ceiling != kNoCeiling) most = largest_finite(slice, shared, ceiling);
  const int exponent = most >> 7 > 15 ? int(most >> 7) : 15, least = exponent > 31 ? exponent - 31 : 0;
  const float factor = power_of_two(141 - exponent);
  const auto floor = uint32_t(least) << 7;
  const bool partial = arch::ballot(below_least != 0xffffffff && below_least + 1 < floor) != 0;
  if (!partial && ceiling == kNoCeiling) {
    for_each_item(slice, shared, [&](uint32_t address, arch::Words4 v) {
      HOPWELL_UNROLL
      for (uint32_t& word : v.w)
        word = arch::pack_fp16(arch::bit_cast<float>(word << 16) * factor,
                               arch::bit_cast<float>(word & 0xffff0000u) * factor);
      arch::store_shared_v4(address, v);
    });
  } else {
    const auto scaled = [&](uint32_t bits) {
      const uint32_t magnitude = bits & 0x7fff;
      return magnitude < floor || magnitude >= ceiling ? 0.f : arch::bit_cast<float>(bits << 16) * factor;
    };
    for_each_item(slice, shared, [&](uint32_t address, arch::Words4 v) {
      HOPWELL_UNROLL
      for (uint32_t& word : v.w) word = arch::pack_fp16(scaled(word & 0xffff), scaled(word >> 16));
      arch::store_shared_v4(address, v);
    });
  }
  ceiling = floor;
  return {power_of_two(exponent - 141), partial};
}

// Loads a slice into shared memory. x.item() reads an item, X::convert() decodes it in all lanes, and X::pairs()
// reorders the items that are stored. Calls overlap() while the first loads are in flight. cp.async is slower here,
// because its destinations are not contiguous, and all later copies wait for it.
template <class X, class Overlap>
HOPWELL_DEVICE void load_items(const X& x, const Slice& slice, uint32_t shared, int batch, Overlap overlap) {
  constexpr int kUnroll = 4;
  const int items = slice.stages * kItemsPerStage, lane = arch::lane_index();
  HOPWELL_NO_UNROLL
  for (int first = lane; first < items; first += 32 * kUnroll) {
    typename X::Item v[kUnroll];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) v[i] = x.item(slice, first + 32 * i, batch);
    if (first == lane) overlap();
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      const auto& converted = X::convert(v[i]);
      if (first + 32 * i < items) arch::store_shared_v4(shared + item_offset(first + 32 * i), X::pairs(converted));
    }
  }
  if (items == 0) overlap();
}

// x as a row of floats, 16-byte aligned.
template <class T, class TheDecoder = DecodeByBits>
struct FloatColumn {
  using Decoder = TheDecoder;
  using Item = arch::Words4;
  const T* x;

  // An unconverted item; zeros beyond the end of the slice.
  HOPWELL_DEVICE arch::Words4 item(const Slice& slice, int number, int) const {
    const int k = slice.begin + number * 8;
    if (number >= slice.stages * kItemsPerStage || k >= slice.end) return {{0, 0, 0, 0}};
    return arch::load_vector<arch::Words4>(x + k);
  }

  // Prefetches a slice into L2.
  HOPWELL_DEVICE void prefetch_l2(const Slice& slice, int) const {
    for (int k = slice.begin + arch::lane_index() * 64; k < slice.end; k += 32 * 64) arch::prefetch_l2(x + k);
  }

  HOPWELL_DEVICE static const arch::Words4& convert(const arch::Words4& v) { return v; }
  HOPWELL_DEVICE static arch::Words4 pairs(const arch::Words4& v) { return Decoder::in_order(v); }

  // Scales this lane's items into the range of fp16. Elements whose magnitude bits are not below `ceiling` become zero.
  // Sets `ceiling` for the next pass. Other lanes may read the items after the next barrier of the warp.
  HOPWELL_DEVICE Pass scale(const Slice& slice, uint32_t shared, uint32_t& ceiling) const {
    if constexpr (std::is_same_v<T, bf16>) return scale_bf16(slice, shared, ceiling);
    return {1, false};
  }
};

// x as row 0 of a matrix of codes: code · scale, at most 2,688 and a multiple of 2^-10, as fp16.
struct CodeColumn {
  using Decoder = DecodeByBits;
  Fp4Matrix matrix;

  // Eight codes and their scale; zeros beyond the end of the slice.
  struct Item {
    uint32_t codes;
    uint8_t scale;
  };
  HOPWELL_DEVICE Item item(const Slice& slice, int number, int batch) const {
    const int k = slice.begin + number * 8;
    if (number >= slice.stages * kItemsPerStage || k >= slice.end) return {0, 0};
    const uint8_t* from = matrix.row(0, batch) + k / 2;
    return {tile::load_e2m1x8(from), matrix.scales.data[matrix.scales.offset(0, k / kCodesPerBlock, batch)]};
  }

  HOPWELL_DEVICE void prefetch_l2(const Slice& slice, int batch) const {
    for (int k = slice.begin + arch::lane_index() * 256; k < slice.end; k += 32 * 256)
      arch::prefetch_l2(matrix.row(0, batch) + k / 2);
  }

  HOPWELL_DEVICE static const arch::Words4& pairs(const arch::Words4& v) { return v; }
  HOPWELL_DEVICE static arch::Words4 convert(const Item& v) {
    const float scale = tile::e4m3_to_float(v.scale);
    float values[8];
    HOPWELL_UNROLL
    for (int j = 0; j < 8; ++j) values[j] = tile::e2m1_to_float(v.codes >> 4 * j) * scale;
    arch::Words4 pairs;
    HOPWELL_UNROLL
    for (int j = 0; j < 4; ++j) pairs.w[j] = arch::pack_fp16(values[j], values[j + 4]);
    return pairs;
  }

  HOPWELL_DEVICE Pass scale(const Slice&, uint32_t, uint32_t&) const { return {1, false}; }
};

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
