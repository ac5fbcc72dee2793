#include "ops/mla_cache_append/op.hpp"

#include <hopwell/operators.hpp>

#include <cmath>
#include <string>

#include "ops/common/paged_cache.hpp"

namespace hopwell::ops::mla_cache_append {
namespace {

constexpr const char* kName = "mla_cache_append";
const DTypes kIntegers = {DType::kInt64, DType::kInt32};

Integers integers(const View& view) {
  return {view.data, view.ndim == 0 ? 0 : view.stride[0], view.dtype == DType::kInt64};
}

std::optional<Rotation> check_rotation(Checker& check, const MlaCacheAppendArgs& args, std::int64_t d) {
  const View positions = check.optional_input("positions", args.positions, kIntegers, {"n"}, Layout::kAny);
  const View table = check.optional_input("cos_sin", args.cos_sin, {DType::kFloat32, DType::kBFloat16},
                                          {"max_positions", "r"}, Layout::kRows);
  check.together("positions", bool(positions), "cos_sin", bool(table));
  check.rule(table || !args.rope_offset, "rope_offset needs positions and cos_sin");
  if (!table) return std::nullopt;
  const std::int64_t r = check["r"], first = args.rope_offset.value_or(d - r);
  check.require(r >= 2 && r % 2 == 0 && r <= d, "cos_sin",
                "[max_positions, r] with an even r between 2 and d = " + std::to_string(d), r);
  check.require(first >= 0 && first + r <= d, "rope_offset", "between 0 and d - r = " + std::to_string(d - r), first);
  return Rotation{table, integers(positions), first, r, args.interleaved};
}

}  // namespace

Problem check(const MlaCacheAppendArgs& args) {
  Checker check(kName);
  Problem p;
  p.kv = check.input("kv", args.kv, {DType::kBFloat16, DType::kFloat32}, {"n", "columns"});
  p.k_rope = check.optional_input("k_rope", args.k_rope, {p.kv.dtype}, {"n", "d_rope"});
  p.n = check["n"], p.d = check["columns"] + (p.k_rope ? check["d_rope"] : 0);
  check.require(p.d >= 1, "kv", "[n, d >= 1]", p.d);
  const PagedCache cache = check_paged_cache(check, "cache", args.cache, p.d, CacheUse::append);
  p.cache = cache.blocks, p.format = cache.format, p.row_type = cache.row_type;
  p.slots = integers(check.input("slots", args.slots, kIntegers, {"n"}, Layout::kAny));
  p.rotation = check_rotation(check, args, p.d);
  p.pow2 = check.choice("scale_format", args.scale_format, HOPWELL_CACHE_SCALE_FP32, "'pow2' or 'fp32'") ==
           HOPWELL_CACHE_SCALE_POW2;
  const bool has_fp32_scales = p.format && p.format->scale == mla_cache::Scale::fp32;
  check.rule(p.pow2 || has_fp32_scales, "scale_format 'fp32' needs rows of 656 bytes or index rows");
  const bool is_v32 =
      p.format && p.format->tile == mla_cache::kV32.tile && p.format->data_pitch == mla_cache::kV32.data_pitch;
  p.least_exponent = is_v32 ? -13 : -22;
  const KvScale scale = check_kv_scale(check, args, p.format);
  p.kv_scale = scale.pointer, p.kv_scale_value = scale.value;
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::mla_cache_append
