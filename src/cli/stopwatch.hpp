// Measures the run time of an operator and the peak rates of its machine.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "cases/case.hpp"

namespace hopwell::cli {

struct Measurement {
  double seconds = 0, spread = 0;            // median; (largest - smallest) / median
  double compute_share = 0, read_share = 0;  // fraction of the machine's matrix-product rate and of its bandwidth:
                                             // medians of ratios of adjacent measurements; 0: no peak rate
  double matmul_rate = 0;                    // FLOP/s of the matrix product, median
};

// Copies of one operator call. Each copy has the same inputs in its own memory.
class Subject {
 public:
  explicit Subject(std::function<cases::Instance()> make) : make_(std::move(make)) {}
  std::vector<cases::Instance*> copies(int count, const std::string& backend);  // in the backend's memory

 private:
  std::function<cases::Instance()> make_;
  std::deque<cases::Instance> copies_;
};

// Times the operator, alternating with the peak-rate kernels. A machine's speed drifts, but ratios of adjacent
// measurements are stable.
Measurement measure(Subject& subject, const std::string& backend);
Measurement measure_on_device(Subject& subject, const std::string& backend);

// Seconds of the operator and of the peak-rate kernels measured next to it.
struct Samples {
  std::vector<double> call, matmul, traffic;
};
Measurement summary(const Samples& samples, double flops, double matmul_flops);

}  // namespace hopwell::cli
