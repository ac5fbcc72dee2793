// indexer_dense_loss on the CPU.
#include "ops/indexer_dense_loss/plan.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::ops::indexer_dense_loss {
namespace {

// A plan whose workspace the launch allocates, because the workspace of the CPU is always 0 bytes.
struct CpuPlan {
  Plan plan;
};

runtime::PlanOr<CpuPlan> plan(const Problem& p) {
  auto planned = plan_on("cpu", p);
  if (auto* unsupported = std::get_if<runtime::Unsupported>(&planned)) return std::move(*unsupported);
  return CpuPlan{std::get<Plan>(std::move(planned))};
}

void launch_on_cpu(const Problem& p, const CpuPlan& planned, void* /*workspace*/, Stream stream) {
  const cpu::Scratch<double> workspace(static_cast<std::int64_t>(planned.plan.workspace_bytes / sizeof(double)));
  launch(p, planned.plan, workspace.get(), stream);
}

const runtime::Registration backend{"cpu", plan, launch_on_cpu};

}  // namespace
}  // namespace hopwell::ops::indexer_dense_loss
