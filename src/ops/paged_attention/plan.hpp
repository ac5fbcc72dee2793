// paged_attention on GPUs: which kernel and which tile run a problem, and with what parameters. On the host, once a
// call, from the shape and the device: what is found out here the kernels need not find out.
#pragma once

#include <cstddef>

#include "ops/paged_attention/gpu/params.hpp"
#include "ops/paged_attention/op.hpp"
#include "runtime/backend.hpp"

namespace hopwell::ops::paged_attention {

// How the lanes of a warp divide a tile of keys: tiles/dispatch.hpp.
enum class TileKind { key_major, dimension_major, mma };
TileKind tile_kind(const Problem& problem);

// Whether q, of 16 bits, goes to the tensor cores as it lies in memory: nothing is added to it, and its elements lie in
// words. Tiles of kind mma with two blocks or more than 128 dimensions are smaller for others, and none has 96 or 192.
bool exact_query(const Problem& problem);

// The blocks of 8 query vectors each that a tile of kind mma has in the split kernel: 1 or 2. In the cluster kernel, whose
// calls are short, it has one.
int mma_blocks(const Problem& problem);

// The tiles of kind key_major: lanes that share a key's row, eighths of dimensions and keys that each of them has.
struct KeyMajorShape {
  int lanes, octets, keys;
};
KeyMajorShape key_major_shape(const Problem& problem);
constexpr int kMaxJoinedHeads = 8;  // of a row block

// Why neither GPU kernel supports the problem, or null.
const char* unsupported(const Problem& problem);

// The shared memory of a CTA: its own, and each of its warps'.
struct SharedBytes {
  std::size_t of_cta, of_warp;
  [[nodiscard]] constexpr std::size_t with(int warps) const {
    return of_cta + static_cast<std::size_t>(warps) * of_warp;
  }
};

// The kernel that runs a warp tile. P: Params for the split kernel, ClusterParams for the cluster kernel.
template <class P>
struct TileKernel {
  void (*kernel)(P) = nullptr;
  SharedBytes shared{};
  int keys_of_lookup = 1;  // consecutive keys of a tile whose page is looked up once
};

// ---- split_kernel.hpp: all keys shared out equally, one CTA an SM --------------------------------------------------

// All but where partial results go and their tag.
Params plan_split(const Problem& problem, const SharedBytes& shared);
// Size of the workspace, which has room for a partial result of each CTA.
std::size_t split_workspace_bytes(const Params& params);

// Plan of a call. `params` has the addresses of the problem's tensors.
struct SplitPlan {
  TileKernel<Params> kernel;
  Params params{};
  std::size_t workspace_bytes = 0;
};

// ---- cluster_kernel.hpp: a cluster of CTAs for each row block ------------------------------------------------------

constexpr int kMaxCluster = 8;

// How many clusters of so many CTAs run at a time, one CTA an SM.
using ClustersThatFit = int (*)(int size, const runtime::Device& device);

struct ClusterPlan {
  int heads = 1, clusters = 0;  // of a row block; row blocks of all sequences
  int size = 0;                 // CTAs of a cluster; 0: not all clusters run at a time
  [[nodiscard]] int ctas() const { return clusters * size; }
};
ClusterPlan plan_clusters(const Problem& problem, ClustersThatFit clusters_that_fit);
// The same, or the reason why the cluster kernel does not support the problem or is slower than the split kernel.
runtime::PlanOr<ClusterPlan> plan_clusters_if_faster(const Problem& problem, ClustersThatFit clusters_that_fit);
// `keys_of_lookup`: see TileKernel.
ClusterParams cluster_params(const Problem& problem, const ClusterPlan& plan, const SharedBytes& shared,
                             int keys_of_lookup);

// Plan of a call. `params` has the addresses of the problem's tensors.
struct ClusterCall {
  TileKernel<ClusterParams> kernel;
  ClusterPlan clusters;
  ClusterParams params{};
};

}  // namespace hopwell::ops::paged_attention
