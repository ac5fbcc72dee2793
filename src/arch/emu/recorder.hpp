// Interface between the emulator and a recording. If no launch is recorded, Machine::recorder is null and nothing here
// is called.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "recording.hpp"

namespace hopwell::arch::emu {

class Machine;
struct Operation;
struct Thread;

class Recorder {
 public:
  Recorder(Machine& machine, const WorkCount& count);
  ~Recorder();
  LaunchRecord finish(const Report& report);

  // ---- called by the emulator ----
  void start_cluster();
  void end_cluster();
  void executed(const Thread& t);  // an instruction is entered
  void shared_access(Thread& t, uint32_t address, uint32_t bytes, SiteId site);

  enum class Engine : uint8_t { tensor, copies };
  /// The current thread submits an operation to an engine. If the engine has a queue, threads wait for its groups.
  void submitted(Operation& op, Engine engine, const void* queue = nullptr);
  void issued(Engine engine, const void* queue, uint64_t group);  // the same for wgmma, which is not an Operation
  void waited(const void* queue, uint64_t before);                // the current thread waits for the groups before this

  /// Numbers that identify barriers. The number of an mbarrier is its address.
  static uint64_t named_barrier(uint32_t rank, int id) {
    return uint64_t{1} << 32 | uint64_t{rank} << 8 | uint64_t(id);
  }
  static constexpr uint64_t kClusterBarrier = uint64_t{2} << 32, kOwnOperations = uint64_t{3} << 32,
                            kWarpgroup = uint64_t{4} << 32, kWarp = uint64_t{5} << 32, kOwnCopies = uint64_t{6} << 32;
  void arrived(uint64_t barrier);  // by the current thread, or by the operation that is executing
  void phase_ended(uint64_t barrier);
  void phase_ended(uint64_t barrier, const std::vector<Thread*>& waiting, Thread* last);  // `waiting` resume
  void passed(Thread& t, uint64_t barrier);                    // resumes at the end of the last phase
  void met(Thread* const* members, int count, uint32_t mask);  // lanes of a warp, or a warpgroup of 128

  void tensor_memory_allocated(uint32_t rank, uint32_t first_column, uint32_t columns);
  void tensor_memory_freed(uint32_t rank, uint32_t first_column, uint32_t columns);
  void tensor_memory_access(uint32_t rank, int first_column, int columns, bool tensor_core, bool write);

 private:
  struct Interval {
    double begin, end;
  };
  struct Wait {
    double begin, end;
    uint64_t barrier;
    SiteId site;
  };
  struct Lane {
    double clock = 0;
    uint64_t seen = 0;  // instructions that the clock has counted already
    std::vector<Interval> busy;
    std::vector<Wait> waits;
  };
  struct Barrier {
    double arriving = 0, ended = 0;
    std::vector<Interval> phases;
  };
  struct Run {  // consecutive operations of one source line
    double begin, end;
    const char* instruction;
    SiteId site;
    uint32_t operations;
  };
  struct EngineRow {
    double free = 0;
    std::vector<Run> runs;
  };
  /// Combined access of a warp: the n-th execution of a line by each lane since the warp was last converged.
  struct WarpAccess {
    uint32_t mask = 0;
    std::array<uint32_t, 32> address{}, bytes{};
  };
  struct AccessesOfLine {
    std::array<size_t, 32> done{};  // per lane
    std::deque<WarpAccess> open;
    size_t first_open = 0;
  };

  Lane& lane_of(const Thread& t);
  size_t warp_of(const Thread& t) const;
  double now(Thread& t);
  static void be_busy(Lane& lane, double cycles);
  void go_on(Thread& t, double when, uint64_t barrier);
  Work work_since_last();
  double run_on(Engine engine, const Thread& issuer, double earliest, size_t warp);  // returns the end
  void place_tensor_memory(double begin, double end);
  void see(double end) { record_.end = std::max(record_.end, end); }
  void together(size_t warp);
  SharedLine& line_of(SiteId site, const char* instruction);
  std::string name_of(uint64_t barrier) const;
  std::string place_of(SiteId site) const;
  std::string waits_for(const Wait& wait) const;
  static std::vector<Interval> without(const std::vector<Interval>& intervals, std::vector<Interval> cut);
  TimelineRow row_of_warp(size_t warp) const;
  void draw_rows();

  Machine& machine_;
  const WorkCount& count_;
  LaunchRecord record_;
  bool timed_ = true;  // true during the first cluster
  std::vector<Lane> lanes_;
  Work seen_;                         // of all warps, at the time of the last cost
  uint64_t thread_shared_bytes_ = 0;  // the part of Work::shared_bytes that threads accessed
  double operation_end_ = -1;         // end of the asynchronous operation that is executing, or -1
  std::map<uint64_t, Barrier> barriers_;
  std::map<std::pair<Engine, size_t>, EngineRow> engines_;                            // by issuing warp
  std::unordered_map<const void*, std::vector<std::pair<uint64_t, double>>> groups_;  // (group, end) by queue
  std::vector<TensorMemoryUse> unplaced_;                            // uses whose time is not known yet
  std::unordered_map<const char*, std::vector<uint64_t>> executed_;  // by string literal, then by thread
  std::map<std::string, std::vector<uint64_t>> instructions_;
  std::map<std::pair<SiteId, const char*>, SharedLine> lines_;
  std::vector<std::map<std::pair<SiteId, const char*>, AccessesOfLine>> open_accesses_;  // by warp
};

}  // namespace hopwell::arch::emu
