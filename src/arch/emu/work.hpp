// The time model: demand of a launch on each unit of an SM, by warp, and the cycles for it at a chip's rates.
//
// The model finds the resource that bounds a launch, not its run time: it has no latency, waiting or overlap.
// Instruction slots count instructions of the arch layer and memory accesses, no arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "rates.hpp"

namespace hopwell::arch::emu {

/// Demand of one or several warps. Asynchronous operations count for the warp that issues them.
struct Work {
  double tensor_cycles = 0;     // per product the maximum of its arithmetic and of its operand reads
  double full_rate_cycles = 0;  // the same products at the full rate of the tensor pipe
  double flops = 0;             // of products as executed, including padding
  uint64_t products = 0;
  uint64_t operand_bytes = 0;    // read from shared memory by products
  uint64_t collected_bytes = 0;  // read from collector buffers by products; not part of operand_bytes
  uint64_t shared_bytes = 0;     // read and written in shared memory by everything else
  uint64_t copied_bytes = 0;     // from global into shared memory
  uint64_t gathers = 0;          // gather4 instructions
  uint64_t added_bytes = 0, added_scalars = 0;
  uint64_t tmem_loaded = 0, tmem_stored = 0, tmem_copied = 0;
  uint64_t global_bytes = 0;  // read and written by threads
  uint64_t exponentials = 0;  // and logarithms
  uint64_t slots = 0;         // largest count of any lane
  Work& operator+=(const Work& other);
};

/// Cycles that one unit needs for the work. The unit with the most cycles bounds the launch.
struct Demand {
  const char* unit;
  double cycles;
};
std::vector<Demand> demands(const Work& work, const Rates& rates);

/// Adjacent warps with the same kinds of work, and cycles per CTA of this work.
struct Role {
  size_t rank, first_warp, last_warp;
  std::vector<Demand> demands;
};

/// Properties of a product that determine its cycles.
struct ProductForm {
  int m, n, cta_group;
  bool ws, a_in_tmem;
  bool collected = false;   // A, or with .ws B, is already in its collector buffer
  bool alternates = false;  // with .ws: uses another buffer than the product before
};
/// Cycles of one product of K = 32 bytes in one CTA.
double product_cycles(const Rates& rates, const ProductForm& product);

/// Counts the demand of this host thread's launches during its lifetime. Without a WorkCount, nothing is counted.
class WorkCount {
 public:
  explicit WorkCount(const Rates& chip);
  ~WorkCount();
  WorkCount(const WorkCount&) = delete;
  WorkCount& operator=(const WorkCount&) = delete;

  Rates rates;
  std::string kernel;  // source file of the last instruction of the first thread for which it is known
  uint64_t ctas = 0;
  std::vector<Work> warps;  // by rank of the CTA and warp index; summed over clusters
  uint32_t warps_a_cta = 0;

  [[nodiscard]] Work total() const;
  /// Bytes of HBM traffic with a perfect L2: every 32-byte sector that is read, and every sector that is written.
  [[nodiscard]] uint64_t memory_bytes() const;
  /// Cycles per CTA by unit; HBM is the last.
  [[nodiscard]] std::vector<Demand> units() const;
  [[nodiscard]] std::vector<Role> roles() const;
  /// Units and roles as one JSON object without line breaks.
  [[nodiscard]] std::string json() const;

  // ---- called by the emulator ----
  void start_cluster(uint32_t cluster_ctas, uint32_t cta_warps);
  Work& of(uint32_t rank, int warp) { return warps[rank * warps_a_cta + uint32_t(warp)]; }
  void touch(const void* global, uint64_t bytes, bool write);

 private:
  std::unordered_map<uint64_t, uint8_t> sectors_;  // bit 0: read, bit 1: written
  WorkCount* outer_;
};

/// The innermost WorkCount of this host thread, or null.
WorkCount* current_work_count();

}  // namespace hopwell::arch::emu
