// Highway building blocks for the CPU kernels. Included once per target, from a file that uses foreach_target.h.
#if defined(HOPWELL_TILE_CPU_VECTOR_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOPWELL_TILE_CPU_VECTOR_INL_HPP_
#undef HOPWELL_TILE_CPU_VECTOR_INL_HPP_
#else
#define HOPWELL_TILE_CPU_VECTOR_INL_HPP_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "tile/float16.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Loads Lanes(d) floats from memory of any storage type, without alignment.
template <class D>
HWY_INLINE hn::Vec<D> LoadFloat(D d, const float* from) {
  return hn::LoadU(d, from);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadFloat(D d, const bfloat16* from) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadFloat(D d, const float16* from) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
}

// Stores Lanes(d) floats, rounded to nearest, ties to even. NaN stays NaN.
template <class D>
HWY_INLINE void StoreFloat(hn::Vec<D> v, D d, float* to) {
  hn::StoreU(v, d, to);
}
template <class D>
HWY_INLINE void StoreFloat(hn::Vec<D> v, D /*d*/, bfloat16* to) {
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFF))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<D>(), hn::IfThenElse(is_nan, quiet, nearest))), d16,
             reinterpret_cast<std::uint16_t*>(to));
}
template <class D>
HWY_INLINE void StoreFloat(hn::Vec<D> v, D /*d*/, float16* to) {
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(to));
}

// exp(x) within about an ulp; 0 below about -104 and for -inf, inf above 88.7, NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> SafeExp(D d, hn::Vec<D> x) {
  const auto e = hn::Exp(d, hn::Min(x, hn::Set(d, 104.0F)));  // upper end of its range
  return hn::IfThenElse(hn::IsNaN(x), x, e);
}

}  // namespace hopwell::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
