// Records launches for a report: instructions, bytes, bank conflicts, and which thread waited for which event.
//
// A Recording holds the data. The emulator calls recorder.hpp during a launch; page.cpp writes the HTML page.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch.hpp"
#include "work.hpp"

namespace hopwell::arch::emu {

/// An interval of a timeline, in cycles of the time model: see LaunchRecord.
struct Span {
  double begin, end;
  std::string what;  // text for the reader: "waits for mbarrier full[1] at kernel.cu:41"
};

/// Busy intervals of one warp or of one engine of a CTA, and its waits in between.
struct TimelineRow {
  std::string name;
  uint32_t rank;  // of the CTA in its cluster
  std::vector<Span> busy, waits;
};

/// A barrier and its phases. Each phase begins at the end of the previous one.
struct BarrierRow {
  std::string name;
  uint32_t rank;
  std::vector<Span> phases;
};

/// Columns of a CTA's tensor memory, and how they were used.
struct TensorMemoryUse {
  /// The tensor core writes (products, tcgen05.cp) and reads operands. Warps store and read.
  enum class Kind : uint8_t { allocated, product, operand, stored, read } kind;
  uint32_t rank, first_column, columns;
  double begin, end;
};

/// Executions of the instructions of one name, per warp: the largest count of any lane.
struct InstructionCount {
  std::string name;
  std::vector<uint64_t> of_warp;  // by rank of the CTA and warp index; summed over clusters
  [[nodiscard]] uint64_t total() const;
};

/// Accesses of threads to shared memory at one line.
struct SharedLine {
  std::string instruction;
  CallSite where;
  uint64_t accesses = 0;    // by warps
  uint64_t bytes = 0;       // over all lanes
  uint64_t wavefronts = 0;  // passes through the 32 banks of 4 bytes
  uint64_t conflicts = 0;   // wavefronts above the minimum: 1 per 32 lanes of 4 bytes, 16 of 8 or 8 of 16
};

/// One launch. Counts cover the whole grid; timelines cover its first cluster.
///
/// Timelines show the time of the model, not of a GPU. A wait ends when the last event that it waits for is complete. A
/// thread takes one cycle per instruction of the arch layer and per access to shared memory. Products, copies and
/// tensor-memory accesses take the time that their unit needs at the chip's rates. The operations of one warp on one
/// engine are sequential. The model has no latency, no arithmetic, and no contention between warps. So a timeline shows
/// the concurrency that the barriers allow, and does not depend on the schedule.
struct LaunchRecord {
  std::string kernel;  // source file of the kernel
  LaunchShape shape;
  uint64_t ctas = 0;
  uint32_t warps_a_cta = 0;
  Work total;
  std::vector<Demand> units;  // cycles per CTA
  std::vector<Role> roles;
  uint64_t memory_bytes = 0;
  std::vector<InstructionCount> instructions;  // sorted by name
  std::vector<SharedLine> shared;              // sorted by file and line
  std::vector<TimelineRow> rows;
  std::vector<BarrierRow> barriers;
  std::vector<TensorMemoryUse> tensor_memory;
  double end = 0;        // end of the timelines
  std::string findings;  // Report::text()
  [[nodiscard]] uint64_t bank_conflicts() const;
};

/// Records the launches of this host thread during its lifetime, including launches inside of sessions. Without a
/// Recording, nothing is recorded. It counts with a WorkCount of its own, so an enclosing WorkCount counts nothing
/// during its lifetime.
class Recording {
 public:
  explicit Recording(const Rates& chip = kB200);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  Rates rates;
  std::vector<LaunchRecord> launches;

  /// Writes all launches as one self-contained HTML file, atomically. Throws std::runtime_error with the reason if the
  /// file cannot be written.
  void write_html(const std::string& path) const;

 private:
  Recording* outer_;
};

/// The innermost Recording of this host thread, or null.
Recording* current_recording();

/// The same page as text, and as a file. `left_out`: number of later launches that were not recorded.
std::string launch_page(const std::vector<LaunchRecord>& launches, const Rates& rates, size_t left_out = 0);
void write_launch_page(const std::string& path, const std::vector<LaunchRecord>& launches, const Rates& rates,
                       size_t left_out = 0);

}  // namespace hopwell::arch::emu
