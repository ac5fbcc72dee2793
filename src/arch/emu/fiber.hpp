// Stackful fibers: one for each emulated CUDA thread, all on one host thread.
#pragma once

#include <cstddef>
#include <vector>

namespace hopwell::arch::emu {

/// Stacks with a guard page below, reused between launches.
class StackPool {
 public:
  static constexpr size_t kBytes = 256 * 1024;
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool();
  std::byte* take();  // lowest usable address; throws std::bad_alloc
  void give_back(std::byte* stack) { free_.push_back(stack); }

 private:
  std::vector<std::byte*> free_, all_;
};

/// One suspended computation. resume() runs it until it calls suspend(); the function must never return.
class Fiber {
 public:
  using Entry = void (*)(void*);
  void create(std::byte* stack, size_t bytes, Entry entry, void* argument);
  void resume();
  void suspend();
  const void* stack_pointer() const { return stack_pointer_; }  // valid while the fiber is suspended

 private:
  static void start();
  void* stack_pointer_ = nullptr;
  void* host_stack_pointer_ = nullptr;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
};

}  // namespace hopwell::arch::emu
