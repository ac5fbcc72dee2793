// Runs the certification cases in this world (emulator or GPU, by the compiler) and compares or records their outputs.
//
//   certify_emulator record  FILE            runs every case on the emulator under several schedules, which must agree,
//   and writes FILE certify_device   compare FILE JSON       runs every case on the GPU, compares with FILE, writes a
//   report
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>

#include "arch/launch.hpp"
#include "arch/platform.hpp"
#include "cases.hpp"
#include "inputs.hpp"

namespace hopwell::arch::certify {
namespace {

#if HOPWELL_ON_DEVICE
void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

std::vector<uint32_t> run(const Case& c, std::vector<uint32_t> in) {
  uint32_t *device_in, *device_out;
  std::vector<uint32_t> out(c.out_words);
  check(cudaMalloc(&device_in, in.size() * 4));
  check(cudaMalloc(&device_out, out.size() * 4));
  check(cudaMemcpy(device_in, in.data(), in.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemset(device_out, 0, out.size() * 4));
  c.run(device_in, device_out);
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(out.data(), device_out, out.size() * 4, cudaMemcpyDeviceToHost));
  check(cudaFree(device_in));
  check(cudaFree(device_out));
  return out;
}

// Largest difference allowed between `a` (emulator) and `b` (GPU).
bool agree(Compare compare, uint32_t a, uint32_t b) {
  if (a == b) return true;
  const float x = bit_cast<float>(a), y = bit_cast<float>(b);
  if (compare == Compare::accumulation)
    return std::fabs(x - y) <=
           64 * 0x1p-22f * 2;  // up to 32 products and a start, each at most 1, aligned to 2^-22 of the largest
  if (compare == Compare::approximate)
    return std::fabs(x - y) <= 0x1p-21f * std::max(1.f, std::fabs(x)) ||
           (std::fabs(x) < 0x1p-125f && std::fabs(y) < 0x1p-125f);
  return false;
}

int compare(const char* recorded, const char* json) {
  std::ifstream in(recorded, std::ios::binary);
  std::ofstream report(json);
  cudaDeviceProp device{};
  int driver = 0;
  check(cudaGetDeviceProperties(&device, 0));
  check(cudaDriverGetVersion(&driver));
  report << "{\n  \"device\": \"" << device.name << "\",\n  \"driver\": " << driver
         << ",\n  \"cuda\": " << CUDART_VERSION << ",\n  \"cases\": [\n";
  size_t failed = 0;
  const std::vector<Case> cases = all_cases();
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    std::vector<uint32_t> expected(c.out_words);
    in.read(reinterpret_cast<char*>(expected.data()), std::streamsize(expected.size() * 4));
    if (!in) throw std::runtime_error("the recorded file is too short: record it again");
    const std::vector<uint32_t> got = run(c, make_inputs(c));
    size_t different = 0, first = 0;
    for (size_t w = got.size(); w-- > 0;)
      if (!agree(c.compare, expected[w], got[w])) ++different, first = w;
    failed += different != 0;
    report << "    {\"name\": \"" << c.name << "\", \"instructions\": \"" << c.instructions
           << "\", \"words\": " << got.size() << ", \"different\": " << different << "}"
           << (i + 1 < cases.size() ? ",\n" : "\n");
    if (different)
      std::printf("%-40s %zu of %zu words differ, first %zu: emulator %08x, GPU %08x\n", c.name.c_str(), different,
                  got.size(), first, expected[first], got[first]);
  }
  report << "  ],\n  \"passed\": " << cases.size() - failed << ",\n  \"failed\": " << failed << "\n}\n";
  std::printf("%zu cases on %s: %zu agree with the emulator, %zu do not\n", cases.size(), device.name,
              cases.size() - failed, failed);
  return failed != 0;
}
#else
int record(const char* file) {
  std::ofstream out(file, std::ios::binary);
  for (const Case& c : all_cases()) {
    std::vector<uint32_t> first;
    for (uint64_t seed = 0; seed < 3; ++seed) {
      emu::Session session({.seed = seed, .async = emu::Async(seed)});
      std::vector<uint32_t> in = make_inputs(c), words(c.out_words);
      c.run(in.data(), words.data());
      if (!session.report.clean()) {
        std::printf("%s, seed %zu:\n%s", c.name.c_str(), size_t(seed), session.report.text().c_str());
        return 1;
      }
      if (seed == 0)
        first = words;
      else if (words != first)
        return std::printf("%s: the schedules differ\n", c.name.c_str()), 1;
    }
    out.write(reinterpret_cast<const char*>(first.data()), std::streamsize(first.size() * 4));
  }
  std::printf("%zu cases recorded\n", all_cases().size());
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
#endif
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: certify_emulator record FILE | certify_device compare FILE JSON\n");
  return 2;
}
