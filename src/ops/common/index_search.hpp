// Search for the best index keys of each query on the CPU. The indexers over a tensor and over a paged cache share it,
// so that their scores and selections have the same bits.
#pragma once

#include <cstdint>

#include "tile/selection.hpp"

namespace hopwell::cpu {

// The keys that a query selects, in ascending order.
struct BestKeys {
  const float* scores;
  const std::int32_t* keys;
  std::int64_t size;
};

// A search. Each sequence has its own queries and keys. Several threads call the functions at the same time.
class IndexSearch {
 public:
  std::int64_t sequences = 1;
  std::int64_t queries = 0, keys = 0;  // of a sequence: their number, and a number that none of them exceeds
  std::int64_t h_index = 0, d_index = 0, topk = 0;
  bool relu = true, has_key_scales = false;

  IndexSearch() = default;
  IndexSearch(const IndexSearch&) = delete;
  IndexSearch& operator=(const IndexSearch&) = delete;
  virtual ~IndexSearch() = default;

  // Selects at most topk >= 1 keys for every query.
  void run() const;

 protected:
  // The keys among which a query selects.
  [[nodiscard]] virtual KeyRange visible(std::int64_t sequence, std::int64_t query) const = 0;
  // q [h_index, d_index], and weights [h_index] multiplied by q's scales.
  virtual void load_query(std::int64_t sequence, std::int64_t query, float* q, float* weights) const = 0;
  // A key and its scale. False if there is no such key: it is not selected, even if it is visible.
  virtual bool load_key(std::int64_t sequence, std::int64_t key, float* to, float* scale) const = 0;
  virtual void write(std::int64_t sequence, std::int64_t query, const BestKeys& best) const = 0;

 private:
  friend class IndexSearchRun;
};

}  // namespace hopwell::cpu
