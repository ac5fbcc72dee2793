// Cases that a backend does not support, recorded beside the cases of an operator. A backend that supports fewer or
// more cases than recorded fails.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hopwell::cases {

// Cases that the emulated backends of some targets do not support. Targets, such as sm90, and globs of cases are
// separated by spaces. `reason` is a part of the error.
struct Unsupported {
  std::string_view targets, reason, cases;
};

// True if the whole name matches a glob: * stands for any letters, ? for any one letter. On a mismatch the last star is
// extended by one letter; earlier stars never change. So the number of steps is at most the product of the lengths.
bool matches(std::string_view name, std::string_view pattern);

// The reason of the first row that has the target and the case, or "". The CPU supports all cases.
std::string reason_of(const std::vector<Unsupported>& rows, const std::string& name, const std::string& target);

}  // namespace hopwell::cases
