// What the measurements on a Blackwell card share: memory, launches and clocks in either world, and what comes out.
//
// A kernel counts cycles of its own SM by its first thread, from behind one meeting of the CTA to behind another. On the
// emulator nothing takes time: there a measurement only shows that its kernel is clean and that what it computes is right.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "arch/launch.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/threads.hpp"

namespace hopwell::blackwell {

using namespace arch;

inline constexpr bool kOnDevice = HOPWELL_ON_DEVICE;
inline constexpr int kLaunches = kOnDevice ? 2 : 1;  // of each kernel; the last one counts

/// How much a measurement does.
struct Sizes {
  int ctas;                    // one an SM; even
  int repeats;                 // of what a kernel repeats
  std::vector<uint32_t> rows;  // of tensors whose rows are picked at random
  uint32_t stream_stages;      // that each CTA reads, one after another
};

struct Measurement {
  std::string name, unit;  // of `amount`
  double amount;           // what a CTA did
  std::vector<uint64_t> cycles;
  bool right;  // what it has computed
};

#if HOPWELL_ON_DEVICE
inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#endif

/// Memory that kernels use.
template <class T>
class Memory {
 public:
  explicit Memory(const std::vector<T>& values) : count_(values.size()) {
#if HOPWELL_ON_DEVICE
    require(cudaMalloc(&data_, count_ * sizeof(T)), "memory");
    require(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "a copy to the device");
#else
    data_ = static_cast<T*>(::operator new(count_ * sizeof(T), std::align_val_t{256}));
    std::copy(values.begin(), values.end(), data_);
#endif
  }
  explicit Memory(size_t count) : Memory(std::vector<T>(count)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
#if HOPWELL_ON_DEVICE
    cudaFree(data_);
#else
    ::operator delete(data_, std::align_val_t{256});
#endif
  }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> all(count_);
#if HOPWELL_ON_DEVICE
    require(cudaMemcpy(all.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "a copy from the device");
#else
    std::copy(data_, data_ + count_, all.begin());
#endif
    return all;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

/// Runs kernel(parameters) kLaunches times, each to its end.
template <class Params>
void run(void (*kernel)(Params), const LaunchShape& shape, const Params& parameters) {
  for (int i = 0; i < kLaunches; ++i) {
#if HOPWELL_ON_DEVICE
    require(launch(kernel, shape, nullptr, parameters), "a launch");
    require(cudaDeviceSynchronize(), "a kernel");
#else
    launch(kernel, shape, parameters);
#endif
  }
}

/// %clock64; 0 on the emulator.
HOPWELL_DEVICE uint64_t clock_now() {
#if HOPWELL_ON_DEVICE
  uint64_t now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
#else
  return 0;
#endif
}

/// All threads of a CTA do `work`; cycles[CTA] is what it took.
template <class Work>
HOPWELL_DEVICE void timed(uint64_t* cycles, Work work) {
  syncthreads();
  const uint64_t begin = clock_now();
  work();
  syncthreads();
  if (thread_index() == 0) cycles[block_index()] = clock_now() - begin;
}

/// A number that looks random, the same in kernels and on the host.
HOPWELL_HOST_DEVICE uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352dU;
  x = (x ^ x >> 15) * 0x846ca68bU;
  return x ^ x >> 16;
}

inline std::vector<uint32_t> some_words(size_t count) {
  std::vector<uint32_t> words(count);
  for (size_t i = 0; i < count; ++i) words[i] = mixed(uint32_t(i));
  return words;
}

}  // namespace hopwell::blackwell
