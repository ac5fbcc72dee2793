// Checks of paged latent caches, which the operators that write and read them share.
#pragma once

#include <cmath>
#include <optional>
#include <string>

#include "runtime/check.hpp"
#include "tile/mla_cache.hpp"

namespace hopwell {

enum class CacheUse { append, latents, index_keys };

struct PagedCache {
  mla_cache::Blocks blocks;
  std::optional<mla_cache::Format> format;  // absent: rows of `row_type`, bf16 or fp32
  DType row_type = DType::kOther;
  bool accessible = true;  // 16-byte aligned base and block stride, as GPU backends need
};

// A cache of rows with d elements: [blocks, block, row] or [blocks, block, 1, row].
inline PagedCache check_paged_cache(Checker& check, const char* name, const DLTensor* tensor, std::int64_t d,
                                    CacheUse use) {
  const DTypes dtypes = {DType::kBFloat16, DType::kFloat32, DType::kUInt8, DType::kInt8, DType::kFloat8E4m3};
  const Access access = use == CacheUse::append ? Access::kWritten : Access::kRead;
  View view = check.any_shape(name, tensor, dtypes, Layout::kRows, access);
  check.require(view.ndim == 3 || (view.ndim == 4 && view.shape[2] == 1), name,
                "[blocks, block, row] or [blocks, block, 1, row]", shape_string(*tensor));
  if (view.ndim == 4) view = view.squeezed(2);
  const std::int64_t blocks = view.shape[0], block = view.shape[1], row = view.shape[2];
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  check.require(block >= 1 && block <= 65'536, name, "in blocks of 1 to 65536 rows", block);
  check.require(blocks * block < (std::int64_t{1} << 31), name, "of less than 2^31 slots", blocks * block);
  check.require(blocks == 0 || block == 1 || view.stride[1] == row, name, "contiguous inside a block",
                "a stride of rows that differs");
  PagedCache cache;
  cache.blocks = {view.as<std::uint8_t>(), blocks, block, view.stride[0] * bytes};
  cache.row_type = view.dtype;
  if (bytes > 1) {
    check.require(row == d, name, "rows of d = " + std::to_string(d) + " elements", row);
    return cache;
  }
  if (use != CacheUse::index_keys) cache.format = mla_cache::latent_format(d, row);
  if (!cache.format && use != CacheUse::latents) cache.format = mla_cache::index_format(d, row);
  std::string expected = "rows of";
  if (use != CacheUse::index_keys && d == 576) expected += " 656 (V3.2),";
  if (use != CacheUse::index_keys && d == 512) expected += " 656 (V3.2), 584 (V4), 528 (V4.1),";
  if (use != CacheUse::index_keys) expected += " " + std::to_string(d) + " (one scale)";
  if (use == CacheUse::append) expected += " or";
  if (use != CacheUse::latents) expected += " " + std::to_string(d + 4) + " (index keys)";
  check.require(cache.format.has_value(), name, expected + " bytes for d = " + std::to_string(d), row);
  return cache;
}

// The scale of a cache with one scale. It has a default only there.
struct KvScale {
  const float* pointer = nullptr;  // on the device, or null
  float value = 1;
};
template <class Args>
KvScale check_kv_scale(Checker& check, const Args& args, const std::optional<mla_cache::Format>& format) {
  const bool has_one = format && format->scale == mla_cache::Scale::none;
  const bool given = args.kv_scale != nullptr || args.kv_scale_value.has_value();
  check.rule(has_one || !given,
             "kv_scale needs a cache of bytes with one scale; the rows of this one have scales, or are not quantised");
  KvScale scale;
  if (args.kv_scale != nullptr) {
    check.rule(!args.kv_scale_value, "kv_scale is a number or an array, not both");
    const View view = check.any_shape("kv_scale", args.kv_scale, {DType::kFloat32}, Layout::kAny);
    check.require(view.size() == 1, "kv_scale", "one number", view.size());
    scale.pointer = view.as<const float>();
  } else if (args.kv_scale_value) {
    scale.value = *args.kv_scale_value;
    check.require(std::isfinite(scale.value) && scale.value > 0, "kv_scale", "positive and finite",
                  static_cast<double>(scale.value));
  }
  return scale;
}

}  // namespace hopwell
