// Plan of paged_attention on GPUs: kernel, tile and parameters. Computed on the host, once a call, from the shape and
// the device, so that the kernels do not compute it again.
#pragma once

#include <cstddef>

#include "ops/paged_attention/gpu/params.hpp"
#include "ops/paged_attention/op.hpp"
#include "runtime/backend.hpp"

namespace hopwell::ops::paged_attention {

// How the lanes of a warp divide a tile of keys: tiles/dispatch.hpp.
enum class TileKind { key_major, dimension_major, mma };
TileKind tile_kind(const Problem& problem);

// True if the tensor cores can read a 16-bit q unconverted: nothing is added to it, and its pairs of elements are
// aligned. Otherwise tiles of kind mma split q + u into two parts. With two blocks or d > 128 they are then smaller,
// and there is no tile for 96 or 192 dimensions.
bool exact_query(const Problem& problem);

// Number of blocks of 8 query vectors in a tile of kind mma of the split kernel: 1 or 2. The cluster kernel has 1,
// because its calls are short.
int mma_blocks(const Problem& problem);

// Tile of kind key_major: lanes that share a key's row; 8-element vectors of the row, and keys, that each lane has.
struct KeyMajorShape {
  int lanes, vectors, keys;
};
KeyMajorShape key_major_shape(const Problem& problem);
constexpr int kMaxJoinedHeads = 8;  // most KV heads of a row block of kind key_major

// The reason if neither GPU kernel supports the problem; otherwise null.
const char* unsupported(const Problem& problem);

// Shared memory of a CTA: a common part and a part for each warp.
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

// ---- split_kernel.hpp: all keys divided equally, one CTA an SM -----------------------------------------------------

// All parameters except the workspace and the launch tag.
Params plan_split(const Problem& problem, const SharedBytes& shared);
// Size of the workspace: a partial result of each CTA.
std::size_t split_workspace_bytes(const Params& params);

// Plan of a call. `params` has the addresses of the problem's tensors.
struct SplitPlan {
  TileKernel<Params> kernel;
  Params params{};
  std::size_t workspace_bytes = 0;
};

// ---- cluster_kernel.hpp: a cluster of CTAs for each row block ------------------------------------------------------

constexpr int kMaxCluster = 8;

// Number of clusters of `size` CTAs that run at the same time, one CTA an SM.
using ClustersThatFit = int (*)(int size, const runtime::Device& device);

struct ClusterPlan {
  int heads = 1, clusters = 0;  // KV heads of a row block; row blocks of all sequences
  int size = 0;                 // CTAs of a cluster; 0: not all clusters run at the same time
  [[nodiscard]] int ctas() const { return clusters * size; }
};
ClusterPlan plan_clusters(const Problem& problem, ClustersThatFit clusters_that_fit);
// plan_clusters(), or the reason why the cluster kernel does not support the problem or is slower than the split
// kernel.
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
