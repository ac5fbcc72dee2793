#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "cases/cuda.hpp"
#include "device_read.hpp"
#include "stopwatch.hpp"

namespace hopwell::cli {
namespace {

namespace cuda = cases::cuda;

// cuBLAS's product of two random bf16 matrices [8192, 8192], if the library can be found (LD_LIBRARY_PATH).
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
    constexpr int kBfloat16 = 14, kCompute32F = 68, kDefault = -1;  // from library_types.h and cublas_api.h
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

struct Interval {
  cuda::Event start, end;
  [[nodiscard]] double seconds() const { return end.seconds_since(start); }
};

template <class Work>
Interval timed(const Work& work) {
  Interval interval;
  interval.start.record(nullptr);
  work();
  interval.end.record(nullptr);
  return interval;
}

std::vector<double> seconds(const std::vector<Interval>& intervals, int pieces = 1) {
  std::vector<double> all;
  for (const Interval& interval : intervals) all.push_back(interval.seconds() / pieces);
  return all;
}

// Measures an operator that is bound by arithmetic, alternating with cuBLAS. Enqueues everything before the first wait,
// so that the device never idles. A write larger than the L2 cache precedes each timed call.
Measurement measure_arithmetic(const cases::Instance& instance, const std::string& backend) {
  constexpr double kBudgetSeconds = 0.5;
  constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
  static const DeviceMatmul matmul;
  const auto flush = cuda::allocate(kFlushBytes);
  const auto cold = [&](const auto& work) {
    cuda::fill(flush.get(), std::byte{1}, kFlushBytes, nullptr);
    return timed(work);
  };
  const auto call = [&] { instance.call(backend.c_str(), nullptr); };
  const auto product = [&] { matmul.enqueue(); };
  call();
  if (matmul.ready()) product();
  const Interval first = cold(call);
  cuda::synchronize();
  const auto repetitions = static_cast<int>(std::clamp(kBudgetSeconds / first.seconds(), 7.0, 50.0));
  std::vector<Interval> calls, products;
  for (int i = 0; i < repetitions; ++i) {
    if (matmul.ready()) products.push_back(cold(product));
    calls.push_back(cold(call));
  }
  cuda::synchronize();
  return summary({seconds(calls), seconds(products), {}}, instance.flops, DeviceMatmul::kFlops);
}

// A graph of `calls` launches of the reading kernel over memory of its own, in the variant that is fastest for this
// size. The launches cycle through `copies` buffers.
cuda::Graph read_graph(const std::byte* from, std::size_t bytes, int copies, int calls) {
  const auto graph_of = [&](int variant) {
    return cuda::Graph([=](Stream stream) {
      for (int i = 0; i < calls; ++i)
        enqueue_device_read(variant, from + static_cast<std::size_t>(i % copies) * bytes, bytes, stream);
    });
  };
  std::vector<std::pair<double, int>> variants;
  for (int variant = 0; variant < kReadVariants; ++variant) {
    const cuda::Graph graph = graph_of(variant);
    graph.launch(nullptr);
    const Interval interval = timed([&] { graph.launch(nullptr); });
    cuda::synchronize();
    variants.emplace_back(interval.seconds(), variant);
  }
  return graph_of(std::min_element(variants.begin(), variants.end())->second);
}

// Random bytes on the device: 64 MiB, repeated.
std::shared_ptr<std::byte> random_memory(std::size_t bytes) {
  cases::Random random(1);
  std::vector<std::uint64_t> words(std::min(bytes / 8 + 1, std::size_t{8} << 20));
  for (std::uint64_t& word : words) word = random.bits();
  auto memory = cuda::allocate(bytes);
  std::size_t done = std::min(bytes, words.size() * 8);
  cuda::copy_to_device(memory.get(), words.data(), done);
  for (const std::size_t piece = done; done < bytes; done += piece)
    cuda::copy(memory.get() + done, memory.get(), std::min(piece, bytes - done), nullptr);
  return memory;
}

// Measures an operator that is bound by memory traffic, alternating with a kernel that reads the same number of bytes.
// Both run in graphs of at least ten calls, which cycle through copies of the inputs larger than the L2 cache.
Measurement measure_traffic(Subject& subject, const std::string& backend, double bytes_of_a_call) {
  constexpr double kBudgetSeconds = 0.5, kRoundBytes = 600e6;
  const auto bytes = static_cast<std::size_t>(bytes_of_a_call) / 256 * 256 + 256;
  const int copies = static_cast<int>(std::clamp(kRoundBytes / static_cast<double>(bytes), 1.0, 64.0));
  const int calls = (10 + copies - 1) / copies * copies;
  const auto instances = subject.copies(copies, backend);
  // Allocations of a first call must happen before the capture.
  for (const cases::Instance* instance : instances) instance->call(backend.c_str(), nullptr);
  cuda::synchronize();
  const cuda::Graph operation([&](Stream stream) {
    for (int i = 0; i < calls; ++i) instances[static_cast<std::size_t>(i % copies)]->call(backend.c_str(), stream);
  });
  const auto memory = random_memory(bytes * static_cast<std::size_t>(copies));
  const cuda::Graph reading = read_graph(memory.get(), bytes, copies, calls);
  const auto turn = [](const cuda::Graph& graph) { return timed([&] { graph.launch(nullptr); }); };
  operation.launch(nullptr);
  const Interval first = turn(operation);
  cuda::synchronize();
  const auto repetitions = static_cast<int>(std::clamp(kBudgetSeconds / first.seconds(), 7.0, 50.0));
  std::vector<Interval> operations, readings;
  for (int i = 0; i < repetitions; ++i) {
    operations.push_back(turn(operation));
    readings.push_back(turn(reading));
  }
  cuda::synchronize();
  return summary({seconds(operations, calls), {}, seconds(readings, calls)}, 0, 0);
}

}  // namespace

Measurement measure_on_device(Subject& subject, const std::string& backend) {
  constexpr double kRidge = 150;  // FLOP per byte at which tensor cores and memory take equal time, roughly
  const cases::Instance& instance = *subject.copies(1, backend).front();
  if (instance.flops < kRidge * instance.bytes) return measure_traffic(subject, backend, instance.bytes);
  return measure_arithmetic(instance, backend);
}

}  // namespace hopwell::cli
