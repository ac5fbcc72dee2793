// Runs a mutant in a separate process, so that a crash or hang is detected and affects only that process.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <system_error>

#include "arch/emu/report.hpp"

namespace hopwell::arch::test {

/// Result of a mutant. `how` is empty if its run ended normally, else it describes the end.
struct Verdict {
  bool noticed;
  std::string how;
};

/// Processor time after which a mutant counts as hanging.
inline constexpr unsigned kMutantSeconds = 240;

/// Runs `notices` in a child process and returns whether it returned true. A child that crashes, throws or hangs counts
/// as true.
inline Verdict in_child(const std::function<bool()>& notices, unsigned seconds = kMutantSeconds) {
  enum : int { kUnnoticed = 0, kNoticed = 80, kThrew = 81 };
  // Reads debug information once in the parent, not in every child with a finding.
  [[maybe_unused]] static const emu::CallSite somewhere = [] {
    emu::SiteTable places;
    return places.resolve(places.intern_address(reinterpret_cast<const void*>(&in_child)));
  }();
  std::fflush(nullptr);  // buffered output belongs to the parent
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) {
    const rlimit time{seconds, seconds + 10}, core{0, 0};
    setrlimit(RLIMIT_CPU, &time);
    setrlimit(RLIMIT_CORE, &core);
    alarm(20 * seconds);  // for a mutant that waits without using processor time
    try {
      _exit(notices() ? kNoticed : kUnnoticed);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a mutant throws: %s\n", error.what());
    } catch (...) {
    }
    _exit(kThrew);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "waitpid");
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const bool hangs = signal == SIGXCPU || signal == SIGALRM;
    return {true, hangs ? "a hang" : std::string("a crash: ") + strsignal(signal)};
  }
  const int code = WEXITSTATUS(status);
  if (code == kUnnoticed || code == kNoticed) return {code == kNoticed, ""};
  return {true, code == kThrew ? "an exception" : "an exit with status " + std::to_string(code)};
}

}  // namespace hopwell::arch::test
