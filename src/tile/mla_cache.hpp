// Paged caches of MLA latents and of index keys: how a row lies in its block, and the values of its quantised elements.
//
// A cache is [blocks, block, row]. Slot s is row s mod block of block s div block. The bytes of a block are contiguous,
// and blocks may have any stride. The formats with one scale for a group of codes come from FlashMLA (`tests/quant.py`,
// rows of 656, 584 and 528 bytes) and from DeepGEMM (index rows of d + 4 bytes).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>

#include "arch/platform.hpp"

namespace hopwell::mla_cache {

enum class Scale : std::uint8_t {
  none,
  fp32,   // little-endian
  ue8m0,  // a byte e is the scale 2^(e - 127); 255 is NaN
};

// A row of d elements: first `codes` e4m3 codes with a scale for each `tile` of them, then `plain` bf16 elements. The
// data of row i of a block begin at byte data_pitch * i. Its scales lie `scales` bytes after that, or, if scale_pitch
// is not 0, in a region of their own behind the data of all rows: at data_pitch * block + scale_pitch * i.
struct Format {
  int codes = 0, tile = 0;
  Scale scale = Scale::none;
  int plain = 0;     // bf16 elements, right behind the codes or at plain_at
  int reserved = 0;  // bytes of the row that are written as 0 and never interpreted, at its end
  int data_pitch = 0;
  int plain_at = 0, scales = 0;
  int scale_pitch = 0;

  [[nodiscard]] HOPWELL_HOST_DEVICE constexpr int tiles() const { return tile == 0 ? 0 : codes / tile; }
  [[nodiscard]] HOPWELL_HOST_DEVICE constexpr int width() const { return codes + plain; }
  [[nodiscard]] constexpr bool operator==(const Format&) const = default;
};

inline constexpr Format kV32{
    .codes = 512, .tile = 128, .scale = Scale::fp32, .plain = 64, .data_pitch = 656, .plain_at = 528, .scales = 512};
inline constexpr Format kV32WithoutRope{
    .codes = 512, .tile = 128, .scale = Scale::fp32, .reserved = 128, .data_pitch = 656, .scales = 512};
inline constexpr Format kV4{
    .codes = 448, .tile = 64, .scale = Scale::ue8m0, .plain = 64, .data_pitch = 576, .plain_at = 448, .scale_pitch = 8};
inline constexpr Format kV41{.codes = 512, .tile = 32, .scale = Scale::ue8m0, .data_pitch = 512, .scale_pitch = 16};

// Codes whose scale is one number for the whole cache.
constexpr Format per_tensor(int d) { return {.codes = d, .data_pitch = d}; }
// A key of the lightning indexer: codes and one scale.
constexpr Format index_row(int d) {
  return {.codes = d, .tile = d, .scale = Scale::fp32, .data_pitch = d, .scale_pitch = 4};
}

// The format of a cache of bytes whose rows have `bytes` bytes and d elements, if there is one.
constexpr std::optional<Format> latent_format(std::int64_t d, std::int64_t bytes) {
  if (d == 576 && bytes == 656) return kV32;
  if (d == 512 && bytes == 656) return kV32WithoutRope;
  if (d == 512 && bytes == 584) return kV4;
  if (d == 512 && bytes == 528) return kV41;
  if (d == bytes && d <= 65'536) return per_tensor(static_cast<int>(d));
  return std::nullopt;
}
constexpr std::optional<Format> index_format(std::int64_t d, std::int64_t bytes) {
  if (bytes == d + 4 && d >= 4 && d % 4 == 0 && d <= 65'536) return index_row(static_cast<int>(d));
  return std::nullopt;
}

// ---- where things are ----

struct Blocks {
  std::uint8_t* data = nullptr;
  std::int64_t blocks = 0, block = 1;
  std::int64_t stride = 0;  // bytes from block to block

  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t slots() const { return blocks * block; }

  // Whether every block begins at a multiple of `bytes` bytes.
  [[nodiscard]] bool aligned(std::int64_t bytes) const {
    return std::bit_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 &&
           (blocks <= 1 || stride % bytes == 0);
  }

  // Address of the data of a slot's row.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::uint8_t* row(std::int64_t slot, std::int64_t pitch) const {
    return data + slot / block * stride + slot % block * pitch;
  }
  // Address of its scales.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::uint8_t* scales(std::int64_t slot, const Format& f) const {
    if (f.scale_pitch == 0) return row(slot, f.data_pitch) + f.scales;
    return data + slot / block * stride + block * f.data_pitch + slot % block * f.scale_pitch;
  }
};

// ---- values ----

// 2^e for -149 <= e <= 127.
HOPWELL_HOST_DEVICE constexpr float power_of_two(int e) {
  return std::bit_cast<float>(e >= -126 ? static_cast<std::uint32_t>(e + 127) << 23 : std::uint32_t{1} << (e + 149));
}
HOPWELL_HOST_DEVICE constexpr float ue8m0(std::uint8_t byte) {
  return byte == 255 ? std::bit_cast<float>(0x7FC00000U) : power_of_two(static_cast<int>(byte) - 127);
}

// The smallest e >= least with 448 * 2^e >= amax, for a finite amax >= 0. 448 is 1.75 * 2^8.
HOPWELL_HOST_DEVICE constexpr int scale_exponent(float amax, int least) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(amax);
  const int e = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFFU) > 0x600000U ? 1 : 0);
  return e > least ? e : least;
}

}  // namespace hopwell::mla_cache
