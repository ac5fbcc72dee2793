// Peak rates of this machine's processor, and the build configuration of the library.
#include <hwy/targets.h>
#include <hopwell/library.hpp>

#include <array>
#include <chrono>
#include <mutex>
#include <numeric>
#include <vector>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "runtime/driver_status.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/product.hpp"

namespace hopwell {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Sums `count` floats with enough independent accumulators that loads, not additions, bound the time.
float sum(const float* x, std::int64_t count) {
  std::array<float, 64> partial{};
  for (std::int64_t i = 0; i + 64 <= count; i += 64)
    for (std::size_t j = 0; j < 64; ++j) partial[j] += x[static_cast<std::size_t>(i) + j];
  return std::accumulate(partial.begin(), partial.end(), 0.0F);
}

}  // namespace

double time_cpu_matmul() {
  constexpr std::int64_t n = 2048, kPitch = n + 16, kTile = 256;  // rows one after another meet all sets of a cache
  static const std::vector<float> a(n * kPitch, 0.7F), b(n * kPitch, 1.1F);
  static std::vector<float> c(n * kPitch);
  static std::mutex one_at_a_time;
  const std::scoped_lock lock(one_at_a_time);
  const auto start = Clock::now();
  cpu::parallel_for(
      n / kTile * (n / kTile), [] { return cpu::Products(); },
      [&](std::int64_t tile, const cpu::Products& products) {
        const std::int64_t i = tile / (n / kTile) * kTile, j = tile % (n / kTile) * kTile;
        products.nt(kTile, kTile, n, a.data() + i * kPitch, kPitch, b.data() + j * kPitch, kPitch, false,
                    c.data() + i * kPitch + j, kPitch);
      });
  return seconds_since(start);
}

double time_cpu_read(std::size_t bytes) {
  const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
  static std::vector<float> memory;
  static std::mutex one_at_a_time;
  const std::scoped_lock lock(one_at_a_time);
  if (memory.size() < static_cast<std::size_t>(count)) memory.assign(static_cast<std::size_t>(count), 1.0F);
  constexpr std::int64_t kPart = 1 << 18;  // 1 MiB
  std::vector<float> sums(static_cast<std::size_t>((count + kPart - 1) / kPart));
  const auto start = Clock::now();
  cpu::parallel_for(static_cast<std::int64_t>(sums.size()), [&](std::int64_t part) {
    sums[static_cast<std::size_t>(part)] = sum(memory.data() + part * kPart, std::min(kPart, count - part * kPart));
  });
  const double seconds = seconds_since(start);
  volatile float used = std::accumulate(sums.begin(), sums.end(), 0.0F);  // so that the compiler keeps the reads
  static_cast<void>(used);
  return seconds;
}

int num_threads() { return cpu::max_threads(); }

void set_num_threads(int threads) {
  Checker("set_num_threads").require(threads >= 0, "threads", "at least 1, or 0 for the default", threads);
  cpu::set_max_threads(threads);
}

std::string build_info() {
  const std::int64_t best = hwy::SupportedTargets() & -hwy::SupportedTargets();  // lower bits are better targets
  const std::string slow = best > HWY_AVX2 ? ": this processor has no AVX2, so operators on the CPU take longer" : "";
  return std::string("compiler ") + __VERSION__ + "\nvectors  " + hwy::TargetName(static_cast<std::uint32_t>(best)) +
         slow + "\nthreads  " + std::to_string(cpu::max_threads()) + "\nCUDA     " + runtime::cuda_status();
}

}  // namespace hopwell

extern "C" int hopwell_num_threads(void) {
  int threads = 0;
  hopwell::runtime::guarded([&] { threads = hopwell::num_threads(); });
  return threads;
}
extern "C" hopwell_status hopwell_set_num_threads(int threads) {
  return hopwell::runtime::guarded([&] { hopwell::set_num_threads(threads); });
}
