// Tensor maps: the copy engine's description of a tensor in global memory. One host function makes them: through the
// driver if the kernel runs on a device, else through the emulator.
#pragma once

#include <stdexcept>
#include <string>

#include "../descriptor.hpp"
#include "tensor_map.hpp"
#if HOPWELL_ON_DEVICE
#include <cuda.h>
#include <cuda_runtime.h>
#endif

namespace hopwell::arch {

enum class TensorElement : uint8_t { u8, fp16, bf16, f32, s32, s64 };

/// A tensor of 1 to 5 dimensions, innermost first, and the box that one copy moves.
struct TensorMapRequest {
  void* address = nullptr;  // global, 16-byte aligned
  TensorElement element = TensorElement::bf16;
  int rank = 0;
  uint64_t extent[5] = {};          // elements
  uint64_t stride_bytes[4] = {};    // dimensions 1 to rank-1; multiples of 16
  uint32_t box[5] = {};             // elements, 1 to 256; the innermost a multiple of 16 bytes
  Swizzle swizzle = Swizzle::none;  // the innermost box extent is then at most 32, 64 or 128 bytes
};

constexpr uint32_t element_bytes(TensorElement e) {
  constexpr uint32_t bytes[] = {1, 2, 2, 4, 4, 8};
  return bytes[int(e)];
}

/// Throws std::invalid_argument, naming the field, if the hardware cannot accept the request.
inline void check_tensor_map_request(const TensorMapRequest& r) {
  const auto require = [](bool ok, const char* what, uint64_t got) {
    if (!ok)
      throw std::invalid_argument(
          std::string("tensor map: ").append(what).append("; got ").append(std::to_string(got)));
  };
  require(r.rank >= 1 && r.rank <= 5, "rank must be 1 to 5", uint64_t(r.rank));
  require(r.address && reinterpret_cast<uintptr_t>(r.address) % 16 == 0, "address must be 16-byte aligned",
          reinterpret_cast<uintptr_t>(r.address));
  for (int i = 0; i < r.rank; ++i) {
    require(r.extent[i] >= 1 && r.extent[i] < uint64_t{1} << 32, "every extent must be 1 to 2^32 - 1", r.extent[i]);
    require(r.box[i] >= 1 && r.box[i] <= 256, "every box dimension must be 1 to 256", r.box[i]);
    if (i > 0)
      require(r.stride_bytes[i - 1] % 16 == 0 && r.stride_bytes[i - 1] < uint64_t{1} << 40,
              "every stride must be a multiple of 16 bytes below 2^40", r.stride_bytes[i - 1]);
  }
  const uint32_t inner = r.box[0] * element_bytes(r.element);
  require(inner % 16 == 0, "the innermost box must be a multiple of 16 bytes", inner);
  require(r.swizzle == Swizzle::none || inner <= 16u << int(r.swizzle),
          "the innermost box must fit the swizzle width, in bytes", inner);
}

#if HOPWELL_ON_DEVICE
/// Made by the driver (cuTensorMapEncodeTiled). Throws std::invalid_argument, or std::runtime_error if the driver
/// fails. `static` in each kernel file, because a library that also contains the emulator has another function of this
/// name.
[[maybe_unused]] static TensorMap make_tensor_map(const TensorMapRequest& r) {
  check_tensor_map_request(r);
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    const bool there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (!encode) throw std::runtime_error("tensor map: the CUDA driver has no cuTensorMapEncodeTiled");
  constexpr CUtensorMapDataType type[] = {CU_TENSOR_MAP_DATA_TYPE_UINT8,    CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                          CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                          CU_TENSOR_MAP_DATA_TYPE_INT32,    CU_TENSOR_MAP_DATA_TYPE_INT64};
  constexpr CUtensorMapSwizzle swizzle[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                            CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  cuuint64_t extent[5], stride[4];
  for (int i = 0; i < 5; ++i) extent[i] = r.extent[i];
  for (int i = 0; i < 4; ++i) stride[i] = r.stride_bytes[i];
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap) && alignof(CUtensorMap) <= alignof(TensorMap));
  TensorMap map;
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(&map), type[int(r.element)], cuuint32_t(r.rank), r.address, extent, stride,
             r.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle[int(r.swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("tensor map: the driver refused it, error " + std::to_string(int(result)));
  return map;
}
#else
/// For the emulator. Throws std::invalid_argument.
TensorMap make_tensor_map(const TensorMapRequest& request);
#endif

}  // namespace hopwell::arch
