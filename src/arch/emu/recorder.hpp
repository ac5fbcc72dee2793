// What the emulator tells of a launch that is recorded. Machine::recorder is null otherwise, and nothing here is called.
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
  /// The current thread hands an operation to an engine. Those with a queue are waited for by group.
  void submitted(Operation& op, Engine engine, const void* queue = nullptr);
  void issued(Engine engine, const void* queue, uint64_t group);  // the same for wgmma, which is no Operation
  void waited(const void* queue, uint64_t before);                // the current thread, for all groups before that one

  /// Barriers by number: an mbarrier's is its address.
  static uint64_t named_barrier(uint32_t rank, int id) {
    return uint64_t{1} << 32 | uint64_t{rank} << 8 | uint64_t(id);
  }
  static constexpr uint64_t kClusterBarrier = uint64_t{2} << 32, kOwnOperations = uint64_t{3} << 32,
                            kWarpgroup = uint64_t{4} << 32, kWarp = uint64_t{5} << 32;
  void arrived(uint64_t barrier);  // whoever runs: the current thread, or an operation that is carried out
  void phase_ended(uint64_t barrier);
  void phase_ended(uint64_t barrier, const std::vector<Thread*>& waiting, Thread* last);  // who go on
  void passed(Thread& t, uint64_t barrier);                    // goes on at the end of the last phase
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
    uint64_t seen = 0;  // of its instructions, those that the clock has counted
    std::vector<Interval> busy;
    std::vector<Wait> waits;
  };
  struct Barrier {
    double arriving = 0, ended = 0;
    std::vector<Interval> phases;
  };
  struct Run {  // operations of one line, one after the other
    double begin, end;
    const char* instruction;
    SiteId site;
    uint32_t operations;
  };
  struct EngineRow {
    double free = 0;
    std::vector<Run> runs;
  };
  /// What the lanes of a warp access together: each lane's n-th execution of a line since the warp was last together.
  struct WarpAccess {
    uint32_t mask = 0;
    std::array<uint32_t, 32> address{}, bytes{};
  };
  struct AccessesOfLine {
    std::array<size_t, 32> done{};  // by each lane
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
  TimelineRow row_of_warp(size_t warp) const;
  void draw_rows();

  Machine& machine_;
  const WorkCount& count_;
  LaunchRecord record_;
  bool timed_ = true;  // during the first cluster
  std::vector<Lane> lanes_;
  Work seen_;                         // of all warps, when the last cost was taken
  uint64_t thread_shared_bytes_ = 0;  // of Work::shared_bytes: what threads accessed
  double operation_end_ = -1;         // of the asynchronous operation that is carried out, if one is
  std::map<uint64_t, Barrier> barriers_;
  std::map<std::pair<Engine, size_t>, EngineRow> engines_;                            // by the warp that issues
  std::unordered_map<const void*, std::vector<std::pair<uint64_t, double>>> groups_;  // group and end, by queue
  std::vector<TensorMemoryUse> unplaced_;                            // uses whose time is not known yet
  std::unordered_map<const char*, std::vector<uint64_t>> executed_;  // by the literal, then by thread
  std::map<std::string, std::vector<uint64_t>> instructions_;
  std::map<std::pair<SiteId, const char*>, SharedLine> lines_;
  std::vector<std::map<std::pair<SiteId, const char*>, AccessesOfLine>> open_accesses_;  // by warp
};

}  // namespace hopwell::arch::emu
