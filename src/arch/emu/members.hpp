// Names of the members of a kernel's shared struct: findings say "part[3]" instead of an offset.
//
// C++20 has no reflection. The number of members is the largest number of {} that initialise the struct. A structured
// binding gives their addresses and types, and the compiler spells a pointer to each in __PRETTY_FUNCTION__. This needs
// GCC. With another compiler findings keep the offset, and also for a struct with a base class, a union, an unnamed
// struct or more than 20 members.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace hopwell::arch::emu {

/// Appends the name of the member at `offset` of a struct to `name`. False if no named member is there. `base` is the
/// address of such a struct. Nothing is read from it.
using MemberName = bool (*)(std::byte* base, size_t offset, std::string& name);

namespace members {

// Each line has one member more than the line before: braces that initialise them, and names that bind them.
// clang-format off
#define HOPWELL_BRACES_1 {}
#define HOPWELL_BRACES_2 HOPWELL_BRACES_1, {}
#define HOPWELL_BRACES_3 HOPWELL_BRACES_2, {}
#define HOPWELL_BRACES_4 HOPWELL_BRACES_3, {}
#define HOPWELL_BRACES_5 HOPWELL_BRACES_4, {}
#define HOPWELL_BRACES_6 HOPWELL_BRACES_5, {}
#define HOPWELL_BRACES_7 HOPWELL_BRACES_6, {}
#define HOPWELL_BRACES_8 HOPWELL_BRACES_7, {}
#define HOPWELL_BRACES_9 HOPWELL_BRACES_8, {}
#define HOPWELL_BRACES_10 HOPWELL_BRACES_9, {}
#define HOPWELL_BRACES_11 HOPWELL_BRACES_10, {}
#define HOPWELL_BRACES_12 HOPWELL_BRACES_11, {}
#define HOPWELL_BRACES_13 HOPWELL_BRACES_12, {}
#define HOPWELL_BRACES_14 HOPWELL_BRACES_13, {}
#define HOPWELL_BRACES_15 HOPWELL_BRACES_14, {}
#define HOPWELL_BRACES_16 HOPWELL_BRACES_15, {}
#define HOPWELL_BRACES_17 HOPWELL_BRACES_16, {}
#define HOPWELL_BRACES_18 HOPWELL_BRACES_17, {}
#define HOPWELL_BRACES_19 HOPWELL_BRACES_18, {}
#define HOPWELL_BRACES_20 HOPWELL_BRACES_19, {}
#define HOPWELL_NAMES_1 m1
#define HOPWELL_NAMES_2 HOPWELL_NAMES_1, m2
#define HOPWELL_NAMES_3 HOPWELL_NAMES_2, m3
#define HOPWELL_NAMES_4 HOPWELL_NAMES_3, m4
#define HOPWELL_NAMES_5 HOPWELL_NAMES_4, m5
#define HOPWELL_NAMES_6 HOPWELL_NAMES_5, m6
#define HOPWELL_NAMES_7 HOPWELL_NAMES_6, m7
#define HOPWELL_NAMES_8 HOPWELL_NAMES_7, m8
#define HOPWELL_NAMES_9 HOPWELL_NAMES_8, m9
#define HOPWELL_NAMES_10 HOPWELL_NAMES_9, m10
#define HOPWELL_NAMES_11 HOPWELL_NAMES_10, m11
#define HOPWELL_NAMES_12 HOPWELL_NAMES_11, m12
#define HOPWELL_NAMES_13 HOPWELL_NAMES_12, m13
#define HOPWELL_NAMES_14 HOPWELL_NAMES_13, m14
#define HOPWELL_NAMES_15 HOPWELL_NAMES_14, m15
#define HOPWELL_NAMES_16 HOPWELL_NAMES_15, m16
#define HOPWELL_NAMES_17 HOPWELL_NAMES_16, m17
#define HOPWELL_NAMES_18 HOPWELL_NAMES_17, m18
#define HOPWELL_NAMES_19 HOPWELL_NAMES_18, m19
#define HOPWELL_NAMES_20 HOPWELL_NAMES_19, m20
#define HOPWELL_FOR_COUNTS(X) \
  X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20)
// clang-format on

template <class T>
consteval std::string_view spell_type() {
  return __PRETTY_FUNCTION__;
}
template <auto kPointer>
consteval std::string_view spell_pointer() {
  return __PRETTY_FUNCTION__;
}

struct Anything {
  template <class T>
  operator T() const;
};
template <class T>
concept Unnamed = std::is_union_v<T> || spell_type<T>().find("<unnamed ") != std::string_view::npos;
struct AnythingUnnamed {  // a structured binding does not reach into an unnamed member
  template <Unnamed T>
  operator T() const;
};
template <class T>
struct BaseOf {
  template <class B>
    requires(std::is_base_of_v<B, T> && !std::is_same_v<B, T>)
  operator B() const;
};

/// Number of members of T. 0 if they cannot be named.
template <class T>
consteval size_t count() {
  if constexpr (!std::is_aggregate_v<T> || std::is_array_v<T> || std::is_union_v<T> || std::is_empty_v<T> ||
                !std::is_trivially_destructible_v<T>) {
    return 0;
  } else if constexpr (requires { T{BaseOf<T>{}}; } || requires { T{AnythingUnnamed{}}; }) {
    return 0;
  } else {
    size_t most = 0;
    bool known = false;  // false if a further member exists that {} does not initialise
#define HOPWELL_COUNT(n)                                                  \
  if constexpr (requires { T{HOPWELL_BRACES_##n}; }) {                    \
    most = n;                                                             \
    known = !requires { T{HOPWELL_BRACES_##n, Anything{}}; };             \
    if (requires { T{HOPWELL_BRACES_##n, AnythingUnnamed{}}; }) return 0; \
  }
    HOPWELL_FOR_COUNTS(HOPWELL_COUNT)
#undef HOPWELL_COUNT
    return known ? most : 0;
  }
}

/// Pointers to the members of `object`.
template <class T>
constexpr auto pointers(T& object) {
#define HOPWELL_BIND(n)                                                               \
  if constexpr (count<T>() == n) {                                                    \
    auto& [HOPWELL_NAMES_##n] = object;                                               \
    return [](auto&... member) { return std::tuple{&member...}; }(HOPWELL_NAMES_##n); \
  }
  HOPWELL_FOR_COUNTS(HOPWELL_BIND)
#undef HOPWELL_BIND
}

template <class T>
union Example {
  char nothing{};
  T object;
};
template <class T>
inline constinit Example<T> example{};  // only for pointers in constant expressions

/// The name at the end of "... [with auto kPointer = (& example<S>.Example<S>::object.S::part); ...]".
template <class T, size_t kMember>
consteval std::string_view name() {
  constexpr auto pointer = std::get<kMember>(pointers(example<T>.object));
  std::string_view text = spell_pointer<pointer>();
  text = text.substr(0, text.find(");"));
  return text.substr(text.rfind("::") + 2);
}

template <class T>
concept StdArray = requires { typename T::value_type; } &&
                   sizeof(T) == sizeof(std::array<typename T::value_type, std::tuple_size<T>::value>);

template <class T>
bool append(std::byte* base, size_t offset, std::string& text) {
  const auto element = [&]<class E>(std::type_identity<E>) {
    text += "[" + std::to_string(offset / sizeof(E)) + "]";
    return append<E>(base, offset % sizeof(E), text);
  };
  if constexpr (std::is_array_v<T>) {
    return element(std::type_identity<std::remove_extent_t<T>>{});
  } else if constexpr (StdArray<T>) {
    return element(std::type_identity<typename T::value_type>{});
  } else if constexpr (count<T>() > 1 || (count<T>() == 1 && sizeof(T) > 16)) {
    const auto members = pointers(*reinterpret_cast<T*>(base));
    const auto inside = [&]<size_t kMember>() {
      auto* const member = std::get<kMember>(members);
      const size_t begin = size_t(reinterpret_cast<std::byte*>(member) - base);
      if (offset < begin || offset - begin >= sizeof(*member)) return false;
      if (!text.empty()) text += ".";
      text += name<T, kMember>();
      return append<std::remove_reference_t<decltype(*member)>>(base + begin, offset - begin, text);
    };
    return [&]<size_t... kMembers>(std::index_sequence<kMembers...>) {
      return (inside.template operator()<kMembers>() || ...);
    }(std::make_index_sequence<count<T>()>{});
  } else {
    if (offset) text += " + " + std::to_string(offset) + " bytes";
    return true;
  }
}

}  // namespace members

/// Names the members of `Storage`. Null if they have no names.
template <class Storage>
constexpr MemberName member_name() {
#if defined(__GNUC__) && !defined(__clang__)
  if constexpr (members::count<Storage>() > 0) return &members::append<Storage>;
#endif
  return nullptr;
}

}  // namespace hopwell::arch::emu
