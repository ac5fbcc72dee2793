// Checks of NVFP4 tensors among an operator's arguments: codes, scales in both layouts, and global scales.
#pragma once

#include <hopwell/operators.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "runtime/check.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::nvfp4 {

inline const DTypes kCodes = {DType::kUInt8, DType::kFloat4E2m1x2};
inline const DTypes kScaleBytes = {DType::kUInt8, DType::kFloat8E4m3};
inline const DTypes kFloats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// Checks that [rows, K/2, ...] is contiguous along K, its second dimension.
inline void check_contiguous_k(const Checker& check, std::string_view name, const View& view) {
  check.require(view.stride[1] == 1 || view.shape[1] <= 1 || view.size() == 0, name, "contiguous along K",
                "a stride of " + std::to_string(view.stride[1]));
}

// Reads K from codes [rows, K/2, ...] and binds "K/16".
inline std::int64_t check_k(Checker& check, std::string_view name, const View& codes, const DLTensor& tensor) {
  check.require(codes.shape[1] % 8 == 0, name, "codes [rows, K/2, ...] with K a multiple of 16", shape_string(tensor));
  check.bind("K/16", codes.shape[1] / 8);
  return 2 * codes.shape[1];
}

// Number of elements; -1 if the tensor has no sizes, or sizes that no memory can hold.
inline std::int64_t elements(const DLTensor& tensor) {
  if (!has_sizes(tensor)) return -1;
  std::int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] < 0 || __builtin_mul_overflow(count, tensor.shape[i], &count)) return -1;
  return count;
}

// Whether the elements fill a contiguous range of memory, in any order of dimensions.
inline bool is_dense(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] != 1) dims.emplace_back(tensor.strides[i], tensor.shape[i]);
  std::sort(dims.begin(), dims.end());
  std::int64_t expected = 1;
  return std::all_of(dims.begin(), dims.end(), [&](const auto& dim) {
    const bool fits = dim.first == expected;
    expected *= dim.second;
    return fits;
  });
}

// The blocked layout: any shape and any order of dimensions, if the tensor is contiguous and has the right number of
// bytes.
inline Scales check_blocked_scales(Checker& check, std::string_view name, const DLTensor* tensor, std::int64_t rows,
                                   std::int64_t batch, Access access = Access::kRead) {
  const std::int64_t columns = check["K/16"], matrix = blocked_bytes(rows, columns);
  std::int64_t bytes = batch * matrix;
  if (tensor == nullptr) return {.data = check.input(name, nullptr, kScaleBytes, {bytes}).as<std::uint8_t>()};
  check.require(elements(*tensor) == bytes, name, std::to_string(bytes) + " bytes of blocked scales",
                shape_string(*tensor));
  check.require(bytes == 0 || is_dense(*tensor), name, "contiguous", "strides with gaps, or that overlap");
  DLTensor flat = *tensor;
  flat.ndim = 1, flat.shape = &bytes, flat.strides = nullptr;
  const View view = access == Access::kWritten ? check.output(name, &flat, kScaleBytes, {bytes}, Layout::kDense)
                                               : check.input(name, &flat, kScaleBytes, {bytes}, Layout::kDense);
  return {.data = view.as<std::uint8_t>(), .blocked = true, .batch_stride = matrix, .columns = columns};
}

template <class Args>
hopwell_scale_layout layout_of(const Checker& check, const Args& args) {
  return check.choice("scale_layout", args.scale_layout, HOPWELL_SCALES_BLOCKED,
                      "HOPWELL_SCALES_PLAIN or HOPWELL_SCALES_BLOCKED");
}

// Checks the scales of a matrix whose number of rows is bound to the dimension `rows`.
inline Scales check_scales(Checker& check, std::string_view name, const DLTensor* tensor, hopwell_scale_layout layout,
                           const char* rows, Access access = Access::kRead) {
  if (layout == HOPWELL_SCALES_BLOCKED) return check_blocked_scales(check, name, tensor, check[rows], 1, access);
  const View view = access == Access::kWritten ? check.output(name, tensor, kScaleBytes, {rows, "K/16"})
                                               : check.input(name, tensor, kScaleBytes, {rows, "K/16"});
  return {.data = view.as<std::uint8_t>(), .row_stride = view.stride[0], .columns = view.shape[1]};
}

inline View check_one_float(Checker& check, std::string_view name, const DLTensor* tensor,
                            Access access = Access::kRead) {
  const View view = check.any_shape(name, tensor, {DType::kFloat32}, Layout::kAny, access);
  check.require(view.size() == 1, name, "float32 with one element", shape_string(*tensor));
  return view;
}

// A reciprocal whose factor is no finite float would make every result infinite or NaN.
inline void check_reciprocal(const Checker& check, std::string_view name, float value) {
  const bool is_usable = std::isfinite(value) && std::isfinite(1 / value);
  check.require(is_usable, name, "finite with a finite reciprocal (global_is_reciprocal)", static_cast<double>(value));
}

// A factor as a number, or its reciprocal.
inline Global check_factor(const Checker& check, std::string_view name, float value, bool is_reciprocal) {
  check.finite(name, value);
  if (is_reciprocal) check_reciprocal(check, name, value);
  return {.value = value, .is_reciprocal = is_reciprocal};
}

// A global in device memory is data and is read on the device. A global given as a number is an argument;
// `has_value` means that the caller set it.
// A reciprocal in host memory is checked like a number, because the host can read it without waiting for a device.
inline Global check_global(Checker& check, std::string_view name, const DLTensor* tensor, std::string_view value_name,
                           float value, bool has_value, bool is_reciprocal) {
  if (tensor == nullptr) return check_factor(check, value_name, value, is_reciprocal);
  const Global global{.pointer = check_one_float(check, name, tensor).as<float>(), .is_reciprocal = is_reciprocal};
  check.rule(!has_value, std::string(name).append(" and ").append(value_name).append(" exclude each other"));
  if (is_reciprocal && check.device().device_type == kDLCPU) check_reciprocal(check, name, *global.pointer);
  return global;
}

}  // namespace hopwell::nvfp4
