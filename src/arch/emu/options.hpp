// Options of an emulated launch: schedule, checks, and policies where PTX is silent.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace hopwell::arch::emu {

/// When queued asynchronous operations (copies, tensor-core work) execute, relative to the threads.
enum class Async : uint8_t {
  eager,   // at once, as if the engine were infinitely fast
  late,    // only when no thread can proceed without them
  random,  // at a random time in between
};

/// Points on which PTX is silent, or which published kernels treat differently. The defaults are the strict choice.
struct Policy {
  /// Data written by cp.async is generic-proxy data: a wgmma or tcgen05 read of it needs fence.proxy.async.
  bool cp_async_needs_proxy_fence = true;
  /// fence.proxy.async covers only the writes of the thread that executes it. False: all writes before it.
  bool proxy_fence_on_writer_side = true;
  /// tcgen05.ld destinations hold poison until tcgen05.wait::ld. False: the value is there at once.
  bool tmem_load_poisoned_until_wait = true;
  /// Reads by tcgen05.ld count as finished for other threads only after fence::before_thread_sync, not after wait::ld.
  bool tmem_wait_needs_fence_before = true;
  /// tcgen05.dealloc must come after fence::after_thread_sync, not only after the barrier.
  bool dealloc_needs_fence_after = false;
  /// tcgen05.ld/st must name the lane quarter of the warp. False: lanes 0-31 mean the warp's own quarter.
  bool tmem_quarter_must_be_named = true;
  /// An mbarrier arrival from another CTA is acquired only by a wait at cluster scope.
  bool remote_arrival_needs_cluster_wait = true;
};

/// A call in a kernel's source.
struct CallSite {
  std::string file;
  uint32_t line = 0, column = 0;
  friend bool operator==(const CallSite&, const CallSite&) = default;
};

/// A synchronising instruction at a call site. A function that takes the site of its caller may have several there.
struct SynchronisationCall {
  std::string instruction;
  CallSite where;
  friend bool operator==(const SynchronisationCall&, const SynchronisationCall&) = default;
};

/// The mbarriers of one name that are initialised at a call site with an arrival count.
struct BarrierArray {
  CallSite where;
  std::string name;  // as in findings, without numbers of elements: "ring.full[]"; "barriers" if they have no names
  uint32_t arrivals = 0;
  friend bool operator==(const BarrierArray&, const BarrierArray&) = default;
};
struct CountChange {
  BarrierArray barriers;
  int by = 0;
};

struct Options {
  uint64_t seed = 1;
  Async async = Async::random;
  int late_cta = -1;                    // rank whose threads are scheduled 256 times less often; -1: none
  bool check = true;                    // vector clocks and shadow memory; false: only numerical results and hangs
  double spurious_wakeups = 0.02;       // how often mbarrier.try_wait returns false without a reason
  size_t max_findings = 32;             // distinct findings kept
  uint64_t max_switches = 200'000'000;  // a launch that polls longer than this is reported as a livelock
  Policy policy{};
  bool throw_findings = false;  // in a session: a launch ends at its first finding and throws CheckFailed
  std::optional<SynchronisationCall> leave_out{};  // mutation testing: skips this instruction at this place
  std::optional<CountChange> change_count{};       // mutation testing: initialises these mbarriers with another count
};

}  // namespace hopwell::arch::emu
