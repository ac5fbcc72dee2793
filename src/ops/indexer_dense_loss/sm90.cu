// indexer_dense_loss for Hopper.
#include "ops/indexer_dense_loss/plan.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::indexer_dense_loss::HOPWELL_TARGET {
namespace {

using runtime::kBackend;

const runtime::Registration<Problem> backend{
    {.name = kBackend,
     .supports = [](const Problem& p) { return supports_on(kBackend, p); },
     .workspace_bytes = [](const Problem& p) { return workspace_bytes_on(kBackend, p); },
     .launch = [](const Problem& p, Stream stream) { launch_on(kBackend, p, stream); }}};

}  // namespace
}  // namespace hopwell::ops::indexer_dense_loss::HOPWELL_TARGET
