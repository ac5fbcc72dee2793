// Element types, and a view of a tensor that converts to the `const DLTensor*` of the argument structs.
#ifndef HOPWELL_TENSOR_HPP_
#define HOPWELL_TENSOR_HPP_

#include <dlpack/dlpack.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
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
/// The view stores shape and strides, so an argument struct that points to a Tensor is valid as long as the Tensor is.
class Tensor {
 public:
  static constexpr int kMaxDims = 8;

  struct Options {
    std::initializer_list<std::int64_t> strides =
        {};  // in elements, of any sign and size, one per dimension; empty: row-major
    DLDevice device = {kDLCPU, 0};
  };

  template <class T>
  Tensor(T* data, std::initializer_list<std::int64_t> shape) : Tensor(data, shape, Options{}) {}

  template <class T>
  Tensor(T* data, std::initializer_list<std::int64_t> shape, const Options& options) {
    init(const_cast<std::remove_cv_t<T>*>(data), detail::dlpack_dtype<T>(), options.device, shape.begin(),
         shape.size());
    if (options.strides.size() == shape.size()) {
      std::copy(options.strides.begin(), options.strides.end(), strides_.begin());
    } else if (options.strides.size() == 0) {
      std::uint64_t stride = 1;  // may wrap; the operators check whether memory can hold the shape
      for (auto i = shape.size(); i-- > 0; stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(shape_[i], 1)))
        strides_[i] = static_cast<std::int64_t>(stride);
    } else {
      throw std::invalid_argument("Tensor: shape and strides differ in length");
    }
  }

  /// For element types that are known only at run time.
  Tensor(void* data, DLDataType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
         DLDevice device = {kDLCPU, 0}) {
    if (shape.size() != strides.size()) throw std::invalid_argument("Tensor: shape and strides differ in length");
    init(data, dtype, device, shape.data(), shape.size());
    std::copy(strides.begin(), strides.end(), strides_.begin());
  }

  Tensor(const Tensor& other) noexcept { *this = other; }
  Tensor& operator=(const Tensor& other) noexcept {
    shape_ = other.shape_;
    strides_ = other.strides_;
    tensor_ = other.tensor_;
    tensor_.shape = shape_.data();
    tensor_.strides = strides_.data();
    return *this;
  }
  ~Tensor() = default;

  operator const DLTensor*() const noexcept {
    return &tensor_;
  }  // NOLINT(google-explicit-constructor): implicit conversion is intended
  const DLTensor* operator->() const noexcept { return &tensor_; }

 private:
  void init(void* data, DLDataType dtype, DLDevice device, const std::int64_t* shape, std::size_t ndim) {
    if (ndim > kMaxDims) throw std::invalid_argument("Tensor: more than 8 dimensions");
    std::copy(shape, shape + ndim, shape_.begin());
    tensor_ = {data, device, static_cast<std::int32_t>(ndim), dtype, shape_.data(), strides_.data(), 0};
  }

  std::array<std::int64_t, kMaxDims> shape_{};
  std::array<std::int64_t, kMaxDims> strides_{};
  DLTensor tensor_{};
};

}  // namespace hopwell

#endif  // HOPWELL_TENSOR_HPP_
