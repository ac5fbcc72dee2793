// mla_cache_append for Hopper, which has an instruction that encodes e4m3. The kernel: append.hpp.
#include "arch/sm90/convert.hpp"
#include "ops/mla_cache_append/launch.hpp"

namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET {
namespace {

struct Encode {
  static HOPWELL_DEVICE uint32_t codes(const float (&quotients)[Config::kColumns]) {
    return uint32_t{arch::pack_e4m3(quotients[0], quotients[1])} | uint32_t{arch::pack_e4m3(quotients[2], quotients[3])}
                                                                       << 16;
  }
};

const runtime::Registration backend{runtime::kBackend, plan, launch<Encode>};

}  // namespace
}  // namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET
