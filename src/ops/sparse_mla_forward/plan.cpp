#include "ops/sparse_mla_forward/plan.hpp"

#include <algorithm>

namespace hopwell::ops::sparse_mla_forward {

Plan plan_of(const Problem& problem) {
  const int tile_heads = problem.h_q <= 16 ? 16 : problem.h_q <= 32 ? 32 : 64;
  const auto head_tiles = (problem.h_q + tile_heads - 1) / tile_heads, work_tiles = problem.s_q * head_tiles;
  return {.tile_heads = tile_heads,
          .head_tiles = static_cast<int>(head_tiles),
          .queries_at_once = tile_heads < 64 && problem.s_q > problem.device.sms ? 2 : 1,
          .work_tiles = static_cast<std::uint32_t>(work_tiles),
          .ctas = static_cast<std::uint32_t>(std::min<std::int64_t>(work_tiles, problem.device.sms))};
}

}  // namespace hopwell::ops::sparse_mla_forward
