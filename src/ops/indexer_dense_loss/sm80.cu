// indexer_dense_loss for any NVIDIA GPU from Ampere on.
#include "arch/platform.hpp"
#include "ops/indexer_dense_loss/plan.hpp"

namespace hopwell::ops::indexer_dense_loss::HOPWELL_TARGET {
namespace {

constexpr const char* kBackend = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80";

const runtime::Registration<Problem> backend{
    {.name = kBackend,
     .supports = [](const Problem& p) { return supports_on(kBackend, p); },
     .workspace_bytes = [](const Problem& p) { return workspace_bytes_on(kBackend, p); },
     .launch = [](const Problem& p, Stream stream) { launch_on(kBackend, p, stream); }}};

}  // namespace
}  // namespace hopwell::ops::indexer_dense_loss::HOPWELL_TARGET
