// Vector clocks: which past accesses an agent is ordered after.
//
// An agent is anything that touches memory: a thread, or an asynchronous engine that acts for it (the copies that
// complete on one mbarrier, the wgmma operations of a warpgroup, the tensor-core operations of one issuing thread, …).
// Each agent counts its own steps. An access is stamped with (agent, step). Thread t is ordered after access (a, c) if
// t's clock has c or more for agent a: then a chain of barriers, waits and fences leads from the access to t.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "report.hpp"

namespace hopwell::arch::emu {

using AgentId = uint16_t;
inline constexpr AgentId kNoAgent = 0xffff;

/// One step of one agent, and the source line it came from.
struct Epoch {
  uint32_t step = 0;
  AgentId agent = kNoAgent;
  SiteId site = 0;
  bool empty() const { return agent == kNoAgent; }
  bool same_step(const Epoch& other) const { return agent == other.agent && step == other.step; }
};

/// Steps of 64 consecutive agents. Clocks with equal steps share one block, so that a join has few blocks to compare:
/// after a barrier, the clocks of its threads differ only in the threads' own steps.
struct ClockBlock {
  static constexpr size_t kAgents = 64;
  std::array<uint32_t, kAgents> steps{};
  uint32_t owners = 0;  // not atomic: all clocks of a cluster belong to one host thread
};

/// least[i] = min(least[i], steps[i]) for the agents of one block.
void lower_steps(uint32_t* least, const uint32_t* steps);

/// Reference-counted handle of a block; may be empty.
class ClockBlockOwner {
 public:
  ClockBlockOwner() = default;
  ClockBlockOwner(const ClockBlockOwner& other) : block_(other.block_) {
    if (block_) ++block_->owners;
  }
  ClockBlockOwner(ClockBlockOwner&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  ClockBlockOwner& operator=(ClockBlockOwner other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~ClockBlockOwner() {
    // A block with an owner is alive. NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDelete)
    if (block_ && --block_->owners == 0) delete block_;
  }
  const ClockBlock* get() const { return block_; }
  /// Returns a block for writing. Copies the block first if other clocks share it.
  ClockBlock& own() {
    if (!block_ || block_->owners > 1) {
      auto* copy = block_ ? new ClockBlock(*block_) : new ClockBlock;
      copy->owners = 0;
      *this = ClockBlockOwner(copy);
    }
    return *block_;
  }

 private:
  explicit ClockBlockOwner(ClockBlock* block) : block_(block) { ++block_->owners; }
  ClockBlock* block_ = nullptr;
};

/// Known step of every agent; 0 for an agent that is not in the clock yet. The clock grows when new agents appear. A
/// step never decreases.
class VectorClock {
 public:
  uint32_t operator[](AgentId agent) const {
    const uint32_t* steps = block(agent / ClockBlock::kAgents);
    return steps ? steps[agent % ClockBlock::kAgents] : 0;
  }
  bool covers(const Epoch& e) const { return (*this)[e.agent] >= e.step; }
  void raise(AgentId agent, uint32_t step) {
    if ((*this)[agent] >= step) return;
    const size_t number = agent / ClockBlock::kAgents;
    if (number >= blocks_.size()) blocks_.resize(number + 1);
    blocks_[number].own().steps[agent % ClockBlock::kAgents] = step;
  }
  /// Removes one agent from a copy of a clock.
  void forget(AgentId agent) {
    if ((*this)[agent]) blocks_[agent / ClockBlock::kAgents].own().steps[agent % ClockBlock::kAgents] = 0;
  }
  void join(const VectorClock& other) {
    if (other.blocks_.size() > blocks_.size()) blocks_.resize(other.blocks_.size());
    for (size_t i = 0; i < other.blocks_.size(); ++i)
      if (blocks_[i].get() != other.blocks_[i].get()) join_block(blocks_[i], other.blocks_[i]);
  }
  /// Steps of agents ClockBlock::kAgents * number and following. Null: all steps of the block are 0.
  const uint32_t* block(size_t number) const {
    const ClockBlock* found = number < blocks_.size() ? blocks_[number].get() : nullptr;
    return found ? found->steps.data() : nullptr;
  }
  void clear() { blocks_.clear(); }

 private:
  static void join_block(ClockBlockOwner& mine, const ClockBlockOwner& theirs);
  std::vector<ClockBlockOwner> blocks_;
};

/// Knowledge that synchronisation passes from thread to thread.
struct Knowledge {
  VectorClock ordered;  // accesses that happened before
  VectorClock proxied;  // generic-proxy writes among them that a proxy fence has made visible to the async proxy
  VectorClock freed;    // accesses that have completed but were not released: their memory may be overwritten, not read
  void join(const Knowledge& other) {
    ordered.join(other.ordered);
    proxied.join(other.proxied);
    freed.join(other.freed);
  }
  void clear() {
    ordered.clear();
    proxied.clear();
    freed.clear();
  }
};

}  // namespace hopwell::arch::emu
