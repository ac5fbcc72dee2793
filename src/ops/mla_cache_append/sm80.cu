// mla_cache_append for any NVIDIA GPU from Ampere on. The kernel: append.hpp.
#include "ops/mla_cache_append/launch.hpp"

namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET {
namespace {

struct Encode {
  static HOPWELL_DEVICE uint32_t codes(const float (&quotients)[Config::kColumns]) {
    uint32_t codes = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < Config::kColumns; ++i) codes |= uint32_t{code_of_quotient(0, quotients[i])} << 8 * i;
    return codes;
  }
};

const runtime::Registration backend{runtime::kBackend, plan, launch<Encode>};

}  // namespace
}  // namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET
