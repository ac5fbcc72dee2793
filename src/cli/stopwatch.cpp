#include "stopwatch.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "cases/cuda.hpp"

namespace hopwell::cli {
namespace {

using Clock = std::chrono::steady_clock;
namespace cuda = cases::cuda;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// Seconds of the operator and, taken beside each, of the ceilings.
struct Samples {
  std::vector<double> call, matmul, traffic;
};

Measurement summary(const Samples& samples, double flops, double matmul_flops) {
  std::vector<double> compute, read;
  for (std::size_t i = 0; i < samples.matmul.size(); ++i) {
    compute.push_back((flops / samples.call[i]) / (matmul_flops / samples.matmul[i]));
  }
  for (std::size_t i = 0; i < samples.traffic.size(); ++i) read.push_back(samples.traffic[i] / samples.call[i]);
  const auto [least, most] = std::minmax_element(samples.call.begin(), samples.call.end());
  const double middle = median(samples.call), matmul = median(samples.matmul);
  return {middle, (*most - *least) / middle, median(compute), median(read), matmul > 0 ? matmul_flops / matmul : 0};
}

Measurement measure_on_host(const cases::Instance& instance, const std::string& backend) {
  constexpr double kBudgetSeconds = 4, kMatmulFlops = 2.0 * 2048 * 2048 * 2048;
  const auto bytes = static_cast<std::size_t>(instance.bytes);
  const auto once = [&] {
    const auto start = Clock::now();
    instance.call(backend.c_str(), nullptr);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  once();
  time_cpu_matmul();
  time_cpu_read(bytes);
  Samples samples;
  const auto start = Clock::now();
  const auto more = [&] { return std::chrono::duration<double>(Clock::now() - start).count() < kBudgetSeconds; };
  while (samples.call.size() < 5 || (more() && samples.call.size() < 200)) {
    samples.matmul.push_back(time_cpu_matmul());
    samples.traffic.push_back(time_cpu_read(bytes));
    samples.call.push_back(once());
  }
  return summary(samples, instance.flops, kMatmulFlops);
}

// cuBLAS' product of two random bf16 matrices [8192, 8192], if the library can be found (LD_LIBRARY_PATH).
class DeviceMatmul {
 public:
  static constexpr int kSize = 8192;
  static constexpr double kFlops = 2.0 * kSize * kSize * kSize;

  DeviceMatmul() {
    void* library = nullptr;
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"})
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    if (create == nullptr || gemm_ == nullptr || create(&handle_) != 0) return;
    cases::Random random(1);
    for (cases::Array* matrix : {&a_, &b_, &c_}) matrix->fill_normal(random).to_device();
    ready_ = true;
  }
  [[nodiscard]] bool ready() const { return ready_; }

  void enqueue() const {
    constexpr int kBfloat16 = 14, kCompute32F = 68, kDefault = -1;  // of library_types.h and cublas_api.h
    const float one = 1, zero = 0;
    const int status =
        gemm_(handle_, 0, 0, kSize, kSize, kSize, &one, a_.view()->data, kBfloat16, kSize, b_.view()->data, kBfloat16,
              kSize, &zero, c_.view()->data, kBfloat16, kSize, kCompute32F, kDefault);
    if (status != 0) throw Error(HOPWELL_DEVICE_ERROR, "cublasGemmEx: status " + std::to_string(status));
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);
  cases::Array a_{"a", DType::kBFloat16, {kSize, kSize}}, b_{"b", DType::kBFloat16, {kSize, kSize}},
      c_{"c", DType::kBFloat16, {kSize, kSize}};
  Gemm gemm_ = nullptr;
  void* handle_ = nullptr;
  bool ready_ = false;
};

// Everything is enqueued before the first wait, so that the device never idles; a write that is larger than the L2
// cache goes before each timed piece.
Measurement measure_on_device(const cases::Instance& instance, const std::string& backend) {
  constexpr double kBudgetSeconds = 0.5;
  constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
  static const DeviceMatmul matmul;
  const auto half = static_cast<std::size_t>(instance.bytes / 2);
  const auto flush = cuda::allocate(kFlushBytes), from = cuda::allocate(half), to = cuda::allocate(half);
  struct Interval {
    cuda::Event start, end;
    [[nodiscard]] double seconds() const { return end.seconds_since(start); }
  };
  const auto timed = [&](const auto& work) {
    Interval interval;
    cuda::fill(flush.get(), std::byte{1}, kFlushBytes, nullptr);
    interval.start.record(nullptr);
    work();
    interval.end.record(nullptr);
    return interval;
  };
  const auto call = [&] { instance.call(backend.c_str(), nullptr); };
  const auto product = [&] { matmul.enqueue(); };
  const auto traffic = [&] { cuda::copy(to.get(), from.get(), half, nullptr); };
  call();
  if (matmul.ready()) product();
  const Interval first = timed(call);
  cuda::synchronize();
  const auto repetitions = static_cast<int>(std::clamp(kBudgetSeconds / first.seconds(), 7.0, 50.0));
  std::vector<Interval> calls, products, copies;
  for (int i = 0; i < repetitions; ++i) {
    if (matmul.ready()) products.push_back(timed(product));
    calls.push_back(timed(call));
    copies.push_back(timed(traffic));
  }
  cuda::synchronize();
  Samples samples;
  for (const Interval& interval : calls) samples.call.push_back(interval.seconds());
  for (const Interval& interval : products) samples.matmul.push_back(interval.seconds());
  for (const Interval& interval : copies) samples.traffic.push_back(interval.seconds());
  return summary(samples, instance.flops, DeviceMatmul::kFlops);
}

}  // namespace

Measurement measure(cases::Instance& instance, const std::string& backend) {
  instance.place_for(backend);
  return cuda::runs(backend) ? measure_on_device(instance, backend) : measure_on_host(instance, backend);
}

}  // namespace hopwell::cli
