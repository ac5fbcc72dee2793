// Records which cases a backend does not support. A backend that supports fewer or more cases than recorded fails.
#pragma once

#include <string>

namespace hopwell::cases {

// Words of the error with which the emulated backend of a target, such as sm90, rejects a case; "" if it supports the
// case. The CPU supports all cases.
std::string refusal(const std::string& op, const std::string& name, const std::string& target);

}  // namespace hopwell::cases
