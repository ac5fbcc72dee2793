#include <cuda_runtime.h>

#include "device_read.hpp"

namespace hopwell::cli {
namespace {

// Reads every 16 bytes once, with kInFlight loads per thread in flight. The compiler cannot prove that the result is
// unused, so it keeps the loads.
template <int kInFlight>
__global__ void __launch_bounds__(512) read(const uint4* from, size_t count, uint32_t* result) {
  const size_t threads = size_t(gridDim.x) * blockDim.x;
  size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  uint32_t bits = 0;
  const auto take = [&](const uint4& v) { bits ^= v.x ^ v.y ^ v.z ^ v.w; };
  for (; i + (kInFlight - 1) * threads < count; i += kInFlight * threads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = __ldcs(from + i + k * threads);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) take(v[k]);
  }
  for (; i < count; i += threads) take(__ldcs(from + i));
  if (result != nullptr) *result = bits;
}

}  // namespace

void enqueue_device_read(int variant, const void* from, std::size_t bytes, Stream stream) {
  const auto require = [](cudaError_t error) {
    if (error != cudaSuccess) throw Error(HOPWELL_DEVICE_ERROR, cudaGetErrorString(error));
  };
  int device = 0, multiprocessors = 0;
  require(cudaGetDevice(&device));
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int grid = multiprocessors * (1 << variant % 3);
  const auto kernel = variant < 3 ? read<4> : read<8>;
  kernel<<<grid, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from), bytes / 16, nullptr);
  require(cudaGetLastError());
}

}  // namespace hopwell::cli
