// normalize_l1 for any NVIDIA GPU from Ampere on: one warp per row, which it reads twice.
#include "ops/normalize_l1/op.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/normalize.hpp"

namespace hopwell::ops::normalize_l1::HOPWELL_TARGET {
namespace {

constexpr int kWarps = 4;

struct Params {
  const float* attn;  // [rows, columns]
  float* out;         // same shape; may be attn itself
  int64_t attn_stride, out_stride, rows;
  int columns;
};

__global__ void __launch_bounds__(32 * kWarps) normalize_l1_rows(const __grid_constant__ Params p) {
  constexpr int kUnroll = 8;
  const int64_t row = int64_t{arch::block_index()} * kWarps + arch::warp_index();
  if (row >= p.rows) return;
  const float* from = p.attn + row * p.attn_stride;
  float total = 0;
  HOPWELL_NO_UNROLL
  for (int first = arch::lane_index(); first < p.columns; first += 32 * kUnroll) {
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) total += first + 32 * i < p.columns ? from[first + 32 * i] : 0;
  }
  tile::normalize(from, p.out + row * p.out_stride, p.columns, total);
}

runtime::PlanOr<runtime::NoPlan> plan(const Problem& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (p.attn.shape[0] >= kLimit || p.attn.shape[1] >= kLimit - 1024)
    return runtime::Unsupported{"needs attn with less than 2^31 rows and columns"};
  return runtime::NoPlan{};
}

void launch(const Problem& problem, Stream stream) {
  if (problem.attn.size() == 0) return;
  const Params p{problem.attn.as<const float>(), problem.out.as<float>(), problem.attn.stride[0],
                 problem.out.stride[0],          problem.attn.shape[0],   static_cast<int>(problem.attn.shape[1])};
  runtime::launch(kName, normalize_l1_rows, runtime::shape_of_ctas((p.rows + kWarps - 1) / kWarps, 32 * kWarps), stream,
                  p);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::normalize_l1::HOPWELL_TARGET
