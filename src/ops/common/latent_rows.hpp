// Rows of a paged cache of latents as fp32, on the CPU.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/dtype.hpp"
#include "tile/mla_cache.hpp"

namespace hopwell::cpu {

// A cache of rows of `width` elements: `format`, or elements of `type` if it is absent.
struct LatentCache {
  mla_cache::Blocks blocks;
  std::optional<mla_cache::Format> format;
  DType type = DType::kOther;
  std::int64_t width = 0;
};

// Writes the values of a slot's row to to[0 .. width). Codes of a cache with one scale count without that scale.
// An element that has a scale is bf16(fp32(code * scale)).
void load_latent_row(const LatentCache& cache, std::int64_t slot, float* to);

}  // namespace hopwell::cpu
