#include "ops/common/latent_rows.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <hopwell/tensor.hpp>

#include "tile/cpu/vector.hpp"
#include "tile/float16.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::cpu {
namespace {

using mla_cache::Format, mla_cache::Scale;

constexpr int kLongestTile = 128;

// Values of all 256 codes. 0x7F and 0xFF are NaN.
constexpr std::array<float, 256> kCodes = [] {
  std::array<float, 256> values{};
  for (unsigned code = 0; code < 256; ++code) {
    const float magnitude = (code & 0x7FU) == 0x7FU ? std::numeric_limits<float>::quiet_NaN()
                                                    : nvfp4::decode_e4m3(static_cast<std::uint8_t>(code & 0x7FU));
    values[code] = code < 128 ? magnitude : -magnitude;
  }
  return values;
}();

// Memory of a row may have any alignment.
void load_bf16(const std::uint8_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    to[i] = std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
}

float scale_of_tile(const Format& format, const std::uint8_t* scales, int tile) {
  if (format.scale == Scale::ue8m0) return mla_cache::ue8m0(scales[tile]);
  float scale = 0;
  std::memcpy(&scale, scales + 4 * tile, sizeof scale);
  return scale;
}

void load_tile(const std::uint8_t* codes, int count, float scale, float* to) {
  std::array<float, kLongestTile> products;
  std::array<bfloat16, kLongestTile> rounded;
  for (int i = 0; i < count; ++i) products[static_cast<std::size_t>(i)] = kCodes[codes[i]] * scale;
  from_float(products.data(), rounded.data(), static_cast<std::size_t>(count));
  to_float(rounded.data(), to, static_cast<std::size_t>(count));
}

}  // namespace

void load_latent_row(const LatentCache& cache, std::int64_t slot, float* to) {
  if (!cache.format) {
    const std::uint8_t* row = cache.blocks.row(slot, cache.width * static_cast<std::int64_t>(size_of(cache.type)));
    if (cache.type == DType::kFloat32)
      std::memcpy(to, row, static_cast<std::size_t>(cache.width) * sizeof(float));
    else
      load_bf16(row, cache.width, to);
    return;
  }
  const Format& format = *cache.format;
  const std::uint8_t* row = cache.blocks.row(slot, format.data_pitch);
  if (format.scale == Scale::none) {
    for (int i = 0; i < format.codes; ++i) to[i] = kCodes[row[i]];
    return;
  }
  const std::uint8_t* scales = cache.blocks.scales(slot, format);
  for (int tile = 0; tile < format.tiles(); ++tile)
    load_tile(row + tile * format.tile, format.tile, scale_of_tile(format, scales, tile), to + tile * format.tile);
  load_bf16(row + format.plain_at, format.plain, to + format.codes);
}

}  // namespace hopwell::cpu
