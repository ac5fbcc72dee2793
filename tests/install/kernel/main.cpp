// Runs the kernel on the emulator. The planted race is reported with its line, the mended kernel is clean and right, and a recording
// counts the bank conflicts of each pitch.  kernel PAGE.html
#include "transpose.hpp"

#include <hopwell/arch/emu/launch.hpp>
#include <hopwell/arch/emu/recording.hpp>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace emu = hopwell::arch::emu;

namespace {

constexpr int kN = 64;

// "" or what is wrong with a transpose under one schedule.
std::string wrong(const std::vector<float>& in, int pitch, bool bug, unsigned seed) {
  emu::Session session({.seed = seed, .async = emu::Async(seed % 3)});
  std::vector<float> out(in.size(), -1);
  transpose(in.data(), out.data(), kN, pitch, bug);
  if (!session.report.clean()) return session.report.text();
  for (int i = 0; i < kN * kN; ++i)
    if (out[size_t(i)] != in[size_t(i % kN * kN + i / kN)]) return "wrong numbers";
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::puts("usage: kernel PAGE.html"), 2;
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> in(kN * kN);
  for (float& x : in) x = uniform(random);

  for (unsigned seed = 0; seed < 9; ++seed) {
    const std::string race = wrong(in, 33, true, seed), mended = wrong(in, 33, false, seed);
    if (race.find("[race] transpose.cu:17: load") == std::string::npos)
      return std::printf("not found: %s\n", race.c_str()), 1;
    if (!mended.empty()) return std::printf("found in the mended kernel: %s\n", mended.c_str()), 1;
  }

  emu::Recording recording(emu::kB200);
  for (const int pitch : {32, 33})
    if (!wrong(in, pitch, false, 1).empty()) return 1;
  recording.write_html(argv[1]);
  // Of four tiles with 32 columns each: at pitch 32 a column lies in one bank.
  const unsigned long long conflicts = recording.launches.at(0).bank_conflicts(),
                           none = recording.launches.at(1).bank_conflicts();
  if (conflicts != 4 * 32 * 31 || none != 0) return std::printf("%llu and %llu bank conflicts\n", conflicts, none), 1;
  return 0;
}
