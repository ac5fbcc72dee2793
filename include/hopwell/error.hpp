// hopwell::Error: the only exception type of the library's C++ functions.
#ifndef HOPWELL_ERROR_HPP_
#define HOPWELL_ERROR_HPP_

#include <hopwell/status.h>

#include <stdexcept>
#include <string>

namespace hopwell {

/// The message names the operator, the argument, the expected value and the given value:
/// `sparse_mla_forward: indices must be int32 [s_q, h_kv, topk]; got int64 [4, 1, 2048]`.
class HOPWELL_API Error : public std::runtime_error {
 public:
  Error(hopwell_status status, const std::string& message) : std::runtime_error(message), status_(status) {}

  [[nodiscard]] hopwell_status status() const noexcept { return status_; }

 private:
  hopwell_status status_;
};

}  // namespace hopwell

#endif  // HOPWELL_ERROR_HPP_
