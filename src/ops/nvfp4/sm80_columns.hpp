// x of nvfp4_linear's fast kernel: how a warp brings the x of its slice of K into shared memory, as fp16.
//
// An item is eight neighbours in k, 16 bytes. Item (stage s, half h, lane's t, word q), k = 256 s + 128 h + 32 t + 8 q,
// lies at 16 · (16 · (2 s + h) + 4 q + t); its numbers as pairs (k, k + 4): what two mma take after decoding word q.
#pragma once

#include "ops/nvfp4/sm80_codes.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct LinearConfig {
  static constexpr int kRows = 16, kStageK = 256, kStages = 4, kMaxWarps = 16;
  static constexpr int kCodeBytes = kRows * kStageK / 2, kScaleBytes = kRows * kStageK / kCodesOfBlock;
  static constexpr int kStageBytes = kCodeBytes + kScaleBytes;
  static constexpr float kCodeUnit = 0x1p14f;  // a decoded code is code / kCodeUnit
};

// Of K, a warp's: from begin to end, in so many stages, of which `whole` have all their 256 k.
struct Slice {
  int begin, end, stages, whole;
};

HOPWELL_DEVICE Slice slice_of(int begin, int width, int k) {
  const int end = begin + width < k ? begin + width : k;
  if (end <= begin) return {begin, begin, 0, 0};
  return {begin, end, (end - begin + LinearConfig::kStageK - 1) / LinearConfig::kStageK,
          (end - begin) / LinearConfig::kStageK};
}

constexpr int kItemsOfStage = LinearConfig::kStageK / 8;
HOPWELL_DEVICE uint32_t item_place(int item) { return uint32_t(item / 16 * 256 + item % 4 * 64 + item / 4 % 4 * 16); }

// Eight neighbours as pairs (k, k + 4).
HOPWELL_DEVICE arch::Words4 as_pairs(const arch::Words4& v) {
  const auto low = [](uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; };
  const auto high = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
  return {{low(v.w[0], v.w[2]), high(v.w[0], v.w[2]), low(v.w[1], v.w[3]), high(v.w[1], v.w[3])}};
}

// What x was brought in as: the numbers are x / unit. `partial`: some were left for a later pass.
struct Pass {
  float unit;
  bool partial;
};

HOPWELL_DEVICE float power_of_two(int exponent) { return arch::bit_cast<float>(uint32_t(exponent + 127) << 23); }

constexpr uint32_t kEverything = 0x8000, kInfinity = 0x7f80;  // bits of bf16 without sign

// Over a warp, in every lane.
HOPWELL_DEVICE uint32_t largest(uint32_t x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = arch::shuffle_xor(x, distance);
    x = other > x ? other : x;
  }
  return x;
}

// A slice's items that this lane brought: visit(place, words).
template <class Visit>
HOPWELL_DEVICE void for_each_item(const Slice& slice, uint32_t shared, Visit visit) {
  HOPWELL_NO_UNROLL
  for (int item = arch::lane_index(); item < slice.stages * kItemsOfStage; item += 32)
    visit(shared + item_place(item), arch::load_shared_v4(shared + item_place(item)));
}

// The bits without sign of the largest finite number below the ceiling.
HOPWELL_DEVICE uint32_t largest_finite(const Slice& slice, uint32_t shared, uint32_t ceiling) {
  uint32_t most = 0;
  const auto look = [&](uint32_t bits) { most = bits < kInfinity && bits < ceiling && bits > most ? bits : most; };
  for_each_item(slice, shared, [&](uint32_t, const arch::Words4& v) {
    HOPWELL_UNROLL
    for (uint32_t word : v.w) look(word & 0x7fff), look(word >> 16 & 0x7fff);
  });
  return largest(most);
}

// The largest number goes to 2^14 or above, as far as a float's exponent goes. Below 2^-17 there are digits of bf16 that
// fp16 has not.
HOPWELL_DEVICE Pass settle_bf16(const Slice& slice, uint32_t shared, uint32_t& ceiling) {
  uint32_t most = 0, below_least = 0xffffffff;  // of all bits; one less than the least that is not zero
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
  most = largest(most);
  if (most >= kInfinity || ceiling != kEverything) most = largest_finite(slice, shared, ceiling);
  const int exponent = most >> 7 > 15 ? int(most >> 7) : 15, least = exponent > 31 ? exponent - 31 : 0;
  const float factor = power_of_two(141 - exponent);
  const auto floor = uint32_t(least) << 7;
  const bool partial = arch::ballot(below_least != 0xffffffff && below_least + 1 < floor) != 0;
  if (!partial && ceiling == kEverything) {
    for_each_item(slice, shared, [&](uint32_t place, arch::Words4 v) {
      HOPWELL_UNROLL
      for (uint32_t& word : v.w)
        word = arch::pack_fp16(arch::bit_cast<float>(word << 16) * factor,
                               arch::bit_cast<float>(word & 0xffff0000u) * factor);
      arch::store_shared_v4(place, v);
    });
  } else {
    const auto scaled = [&](uint32_t bits) {
      const uint32_t magnitude = bits & 0x7fff;
      return magnitude < floor || magnitude >= ceiling ? 0.f : arch::bit_cast<float>(bits << 16) * factor;
    };
    for_each_item(slice, shared, [&](uint32_t place, arch::Words4 v) {
      HOPWELL_UNROLL
      for (uint32_t& word : v.w) word = arch::pack_fp16(scaled(word & 0xffff), scaled(word >> 16));
      arch::store_shared_v4(place, v);
    });
  }
  ceiling = floor;
  return {power_of_two(exponent - 141), partial};
}

// x as a row of floats, 16-byte aligned.
template <class T>
struct FloatColumn {
  const T* x;

  // An item as it lies in memory; zeros where the slice has ended.
  HOPWELL_DEVICE arch::Words4 item(const Slice& slice, int number) const {
    const int k = slice.begin + number * 8;
    if (number >= slice.stages * kItemsOfStage || k >= slice.end) return {{0, 0, 0, 0}};
    return *reinterpret_cast<const arch::Words4*>(x + k);
  }

  // Asks for a slice to come to the L2 cache.
  HOPWELL_DEVICE void prefetch(const Slice& slice, int) const {
    for (int k = slice.begin + arch::lane_index() * 64; k < slice.end; k += 32 * 64) arch::prefetch_l2(x + k);
  }

  // Brings a slice into shared memory; does `meanwhile` while the first items are on their way. Not by cp.async: copies
  // to places that are not neighbours are slow, and all other copies wait for them.
  template <class Meanwhile>
  HOPWELL_DEVICE void fetch(const Slice& slice, uint32_t shared, int, Meanwhile meanwhile) const {
    constexpr int kTogether = 4;
    const int items = slice.stages * kItemsOfStage, lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int first = lane; first < items; first += 32 * kTogether) {
      arch::Words4 v[kTogether];
      HOPWELL_UNROLL
      for (int i = 0; i < kTogether; ++i) v[i] = item(slice, first + 32 * i);
      if (first == lane) meanwhile();
      HOPWELL_UNROLL
      for (int i = 0; i < kTogether; ++i)
        if (first + 32 * i < items) arch::store_shared_v4(shared + item_place(first + 32 * i), as_pairs(v[i]));
    }
    if (items == 0) meanwhile();
  }

  // Brings what this lane fetched into shape: of it numbers whose bits without sign are below `ceiling`, which becomes
  // that of the next pass. To the warp it is there after the next barrier.
  HOPWELL_DEVICE Pass settle(const Slice& slice, uint32_t shared, uint32_t& ceiling) const {
    if constexpr (std::is_same_v<T, bf16>) return settle_bf16(slice, shared, ceiling);
    return {1, false};
  }
};

// x as row 0 of a matrix of codes: code · scale, at most 2,688 and a multiple of 2^-10, as fp16.
struct CodeColumn {
  Matrix matrix;

  // Eight codes and their scale; zeros where the slice has ended.
  struct Item {
    uint32_t codes;
    uint8_t scale;
  };
  HOPWELL_DEVICE Item item(const Slice& slice, int number, int batch) const {
    const int k = slice.begin + number * 8;
    if (number >= slice.stages * kItemsOfStage || k >= slice.end) return {0, 0};
    const uint8_t* from = matrix.at(0, batch) + k / 2;
    return {load_word(from), matrix.scales.data[matrix.scales.offset(0, k / kCodesOfBlock, batch)]};
  }

  HOPWELL_DEVICE void prefetch(const Slice& slice, int batch) const {
    for (int k = slice.begin + arch::lane_index() * 256; k < slice.end; k += 32 * 256)
      arch::prefetch_l2(matrix.at(0, batch) + k / 2);
  }

  // Brings a slice into shared memory; does `meanwhile` while the first items are on their way.
  template <class Meanwhile>
  HOPWELL_DEVICE void fetch(const Slice& slice, uint32_t shared, int batch, Meanwhile meanwhile) const {
    constexpr int kTogether = 4;
    const int items = slice.stages * kItemsOfStage, lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int first = lane; first < items; first += 32 * kTogether) {
      Item v[kTogether];
      HOPWELL_UNROLL
      for (int i = 0; i < kTogether; ++i) v[i] = item(slice, first + 32 * i, batch);
      if (first == lane) meanwhile();
      HOPWELL_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const float scale = scale_value(v[i].scale);
        float values[8];
        HOPWELL_UNROLL
        for (int j = 0; j < 8; ++j) values[j] = code_value(v[i].codes >> 4 * j) * scale;
        arch::Words4 pairs;
        HOPWELL_UNROLL
        for (int j = 0; j < 4; ++j) pairs.w[j] = arch::pack_fp16(values[j], values[j + 4]);
        if (first + 32 * i < items) arch::store_shared_v4(shared + item_place(first + 32 * i), pairs);
      }
    }
    if (items == 0) meanwhile();
  }

  HOPWELL_DEVICE Pass settle(const Slice&, uint32_t, uint32_t&) const { return {1, false}; }
};

}  // namespace
}  // namespace hopwell::ops::nvfp4
