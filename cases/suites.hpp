// One function per operator, each in the file of its name.
#pragma once

#include "case.hpp"

namespace hopwell::cases {

Suite sparse_mla_forward();
Suite sparse_mla_backward();
Suite attention_distribution();
Suite paged_attention();
Suite nvfp4_gemv();
Suite nvfp4_linear();
Suite nvfp4_linear_backward();
Suite nvfp4_matmul();
Suite nvfp4_quantize();
Suite nvfp4_dequantize();
Suite lightning_indexer();
Suite lightning_indexer_backward();
Suite indexer_dense_loss();
Suite normalize_l1();

}  // namespace hopwell::cases
