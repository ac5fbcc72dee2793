// Certification: runs the same small kernels on the emulator and on a GPU and compares their outputs word by word.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace hopwell::arch::certify {

enum class Compare : uint8_t {
  bits,               // data movement, synchronisation, conversions: equal
  accumulation,       // sums of products in fp32: equal within the error of the order of summation; NaN if NaN
  accumulation_e4m3,  // the same for e4m3, whose products are truncated to fewer bits
  approximate,        // ex2.approx, lg2.approx: equal within their documented error; special values equal
  refused,            // misuse: a finding on the emulator, a launch error on the GPU
};
inline const char* name(Compare compare) {
  constexpr const char* names[] = {"bits", "accumulation", "accumulation of e4m3", "approximate", "refused"};
  return names[size_t(compare)];
}

enum class Inputs : uint8_t {
  bits,       // random 32-bit patterns, every eighth one adversarial (zeros, ones, NaN, infinities, subnormals)
  bf16_unit,  // pairs of bf16 uniform in [-1, 1]
  fp16_unit,
  bf16_special,  // the same with some infinities, NaN, subnormals and negative zeros
  fp16_special,
  bf16_subnormal,  // words 0-3 of every 8: subnormals; the others so large that the products are of order 1
  fp16_subnormal,
  float_wide,    // floats of all exponents, and special values
  float_small,   // around the smallest normal number, and special values
  e4m3_unit,     // four e4m3 in [-1, 1]
  e4m3_special,  // the same with some NaN, subnormals and zeros of both signs
  integers,      // floats that are integers from -8 to 8, so that sums are exact in any order
};

/// One kernel. `run` launches it; `in` and `out` are in host or device memory accordingly. `out` is zeroed before.
struct Case {
  std::string name;
  std::string functions;  // functions of the arch layer that it certifies, separated by spaces
  Inputs inputs;
  Compare compare;
  size_t in_words, out_words;
  std::function<void(uint32_t* in, uint32_t* out)> run;
};

void add_sm80_cases(std::vector<Case>& cases);
void add_sm90_cases(std::vector<Case>& cases);
void add_wgmma_cases(std::vector<Case>& cases);
void add_refused_cases(std::vector<Case>& cases);

inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  add_sm80_cases(cases);
  add_sm90_cases(cases);
  add_wgmma_cases(cases);
  add_refused_cases(cases);
  if (const char* only = std::getenv("CERTIFY_ONLY"))
    std::erase_if(cases, [&](const Case& c) { return c.name.find(only) == std::string::npos; });
  return cases;
}

}  // namespace hopwell::arch::certify
