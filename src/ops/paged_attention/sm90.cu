// paged_attention for Hopper where there are few strips: one kernel, a cluster a strip (sm90_strip.hpp). sm80.cu, which
// shares out any work equally, has the rest: many strips, several sequences that may be long and of different lengths, and
// long ones of too few heads to fill the GPU.
#include "ops/paged_attention/sm80_choice.hpp"
#include "ops/paged_attention/sm90_strip.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr int kMostHeads = 4;  // that are read together
// Keys of the longest sequence that there can be. Up to kLong it matters little that some SMs have no work, or less of it
// than others; up to kShort few warps a CTA are enough.
constexpr int kLong = 4096, kShort = 2048, kShortWarps = 6;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 28;  // of K and V; for more sm80's equal shares count more

// How many clusters of so many CTAs run at a time, one CTA an SM. The SMs lie in groups of 16 or so, and a cluster lies in
// one of them: of an H200's 132 SMs 66 clusters of 2 find room, 39 of 3, 30 of 4, 22 of 5, 17 of 6, 15 of 7 or 8.
int clusters_that_fit(int size, const runtime::Device& device) {
  using Lanes = Rows<bf16, false>;
  return runtime::clusters_that_fit<strip_kernel<Lanes>>(device, {.threads = kMaxThreads,
                                                                  .cluster = static_cast<std::uint32_t>(size),
                                                                  .shared_bytes = strip_bytes<Lanes>(kMaxWarps)});
}

struct Choice {
  int heads = 1, clusters = 0;  // of a strip; strips of all sequences
  int size = 0;                 // CTAs of a cluster; 0: not all clusters run at a time
  [[nodiscard]] int ctas() const { return clusters * size; }
};

// The heads of a strip, and the largest clusters that all run at a time: so that most SMs have work, and of equal choices the
// one that reads more heads together. `p`: for strips of one head.
Choice choose(const Problem& problem, const Params& p) {
  Choice best;
  for (int heads = 1; heads <= kMostHeads && (heads == 1 || can_join(problem, p.lanes, heads)); heads *= 2) {
    Choice choice{heads, p.b * p.strips / heads};
    for (int size = 2; size <= kMaxCluster; ++size)
      if (clusters_that_fit(size, problem.device) >= choice.clusters) choice.size = size;
    if (choice.ctas() >= best.ctas()) best = choice;
  }
  return best;
}

runtime::Support supports_few(const Problem& problem) {
  if (const runtime::Support support = supports(problem); !support.ok) return support;
  if (problem.b == 0) return {};
  if (problem.b * problem.h_kv > kMostHeads * clusters_that_fit(2, problem.device))
    return runtime::Support::no("too many sequences and heads");
  const Choice choice = choose(problem, params_of(problem, 1));
  if (choice.size == 0) return runtime::Support::no("too many sequences and heads");
  const std::int64_t longest = problem.max_blocks * problem.block;
  if (longest <= kLong && longest * problem.b <= 4 * kLong) return {};
  if (problem.b > 1)
    return runtime::Support::no("max_blocks * block must be at most 4096, and 16384 / b, for b above 1");
  if (problem.q.dtype == DType::kFloat32 || 3 * choice.ctas() < 2 * problem.device.sms)
    return runtime::Support::no("max_blocks * block must be at most 4096 for so few heads, or float32");
  if (4 * longest * problem.h_kv * problem.d > kMostBytes)
    return runtime::Support::no("a block table must be for at most 256 MiB of keys and values");
  return {};
}

static_assert(strip_bytes<Rows<bf16, true>>(kMaxWarps) <= 227 * 1024);
static_assert(strip_bytes<Fragments<bf16, 128, 0>>(kMaxWarps) <= 227 * 1024);

// Two CTAs on an SM: the next launch's can come while this one runs.
template <class Lanes>
constexpr bool kTwoFit = 2 * (strip_bytes<Lanes>(kShortWarps) + 1024) <= 228 * 1024;
static_assert(kTwoFit<Rows<bf16, false>>);

template <class Lanes>
void start(const Problem& problem, Stream stream) {
  StripParams p{params_of(problem, 1)};
  const Choice choice = choose(problem, p);
  if (choice.heads > 1) static_cast<Params&>(p) = params_of(problem, choice.heads);
  describe_prefetch(problem, p);
  p.cluster = choice.size, p.slice = (p.pairs.value + choice.size - 1) / choice.size;
  p.warps = kTwoFit<Lanes> && p.max_context <= kShort ? kShortWarps : kMaxWarps, p.threads = 32 * p.warps;
  while (Lanes::kKeysOfLookup << p.lookups_log2 < p.tile) ++p.lookups_log2;
  const int row = p.heads * p.d * static_cast<int>(sizeof(typename Lanes::Type));
  const bool rows = problem.layout != HOPWELL_CACHE_VLLM && !p.scattered;
  p.row_lines = rows && (row == 128 || row == 256) ? row / 128 : 0;
  runtime::launch(kName, strip_kernel<Lanes>,
                  {.grid = {static_cast<std::uint32_t>(choice.ctas())},
                   .threads = static_cast<std::uint32_t>(p.threads),
                   .cluster = static_cast<std::uint32_t>(choice.size),
                   .shared_bytes = strip_bytes<Lanes>(p.warps),
                   .programmatic_dependency = problem.device.has_dependent_launches()},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.b > 0) with_lanes(problem, [&]<class Lanes>() { start<Lanes>(problem, stream); });
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports_few, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::paged_attention
