// Detects the targets that this processor can run, in place of Highway's own library: Debian has it only as a shared
// library, and nothing else of it is needed. HWY_DYNAMIC_DISPATCH calls these two functions.
#include <hwy/highway.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

namespace hwy {
namespace {

#if HWY_ARCH_X86
// Whether the processor and the operating system support all features of a list such as "sse2,ssse3": the features that
// Highway lets the compiler use for a target.
bool have(std::string_view features) {
  const std::pair<std::string_view, bool> known[] = {
      {"sse2", __builtin_cpu_supports("sse2") != 0},         {"ssse3", __builtin_cpu_supports("ssse3") != 0},
      {"sse4.1", __builtin_cpu_supports("sse4.1") != 0},     {"sse4.2", __builtin_cpu_supports("sse4.2") != 0},
      {"pclmul", __builtin_cpu_supports("pclmul") != 0},     {"aes", __builtin_cpu_supports("aes") != 0},
      {"avx", __builtin_cpu_supports("avx") != 0},           {"avx2", __builtin_cpu_supports("avx2") != 0},
      {"bmi", __builtin_cpu_supports("bmi") != 0},           {"bmi2", __builtin_cpu_supports("bmi2") != 0},
      {"fma", __builtin_cpu_supports("fma") != 0},           {"f16c", __builtin_cpu_supports("f16c") != 0},
      {"avx512f", __builtin_cpu_supports("avx512f") != 0},   {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
      {"avx512dq", __builtin_cpu_supports("avx512dq") != 0}, {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
  };
  while (!features.empty()) {
    const std::string_view name = features.substr(0, features.find(','));
    features.remove_prefix(std::min(name.size() + 1, features.size()));
    const auto* const at = std::find(std::begin(known), std::end(known), std::pair(name, true));
    if (at == std::end(known)) return false;
  }
  return true;
}
#endif

}  // namespace

int64_t SupportedTargets() {
  int64_t targets = HWY_STATIC_TARGET;
#if HWY_ARCH_X86
  if (have(HWY_TARGET_STR_SSSE3)) targets |= HWY_SSSE3;
  if (have(HWY_TARGET_STR_SSE4)) targets |= HWY_SSE4;
  if (have(HWY_TARGET_STR_AVX2)) targets |= HWY_AVX2;
  if (have(HWY_TARGET_STR_AVX3)) targets |= HWY_AVX3;
#endif
  return targets & HWY_TARGETS;
}

ChosenTarget& GetChosenTarget() {
  static constinit ChosenTarget chosen;
  return chosen;
}

}  // namespace hwy
