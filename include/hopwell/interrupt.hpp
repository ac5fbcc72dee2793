// How a program ends a long call on the CPU early: as the Python package does for Ctrl-C.
#ifndef HOPWELL_INTERRUPT_HPP_
#define HOPWELL_INTERRUPT_HPP_

#include <hopwell/hopwell.h>

#include <cstdint>
#include <exception>

namespace hopwell {

/// An operator throws this if an InterruptCheck ended it, and at no other time.
class HOPWELL_API Interrupted : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override;
};

/// While the object lives, operators that this thread calls on the CPU and on emulated backends ask `wanted` on this thread, between
/// items of their work and at most once in 50 ms. If it returns true, the operator throws Interrupted as soon as its other threads have
/// finished their parts. Then the outputs hold anything, and later calls are not affected. `wanted` must not throw.
class HOPWELL_API InterruptCheck {
 public:
  explicit InterruptCheck(bool (*wanted)());
  ~InterruptCheck();
  InterruptCheck(const InterruptCheck&) = delete;
  InterruptCheck& operator=(const InterruptCheck&) = delete;

  /// For operators: asks this thread's check, if there is one and it is time.
  static void poll();

 private:
  bool (*wanted_)();
  std::int64_t next_;  // time of the next question, in nanoseconds
  InterruptCheck* outer_;
};

}  // namespace hopwell

#endif  // HOPWELL_INTERRUPT_HPP_
