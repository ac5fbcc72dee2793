// The floating-point mode in which the library computes.
#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace hopwell::runtime {

// While it lives, this thread computes in the default mode: it rounds to nearest, keeps subnormal numbers and traps
// nothing. So no result depends on the mode of the caller, which has its mode and its exception flags back afterwards.
// Compilers move arithmetic across a change of the mode, but not a call of a function that they do not see.
class DefaultFloatMode {
 public:
#ifdef __SSE2__  // <cfenv> sets the x87 unit too, which nothing here uses, and takes 400 ns
  DefaultFloatMode() : before_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatMode() { _mm_setcsr(before_); }
#else
  DefaultFloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&before_); }
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#ifdef __SSE2__
  static constexpr unsigned kDefault = _MM_MASK_MASK;  // all exceptions masked, to nearest, no flush to zero
  unsigned before_;
#else
  std::fenv_t before_{};
#endif
};

}  // namespace hopwell::runtime
