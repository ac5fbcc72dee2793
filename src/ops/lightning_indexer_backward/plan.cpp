#include "ops/lightning_indexer_backward/plan.hpp"

#include <algorithm>

namespace hopwell::ops::lightning_indexer_backward {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

Workspace workspace_of(const Problem& p) {
  Workspace w;
  const auto reserve = [&w](std::int64_t size) {
    const std::size_t at = w.bytes;
    w.bytes += (static_cast<std::size_t>(size) + 255) / 256 * 256;
    return at;
  };
  w.gradients = reserve(4 * p.pass_queries * p.topk);
  if (!p.losses) w.losses = reserve(8 * p.s_q);
  if (!p.indices) w.apart = reserve(4 * p.pass_queries);
  if (!p.deterministic) return w;
  w.fixed_d_k = reserve(8 * p.s_kv * p.d_index);
  w.largest = reserve(4 * p.s_kv);
  w.count = reserve(4 * p.s_kv);
  w.of_all = reserve(4);
  return w;
}

std::size_t workspace_bytes(const Problem& p) { return workspace_of(p).bytes; }

Plan plan_of(const Problem& p) {
  const std::int64_t most = 8 * std::int64_t{p.device.sms};  // maximum number of CTAs that run at the same time
  const int group_rows = p.indices || p.h_index > 64 ? 0 : p.h_index > 32 ? 64 : p.h_index > 16 ? 32 : 16;
  int group = group_rows == 0 ? 1 : 128 / group_rows;
  while (group > 1 && ceil_div(p.queries(), group) < p.device.sms) group /= 2;  // at least one group per SM
  return {static_cast<std::uint32_t>(std::min(ceil_div(p.s_kv * p.d_index, kPassThreads), most)),
          static_cast<int>(ceil_div(p.h_index, 64)), static_cast<int>(ceil_div(p.d_index, 32)), group_rows, group};
}

}  // namespace hopwell::ops::lightning_indexer_backward
