#include "suites.hpp"

namespace hopwell::cases {

const std::vector<Suite>& suites() {
  static const std::vector<Suite> all = {
      sparse_mla_forward(),
      sparse_mla_backward(),
      attention_distribution(),
      paged_attention(),
      lightning_indexer(),
      lightning_indexer_backward(),
  };
  return all;
}

}  // namespace hopwell::cases
