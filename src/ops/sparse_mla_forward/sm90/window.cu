// The kernels for Hopper with window keys, and the kernel with tensor copies.
#include <optional>

#include "ops/sparse_mla_forward/sm90/kernel.hpp"
#include "tile/gpu/tensor_map.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

// Whether the kernel for 64 heads can use tensor copies.
bool takes_boxes(const Problem& problem, const WindowParams& p) {
  return p.aligned && tile::can_map(problem.q, {0, 1}) && tile::can_map(problem.out, {0, 1}) &&
         (!problem.window || tile::can_map(problem.window_kv, {0})) &&
         (p.selection.has_indices || tile::can_map(problem.kv, {0}));
}

BoxParams params_with_boxes(const Problem& problem, const WindowParams& params, const KeyRows& keys) {
  constexpr auto kSwizzle = arch::Swizzle::bytes128;
  constexpr std::uint32_t kHeads = many_heads::SharedStorage<512, BoxParams>::kHeads;
  const auto map_heads = [](const View& v, std::uint32_t heads) {
    return tile::map_of(v, {{2, tile::kPanelColumns}, {1, heads}, {0, 1}}, kSwizzle);
  };
  BoxParams p{params, map_heads(problem.q, kHeads), map_heads(problem.out, kHeads / 4), {}, {}, keys};
  // A tensor of fewer rows than a box has none, and need not exist.
  const auto map_rows = [](arch::TensorMap& map, const View& rows) {
    if (rows.shape[0] >= kKeys) map = tile::map_of(rows, {{1, tile::kPanelColumns}, {0, kKeys}}, kSwizzle);
  };
  if (problem.window) map_rows(p.window_rows, problem.window_kv);
  if (!p.selection.has_indices) map_rows(p.kv_rows, problem.kv);
  return p;
}

}  // namespace

bool launch_with_boxes(const Problem& problem, const LaunchPlan& plan, const tile::SelectionParams& selection,
                       Stream stream) {
  // On an H200, rows of 256 selected keys take 4 % less time than with the other kernel, of 640 keys 1 % more.
  constexpr std::int64_t kMostEntries = 512;
  const bool pays = problem.window || problem.selection.indices == nullptr || problem.topk <= kMostEntries;
  if (!pays || problem.d_qk != 512 || plan.tile_heads != 64) return false;
  const WindowParams p = params_with_window(problem, selection);
  if (!takes_boxes(problem, p)) return false;
  const std::optional<KeyRows> keys = key_rows_of(problem.kv, problem.window_kv);
  if (!keys) return false;
  const BoxParams with_boxes = params_with_boxes(problem, p, *keys);
  // Without indices, rows have any length. Selected rows are mostly whole steps. To look for a last
  // tile without keys would cost them 1 % of their time.
  if (p.selection.has_indices)
    launch_kernel<many_heads::SharedStorage<512, BoxParams, false>>(problem, plan, with_boxes, stream);
  else
    launch_kernel<many_heads::SharedStorage<512, BoxParams, true>>(problem, plan, with_boxes, stream);
  return true;
}

void launch_with_window(const Problem& problem, const LaunchPlan& plan, const tile::SelectionParams& selection,
                        Stream stream) {
  const WindowParams p = params_with_window(problem, selection);
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() { launch_for_heads<kDqk>(problem, plan, p, stream); });
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
