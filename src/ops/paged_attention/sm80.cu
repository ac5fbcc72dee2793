// paged_attention for any NVIDIA GPU from Ampere on. One kernel walks along the keys (sm80_ring.hpp) and joins what several
// warps and CTAs have of one result (sm80_merge.hpp); how the work is shared out is told in sm80_work.hpp, how the lanes of
// a warp divide a tile in sm80_choice.hpp.
#include <atomic>
#include <random>

#include "ops/paged_attention/sm80_choice.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr int kMostHeads = 32;  // as many as a warp has lanes

// One an SM.
int ctas_of(const Problem& problem) { return problem.device.sms; }

std::size_t workspace_bytes(const Problem& problem) {
  const Params p = params_of(problem, kMostHeads);
  return static_cast<std::size_t>(ctas_of(problem) * p.heads * p.queries) * static_cast<std::size_t>(p.half + 1) *
         sizeof(arch::Words4);
}

// The mark of a launch's parts: 64 random bits, other ones for each launch.
void choose_mark(Params& p) {
  static std::atomic<std::uint64_t> state = std::uint64_t{std::random_device{}()} << 32 | std::random_device{}();
  std::uint64_t x = state.fetch_add(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  p.mark[0] = static_cast<std::uint32_t>(x) | 1, p.mark[1] = static_cast<std::uint32_t>(x >> 32);  // not zero
}

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(ring_bytes<Rows<bf16, false>>(kMaxWarps) == 157184 && ring_bytes<Columns<bf16>>(kMaxWarps) == 157184);
static_assert(ring_bytes<Rows<bf16, true>>(kMaxWarps) <= 227 * 1024);
static_assert(ring_bytes<Fragments<bf16, 128, 0>>(kMaxWarps) <= 227 * 1024);
static_assert(ring_bytes<Fragments<bf16, 64, 8>>(kMaxWarps) <= 227 * 1024);

// Where all strips are equally long, CTAs take whole ones, though up to one in 33 then has nothing to do.
int whole_strips(const Params& p) {
  const std::int64_t ctas = p.ctas.value, strips = std::int64_t{p.b} * p.strips, of_cta = (strips + ctas - 1) / ctas;
  return p.alone && 32 * (of_cta * ctas - strips) <= strips ? static_cast<int>(of_cta) : 0;
}

template <class Lanes>
void start(const Problem& problem, Stream stream) {
  Params p = params_of(problem, kMostHeads);
  p.parts = static_cast<arch::Words4*>(problem.workspace);
  choose_mark(p);
  describe_prefetch(problem, p);
  int warps = kMaxWarps;
  while (ring_bytes<Lanes>(warps) > problem.device.shared_bytes) warps /= 2;
  p.warps = warps, p.threads = 32 * warps, p.ctas = ctas_of(problem);
  p.groups = std::max(1, p.threads / p.pairs.value);
  p.alone = p.b <= 64, p.part = (p.b + (p.alone ? 31 : p.threads - 1)) / (p.alone ? 32 : p.threads);
  p.whole = whole_strips(p);
  runtime::launch(kName, ring_kernel<Lanes>,
                  {.grid = {static_cast<std::uint32_t>(p.ctas.value)},
                   .threads = static_cast<std::uint32_t>(32 * warps),
                   .shared_bytes = ring_bytes<Lanes>(warps),
                   .programmatic_dependency = problem.device.has_dependent_launches()},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.b > 0) with_lanes(problem, [&]<class Lanes>() { start<Lanes>(problem, stream); });
}

const runtime::Registration<Problem> backend{{.name = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80",
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes,
                                              .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::paged_attention
