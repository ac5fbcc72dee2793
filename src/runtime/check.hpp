// Argument checks, written once per operator and shared by all its backends.
//
//     Checker check("sparse_mla_forward");
//     View q  = check.input("q", args.q, {DType::kBFloat16}, {"s_q", "h_q", "d_qk"});
//     View kv = check.input("kv", args.kv, {q.dtype}, {"s_kv", "d_qk"});             // d_qk must equal q's
//     check.require(check["d_qk"] >= args.d_v, "d_v", "at most d_qk = 576", args.d_v);
//
// The first use of a dimension name binds it to a size. All later uses must have the same size.
#pragma once

#include <hopwell/error.hpp>

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/dtype.hpp"

namespace hopwell {

// A checked tensor as plain data, used in problems and kernel parameters. An absent tensor has null data and ndim 0.
struct View {
  static constexpr int kMaxDims = 5;
  void* data = nullptr;
  DType dtype = DType::kOther;
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> stride{};  // in elements
  bool present = false;

  explicit operator bool() const { return present; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  [[nodiscard]] std::int64_t size() const;  // number of elements
  // The same memory without dimension `dim`, which has size 1: [s_kv, 1, d] -> [s_kv, d].
  [[nodiscard]] View squeezed(int dim) const;
};

// A dimension of an expected shape: a name, or an exact size.
struct Dim {
  Dim(const char* dim_name) : name(dim_name) {}  // NOLINT(google-explicit-constructor)
  template <class Int, std::enable_if_t<std::is_integral_v<Int>, int> = 0>
  Dim(Int exact) : name(nullptr), value(static_cast<std::int64_t>(exact)) {}  // NOLINT(google-explicit-constructor)
  const char* name;
  std::int64_t value = 0;
  bool may_be_absent = false;  // the caller accepts the shape without it, too; for messages
};
inline Dim maybe(Dim dim) {
  dim.may_be_absent = true;
  return dim;
}
using Shape = std::vector<Dim>;
using DTypes = std::vector<DType>;

enum class Layout {
  kRows,  // the last dimension is contiguous, the others are free
  kAny,   // every stride is free
  kDense  // row-major without gaps
};

enum class Access { kRead, kWritten };

class Checker {
 public:
  explicit Checker(std::string_view operator_name) : operator_(operator_name) {}

  // Each of these functions checks presence, dtype, shape, layout, device (the first tensor's) and alignment, and that
  // sizes and strides are small enough that products of sizes do not overflow. They bind dimension names.
  // `optional_input` returns an absent View for null. Outputs must not overlap themselves (no stride of 0) or any other
  // tensor checked before or after.
  View input(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
             Layout layout = Layout::kRows);
  View optional_input(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
                      Layout layout = Layout::kRows);
  View output(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
              Layout layout = Layout::kRows);
  View optional_output(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
                       Layout layout = Layout::kRows);
  // All checks but the shape, for arguments with a shape rule of their own.
  View any_shape(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, Layout layout,
                 Access access = Access::kRead);

  // The size bound to a dimension name.
  [[nodiscard]] std::int64_t operator[](std::string_view dim) const { return *find(dim); }
  void bind(const char* dim, std::int64_t size) { dims_.emplace_back(dim, size); }

  // Throws `operator: argument must be <expected>; got <got>` unless the condition holds.
  template <class Got>
  void require(bool condition, std::string_view argument, std::string_view expected, const Got& got) const {
    if (condition) return;
    if constexpr (std::is_convertible_v<Got, std::string_view>)
      fail(argument, expected, got);
    else
      fail(argument, expected, to_string(got));
  }
  void finite(std::string_view argument, float value) const;
  // Checks an enumeration of an argument struct, with values 0 .. last. C callers can store any integer there, and
  // reading a value that is not an enumerator as an Enum would be undefined behaviour.
  template <class Enum>
  Enum choice(std::string_view argument, const Enum& given, Enum last, std::string_view expected) const {
    std::int32_t value = 0;
    static_assert(sizeof value == sizeof given);
    std::memcpy(&value, &given, sizeof value);
    require(value >= 0 && value <= static_cast<std::int32_t>(last), argument, expected, value);
    return given;
  }
  [[noreturn]] void fail(std::string_view argument, std::string_view expected, std::string_view got) const;
  // Checks a rule between arguments. The message is `operator: <rule>`.
  void rule(bool holds, std::string_view rule) const;
  // Checks that two arguments are both given, or neither.
  void together(std::string_view first, bool has_first, std::string_view second, bool has_second) const;

  [[nodiscard]] DLDevice device() const { return device_; }

  // Sets the problem's device and its workspace, and checks that the workspace overlaps no argument. Call it after all
  // other checks.
  template <class Problem, class Args>
  void take_workspace(Problem& problem, const Args& args) const {
    check_workspace(args.workspace, args.workspace_bytes);
    problem.device.location = device_;
  }

 private:
  static std::string to_string(double value);
  static std::string to_string(std::int64_t value) { return std::to_string(value); }
  static std::string to_string(int value) { return std::to_string(value); }
  [[nodiscard]] std::string expected(const DTypes& dtypes, const Shape* shape, bool any_rank) const;
  View taken(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape* shape, Layout layout,
             Access access);
  View checked(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape* shape);
  void check_extent(std::string_view name, const DLTensor& tensor, const View& view) const;
  void check_memory(std::string_view name, const DLTensor& tensor, const View& view, Layout layout, bool written) const;
  void check_device(std::string_view name, const DLDevice& device);
  void check_workspace(void* workspace, std::size_t bytes) const;
  [[nodiscard]] const std::int64_t* find(std::string_view dim) const;  // null: not bound

  struct Taken {
    std::string_view name;
    View view;
    Access access;
  };

  // All names are string literals of the caller.
  std::string_view operator_;
  std::vector<Taken> taken_;
  std::vector<std::pair<std::string_view, std::int64_t>> dims_;
  DLDevice device_{};
  std::string_view device_owner_;  // the argument that set device_
};

std::string to_string(const DLDevice& device);  // "cpu", "cuda:0"

// Whether a tensor has a valid number of dimensions, at most the largest supported number, and their sizes. Code that
// reads sizes before a check above must call this first.
bool has_sizes(const DLTensor& tensor);
std::string shape_string(const DLTensor& tensor);  // "[4, 1, 2048]"; for any tensor, with or without sizes

}  // namespace hopwell
