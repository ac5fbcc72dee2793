// Which cases a backend refuses: recorded, so that one that takes less than before, or more, fails the cases.
#pragma once

#include <string>

namespace hopwell::cases {

// Words of the error with which the emulated backend of a target, such as sm90, refuses a case; "" if it runs it. The CPU
// refuses none.
std::string refusal(const std::string& op, const std::string& name, const std::string& target);

}  // namespace hopwell::cases
