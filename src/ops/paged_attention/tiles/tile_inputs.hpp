// paged_attention on GPUs: loads of query vectors and biases, for all warp tiles.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/paged_attention/tiles/warp_tile.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

HOPWELL_DEVICE uintptr_t bias_row_of(const PositionBias& bias, const QueryVector& vector) {
  const int64_t at = bias.row_offset(vector.sequence, vector.query, vector.head);
  return reinterpret_cast<uintptr_t>(bias.bias) + uintptr_t(at) * (bias.type == Float::fp32 ? 4 : 2);
}

// k_offset, v_offset: bytes from the head's first element to the lane's first chunk. `element`: the lane's first
// element of a row of r.
HOPWELL_DEVICE CopySource copy_source_of(const Params& p, const QueryVector& vector, int width, int64_t k_offset,
                                         int64_t v_offset, int element) {
  const Cache& cache = p.cache;
  return {vector, static_cast<const char*>(cache.k) + vector.kv_head * cache.k_at.head * width + k_offset,
          static_cast<const char*>(cache.v) + vector.kv_head * cache.v_at.head * width + v_offset,
          static_cast<const char*>(p.bias.r) + (vector.head * p.bias.r_head_stride + element) * width,
          p.bias.exists() ? bias_row_of(p.bias, vector) : 0};
}

// Copies the aligned word that holds the bias of a key, if the key is visible. Returns 2 if the bias is the upper half.
HOPWELL_DEVICE uint32_t copy_bias(const PositionBias& bias, const CopySource& source, int key, bool visible,
                                  void* word) {
  if (!bias.exists()) return 0;
  const int column = bias.column_of(source.vector.position, key);
  const bool wanted = visible && column >= 0;
  const uintptr_t address = source.bias + unsigned(wanted ? column : 0) * uintptr_t{bias.type == Float::fp32 ? 4U : 2U};
  arch::cp_async<4>(arch::shared_address(word), reinterpret_cast<const void*>(address & ~uintptr_t{3}), wanted ? 4 : 0);
  return bias.type == Float::fp32 ? 0 : uint32_t(address) & 2;
}
HOPWELL_DEVICE float decode_bias(const PositionBias& bias, uint32_t word, uint32_t half) {
  if (bias.type == Float::fp32) return arch::bit_cast<float>(word);
  return decode(half & 2 ? word >> 16 : word & 0xffff, bias.type);
}

// ALiBi slope of a head, times log2(e).
HOPWELL_DEVICE float alibi_slope(const PositionBias& bias, int head) {
  return bias.alibi_slopes[head * bias.slopes_stride] * kLog2E;
}

// Load kCount unconverted elements of a query vector, of pos_bias_u or of pos_bias_v, from `e` on. Absent elements and
// elements beyond d are zero bits, which are 0 in any type.
template <class T, int kCount>
HOPWELL_DEVICE RawElements load_q(const Params& p, const QueryVector& vector, int e) {
  const Query& query = p.query;
  if (e >= query.d) return {};
  const int64_t at =
      vector.sequence * query.strides[0] + vector.query * query.strides[1] + vector.head * query.strides[2] + e;
  return load_elements<kCount>(query.q, kFloat<T>, at, query.aligned);
}
template <int kCount>
HOPWELL_DEVICE RawElements load_u(const Params& p, const QueryVector& vector, int e) {
  const Query& query = p.query;
  if (!query.u || e >= query.d) return {};
  return load_elements<kCount>(query.u, query.u_type, vector.head * query.u_stride + e, query.u_aligned);
}
template <int kCount>
HOPWELL_DEVICE RawElements load_v(const Params& p, const QueryVector& vector, int e) {
  const PositionBias& bias = p.bias;
  if (!bias.v || e >= p.query.d) return {};
  return load_elements<kCount>(bias.v, bias.v_type, vector.head * bias.v_stride + e, bias.v_aligned);
}
template <class T, int kCount>
HOPWELL_DEVICE void query_plus(const RawElements& q, const RawElements& other, Float type, float (&x)[kCount]) {
  HOPWELL_UNROLL
  for (float& element : x) element = 0;
  add_elements(q, kFloat<T>, x);
  add_elements(other, type, x);
}

// Bits 0 to n - 1, with n clamped to [0, size].
HOPWELL_DEVICE uint32_t first_bits(int n, int size) { return (1U << larger(0, smaller(n, size))) - 1; }

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
