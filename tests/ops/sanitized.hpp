// Sanitizers watch accesses and cost a factor of ten: under them tests draw numbers once, and try fewer cases and
// numbers of threads where they repeat what every case does anyway.
#pragma once

namespace hopwell::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace hopwell::test
