// One function per operator, each in the file of its name. The build generates the list of operators from their
// declarations.
#pragma once

#include "case.hpp"

namespace hopwell::cases {

#define HOPWELL_OPERATOR(name) Suite name();
#include "operators.inc"
#undef HOPWELL_OPERATOR

}  // namespace hopwell::cases
