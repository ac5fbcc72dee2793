// attention_distribution for Blackwell: what it takes, and its kernel's launch.
#include "ops/attention_distribution/sm100/head_sums.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

// Whether the copy engine takes rows that lie `stride` elements apart.
bool fits(const View& view, std::size_t dimension) {
  return view.shape[dimension] <= 1 || (view.stride[dimension] > 0 && view.stride[dimension] % 8 == 0);
}

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return Support::no("d_qk must be 576 or 512");
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 1024;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q >= kLimit)
    return Support::no("s_q, s_kv, topk and h_q must be below 2^31 - 1024");
  const auto aligned = [](const View& view) { return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0; };
  if (!aligned(p.q) || !aligned(p.kv) || !fits(p.q, 0) || !fits(p.q, 1) || !fits(p.kv, 0))
    return Support::no("rows of q and kv must be 16-byte aligned, in ascending order");
  if (!tile::can_gather(p.kv.data, p.s_kv, p.kv.stride[0])) return Support::no("rows of kv must lie within 64 GiB");
  return {};
}

std::uint64_t extent(std::int64_t size) { return static_cast<std::uint64_t>(size); }

// Bytes from one to the next. A dimension of size 1 may have any stride; the copy engine wants a multiple of 16.
std::uint64_t stride_bytes(const View& view, std::size_t dimension) {
  return view.shape[dimension] > 1 ? 2 * extent(view.stride[dimension]) : 16;
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  GatherParams p{params_of(problem), {}, {}};
  p.keys = tile::map_of_rows(problem.kv, problem.q, kDqk, 64, arch::Swizzle::bytes128);
  p.queries = arch::make_tensor_map({.address = problem.q.data,
                                     .rank = 3,
                                     .extent = {kDqk, extent(problem.h_q), extent(problem.s_q)},
                                     .stride_bytes = {stride_bytes(problem.q, 1), stride_bytes(problem.q, 0)},
                                     .box = {64, kHeadsAtATime, 1},
                                     .swizzle = arch::Swizzle::bytes128});
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(p.plan.ctas)},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("attention_distribution", kernel<kDqk>, shape, stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm100" : "emu:sm100", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
