#include "runtime/dtype.hpp"

#include <hopwell/tensor.hpp>

namespace hopwell {

DType dtype_of(const DLDataType& type) {
  const auto is = [&](int code, int bits, int lanes) {
    return type.code == code && type.bits == bits && type.lanes == lanes;
  };
  if (is(kDLFloat, 32, 1)) return DType::kFloat32;
  if (is(kDLFloat, 16, 1)) return DType::kFloat16;
  if (is(kDLBfloat, 16, 1)) return DType::kBFloat16;
  if (is(kDLInt, 32, 1)) return DType::kInt32;
  if (is(kDLInt, 64, 1)) return DType::kInt64;
  if (is(kDLUInt, 8, 1)) return DType::kUInt8;
  if (is(kDLInt, 8, 1)) return DType::kInt8;
  if (is(kDlpackFloat8E4m3fn, 8, 1)) return DType::kFloat8E4m3;
  if (is(kDlpackFloat4E2m1fn, 4, 2)) return DType::kFloat4E2m1x2;
  return DType::kOther;
}

std::string dtype_name(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kFloat8E4m3:
      return "float8_e4m3fn";
    case DType::kFloat4E2m1x2:
      return "float4_e2m1fn_x2";
    case DType::kOther:
      break;
  }
  return "other";
}

std::string dtype_name(const DLDataType& type) {
  if (const DType known = dtype_of(type); known != DType::kOther) return dtype_name(known);
  constexpr const char* kFamilies[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  constexpr std::size_t kFirstNarrow = std::size(kFamilies);  // types of at most 8 bits, whose names have their bits
  constexpr const char* kNarrow[] = {"float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz", "float8_e4m3fn",
                                     "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",    "float8_e8m0fnu",
                                     "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
  std::string name;
  if (type.code < kFirstNarrow)
    name = kFamilies[type.code] + std::to_string(type.bits);
  else if (type.code < kFirstNarrow + std::size(kNarrow))
    name = kNarrow[type.code - kFirstNarrow];
  else
    name = "dlpack" + std::to_string(type.code) + "_" + std::to_string(type.bits);
  if (type.lanes != 1) name += "x" + std::to_string(type.lanes);
  return name;
}

}  // namespace hopwell
