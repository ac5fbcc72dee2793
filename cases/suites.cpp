#include "suites.hpp"

namespace hopwell::cases {

const std::vector<Suite>& suites() {
  static const std::vector<Suite> all = {
      sparse_mla_forward(), sparse_mla_backward(), attention_distribution(), paged_attention(),
      nvfp4_gemv(),         nvfp4_linear(),        nvfp4_linear_backward(),  nvfp4_matmul(),
      nvfp4_quantize(),     nvfp4_dequantize(),    lightning_indexer(),      lightning_indexer_backward(),
      indexer_dense_loss(), normalize_l1(),
  };
  return all;
}

}  // namespace hopwell::cases
