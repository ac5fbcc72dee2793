#include "stopwatch.hpp"

#include <algorithm>
#include <chrono>

namespace hopwell::cli {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

Measurement measure_on_host(Subject& subject, const std::string& backend) {
  constexpr double kBudgetSeconds = 4, kMatmulFlops = 2.0 * 2048 * 2048 * 2048;
  const cases::Instance& instance = *subject.copies(1, backend).front();
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

}  // namespace

std::vector<cases::Instance*> Subject::copies(int count, const std::string& backend) {
  std::vector<cases::Instance*> some;
  for (int i = 0; i < count; ++i) {
    if (copies_.size() == some.size()) copies_.push_back(make_());
    some.push_back(&copies_[some.size()]);
    some.back()->place_for(backend);
  }
  return some;
}

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

Measurement measure(Subject& subject, const std::string& backend) {
#ifdef HOPWELL_CUDA_BACKENDS
  if (cases::cuda::runs(backend)) return measure_on_device(subject, backend);
#endif
  return measure_on_host(subject, backend);
}

}  // namespace hopwell::cli
