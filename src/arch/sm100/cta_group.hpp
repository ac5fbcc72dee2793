// The .cta_group qualifier (one CTA or a pair) as part of an instruction's name.
#pragma once

namespace hopwell::arch::detail {

template <int kCtaGroup>
struct CtaGroupName;
template <>
struct CtaGroupName<1> {
  static constexpr const char text[] = "cta_group::1";
};
template <>
struct CtaGroupName<2> {
  static constexpr const char text[] = "cta_group::2";
};

}  // namespace hopwell::arch::detail
