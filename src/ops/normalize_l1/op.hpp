// normalize_l1: what its backends are given. Meaning and shapes: hopwell.h.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"

namespace hopwell::ops::normalize_l1 {

inline constexpr const char* kName = "normalize_l1";

struct Problem {
  View attn;  // fp32 [rows, columns]
  View out;   // like it, or it
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

}  // namespace hopwell::ops::normalize_l1
