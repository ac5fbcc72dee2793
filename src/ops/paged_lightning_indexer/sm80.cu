// paged_lightning_indexer by mma.sync, for any NVIDIA GPU from Ampere on: list of kernels.
//
//     paged_lightning_indexer_score_sm80    scores of some queries and their keys, to the workspace
//     lightning_indexer_select              the best positions of each query; then the next queries
#include "ops/lightning_indexer/sm80/score.hpp"
#include "ops/paged_lightning_indexer/score_work.hpp"
#include "ops/paged_lightning_indexer/select.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {
namespace {

using Config = indexer::ScoreConfig;

}  // namespace

template <class T>
using Sm80Params = PagedScoreParams<indexer::ScoreParams<T>>;

template <class T>
HOPWELL_DEVICE KeyRow<T> row_of_key(const Sm80Params<T>& p, int key) {
  const CachePage page = page_of(p, key, key < p.s_kv);
  return {reinterpret_cast<const T*>(page.data + int64_t{page.row} * p.row_bytes), page.exists};
}

template <class T>
struct Sm80Storage : indexer::ScoreStorage<T> {
  WorkStorage<Config::kWarps> work;
};
static_assert(sizeof(Sm80Storage<float>) <= 99 * 1024);

// Two CTAs an SM for fp8 alone: with bf16 the loop over items needs more than 128 registers.
template <bool kWhole, bool kRelu, class T>
__global__ void __launch_bounds__(Config::kThreads, sizeof(T) == 1 ? 2 : 1)
    paged_lightning_indexer_score_sm80(const __grid_constant__ Sm80Params<T> p) {
  constexpr int kKeys = indexer::kKeysOfCta<T>;
  auto& s = arch::dynamic_smem<Sm80Storage<T>>();
  HOPWELL_NO_UNROLL
  for (WorkItem item = first_item<kKeys>(p, s.work); item.left > 0; advance<kKeys>(p, item)) {
    Sm80Params<T> of = params_of_item<T>(p, item);
    of.q.data += of.sequence * p.q_stride_b;
    indexer::score_part<kWhole, kRelu, T>(of, static_cast<indexer::ScoreStorage<T>&>(s),
                                          {item.block * kKeys, {0, of.tiles}});
    arch::syncthreads();  // all warps have read the last tile
  }
}

namespace {

template <class T>
void launch_score(const Problem& problem, const Plan& plan, void* workspace, std::int64_t first, std::int64_t count,
                  Stream stream) {
  const std::int64_t keys = indexer::kKeysOfCta<T>;
  Sm80Params<T> p{};
  set_params(p, problem, plan.problem, unpaged::plan_mma_score(plan.problem, count, keys), workspace, first, count);
  constexpr std::int64_t kAlignment = sizeof(T) == 1 ? 8 : 16;
  const bool aligned = reinterpret_cast<std::uintptr_t>(p.cache) % kAlignment == 0 &&
                       p.block_stride % kAlignment == 0 && problem.d_index % 8 == 0;
  p.q = tile::row_major<T>(problem.q, 3), p.q_stride = problem.q.stride[1];
  p.k = {nullptr, problem.d_index, static_cast<int>(problem.d_index), aligned};
  p.column_blocks = static_cast<int>(tile::ceil_div<std::int64_t>(problem.d_index, tile::kBlockColumns));
  const auto kernel = !problem.relu                            ? paged_lightning_indexer_score_sm80<false, false, T>
                      : p.column_blocks == tile::kColumnBlocks ? paged_lightning_indexer_score_sm80<true, true, T>
                                                               : paged_lightning_indexer_score_sm80<false, true, T>;
  const std::int64_t ctas = ctas_of(problem, plan.problem, count, keys, 2 * std::int64_t{problem.device.sms});
  runtime::launch(kName, kernel, runtime::shape_of_ctas(ctas, Config::kThreads, sizeof(Sm80Storage<T>)), stream, p);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  const auto score = problem.q.dtype == DType::kBFloat16     ? launch_score<arch::bf16>
                     : problem.q.dtype == DType::kFloat8E4m3 ? launch_score<arch::e4m3>
                                                             : launch_score<float>;
  for_each_pass(plan, [&](std::int64_t first, std::int64_t count) {
    if (plan.problem.s_kv > 0 && problem.topk > 0) score(problem, plan, workspace, first, count, stream);
    indexer::select_in_rounds(
        plan.problem, plan.of, workspace, count,
        [&](const unpaged::SelectPlan& select) { return select_params(problem, plan, workspace, first, select); },
        [&](const unpaged::Problem& of, std::int64_t rows, auto params) {
          indexer::launch_select(kName, of, rows, stream, params);
        });
  });
}

const runtime::Registration backend{runtime::kBackend, plan_of, launch};

}  // namespace
}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
