// normalize_l1: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"

namespace hopwell {
struct NormalizeL1Args;
}  // namespace hopwell

namespace hopwell::ops::normalize_l1 {

inline constexpr const char* kName = "normalize_l1";

struct Problem {
  View attn;  // fp32 [rows, columns]
  View out;   // same shape; may be attn itself
  runtime::Device device;
};

Problem check(const NormalizeL1Args& args);

}  // namespace hopwell::ops::normalize_l1
