#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  // Two index keys of width 32: a block of 4 rows has 4 * 32 codes, then 4 scales.
  const std::int64_t n = 2, d = 32, blocks = 1, block = 4, row = d + 4;
  std::vector<float> kv(n * d);
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = i < d ? 1.0F : 448.0F;
  const std::vector<std::int64_t> slots{3, 0};  // the first key goes to row 3
  std::vector<std::uint8_t> cache(blocks * block * row);

  hopwell::mla_cache_append({.kv = hopwell::Tensor(kv.data(), {n, d}),
                             .cache = hopwell::Tensor(cache.data(), {blocks, block, row}),
                             .slots = hopwell::Tensor(slots.data(), {n})});

  // Both are stored as 448 times their scale. The scale of the first would be 1/448, but is a power of two: 2^-8.
  std::printf("codes %d and %d\n", cache[3 * d], cache[0]);
  return cache[3 * d] == 0x78 && cache[0] == 0x7E ? 0 : 1;
}
