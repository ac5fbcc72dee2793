// What launches did, event by event, for a report that people read: instructions, bytes, bank conflicts, and who waited for whom.
//
// A Recording keeps what is recorded; recorder.hpp is what the emulator calls meanwhile; page.cpp makes HTML of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch.hpp"
#include "work.hpp"

namespace hopwell::arch::emu {

/// A stretch of a timeline. Its unit is a cycle of the model: see LaunchRecord.
struct Span {
  double begin, end;
  std::string what;  // for the reader: "waits for the mbarrier at +0x8000, kernel.cu:41"
};

/// One warp, or one engine of a CTA: what it was busy with, and what it waited for in between.
struct TimelineRow {
  std::string name;
  uint32_t rank;  // of the CTA in its cluster
  std::vector<Span> busy, waits;
};

/// A barrier and its phases, each from the end of the one before.
struct BarrierRow {
  std::string name;
  uint32_t rank;
  std::vector<Span> phases;
};

/// Columns of a CTA's tensor memory, and how they were used.
struct TensorMemoryUse {
  /// By the tensor core: what it writes (products, tcgen05.cp) and reads. By warps: what they store and read.
  enum class Kind : uint8_t { allocated, product, operand, stored, read } kind;
  uint32_t rank, first_column, columns;
  double begin, end;
};

/// Instructions of one name, as warps execute them: of each warp the most that a lane has executed.
struct InstructionCount {
  std::string name;
  std::vector<uint64_t> of_warp;  // by the CTA's rank in its cluster and the warp's place in it; summed over clusters
  [[nodiscard]] uint64_t total() const;
};

/// Accesses of threads to shared memory at one line.
struct SharedLine {
  std::string instruction;
  CallSite where;
  uint64_t accesses = 0;    // of warps
  uint64_t bytes = 0;       // of all lanes
  uint64_t wavefronts = 0;  // passes through the 32 banks of 4 bytes
  uint64_t conflicts = 0;   // of these: more than one for 32 lanes of 4 bytes, 16 of 8 or 8 of 16
};

/// One launch. Counts are of the whole grid; timelines of its first cluster.
///
/// Time on a timeline is that of the model, not of a GPU: whatever waits goes on when the last of what it waits for is
/// there; a thread takes a cycle an instruction of the arch layer or access to shared memory; products, copies and tensor
/// memory take what their unit needs at the chip's rates; the operations of one warp on one engine follow each other. No
/// latency, no arithmetic, no unit shared between warps. So it shows what the barriers allow, and does not depend on the
/// schedule.
struct LaunchRecord {
  std::string kernel;  // its file
  LaunchShape shape;
  uint64_t ctas = 0;
  uint32_t warps_a_cta = 0;
  Work total;
  std::vector<Demand> units;  // cycles a CTA
  std::vector<Role> roles;
  uint64_t memory_bytes = 0;
  std::vector<InstructionCount> instructions;  // by name
  std::vector<SharedLine> shared;              // by file and line
  std::vector<TimelineRow> rows;
  std::vector<BarrierRow> barriers;
  std::vector<TensorMemoryUse> tensor_memory;
  double end = 0;        // of the timelines
  std::string findings;  // Report::text()
  [[nodiscard]] uint64_t bank_conflicts() const;
};

/// Records the launches of this host thread while it lives, within sessions too. Without one, nothing is recorded. It counts with
/// a WorkCount of its own: one around it sees nothing meanwhile.
class Recording {
 public:
  explicit Recording(const Rates& chip = kB200);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  Rates rates;
  std::vector<LaunchRecord> launches;

  /// Writes all launches as one HTML file that needs no other, whole or not at all. Throws std::runtime_error, which says
  /// why it cannot be written.
  void write_html(const std::string& path) const;

 private:
  Recording* outer_;
};

/// The innermost Recording of this host thread, or null.
Recording* current_recording();

/// The same page as text, and as a file. `left_out`: launches that came after these and were not recorded.
std::string launch_page(const std::vector<LaunchRecord>& launches, const Rates& rates, size_t left_out = 0);
void write_launch_page(const std::string& path, const std::vector<LaunchRecord>& launches, const Rates& rates,
                       size_t left_out = 0);

}  // namespace hopwell::arch::emu
