// paged_attention for any NVIDIA GPU from Ampere on. One kernel walks along the keys and merges what several warps and
// CTAs have of one result (split_kernel.hpp); how the work is shared out is told in gpu/schedule.hpp, how the lanes of
// a warp divide a tile in tiles/dispatch.hpp.
#include "ops/paged_attention/split_kernel.hpp"
#include "ops/paged_attention/tiles/dispatch.hpp"
#include "runtime/launch.hpp"
#include "runtime/launch_tag.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {
namespace {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kSplitBytes<KeyMajorTile<bf16, 1, 8, false>>.with(kMaxWarps) == 159232);
static_assert(kSplitBytes<DimensionMajorTile<bf16>>.with(kMaxWarps) == 159232);
static_assert(kSplitBytes<KeyMajorTile<bf16, 2, 4, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 3, 4, false>>.with(kMaxWarps - 1) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 4, 2, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 5, 2, false>>.with(kMaxWarps - 1) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 1, 8, true>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 128, 0>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 64, 8>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 256, 0>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 64, 8, 2>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 128, 4, 2>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 256, 0, 1, false>>.with(kMaxWarps - 2) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 64, 4, 2, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 128, 2, 2, false>>.with(kMaxWarps) <= 227 * 1024);

template <class Tile>
void start(const Problem& problem, Stream stream) {
  Params p = plan_split(problem, kSplitBytes<Tile>);
  p.schedule.partials = static_cast<arch::Words4*>(problem.workspace);
  const runtime::LaunchTag tag = runtime::new_launch_tag();
  p.schedule.tag[0] = tag.words[0], p.schedule.tag[1] = tag.words[1];
  runtime::launch("paged_attention", split_kernel<Tile>,
                  {.grid = {static_cast<std::uint32_t>(p.schedule.ctas.value)},
                   .threads = static_cast<std::uint32_t>(p.schedule.threads),
                   .shared_bytes = kSplitBytes<Tile>.with(p.schedule.warps),
                   .programmatic_dependency = problem.device.has_dependent_launches(),
                   .cooperative = true},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.b > 0) with_tile<2>(problem, [&]<class Tile>() { start<Tile>(problem, stream); });
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend, .supports = supports, .workspace_bytes = split_workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
