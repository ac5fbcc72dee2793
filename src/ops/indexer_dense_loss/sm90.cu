// indexer_dense_loss for Hopper.
#include "ops/indexer_dense_loss/plan.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::indexer_dense_loss::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& p) { return plan_on(runtime::kBackend, p); }

const runtime::Registration backend{runtime::kBackend, plan, indexer_dense_loss::launch};

}  // namespace
}  // namespace hopwell::ops::indexer_dense_loss::HOPWELL_TARGET
