// Measures what nobody has measured, or not the way kernels need it, on one Blackwell card. See blackwell_first_hour.py.
//
//   nvcc, sm_100a       prints a JSON array of measurements: amounts, cycles of an SM (median and most over the CTAs), rates
//   a host compiler     runs every kernel on the emulator, small, with the checker: the test that it will work the first time
#include <algorithm>
#include <exception>

#include "blackwell/additions.hpp"
#include "blackwell/copies.hpp"
#include "blackwell/gather_and_add.hpp"
#include "blackwell/products.hpp"

namespace hopwell::blackwell {
namespace {

Sizes sizes_here() {
#if HOPWELL_ON_DEVICE
  cudaDeviceProp card{};
  require(cudaGetDeviceProperties(&card, 0), "the card");
  if (card.major != 10) throw std::runtime_error(std::string(card.name) + " is no Blackwell data-centre card");
  return {card.multiProcessorCount & ~1, 64, {8192, 16384, 32768, 49152, 65536, 131072}, 400};
#else
  return {2, 1, {40, 56}, 9};
#endif
}

void print(const std::vector<Measurement>& all) {
  std::printf("[\n");
  for (const Measurement& m : all) {
    std::vector<uint64_t> cycles = m.cycles;
    std::sort(cycles.begin(), cycles.end());
    const double median = cycles.empty() ? 0 : double(cycles[cycles.size() / 2]),
                 most = cycles.empty() ? 0 : double(cycles.back());
    std::printf(
        R"( {"name": "%s", "unit": "%s", "amount": %.0f, "cycles": %.0f, "most": %.0f, "per_cycle": %.4f, "right": %s}%s)",
        m.name.c_str(), m.unit.c_str(), m.amount, median, most, median > 0 ? m.amount / median : 0,
        m.right ? "true" : "false", &m == &all.back() ? "\n" : ",\n");
  }
  std::printf("]\n");
}

int measure() {
  const Sizes sizes = sizes_here();
  std::vector<Measurement> all;
  measure_additions(sizes, all);
  measure_gathers(sizes, all);
  measure_both_ways(sizes, all);
  measure_gather_and_add(sizes, all);
  measure_products(sizes, all);
  measure_products_beside(sizes, all);
  measure_messages(sizes, all);
  measure_stream(sizes, all);
  measure_cancel(sizes, all);
  print(all);
  return std::all_of(all.begin(), all.end(), [](const Measurement& m) { return m.right; }) ? 0 : 1;
}

}  // namespace
}  // namespace hopwell::blackwell

int main() {
  try {
    return hopwell::blackwell::measure();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "blackwell_first_hour: %s\n", error.what());
    return 1;
  }
}
