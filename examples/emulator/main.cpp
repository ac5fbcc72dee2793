// Runs the kernel on the emulator under many schedules: emulator_example [--bug]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "arch/emu/launch.hpp"
#include "arch/emu/numeric.hpp"
#include "kernel.hpp"

namespace emu = hopwell::arch::emu;

int main(int argc, char** argv) {
  const bool bug = argc > 1 && !std::strcmp(argv[1], "--bug");
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<unsigned short> a(128 * 64), b(64 * 64);
  for (auto* v : {&a, &b})
    for (unsigned short& x : *v) x = emu::to_bf16_bits(uniform(random));

  for (unsigned seed = 0; seed < 20; ++seed) {
    emu::Session session({.seed = seed, .async = emu::Async(seed % 3)});
    std::vector<float> c(128 * 64, NAN);
    tcgen05_tile(a.data(), b.data(), c.data(), bug);
    double worst = 0;
    for (size_t m = 0; m < 128; ++m)
      for (size_t n = 0; n < 64; ++n) {
        double sum = 0;
        for (size_t k = 0; k < 64; ++k)
          sum += double(emu::from_bf16(a[m * 64 + k])) * double(emu::from_bf16(b[n * 64 + k]));
        const double error = std::fabs(sum - double(c[m * 64 + n]));
        if (!(error <= worst)) worst = error;
      }
    if (!session.report.clean() || !(worst < 1e-4)) {
      std::printf("seed %u: largest error %.1e\n%s", seed, worst, session.report.text().c_str());
      return 1;
    }
  }
  std::printf("20 schedules: right numbers, no findings\n");
  return 0;
}
