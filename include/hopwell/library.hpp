// The C++ interface but for the operators: backends, devices, threads. <hopwell/hopwell.hpp> includes it.
#ifndef HOPWELL_LIBRARY_HPP_
#define HOPWELL_LIBRARY_HPP_

#include <hopwell/status.h>
#include <hopwell/error.hpp>
#include <hopwell/tensor.hpp>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace hopwell {

using Stream = hopwell_stream;

/// Names of the backends that this build has and this machine can run, best first; always ends with the emulated ones,
/// if any.
HOPWELL_API std::vector<std::string> backends();
/// The same of those that have a kernel for the operator; an operator that there is not is an Error.
HOPWELL_API std::vector<std::string> backends(std::string_view operator_name);

/// One entry a backend the library knows, present or not: {name, requirements, "" or why it cannot run here}.
struct BackendInfo {
  std::string name, needs, missing;
};
HOPWELL_API std::vector<BackendInfo> backend_info();

/// CUDA devices that the driver reports, found without linking to it: empty without a driver.
struct DeviceInfo {
  std::string name;
  int compute_capability;  ///< major * 10 + minor: 90 for Hopper, 100 for Blackwell
  std::size_t memory_bytes;
};
HOPWELL_API std::vector<DeviceInfo> cuda_devices();

/// What this machine's processor can do, timed when called and with as many threads as the operators use: seconds that
/// one fp32 matrix product of 2048^3 takes (2 * 2048^3 operations), and that summing `bytes` bytes of memory takes.
/// `hopwell bench` states operators as shares of these.
HOPWELL_API double time_cpu_matmul();
HOPWELL_API double time_cpu_read(std::size_t bytes);

/// How many threads a CPU operator may use, the calling one included: as set, else HOPWELL_NUM_THREADS, else
/// OMP_NUM_THREADS, else as many as the process has processors. Results do not depend on it. 0: no longer set.
HOPWELL_API int num_threads();
HOPWELL_API void set_num_threads(int threads);

/// One line a component: the compiler, vector instruction set and number of threads in use.
HOPWELL_API std::string build_info();

HOPWELL_API std::string version();

}  // namespace hopwell

#endif  // HOPWELL_LIBRARY_HPP_
