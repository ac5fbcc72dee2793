// mla_cache_append on GPUs: supported problems, and the kernel's launch.
#pragma once

#include "ops/mla_cache_append/append.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET {

// The format of a cache that is not quantised.
inline mla_cache::Format plain_format(std::int64_t d) {
  return {.plain = static_cast<int>(d), .data_pitch = static_cast<int>(2 * d)};
}

inline bool is_group_of_lanes(int tile) { return tile == 0 || tile == 32 || tile == 64 || tile == 128; }

inline runtime::PlanOr<runtime::NoPlan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.kv.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 kv"};
  if (!p.format && p.row_type != DType::kBFloat16) return Unsupported{"needs a cache of bfloat16 or of bytes"};
  if (p.d % 4 != 0 || p.d > 65'536) return Unsupported{"needs d that is a multiple of 4, at most 65536"};
  if (p.format && !is_group_of_lanes(p.format->tile)) return Unsupported{"needs index keys of width 32, 64 or 128"};
  const std::int64_t alignment = p.format && p.format->scale_pitch == 4 ? 4 : 16;
  if (!p.cache.aligned(alignment))
    return Unsupported{"needs base and block stride of the cache in multiples of " + std::to_string(alignment) +
                       " bytes"};
  if (!runtime::fit_in_ints({p.n})) return Unsupported{"needs n below 2^31 - 1024"};
  return runtime::NoPlan{};
}

inline Params params_of(const Problem& problem) {
  Params p{};
  p.kv = problem.kv.as<const bf16>(), p.k_rope = problem.k_rope.as<const bf16>();
  p.kv_stride = problem.kv.stride[0], p.k_rope_stride = problem.k_rope ? problem.k_rope.stride[0] : 0;
  p.cache = problem.cache, p.format = problem.format.value_or(plain_format(problem.d));
  p.tile_bits = p.format.tile == 128 ? 7 : p.format.tile == 64 ? 6 : 5;
  p.slots = problem.slots, p.block = static_cast<int>(p.cache.block);
  p.kv_scale = problem.kv_scale, p.kv_scale_value = problem.kv_scale_value;
  p.n = problem.n, p.kv_columns = static_cast<int>(problem.kv.shape[1]);
  p.pow2 = problem.pow2, p.least_exponent = problem.least_exponent;
  p.aligned = tile::rows_aligned(problem.kv, 1, 8) && (!problem.k_rope || tile::rows_aligned(problem.k_rope, 1, 8)) &&
              p.kv_columns % 4 == 0;
  p.codes_are_contiguous = tile::rows_aligned(problem.kv, 1, 16) && p.format.codes <= p.kv_columns &&
                           (!problem.rotation || problem.rotation->first >= p.format.codes);
  if (!problem.rotation) return p;
  const Rotation& r = *problem.rotation;
  p.cos_sin = r.cos_sin.data, p.cos_sin_stride = r.cos_sin.stride[0], p.max_positions = r.cos_sin.shape[0];
  p.cos_sin_is_bf16 = r.cos_sin.dtype == DType::kBFloat16, p.positions = r.positions;
  p.rope_first = static_cast<int>(r.first), p.rope_columns = static_cast<int>(r.columns);
  p.interleaved = r.interleaved;
  return p;
}

template <class Encode>
void launch(const Problem& problem, Stream stream) {
  if (problem.n == 0 || problem.cache.slots() == 0) return;
  Params params = params_of(problem);
  params.rows_of_cta = tile::ceil_div(problem.n, 4 * problem.device.sms);
  // 16 columns a lane need fewer instructions a column, but leave lanes idle if a row has 128 columns.
  const bool is_long = params.format.codes >= 256 && params.format.codes % 16 == 0;
  arch::LaunchShape shape =
      runtime::shape_of_ctas(tile::ceil_div(problem.n, params.rows_of_cta), Config::kThreads, sizeof(SharedStorage));
  shape.programmatic_dependency = problem.device.has_dependent_launches();
  runtime::launch("mla_cache_append", is_long ? mla_cache_append_rows<Encode, 4> : mla_cache_append_rows<Encode, 1>,
                  shape, stream, params);
}

}  // namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET
