// Runs the certification cases on the emulator or on a GPU, depending on the compiler, and records or compares their
// outputs.
//
//   certify_emulator record  FILE        runs every case on the emulator under three schedules, which must agree
//   certify_emulator covers  JSON ARCH   whether a report has every case, and the cases every function of src/arch
//   certify_device   compare FILE JSON   runs every case on the GPU, compares with FILE, writes a report
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "arch/platform.hpp"
#include "cases.hpp"
#include "inputs.hpp"
#if HOPWELL_ON_DEVICE
#include "compare.hpp"
#else
#include "arch/emu/launch.hpp"
#include "coverage.hpp"
#endif

namespace hopwell::arch::certify {
namespace {

#if !HOPWELL_ON_DEVICE
// Outputs of one case under one schedule. Throws if the emulator has an unexpected finding, or lacks an expected one.
std::vector<uint32_t> run(const Case& c, uint64_t seed) {
  emu::Session session({.seed = seed, .async = emu::Async(seed)});
  std::vector<uint32_t> in = make_inputs(c), out(c.out_words);
  c.run(in.data(), out.data());
  if (session.report.clean() == (c.compare == Compare::refused))
    throw std::runtime_error(c.name + ", seed " + std::to_string(seed) + ":\n" + session.report.text());
  return out;
}

int record(const char* file) {
  std::ofstream out(file, std::ios::binary);
  const std::vector<Case> cases = all_cases();
  for (const Case& c : cases) {
    const std::vector<uint32_t> words = run(c, 0);
    for (uint64_t seed = 1; seed < 3; ++seed)
      if (run(c, seed) != words) throw std::runtime_error(c.name + ": the schedules differ");
    out.write(reinterpret_cast<const char*>(words.data()), std::streamsize(words.size() * 4));
  }
  std::printf("%zu cases recorded\n", cases.size());
  return 0;
}
#endif

}  // namespace
}  // namespace hopwell::arch::certify

int main(int argc, char** argv) {
  using namespace hopwell::arch::certify;
  try {
#if HOPWELL_ON_DEVICE
    if (argc == 4 && !std::strcmp(argv[1], "compare")) return compare(argv[2], argv[3]);
#else
    if (argc == 3 && !std::strcmp(argv[1], "record")) return record(argv[2]);
    if (argc == 4 && !std::strcmp(argv[1], "covers")) return check_coverage(argv[2], argv[3]);
#endif
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::fprintf(
      stderr,
      "usage: certify_emulator record FILE | certify_emulator covers JSON ARCH | certify_device compare FILE JSON\n");
  return 2;
}
