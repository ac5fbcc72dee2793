// clusterlaunchcontrol: a running cluster cancels a cluster that has not started and does its work.
#include "machine.hpp"
#include "sm100.hpp"

namespace hopwell::arch::emu {

void try_cancel_cluster(uint32_t response, uint32_t mbarrier, const Site& site) {
  enter("clusterlaunchcontrol.try_cancel", site);
  Machine& m = *machine;
  m.require_shared(response, 16, 16, "the response");
  Observer self(*current);
  const Epoch epoch = m.begin_transaction(m.mbarrier_at(mbarrier, true));
  m.async_access(self, epoch, response, 16, true, Proxy::async, "it");
  m.poison(response, 16);
  m.submit({[&m, response, mbarrier, step = epoch.step] {
    // Kernels cannot interpret the bits of the response. Here they are a flag and the index of the first CTA. Some
    // requests fail at random.
    uint32_t words[4] = {};
    if (!m.clusters_left.empty() && m.random.chance(0.75)) {
      const uint32_t number = m.clusters_left.front();
      m.clusters_left.pop_front();
      const uint32_t cx = m.shape.grid.x / m.shape.cluster.x, cy = m.shape.grid.y / m.shape.cluster.y;
      words[0] = 1;
      words[1] = number % cx * m.shape.cluster.x;
      words[2] = number / cx % cy * m.shape.cluster.y;
      words[3] = number / cx / cy * m.shape.cluster.z;
    }
    __builtin_memcpy(m.memory(response), words, 16);
    m.complete_transaction(mbarrier, step, 16);
  }});
}

}  // namespace hopwell::arch::emu
