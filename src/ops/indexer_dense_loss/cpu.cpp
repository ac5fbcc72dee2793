// indexer_dense_loss on the CPU.
#include "ops/indexer_dense_loss/plan.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::ops::indexer_dense_loss {
namespace {

constexpr const char* kBackend = "cpu";

void launch(const Problem& problem, Stream stream) {
  Problem p = problem;
  p.workspace_bytes = workspace_bytes_on(kBackend, p);
  const cpu::Scratch<double> workspace(static_cast<std::int64_t>(p.workspace_bytes / sizeof(double)));
  p.workspace = workspace.get();
  launch_on(kBackend, p, stream);
}

const runtime::Registration<Problem> backend{
    {.name = kBackend, .supports = [](const Problem& p) { return supports_on(kBackend, p); }, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::indexer_dense_loss
