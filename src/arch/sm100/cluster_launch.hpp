// clusterlaunchcontrol: a cluster that has finished its tile cancels one that has not started, and does its work.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm90/bulk_copy.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/sm100.hpp"
#endif

namespace hopwell::arch {

#if HOPWELL_HAS_SM100A

/// clusterlaunchcontrol.try_cancel.async: 16 bytes of response arrive in shared memory and are counted on the mbarrier.
/// PTX: #parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-try-cancel
HOPWELL_DEVICE void clusterlaunchcontrol_try_cancel(uint32_t response, mbarrier& b,
                                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(response),
      "r"(shared_address(&b))
      : "memory");
#else
  emu::try_cancel_cluster(response, emu::shared_address(&b), site);
#endif
}

/// The response: whether a cluster was canceled, and the index of its first CTA.
struct CancelResponse {
  bool canceled;
  int x, y, z;
};

/// clusterlaunchcontrol.query_cancel of the 16 bytes. PTX:
/// #parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-query-cancel
HOPWELL_DEVICE CancelResponse clusterlaunchcontrol_query_cancel(const Words4& response) {
#if HOPWELL_ON_DEVICE
  uint32_t canceled, x, y, z;
  asm volatile(
      "{ .reg .b128 r; .reg .b64 lo, hi; .reg .pred p; .reg .u32 w;\n"
      "mov.b64 lo, {%4, %5}; mov.b64 hi, {%6, %7}; mov.b128 r, {lo, hi};\n"
      "mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, %3, w}, r; }"
      : "=r"(canceled), "=&r"(x), "=&r"(y), "=&r"(z)
      : "r"(response.w[0]), "r"(response.w[1]), "r"(response.w[2]), "r"(response.w[3]));
  return {canceled != 0, int(x), int(y), int(z)};
#else
  return {response.w[0] != 0, int(response.w[1]), int(response.w[2]), int(response.w[3])};
#endif
}

#endif

}  // namespace hopwell::arch
