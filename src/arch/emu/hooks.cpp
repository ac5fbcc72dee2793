// Functions that a compiler calls with -fsanitize=thread. Kernel files are compiled with that flag but not linked with
// its runtime. These functions replace the runtime, so the emulator sees every ordinary access to shared memory.
#include <algorithm>
#include <cstdint>

#include "machine.hpp"

namespace hopwell::arch::emu {
namespace {

bool on_stack(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(current->stack) < StackPool::kBytes;
}

void count_global(const void* pointer, size_t bytes, bool write) {
  const auto within = [at = reinterpret_cast<uintptr_t>(pointer)](const void* begin, size_t size) {
    return at - reinterpret_cast<uintptr_t>(begin) < size;
  };
  if (on_stack(pointer)) return;
  // The indices of a thread and of its CTA are special registers.
  if (within(machine->threads.data(), machine->threads.size() * sizeof(Thread))) return;
  if (within(machine->ctas.data(), machine->ctas.size() * sizeof(Cta))) return;
  ++current->instructions;
  machine->work->touch(pointer, bytes, write);
  count_work([&](Work& w) { w.global_bytes += bytes; });
}

// Of a watched address. Not inlined: most accesses end before it, and would save registers for nothing.
__attribute__((noinline)) void watched_access(const void* pointer, size_t bytes, bool write,
                                              const void* return_address) {
  Thread* const thread = current;
  if (!thread) return;
  Machine& m = *machine;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(m.window);
  if (offset >= m.window_bytes) {  // stack or global memory
    if (m.work) count_global(pointer, bytes, write);
    return;
  }
  ++thread->instructions;
  thread->instruction = write ? "store" : "load";
  thread->site = m.sites.intern_address(return_address);
  m.generic_access(*thread, uint32_t(offset), uint32_t(bytes), write ? Access::write : Access::read, thread->site);
}

inline void access(const void* pointer, size_t bytes, bool write, const void* return_address) {
  if (watched.has(reinterpret_cast<uintptr_t>(pointer))) [[unlikely]]
    watched_access(pointer, bytes, write, return_address);
}

// Local variables are registers on a GPU, so accesses to the stack are not checked. The compiler calls the hook for n
// bytes if the type is aligned to n bytes, but to 8 for 16 bytes. arch::load_vector() and store_vector() check all 16.
__attribute__((noinline)) void misaligned_access(const void* pointer, size_t bytes, bool write,
                                                 const void* return_address) {
  Thread* const thread = current;
  if (!thread || on_stack(pointer)) return;
  Machine& m = *machine;
  thread->instruction = write ? "store" : "load";
  thread->site = m.sites.intern_address(return_address);
  m.stop(Kind::bounds, format("the address of %zu bytes must be %zu-byte aligned", bytes, std::min<size_t>(bytes, 8)));
}

template <size_t kBytes>
void aligned_access(const void* pointer, bool write, const void* return_address) {
  if (reinterpret_cast<uintptr_t>(pointer) % std::min<size_t>(kBytes, 8)) [[unlikely]]
    misaligned_access(pointer, kBytes, write, return_address);
  access(pointer, kBytes, write, return_address);
}

}  // namespace
}  // namespace hopwell::arch::emu

using hopwell::arch::emu::access;
using hopwell::arch::emu::aligned_access;

// The names are the compiler's interface, one for each size, so a macro spells them out.
#define HOPWELL_HOOK(bytes)                                                                                     \
  void __tsan_read##bytes(void* p) { aligned_access<bytes>(p, false, __builtin_return_address(0)); }            \
  void __tsan_write##bytes(void* p) { aligned_access<bytes>(p, true, __builtin_return_address(0)); }            \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, false, __builtin_return_address(0)); }          \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, true, __builtin_return_address(0)); }          \
  void __tsan_volatile_read##bytes(void* p) { aligned_access<bytes>(p, false, __builtin_return_address(0)); }   \
  void __tsan_volatile_write##bytes(void* p) { aligned_access<bytes>(p, true, __builtin_return_address(0)); }   \
  void __tsan_unaligned_volatile_read##bytes(void* p) { access(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_volatile_write##bytes(void* p) { access(p, bytes, true, __builtin_return_address(0)); }

// Atomics of the host code that kernel files include (guards of local statics): plain atomic operations.
#define HOPWELL_ATOMIC(bits, type)                                                                                  \
  type __tsan_atomic##bits##_load(const type* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }              \
  void __tsan_atomic##bits##_store(type* p, type v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }              \
  type __tsan_atomic##bits##_exchange(type* p, type v, int) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); } \
  type __tsan_atomic##bits##_fetch_add(type* p, type v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } \
  type __tsan_atomic##bits##_fetch_sub(type* p, type v, int) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); } \
  type __tsan_atomic##bits##_fetch_and(type* p, type v, int) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); } \
  type __tsan_atomic##bits##_fetch_or(type* p, type v, int) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }   \
  type __tsan_atomic##bits##_fetch_xor(type* p, type v, int) { return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); } \
  int __tsan_atomic##bits##_compare_exchange_strong(type* p, type* e, type v, int, int) {                           \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                         \
  }                                                                                                                 \
  int __tsan_atomic##bits##_compare_exchange_weak(type* p, type* e, type v, int, int) {                             \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                         \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, size_t n) { access(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { access(p, n, true, __builtin_return_address(0)); }
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
HOPWELL_HOOK(1)
HOPWELL_HOOK(2)
HOPWELL_HOOK(4)
HOPWELL_HOOK(8)
HOPWELL_HOOK(16)
HOPWELL_ATOMIC(8, uint8_t)
HOPWELL_ATOMIC(16, uint16_t)
HOPWELL_ATOMIC(32, uint32_t)
HOPWELL_ATOMIC(64, uint64_t)
}
