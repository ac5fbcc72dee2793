// Records which cases a backend does not support. A backend that supports fewer or more cases than recorded fails.
#pragma once

#include <string>
#include <string_view>

namespace hopwell::cases {

// True if the whole name matches a glob: * stands for any letters, ? for any one letter. On a mismatch the last star is
// extended by one letter; earlier stars never change. So the number of steps is at most the product of the lengths.
bool matches(std::string_view name, std::string_view pattern);

// Words of the error with which the emulated backend of a target, such as sm90, rejects a case; "" if it supports the
// case. The CPU supports all cases.
std::string refusal(const std::string& op, const std::string& name, const std::string& target);

}  // namespace hopwell::cases
