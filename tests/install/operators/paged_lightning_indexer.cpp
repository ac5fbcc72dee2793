#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  // One query token with one head of width 4. The cache has two blocks of two rows; row s is s + 1 in all columns.
  const std::int64_t b = 1, q_len = 1, h = 1, d = 4, blocks = 2, block = 2, max_blocks = 3, topk = 2;
  const std::vector<float> q(d, 1.0F), weights{1.0F};
  std::vector<float> cache(blocks * block * d);
  for (std::size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<float>(i / 4 + 1);
  const std::vector<std::int32_t> tables{1, 0, -1}, lens{6};  // the last block does not exist
  std::vector<std::int32_t> indices(topk), lengths(1);
  std::vector<float> scores(topk);

  hopwell::paged_lightning_indexer({.q_index = hopwell::Tensor(q.data(), {b, q_len, h, d}),
                                    .cache = hopwell::Tensor(cache.data(), {blocks, block, d}),
                                    .weights = hopwell::Tensor(weights.data(), {b, q_len, h}),
                                    .block_tables = hopwell::Tensor(tables.data(), {b, max_blocks}),
                                    .context_lens = hopwell::Tensor(lens.data(), {b}),
                                    .indices = hopwell::Tensor(indices.data(), {b, q_len, topk}),
                                    .scores = hopwell::Tensor(scores.data(), {b, q_len, topk}),
                                    .lengths = hopwell::Tensor(lengths.data(), {b, q_len})});

  std::printf("positions %d and %d, scores %g and %g\n", indices[0], indices[1], static_cast<double>(scores[0]),
              static_cast<double>(scores[1]));  // 0 and 1: rows 2 and 3 of the cache, 12 and 16
  return indices[0] == 0 && indices[1] == 1 && scores[0] == 12.0F && scores[1] == 16.0F && lengths[0] == 2 ? 0 : 1;
}
