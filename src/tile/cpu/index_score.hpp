// Shared by the CPU backends of the lightning indexer and of its backward: rows as fp32, and vector code for scores,
// sums of weighted relus, selection among scores, and the gradient of the relus.
#pragma once

#include <cstdint>

#include "runtime/check.hpp"

namespace hopwell::cpu {

// Counts below must be multiples of this, so that every vector is full. The caller pads.
inline constexpr std::int64_t kLaneBlock = 64;
constexpr std::int64_t padded(std::int64_t n) { return (n + kLaneBlock - 1) / kLaneBlock * kLaneBlock; }

// load: `count` contiguous elements of a bf16, fp32 or e4m3 tensor, from element `offset` on, as fp32. store: the
// inverse, for bf16 and fp32.
void load(const View& from, std::int64_t offset, float* to, std::int64_t count);
void store(const float* from, const View& to, std::int64_t offset, std::int64_t count);

// score[t] = sum_j w[j] * relu(q[j, :] . k[:, t]). Keys are the columns of k, whose row pitch is ld. Each product is
// summed in the order of d, then over heads in the order of j, for any position of the key and any neighbours: equal
// keys have equal scores. count is a multiple of kLaneBlock. relu(NaN) is NaN. `relu` false: the products without relu.
void score_keys(const float* q, const float* w, std::int64_t heads, std::int64_t d, const float* k, std::int64_t ld,
                bool relu, float* score, std::int64_t count);

// score[t] += sum_j w[j] * relu(dot[j, t]) in the order of j, so that equal columns give equal scores. relu(NaN) is
// NaN. The row pitch of dot is ld; count is a multiple of kLaneBlock. `relu` false: dot without relu.
void add_head_scores(const float* dot, std::int64_t ld, const float* w, std::int64_t heads, bool relu, float* score,
                     std::int64_t count);

// Appends the scores above `threshold` (all scores if it is NaN) and their keys first_key, first_key + 1, ... to a
// list. NaN scores count as -inf, -0 as 0. `score` is readable, the list writable, up to kLaneBlock past the end.
// Returns the number of appended scores.
std::int64_t append_above(const float* score, std::int64_t count, float threshold, std::int32_t first_key,
                          float* scores, std::int32_t* keys);

// The k-th largest of `count` numbers, 1 <= k <= count, without NaN or -0. `x` is readable, the scratch `ordered`
// writable, up to kLaneBlock past the end.
float kth_largest(const float* x, std::int64_t count, std::int64_t k, std::int32_t* ordered);

// For one head: returns sum_i g[i] * relu(dot[i]) and replaces dot by the gradient w * g[i] * 1[dot[i] > 0], which is
// NaN where g is NaN, for either value of the gate. relu(NaN) is 0 here, for padding. `relu` false: sum_i g[i] * dot[i]
// and w * g[i]. count is a multiple of kLaneBlock.
float head_gradient(const float* g, float w, float* dot, std::int64_t count, bool relu);

}  // namespace hopwell::cpu
