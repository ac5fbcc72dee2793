// normalize_l1 on the CPU: row by row.
#include "ops/common/normalize_row.hpp"
#include "ops/normalize_l1/op.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::ops::normalize_l1 {
namespace {

void launch(const Problem& p, Stream /*stream*/) {
  cpu::parallel_for(p.attn.shape[0], [&](std::int64_t row) {
    cpu::normalize_row(p.attn.as<const float>() + row * p.attn.stride[0], p.attn.shape[1],
                       p.out.as<float>() + row * p.out.stride[0]);
  });
}

const runtime::Registration backend{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::normalize_l1
