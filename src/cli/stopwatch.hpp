// How long an operator takes, beside what its machine could do.
#pragma once

#include <string>

#include "cases/case.hpp"

namespace hopwell::cli {

struct Measurement {
  double seconds = 0, spread = 0;            // median; (largest - smallest) / median
  double compute_share = 0, read_share = 0;  // of the machine's matrix product and of its bandwidth, medians of ratios
                                             // taken in turns; 0: no ceiling
  double matmul_rate = 0;                    // FLOP/s of the matrix product, median
};

// Times the operator in turns with the ceilings of the machine it runs on: machines drift, ratios of neighbours hold.
Measurement measure(cases::Instance& instance, const std::string& backend);

}  // namespace hopwell::cli
