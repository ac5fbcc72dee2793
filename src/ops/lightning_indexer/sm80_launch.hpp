// lightning_indexer on GPUs: what its backend files share on the host.
#pragma once

#include <algorithm>

#include "ops/lightning_indexer/sm80_select.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops {
namespace {

constexpr std::int64_t kLimit = std::int64_t{1} << 31;

std::uint32_t to_count(std::int64_t x) { return static_cast<std::uint32_t>(x); }
int to_int(std::int64_t x) { return static_cast<int>(x); }
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// What holds for both operators.
template <class Problem>
runtime::Support check_sizes(const Problem& p) {
  using runtime::Support;
  if (p.d_index > 128) return Support::no("d_index must be at most 128");
  if (p.s_q >= kLimit || p.topk >= kLimit) return Support::no("s_q and topk must be below 2^31");
  if (p.s_kv >= kLimit / 2) return Support::no("s_kv must be below 2^30");  // so that keys past the last are ints
  if (p.h_index >= kLimit / 64) return Support::no("h_index must be below 2^25");
  return {};
}

}  // namespace

namespace lightning_indexer {
namespace {

constexpr const char* kName = "lightning_indexer";

// Queries whose scores the workspace holds: 64 MiB of scores, but at least those of 32 queries.
std::int64_t queries_at_a_time(const Problem& p) {
  constexpr std::int64_t kFloats = 1 << 24, kLeast = 32;
  return std::min(p.s_q, std::max(kLeast, kFloats / std::max<std::int64_t>(p.s_kv, 1)));
}

std::size_t workspace_bytes(const Problem& p) {
  return p.topk == 0 ? 0 : sizeof(float) * static_cast<std::size_t>(queries_at_a_time(p) * p.s_kv);
}

// score(first, count), then select(first, count), for as many queries at a time as the workspace has room for.
template <class Score, class Select>
void launch_in_turns(const Problem& problem, Score score, Select select) {
  if (problem.topk == 0) return;
  const std::int64_t together = queries_at_a_time(problem);
  for (std::int64_t first = 0; first < problem.s_q; first += together) {
    const std::int64_t count = std::min(together, problem.s_q - first);
    if (problem.s_kv > 0) score(first, count);
    select(first, count);
  }
}

SelectParams select_params_of(const Problem& problem, std::int64_t first) {
  SelectParams p{};
  p.causality = problem.causality;
  p.scores = static_cast<const float*>(problem.workspace), p.first_query = first, p.pitch = problem.s_kv;
  p.indices = problem.indices.as<int>(), p.indices_stride = problem.indices.stride[0];
  p.kept_scores = problem.scores.as<float>(), p.kept_stride = problem.scores.stride[0];
  p.s_kv = to_int(problem.s_kv), p.topk = to_int(problem.topk);
  return p;
}

// Selects for `count` queries from `first` on.
void select(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  SelectParams p = select_params_of(problem, first);
  // Few queries: as many warps as there can be. Many: several CTAs a multiprocessor hide each other's barriers.
  const bool few = count <= 2 * std::int64_t{problem.device.sms};
  p.warps = to_int(std::clamp<std::int64_t>(problem.s_kv / 256, 1, few ? SelectConfig::kMaxWarps : 8));
  runtime::launch(kName, select_keys,
                  {.grid = {to_count(count)}, .threads = 32 * to_count(p.warps), .shared_bytes = sizeof(SelectStorage)},
                  stream, p);
}

}  // namespace
}  // namespace lightning_indexer
}  // namespace hopwell::ops
