// A mutant in a process of its own: one that crashes or hangs is noticed like any other, and ends nothing but itself.
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

/// What became of a mutant. `how` is empty if its run came to an end of its own, and otherwise says how it ended.
struct Verdict {
  bool noticed;
  std::string how;
};

/// Processor time that a mutant may take before it counts as one that hangs.
inline constexpr unsigned kMutantSeconds = 240;

/// Runs `notices` in a child process and says whether it gave true; a child that crashes, throws or hangs is noticed too.
inline Verdict in_child(const std::function<bool()>& notices, unsigned seconds = kMutantSeconds) {
  enum : int { kUnnoticed = 0, kNoticed = 80, kThrew = 81 };
  // Debug information is read here, once, and not by every child that has a finding.
  [[maybe_unused]] static const emu::CallSite somewhere = [] {
    emu::SiteTable places;
    return places.resolve(places.intern_address(reinterpret_cast<const void*>(&in_child)));
  }();
  std::fflush(nullptr);  // what is buffered belongs to the parent
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) {
    const rlimit time{seconds, seconds + 10}, core{0, 0};
    setrlimit(RLIMIT_CPU, &time);
    setrlimit(RLIMIT_CORE, &core);
    alarm(20 * seconds);  // for one that waits without using any
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
