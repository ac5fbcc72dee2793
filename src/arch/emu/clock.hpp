// Vector clocks: who knows that what has happened.
//
// An agent is anything that touches memory: a thread, and also every asynchronous engine that acts for it (the copies
// that complete on one mbarrier, the wgmma operations of a warpgroup, the tensor-core operations of one issuing thread,
// …). Each agent counts its own steps; an access is stamped with (agent, step). Thread t may touch what access (a, c)
// touched if t's clock has c or more for agent a: some chain of barriers, waits and fences leads from the access to t.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hopwell::arch::emu {

using AgentId = uint16_t;
using SiteId = uint16_t;
inline constexpr AgentId kNoAgent = 0xffff;

/// One step of one agent, and the source line it came from.
struct Epoch {
  uint32_t step = 0;
  AgentId agent = kNoAgent;
  SiteId site = 0;
  bool empty() const { return agent == kNoAgent; }
  bool same_step(const Epoch& other) const { return agent == other.agent && step == other.step; }
};

/// mine[i] = max(mine[i], theirs[i]): half of what synchronisation costs.
void join_steps(uint32_t* mine, const uint32_t* theirs, size_t count);

/// least[i] = min(least[i], steps[i]).
void lower_steps(uint32_t* least, const uint32_t* steps, size_t count);

/// Steps known of every agent; agents never heard of are at step 0. Grows when new agents appear.
class VectorClock {
 public:
  uint32_t operator[](AgentId agent) const { return agent < steps_.size() ? steps_[agent] : 0; }
  bool covers(const Epoch& e) const { return (*this)[e.agent] >= e.step; }
  void raise(AgentId agent, uint32_t step) {
    if (agent >= steps_.size()) steps_.resize(size_t{agent} + 1);
    steps_[agent] = std::max(steps_[agent], step);
  }
  void set(AgentId agent, uint32_t step) {
    if (agent >= steps_.size()) steps_.resize(size_t{agent} + 1);
    steps_[agent] = step;
  }
  void join(const VectorClock& other) {
    if (other.steps_.size() > steps_.size()) steps_.resize(other.steps_.size());
    join_steps(steps_.data(), other.steps_.data(), other.steps_.size());
  }
  /// least[i] = min(least[i], step of agent first + i), for `count` agents.
  void lower(size_t first, uint32_t* least, size_t count) const {
    const size_t heard_of = std::min(steps_.size() - std::min(first, steps_.size()), count);
    lower_steps(least, steps_.data() + first, heard_of);
    std::fill(least + heard_of, least + count, 0u);
  }
  void clear() { std::fill(steps_.begin(), steps_.end(), 0u); }

 private:
  std::vector<uint32_t> steps_;
};

/// What synchronisation hands from thread to thread.
struct Knowledge {
  VectorClock ordered;  // happened before
  VectorClock proxied;  // of these, generic-proxy writes that a proxy fence has made visible to the async proxy
  VectorClock freed;    // is over, but was not released: memory that it touched may be overwritten, not read
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
