// How long an operator takes, beside what its machine could do.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "cases/case.hpp"

namespace hopwell::cli {

struct Measurement {
  double seconds = 0, spread = 0;            // median; (largest - smallest) / median
  double compute_share = 0, read_share = 0;  // of the machine's matrix product and of its bandwidth, medians of ratios
                                             // taken in turns; 0: no ceiling
  double matmul_rate = 0;                    // FLOP/s of the matrix product, median
};

// One call of an operator, as often as a measurement wants it: each copy has the same inputs in memory of its own.
class Subject {
 public:
  explicit Subject(std::function<cases::Instance()> make) : make_(std::move(make)) {}
  std::vector<cases::Instance*> copies(int count, const std::string& backend);  // where the backend takes them

 private:
  std::function<cases::Instance()> make_;
  std::deque<cases::Instance> copies_;
};

// Times the operator in turns with the ceilings of the machine it runs on: machines drift, ratios of neighbours hold.
Measurement measure(Subject& subject, const std::string& backend);
Measurement measure_on_device(Subject& subject, const std::string& backend);

// Seconds of the operator and, taken beside each, of the ceilings.
struct Samples {
  std::vector<double> call, matmul, traffic;
};
Measurement summary(const Samples& samples, double flops, double matmul_flops);

}  // namespace hopwell::cli
