#include "suites.hpp"

namespace hopwell::cases {

const std::vector<Suite>& suites() {
#define HOPWELL_OPERATOR(name) name(),
  static const std::vector<Suite> all = {
#include "operators.inc"
  };
#undef HOPWELL_OPERATOR
  return all;
}

}  // namespace hopwell::cases
