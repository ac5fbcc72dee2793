// Running a grid on the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

#include "options.hpp"
#include "report.hpp"

namespace hopwell::arch::emu {

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};
struct Extent {
  uint32_t x = 1, y = 1, z = 1;
  constexpr uint32_t volume() const { return x * y * z; }
};
struct LaunchShape {
  Extent grid, block, cluster;
  size_t shared_bytes = 0;
};

/// Runs `kernel` once for every thread of the grid and reports its findings. Clusters run one after another, so CTAs
/// of different clusters cannot wait for each other. Throws std::invalid_argument if the shape is impossible.
Report launch(const LaunchShape& shape, const Options& options, const std::function<void()>& kernel);

/// Sets the options for the launches of this host thread during its lifetime, and collects their findings. Sessions
/// nest.
class Session {
 public:
  explicit Session(Options session_options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  Options options;
  Report report;  // findings of all launches so far

 private:
  Session* outer_;
};

/// Thrown for the findings of a launch outside of any session.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// launch() with the options of the innermost session; see arch/launch.hpp.
void launch_in_session(const LaunchShape& shape, const std::function<void()>& kernel);

/// While a launch runs, its host thread calls this from time to time. An exception that it throws ends the launch, and
/// leaves it.
extern thread_local void (*poll)();

/// Makes a memory fault inside of a kernel report its thread and last instruction.
void install_fault_handler();

}  // namespace hopwell::arch::emu
