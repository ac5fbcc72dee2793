#include "tile/cpu/product.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile/cpu/product.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <utility>

#ifndef HOPWELL_TILE_CPU_PRODUCT_CPP_
#define HOPWELL_TILE_CPU_PRODUCT_CPP_
namespace hopwell::cpu {

// An element's sum: fused multiply-adds in ascending order of k, kDepth of them from zero; such partial sums are added
// in their order. Nothing else is free for a shape to change, so how the rest is cut is a matter of speed alone.
constexpr std::int64_t kDepth = 640;
constexpr std::int64_t kPanelColumns = 48;  // at most: three vectors of 16

// The broadcast side: element [row, k] is at row * row_stride + k * step. Either stride is 1.
struct Rows {
  const float* at;
  std::int64_t row_stride, step;
};

}  // namespace hopwell::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
template <int kLanes>
using Floats = hn::CappedTag<float, kLanes>;

// A tile's sums fill most registers: of 32 of them 24, of 16 of them 12.
constexpr int kTileRows = HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3 ? 4 : 8;

// tile[kRows, kVectors vectors] = rows of a times columns of b.
template <int kRows, int kVectors, bool kAdjacent, class D, std::size_t... i>
HWY_INLINE void SumTile(D d, const float* a, std::int64_t lda, const float* b, std::int64_t ldb, std::int64_t k,
                        float* tile, std::int64_t stride, std::index_sequence<i...> /*all*/) {
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  hn::Vec<D> sums[] = {((void)i, hn::Zero(d))...};
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = kAdjacent ? a : a + r * lda;
  for (std::int64_t step = 0; step < k; ++step, b += ldb) {
    hn::Vec<D> x[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) x[v] = hn::LoadU(d, b + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto y = hn::Set(d, kAdjacent ? a[r] : rows[r][step]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r * kVectors + v] = hn::MulAdd(y, x[v], sums[r * kVectors + v]);
    }
    if (kAdjacent) a += lda;
  }
  (hn::StoreU(sums[i], d, tile + i / kVectors * stride + i % kVectors * lanes), ...);
}

template <int kRows, int kVectors, class D>
HWY_INLINE void SumTile(D d, const Rows& a, const float* b, std::int64_t ldb, std::int64_t k, float* tile,
                        std::int64_t stride) {
  constexpr auto all = std::make_index_sequence<kRows * kVectors>();
  if (a.step == 1)
    SumTile<kRows, kVectors, false>(d, a.at, a.row_stride, b, ldb, k, tile, stride, all);
  else
    SumTile<kRows, kVectors, true>(d, a.at, a.step, b, ldb, k, tile, stride, all);
}

template <int kRows, class D>
HWY_INLINE void SumTile(D d, std::int64_t vectors, const Rows& a, const float* b, std::int64_t ldb, std::int64_t k,
                        float* tile, std::int64_t stride) {
  if (vectors == 1) SumTile<kRows, 1>(d, a, b, ldb, k, tile, stride);
  if (vectors == 2) SumTile<kRows, 2>(d, a, b, ldb, k, tile, stride);
  if (vectors == 3) SumTile<kRows, 3>(d, a, b, ldb, k, tile, stride);
}

// Sums of as many of `rows` rows as one tile has; returns how many.
template <class D>
HWY_INLINE std::int64_t SumTile(D d, std::int64_t rows, std::int64_t vectors, const Rows& a, const float* b,
                                std::int64_t ldb, std::int64_t k, float* tile, std::int64_t stride) {
  if (rows >= kTileRows) return SumTile<kTileRows>(d, vectors, a, b, ldb, k, tile, stride), kTileRows;
  if (rows >= 4) return SumTile<4>(d, vectors, a, b, ldb, k, tile, stride), 4;
  if (rows >= 2) return SumTile<2>(d, vectors, a, b, ldb, k, tile, stride), 2;
  return SumTile<1>(d, vectors, a, b, ldb, k, tile, stride), 1;
}

// A tile to rows of C, or to columns.
void WriteRows(const float* tile, std::int64_t rows, std::int64_t stride, std::int64_t width, bool add, float* c,
               std::int64_t ldc) {
  for (std::int64_t r = 0; r < rows; ++r, tile += stride, c += ldc)
    for (std::int64_t j = 0; j < width; ++j) c[j] = add ? c[j] + tile[j] : tile[j];
}
HWY_INLINE void CopyFour(const float* from, bool add, float* to) {
  const Floats<4> d;
  for (std::size_t i = 0; i < 4; i += hn::MaxLanes(d)) {
    const auto x = hn::LoadU(d, from + i);
    hn::StoreU(add ? hn::Add(hn::LoadU(d, to + i), x) : x, d, to + i);
  }
}
template <class D>
HWY_INLINE void WriteColumns(D d, const float* tile, std::int64_t rows, std::int64_t stride, std::int64_t width,
                             bool add, float* c, std::int64_t ldc) {
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  HWY_ALIGN float turned[4 * kPanelColumns];
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4, tile += 4 * stride, c += 4) {
    for (std::int64_t j = 0; j < width; j += lanes)
      hn::StoreInterleaved4(hn::LoadU(d, tile + j), hn::LoadU(d, tile + stride + j),
                            hn::LoadU(d, tile + 2 * stride + j), hn::LoadU(d, tile + 3 * stride + j), d,
                            turned + 4 * j);
    for (std::int64_t j = 0; j < width; ++j) CopyFour(turned + 4 * j, add, c + j * ldc);
  }
  for (; r < rows; ++r, tile += stride, ++c)
    for (std::int64_t j = 0; j < width; ++j) c[j * ldc] = add ? c[j * ldc] + tile[j] : tile[j];
}

// panel[k, stride] = b[k, width], and zeros beside it.
template <class D>
HWY_INLINE void PackRows(D d, const float* b, std::int64_t ldb, std::int64_t k, std::int64_t width, float* panel,
                         std::int64_t stride) {
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const std::int64_t whole = width / lanes * lanes;
  for (std::int64_t i = 0; i < k; ++i, b += ldb, panel += stride) {
    for (std::int64_t j = 0; j < whole; j += lanes) hn::StoreU(hn::LoadU(d, b + j), d, panel + j);
    for (std::int64_t j = whole; j < stride; ++j) panel[j] = j < width ? b[j] : 0;
  }
}
// panel[k, stride] = b[width, k]^T, and its last column again beside it.
void PackColumns(const float* b, std::int64_t ldb, std::int64_t k, std::int64_t width, float* panel,
                 std::int64_t stride) {
  const Floats<16> d;
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  HWY_ALIGN float turned[4 * 16];
  const std::int64_t whole = k / lanes * lanes;
  for (std::int64_t j = 0; j < stride; j += 4) {
    const auto row = [&](std::int64_t r) { return b + std::min(j + r, width - 1) * ldb; };
    const float *r0 = row(0), *r1 = row(1), *r2 = row(2), *r3 = row(3);
    for (std::int64_t i = 0; i < whole; i += lanes) {
      hn::StoreInterleaved4(hn::LoadU(d, r0 + i), hn::LoadU(d, r1 + i), hn::LoadU(d, r2 + i), hn::LoadU(d, r3 + i), d,
                            turned);
      for (std::int64_t l = 0; l < lanes; ++l) CopyFour(turned + 4 * l, false, panel + (i + l) * stride + j);
    }
    for (std::int64_t i = whole; i < k; ++i) {
      const float last[] = {r0[i], r1[i], r2[i], r3[i]};
      std::copy_n(last, 4, panel + i * stride + j);
    }
  }
}

// C[rows, columns] (+)= A . b[k, columns], a panel of up to three vectors of columns at a time; or, if kTurned,
// C[columns, rows] (+)= b[columns, k] . A^T.
template <bool kTurned, class D>
HWY_INLINE void Multiply(D d, const Rows& a, std::int64_t rows, const float* b, std::int64_t ldb, std::int64_t columns,
                         std::int64_t k, bool add, float* c, std::int64_t ldc, float* panel) {
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  HWY_ALIGN float tile[kTileRows * kPanelColumns];
  for (std::int64_t j = 0; j < columns; j += 3 * lanes) {
    const std::int64_t width = std::min(3 * lanes, columns - j), vectors = (width + lanes - 1) / lanes;
    const std::int64_t stride = vectors * lanes;
    const float* x = panel;
    std::int64_t ldx = stride;
    if (kTurned)
      PackColumns(b + j * ldb, ldb, k, width, panel, stride);
    else if (rows > kTileRows || width < stride)
      PackRows(d, b + j, ldb, k, width, panel, stride);
    else
      x = b + j, ldx = ldb;  // read once or twice, without packing
    for (std::int64_t i = 0, count = 0; i < rows; i += count) {
      const Rows from{a.at + i * a.row_stride, a.row_stride, a.step};
      if (!kTurned && !add && width == stride) {
        count = SumTile(d, rows - i, vectors, from, x, ldx, k, c + i * ldc + j, ldc);
        continue;
      }
      count = SumTile(d, rows - i, vectors, from, x, ldx, k, tile, stride);
      if (kTurned)
        WriteColumns(d, tile, count, stride, width, add, c + j * ldc + i, ldc);
      else
        WriteRows(tile, count, stride, width, add, c + i * ldc + j, ldc);
    }
  }
}

#if HWY_TARGET != HWY_SCALAR

// C[kColumns, 16 rows] (+)= b[kColumns, k] . A^T, k a multiple of 4: rows are lanes, four vectors of them.
template <int kColumns, std::size_t... i>
HWY_INLINE void SumFew(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, std::int64_t k, bool add,
                       float* c, std::int64_t ldc, std::index_sequence<i...> /*all*/) {
  const Floats<4> d;
  hn::Vec<Floats<4>> sums[] = {((void)i, hn::Zero(d))...};
  for (std::int64_t step = 0; step < k; step += 4) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const float* const at = a + 4 * v * lda + step;
      const auto r0 = hn::LoadU(d, at), r1 = hn::LoadU(d, at + lda), r2 = hn::LoadU(d, at + 2 * lda),
                 r3 = hn::LoadU(d, at + 3 * lda);
      const auto low02 = hn::InterleaveLower(d, r0, r2), low13 = hn::InterleaveLower(d, r1, r3),
                 high02 = hn::InterleaveUpper(d, r0, r2), high13 = hn::InterleaveUpper(d, r1, r3);
      const auto x0 = hn::InterleaveLower(d, low02, low13), x1 = hn::InterleaveUpper(d, low02, low13),
                 x2 = hn::InterleaveLower(d, high02, high13), x3 = hn::InterleaveUpper(d, high02, high13);
#pragma GCC unroll 2
      for (int j = 0; j < kColumns; ++j) {
        const float* const y = b + j * ldb + step;
        auto sum = hn::MulAdd(hn::Set(d, y[0]), x0, sums[4 * j + v]);
        sum = hn::MulAdd(hn::Set(d, y[1]), x1, sum);
        sum = hn::MulAdd(hn::Set(d, y[2]), x2, sum);
        sums[4 * j + v] = hn::MulAdd(hn::Set(d, y[3]), x3, sum);
      }
    }
  }
  const auto write = [&](const auto& sum, float* to) { hn::StoreU(add ? hn::Add(hn::LoadU(d, to), sum) : sum, d, to); };
  (write(sums[i], c + i / 4 * ldc + i % 4 * 4), ...);
}

#endif

void MultiplyRows(const Rows& a, std::int64_t rows, const float* b, std::int64_t ldb, std::int64_t columns,
                  std::int64_t k, bool add, float* c, std::int64_t ldc, float* panel) {
  Multiply<false>(Floats<16>(), a, rows, b, ldb, columns, k, add, c, ldc, panel);
}
void MultiplyTurned(const Rows& a, std::int64_t rows, const float* b, std::int64_t ldb, std::int64_t columns,
                    std::int64_t k, bool add, float* c, std::int64_t ldc, float* panel) {
  std::int64_t done = 0;
#if HWY_TARGET != HWY_SCALAR
  if ((columns == 1 || columns == 2) && k % 4 == 0) {  // a lane for a column would leave most of them idle
    for (; done + 16 <= rows; done += 16) {
      const float* const from = a.at + done * a.row_stride;
      if (columns == 1)
        SumFew<1>(from, a.row_stride, b, ldb, k, add, c + done, ldc, std::make_index_sequence<4>());
      else
        SumFew<2>(from, a.row_stride, b, ldb, k, add, c + done, ldc, std::make_index_sequence<8>());
    }
  }
#endif
  const Rows rest{a.at + done * a.row_stride, a.row_stride, a.step};
  if (columns <= 4)
    Multiply<true>(Floats<4>(), rest, rows - done, b, ldb, columns, k, add, c + done, ldc, panel);
  else if (columns <= 8)
    Multiply<true>(Floats<8>(), rest, rows, b, ldb, columns, k, add, c, ldc, panel);
  else
    Multiply<true>(Floats<16>(), rest, rows, b, ldb, columns, k, add, c, ldc, panel);
}

}  // namespace hopwell::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hopwell::cpu {

HWY_EXPORT(MultiplyRows);
HWY_EXPORT(MultiplyTurned);

Products::Products() : panel_(kDepth * kPanelColumns) {}

void Products::nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                  std::int64_t ldb, bool add, float* c, std::int64_t ldc) const {
  for (std::int64_t first = 0; first == 0 || first < k; first += kDepth) HWY_DYNAMIC_DISPATCH(MultiplyTurned)
  (Rows{b + first, ldb, 1}, n, a + first, lda, m, std::min(kDepth, k - first), add || first > 0, c, ldc, panel_.get());
}

void Products::nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                  std::int64_t ldb, bool add, float* c, std::int64_t ldc) const {
  for (std::int64_t first = 0; first == 0 || first < k; first += kDepth) HWY_DYNAMIC_DISPATCH(MultiplyRows)
  (Rows{a + first, lda, 1}, m, b + first * ldb, ldb, n, std::min(kDepth, k - first), add || first > 0, c, ldc,
   panel_.get());
}

void Products::tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                  std::int64_t ldb, bool add, float* c, std::int64_t ldc) const {
  for (std::int64_t first = 0; first == 0 || first < k; first += kDepth) HWY_DYNAMIC_DISPATCH(MultiplyRows)
  (Rows{a + first * lda, 1, lda}, m, b + first * ldb, ldb, n, std::min(kDepth, k - first), add || first > 0, c, ldc,
   panel_.get());
}

}  // namespace hopwell::cpu
#endif  // HWY_ONCE
