// Element types, and a view of a tensor, which converts to the `const DLTensor*` of C and back.
#ifndef HOPWELL_TENSOR_HPP_
#define HOPWELL_TENSOR_HPP_

#include <dlpack/dlpack.h>
#include <hopwell/error.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

namespace hopwell {

/// Storage of a 16-bit float: bits only. Computation converts it to float.
struct bfloat16 {
  std::uint16_t bits;
  friend bool operator==(bfloat16, bfloat16) = default;
};
struct float16 {
  std::uint16_t bits;
  friend bool operator==(float16, float16) = default;
};
/// Two e2m1 codes in one byte, the low nibble first; and an e4m3 number. Tensors of uint8_t are accepted for both as
/// well.
struct float4_e2m1x2 {
  std::uint8_t bits;
};
struct float8_e4m3 {
  std::uint8_t bits;
};

// DLPack type codes that some installed dlpack.h do not have yet (DLPack 1.1, dlpack.h: DLDataTypeCode).
inline constexpr std::uint8_t kDlpackFloat8E4m3fn = 10;
inline constexpr std::uint8_t kDlpackFloat4E2m1fn = 17;

namespace detail {
template <class T>
constexpr DLDataType dlpack_dtype() {
  using U = std::remove_cv_t<T>;
  constexpr auto bits = static_cast<std::uint8_t>(8 * sizeof(U));
  if constexpr (std::is_same_v<U, bfloat16>)
    return {kDLBfloat, 16, 1};
  else if constexpr (std::is_same_v<U, float16>)
    return {kDLFloat, 16, 1};
  else if constexpr (std::is_same_v<U, float8_e4m3>)
    return {kDlpackFloat8E4m3fn, 8, 1};
  else if constexpr (std::is_same_v<U, float4_e2m1x2>)
    return {kDlpackFloat4E2m1fn, 4, 2};
  else if constexpr (std::is_floating_point_v<U>)
    return {kDLFloat, bits, 1};
  else if constexpr (std::is_unsigned_v<U>)
    return {kDLUInt, bits, 1};
  else {
    static_assert(std::is_integral_v<U>, "no DLPack type for this element type");
    return {kDLInt, bits, 1};
  }
}
}  // namespace detail

/// A view of memory that the caller owns:
///
///     Tensor q(pointer, {s_q, h_q, d_qk});                                    // row-major, on the host
///     Tensor k(pointer, {s_kv, d_qk}, {.strides = {1024, 1}, .device = {kDLCUDA, 0}});
///
/// A default-constructed tensor is absent. The view stores shape and strides, and the C++ argument structs store the view.
class Tensor {
 public:
  static constexpr int kMaxDims = 8;

  struct Options {
    std::initializer_list<std::int64_t> strides =
        {};  // in elements, of any sign and size, one per dimension; empty: row-major
    DLDevice device = {kDLCPU, 0};
  };

  Tensor() = default;

  template <class T>
  Tensor(T* data, std::initializer_list<std::int64_t> shape) : Tensor(data, shape, Options{}) {}

  template <class T>
  Tensor(T* data, std::initializer_list<std::int64_t> shape, const Options& options)
      : Tensor(const_cast<std::remove_cv_t<T>*>(data), detail::dlpack_dtype<T>(),
               std::span(shape.begin(), shape.size()), std::span(options.strides.begin(), options.strides.size()),
               options.device) {}

  /// For element types that are known only at run time. Empty strides mean row-major.
  Tensor(void* data, DLDataType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
         DLDevice device = {kDLCPU, 0})
      : present_(true) {
    if (shape.size() > kMaxDims) refuse("shape", "of at most 8 dimensions", shape.size());
    if (!strides.empty() && strides.size() != shape.size())
      refuse("strides", "as many as dimensions, or none", strides.size());
    std::copy(shape.begin(), shape.end(), shape_.begin());
    std::copy(strides.begin(), strides.end(), strides_.begin());
    std::uint64_t stride = 1;  // may wrap; the operators check whether memory can hold the shape
    for (auto i = strides.empty() ? shape.size() : 0; i-- > 0;
         stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(shape_[i], 1)))
      strides_[i] = static_cast<std::int64_t>(stride);
    tensor_ = {data, device, static_cast<std::int32_t>(shape.size()), dtype, shape_.data(), strides_.data(), 0};
  }

  /// A tensor of C or of another library; null is an absent tensor. The operators refuse a description without
  /// valid sizes.
  Tensor(const DLTensor* tensor) noexcept : present_(tensor != nullptr) {  // NOLINT(google-explicit-constructor)
    if (tensor == nullptr) return;
    tensor_ = *tensor;
    if (tensor->ndim < 0 || tensor->ndim > kMaxDims || tensor->shape == nullptr) return;
    std::copy(tensor->shape, tensor->shape + tensor->ndim, shape_.begin());
    tensor_.shape = shape_.data();
    if (tensor->strides == nullptr) return;
    std::copy(tensor->strides, tensor->strides + tensor->ndim, strides_.begin());
    tensor_.strides = strides_.data();
  }

  Tensor(const Tensor& other) noexcept { *this = other; }
  Tensor& operator=(const Tensor& other) noexcept {
    const bool own_shape = other.tensor_.shape == other.shape_.data();
    const bool own_strides = other.tensor_.strides == other.strides_.data();
    shape_ = other.shape_;
    strides_ = other.strides_;
    tensor_ = other.tensor_;
    present_ = other.present_;
    if (own_shape) tensor_.shape = shape_.data();
    if (own_strides) tensor_.strides = strides_.data();
    return *this;
  }
  ~Tensor() = default;

  /// Null if the tensor is absent. Valid as long as the Tensor is.
  operator const DLTensor*() const noexcept {  // NOLINT(google-explicit-constructor): implicit conversion is intended
    return present_ ? &tensor_ : nullptr;
  }
  const DLTensor* operator->() const noexcept { return *this; }

 private:
  [[noreturn]] static void refuse(const char* what, const char* expected, std::size_t got) {
    throw Error(HOPWELL_INVALID_ARGUMENT,
                std::string("Tensor: ") + what + " must be " + expected + "; got " + std::to_string(got));
  }

  std::array<std::int64_t, kMaxDims> shape_{};
  std::array<std::int64_t, kMaxDims> strides_{};
  DLTensor tensor_{};
  bool present_ = false;
};

}  // namespace hopwell

#endif  // HOPWELL_TENSOR_HPP_
