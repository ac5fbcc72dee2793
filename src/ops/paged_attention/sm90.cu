// paged_attention for Hopper where there are few row blocks: one kernel, a cluster a row block (cluster_kernel.hpp).
// sm80.cu, which shares out any work equally, has the rest: many row blocks, several sequences that may be long and of
// different lengths, and long ones of too few heads to fill the GPU.
#include "ops/paged_attention/cluster_kernel.hpp"
#include "ops/paged_attention/tiles/dispatch.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {
namespace {

static_assert(kClusterBytes<KeyMajorTile<bf16, 2, 4, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kClusterBytes<KeyMajorTile<bf16, 3, 4, false>>.with(kMaxWarps - 1) <= 227 * 1024);
static_assert(kClusterBytes<KeyMajorTile<bf16, 5, 2, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kClusterBytes<KeyMajorTile<bf16, 1, 8, true>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kClusterBytes<MmaTile<bf16, 128, 0>>.with(kMaxWarps) <= 227 * 1024);

// The SMs lie in groups of 16 or so, and a cluster lies in one of them: of an H200's 132 SMs 66 clusters of 2 find
// room, 39 of 3, 30 of 4, 22 of 5, 17 of 6, 15 of 7 or 8.
int clusters_that_fit(int size, const runtime::Device& device) {
  using Tile = KeyMajorTile<bf16, 1, 8, false>;
  return runtime::clusters_that_fit<cluster_kernel<Tile>>(device,
                                                          {.threads = kMaxThreads,
                                                           .cluster = static_cast<std::uint32_t>(size),
                                                           .shared_bytes = kClusterBytes<Tile>.with(kMaxWarps)});
}

template <class Tile>
void start(const Problem& problem, Stream stream) {
  const ClusterPlan plan = plan_clusters(problem, clusters_that_fit);
  const ClusterParams p = cluster_params(problem, plan, kClusterBytes<Tile>, Tile::kKeysOfLookup);
  runtime::launch("paged_attention", cluster_kernel<Tile>,
                  {.grid = {static_cast<std::uint32_t>(plan.ctas())},
                   .threads = static_cast<std::uint32_t>(p.schedule.threads),
                   .cluster = static_cast<std::uint32_t>(plan.size),
                   .shared_bytes = kClusterBytes<Tile>.with(p.schedule.warps),
                   .programmatic_dependency = problem.device.has_dependent_launches()},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.b > 0) with_tile<1>(problem, [&]<class Tile>() { start<Tile>(problem, stream); });
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend,
     .supports = [](const Problem& problem) { return supports_clusters(problem, clusters_that_fit); },
     .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
