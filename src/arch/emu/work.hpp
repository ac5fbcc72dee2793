// The model of time: what a launch asks of each unit of an SM, by warp, and how many cycles that takes at a chip's rates.
//
// It knows shares of resources and which of them binds, not a time: latencies, waiting and overlap are not in it. Of
// instruction slots it sees instructions of the arch layer and accesses to memory, no arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "rates.hpp"

namespace hopwell::arch::emu {

/// What one or several warps have asked for. Asynchronous operations count for the warp that issues them.
struct Work {
  double tensor_cycles = 0;     // of each product the longer of its arithmetic and of its operands' reads
  double full_rate_cycles = 0;  // what the same products take at the full rate of the tensor pipe
  double flops = 0;             // of products, as they are executed: of padding too
  uint64_t products = 0;
  uint64_t operand_bytes = 0;    // read from shared memory by products
  uint64_t collected_bytes = 0;  // not among these: what products have found in collector buffers
  uint64_t shared_bytes = 0;     // read and written in shared memory by all else
  uint64_t copied_bytes = 0;     // from global into shared memory
  uint64_t gathers = 0;          // gather4 instructions
  uint64_t added_bytes = 0, added_scalars = 0;
  uint64_t tmem_loaded = 0, tmem_stored = 0, tmem_copied = 0;
  uint64_t global_bytes = 0;  // read and written by threads
  uint64_t exponentials = 0;  // and logarithms
  uint64_t slots = 0;         // the most that a lane has executed
  Work& operator+=(const Work& other);
};

/// Cycles that each unit needs for a piece of work; the longest binds.
struct Demand {
  const char* unit;
  double cycles;
};
std::vector<Demand> demands(const Work& work, const Rates& rates);

/// Neighbouring warps that ask for the same kinds of work, and cycles a CTA of that.
struct Role {
  size_t rank, first_warp, last_warp;
  std::vector<Demand> demands;
};

/// What the cycles of a product depend on.
struct ProductForm {
  int m, n, cta_group;
  bool ws, a_in_tmem;
  bool collected = false;   // finds A, or with .ws B, in its collector buffer
  bool alternates = false;  // with .ws: its buffer is not that of the product before
};
/// Cycles of one product of K 32 bytes in one CTA.
double product_cycles(const Rates& rates, const ProductForm& product);

/// Counts what the launches of this host thread ask for while it lives. Without one, nothing is counted.
class WorkCount {
 public:
  explicit WorkCount(const Rates& chip);
  ~WorkCount();
  WorkCount(const WorkCount&) = delete;
  WorkCount& operator=(const WorkCount&) = delete;

  Rates rates;
  std::string kernel;  // the file of the last instruction of the first thread of which it is known
  uint64_t ctas = 0;
  std::vector<Work> warps;  // by the CTA's rank in its cluster, and the warp's place in it; summed over clusters
  uint32_t warps_a_cta = 0;

  [[nodiscard]] Work total() const;
  /// Bytes of HBM traffic if L2 keeps everything: every 32-byte sector that is read, and every one that is written.
  [[nodiscard]] uint64_t memory_bytes() const;
  /// Cycles a CTA by unit, the last HBM.
  [[nodiscard]] std::vector<Demand> units() const;
  [[nodiscard]] std::vector<Role> roles() const;
  /// Units and roles as one JSON object without line breaks.
  [[nodiscard]] std::string json() const;

  // ---- called by the emulator ----
  void start_cluster(uint32_t cluster_ctas, uint32_t cta_warps);
  Work& of(uint32_t rank, int warp) { return warps[rank * warps_a_cta + uint32_t(warp)]; }
  void touch(const void* global, uint64_t bytes, bool write);

 private:
  std::unordered_map<uint64_t, uint8_t> sectors_;  // read 1, written 2
  WorkCount* outer_;
};

/// The innermost WorkCount of this host thread, or null.
WorkCount* current_work_count();

}  // namespace hopwell::arch::emu
