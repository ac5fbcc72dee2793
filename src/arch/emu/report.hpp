// Findings of a launch as text, with the source line of every access.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "../platform.hpp"
#include "options.hpp"

namespace hopwell::arch::emu {

enum class Kind : uint8_t {
  race,           // two accesses without an order between them
  proxy,          // ordered, but a proxy fence is missing
  uninitialized,  // read of memory that nothing wrote
  bounds,         // outside of the CTA's shared memory
  barrier,        // misuse of bar, barrier.cluster or an mbarrier
  transaction,    // byte counts of an mbarrier do not add up
  tensor_memory,  // allocation, lanes, columns
  descriptor,     // matrix, instruction or tensor-map descriptor
  divergence,     // threads of a warp or warpgroup disagree
  pending,        // asynchronous work not waited for
  deadlock,
  unsupported,  // an instruction or form of it that this emulator does not model
};
const char* name(Kind kind);

struct Finding {
  Kind kind;
  std::string text;  // one sentence: instruction, thread, CTA, and the missing instruction
  CallSite where;    // the instruction that noticed
  CallSite other;    // the earlier access, if there is one
  uint64_t count = 1;
};

/// A synchronisation call that was executed, and how often, for mutation testing.
struct SynchronisationCount {
  SynchronisationCall call;
  uint64_t calls = 0;
};

struct Statistics {
  uint64_t switches = 0, shared_accesses = 0, tensor_operations = 0, bulk_copies = 0;
};

struct Report {
  std::vector<Finding> findings;
  std::vector<SynchronisationCount> synchronisation;
  std::vector<BarrierArray> barriers;  // for mutation testing
  Statistics statistics;
  bool clean() const { return findings.empty(); }
  bool has(Kind kind) const;
  /// All findings, a paragraph each, or "no findings\n".
  std::string text() const;
};

using SiteId = uint16_t;

/// Numbers for source places, so that every shadow cell can remember one in 16 bits. Place 0 is "unknown".
class SiteTable {
 public:
  SiteTable() : places_(1) {}
  SiteId intern(const Site& site) {
    static_assert(sizeof site == sizeof(uintptr_t));  // it points to data of the compiler
    const auto key = bit_cast<uintptr_t>(site);
    const Recent& slot = recent(key);
    return slot.key == key ? slot.id : find(key, {site.file_name(), site.line(), site.column(), 0});
  }
  SiteId intern_address(const void* return_address) {  // of compiler-inserted memory hooks
    const auto key = reinterpret_cast<uintptr_t>(return_address);
    const Recent& slot = recent(key);
    return slot.key == key ? slot.id : find(key, {nullptr, 0, 0, key});
  }
  CallSite resolve(SiteId id);  // looks debug information up for addresses

 private:
  struct Place {
    const char* file;
    uint32_t line, column;
    uintptr_t address;
    bool operator==(const Place&) const = default;
  };
  struct Hash {
    size_t operator()(const Place& p) const {
      return (reinterpret_cast<uintptr_t>(p.file) ^ p.address * 0x9e3779b97f4a7c15u) + p.line * 0x85ebca6bu + p.column;
    }
  };
  // Most lookups repeat: a direct-mapped cache in front of the map. A key is an address of constant data or of code;
  // several may have one place.
  struct Recent {
    uintptr_t key = 0;
    SiteId id = 0;
  };
  static constexpr size_t kRecent = 1024;
  Recent& recent(uintptr_t key) { return recent_[(key * 0x9e3779b97f4a7c15u >> 32) % kRecent]; }
  SiteId find(uintptr_t key, const Place& place);
  std::vector<Place> places_;
  std::unordered_map<Place, SiteId, Hash> index_;
  std::array<Recent, kRecent> recent_{};
};

/// "file.cu:12", or "an unknown place".
std::string to_string(const CallSite& site);

}  // namespace hopwell::arch::emu
