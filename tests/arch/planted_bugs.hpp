// Shared by the tests of planted bugs: small kernels that are correct when `bug` is 0 and have one mistake otherwise.
// Every mistake must be found under every schedule, by a finding of the right kind that names the right line (the line
// that ends with "// @name").
#pragma once

#include "harness.hpp"

#include <array>
#include <source_location>
#include <vector>

#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/mbarrier.hpp"

namespace hopwell::arch {

using emu::Kind;

struct Planted {
  int bug;
  Kind kind;
  const char* words;
  const char* mark;
};
inline int planted_in_all = 0;

/// The correct kernel is clean over 50 seeds; every planted bug is found, with its line in the file of the call.
inline void plant(const emu::LaunchShape& shape, const std::function<void(int)>& kernel,
                  const std::vector<Planted>& bugs, std::source_location here = std::source_location::current()) {
  test::expect_clean(shape, [&] { kernel(0); });
  for (const Planted& b : bugs) {
    SCOPED_TRACE("bug " + std::to_string(b.bug));
    test::expect_finding(shape, [&] { kernel(b.bug); }, b.kind, b.words, b.mark, here);
    ++planted_in_all;
  }
}

struct Shared {
  alignas(1024) std::array<uint32_t, 8192> words;
  mbarrier full[2], empty[2], done;
  uint32_t tmem;
};
inline emu::LaunchShape shape(uint32_t threads, uint32_t ctas = 1) {
  return {{ctas, 1, 1}, {threads, 1, 1}, {ctas, 1, 1}, sizeof(Shared)};
}
alignas(128) inline std::array<uint32_t, 16384> global;  // source and destination of the kernels' loads and stores

/// Operands in `global`: boxes of `rows` rows of 64 columns.
inline TensorMap operand_map(uint32_t rows = 64) {
  return make_tensor_map({.address = global.data(),
                          .element = TensorElement::bf16,
                          .rank = 2,
                          .extent = {256, 128},
                          .stride_bytes = {512},
                          .box = {64, rows},
                          .swizzle = Swizzle::bytes128});
}

}  // namespace hopwell::arch
