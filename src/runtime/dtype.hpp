// Element types of the operators, as one enumeration.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <string>

namespace hopwell {

enum class DType { kFloat32, kFloat16, kBFloat16, kInt32, kInt64, kUInt8, kInt8, kFloat8E4m3, kFloat4E2m1x2, kOther };

DType dtype_of(const DLDataType& type);

// The usual name: "bfloat16", "int64", "float8_e4m3fn". Also for types that no operator supports.
std::string dtype_name(const DLDataType& type);
std::string dtype_name(DType type);

// Bytes per element; a pair of float4 is one byte.
constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

}  // namespace hopwell
