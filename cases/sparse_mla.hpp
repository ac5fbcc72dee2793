// Shared by the cases of the three sparse MLA operators: inputs, and the float64 reference of scores, forward and
// distribution.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "case.hpp"
#include "vectors.hpp"

namespace hopwell::cases {

// One problem: shapes, and properties of its data. The defaults are a small version of the production shape.
struct SparseMla {
  DType dtype = DType::kBFloat16;
  std::int64_t s_q = 2, s_kv = 300, h_q = 16, d_qk = 576, d_v = 512, topk = 64;
  float sm_scale = 0.5F;  // large, so that dV does not hide errors of dK
  double q_size = 0.1;    // standard deviation of q's elements; kv's is 1
  bool constant = false;  // all elements of q are 8, of kv -8, so that roundings do not cancel
  enum class Indices {
    kAny,        // each a random key
    kInvalid,    // a third out of range, at the extremes of int32 and next to the limits
    kEmptyRows,  // every second row has no valid entry
    kHot,        // all the same key
    kTwice,      // adjacent entries are equal
    kAscending,  // as from the lightning indexer: ascending, then -1
    kDistinct,   // all different, in random order, then -1
    kAbsent      // no indices: every visible key; topk must be s_kv
  } indices = Indices::kAny;
  int overlap = 0;  // per cent of a row's keys that the next row shares, for distinct keys; 0: rows are independent
  enum class Sink {
    kNone,
    kAny,
    kExtreme,  // 0, +-inf, +-1e38 in turn
    kLarge     // 30, inf, 1e38 in turn: little is left to some heads, nothing to others
  } sink = Sink::kNone;
  bool lengths = false;  // topk_length below 0, 0 ... topk, beyond
  enum class Positions { kNone, kStart, kArray } positions = Positions::kNone;
  std::int64_t q_start = 0, kv_stride = 1;
  bool ranges = false;      // k_start and k_end: extreme values of int32, then packed documents
  std::int64_t window = 0;  // 0: no window_kv
  std::int64_t s_w = 0;     // rows of window_kv
  enum class WindowRows {
    kLast,      // no w_start and w_end: the queries are the last rows
    kExtreme,   // extreme values of int32, then packed documents
    kDocuments  // packed documents
  } window_rows = WindowRows::kLast;
  // The first entries of an index row are this many window keys, which are the last s_w rows of kv; then distinct keys,
  // or with positions the visible ones. The same work as with window_kv, for comparisons.
  std::int64_t listed = 0;
  bool nan_elsewhere = true;  // NaN and infinities in the rows of kv that no valid entry selects, and of window_kv that
                              // no query sees
  double planted = 0;         // if not 0: NaN or an infinity, in one element of a seen row of window_kv, or, without a
                              // window, of a selected row of kv
  bool strided = false;       // gaps between the rows of every tensor, permuted dimensions, an expanded d_out
  std::int64_t gap = 3;       // size of the gaps in elements
};

// Names and problems of the cases that all three operators run. The second list is for GPUs only.
std::vector<std::pair<std::string, SparseMla>> sparse_mla_problems();
std::vector<std::pair<std::string, SparseMla>> sparse_mla_device_problems();
// Names of cases of the first list that take long on the emulator, where other cases reach the same code.
std::vector<std::string> long_sparse_mla_cases();
// Problems with window keys, for the forward and the backward.
std::vector<std::pair<std::string, SparseMla>> sparse_mla_window_problems();
// Adjacent queries whose rows share keys, do not, or share some. They must not contain NaN in keys that only an
// adjacent query selects.
std::vector<std::pair<std::string, SparseMla>> sparse_mla_group_problems();
// Chooses the backends that run such a problem with share_keys. Only Hopper's kernels group queries; other backends
// ignore share_keys, and problems that run on each of them cover that. The CPU runs all but the problem with the many
// keys of a round.
void choose_backends_of_groups(Case& c, const SparseMla& problem);
// One query of the production shape, with two lengths of its row: the difference is the cost of a step in the time
// model (docs/emulator.md). For each number of heads.
std::vector<std::pair<std::string, SparseMla>> sparse_mla_query_problems(std::initializer_list<std::int64_t> heads,
                                                                         std::int64_t d_qk = 576);

// Benchmark shapes. Shapes of training steps, named by heads and keys, which need a GPU. And a problem from such
// settings.
std::vector<std::pair<std::string, Settings>> sparse_mla_shapes();
std::vector<std::pair<std::string, Settings>> sparse_mla_device_shapes();
SparseMla sparse_mla_from(const Settings& settings);
// Settings of a window, which sparse_mla_from understands; the defaults are a call without one. `window`: each query
// sees this many keys. `listed` 1: not by window_kv, but in an index table over all rows. `dense` 1: instead of topk
// keys of each index row, all visible keys. `kv_stride`, `q_start`: the masks, if kv_stride is not 0.
Settings sparse_mla_window_settings();

// Typical lse of a forward for inputs of variance 1 and sm_scale d_qk^-0.5, with some spread.
void fill_typical_lse(Array& lse, Random& random, const SparseMla& problem);

// Inputs of one problem, in the instance. Optional inputs are null if absent.
struct SparseMlaInputs {
  SparseMla problem;
  Array *q = nullptr, *kv = nullptr, *indices = nullptr;
  Array *attn_sink = nullptr, *topk_length = nullptr, *q_positions = nullptr, *k_start = nullptr, *k_end = nullptr;
  Array *window_kv = nullptr, *w_start = nullptr, *w_end = nullptr;
  [[nodiscard]] SelectionArgs selection() const;
  [[nodiscard]] std::optional<std::int64_t> window() const;
  [[nodiscard]] std::vector<double> keys() const;  // rows of kv, then rows of window_kv
};
// k_start and k_end [s_q], with a stride of `stride` elements: eight queries with special ranges, then three documents,
// in which a query sees the keys up to its own.
std::pair<Array*, Array*> add_key_ranges(Instance& instance, Random& random, std::int64_t s_q, std::int64_t s_kv,
                                         std::int64_t stride);
SparseMlaInputs add_inputs(Instance& instance, Random& random, const SparseMla& problem);

// A tensor of the problem: dense, or with gaps and permuted dimensions if the problem is strided.
Array& add_array(Instance& instance, const SparseMla& problem, const char* name, DType dtype,
                 const std::vector<std::int64_t>& shape);

// An optional argument: absent if there is no array.
Tensor view_of(const Array* array);

// One query in float64: the entries that it attends and, for every head, their scores. Entries of the window have the
// number -1 and come first. Row t of window_kv has the key s_kv + t. This and the functions below use all
// threads. One thread computes each number, so that the bits do not depend on the number of threads.
struct QueryReference {
  std::vector<std::int64_t> entries, keys;     // [n]; keys are rows of SparseMlaInputs::keys()
  std::vector<double> score, score_magnitude;  // [h_q, n], and the same sums with absolute values
  std::vector<double> max, lse;                // [h_q]; -inf and +inf if there is no valid entry
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(entries.size()); }
};
std::vector<QueryReference> query_references(const SparseMlaInputs& inputs);  // [s_q]

// Sets the instance's FLOPs, 2 * depth per head and valid entry, and its bytes.
void add_cost(Instance& instance, const SparseMlaInputs& inputs, std::int64_t depth);

// Results of the forward in float64, all row-major, with the magnitudes that bound their rounding.
struct ForwardReference {
  std::vector<double> out, out_magnitude;       // [s_q, h_q, d_v]
  std::vector<double> max, lse, lse_magnitude;  // [s_q, h_q]
};
ForwardReference forward_reference(const SparseMlaInputs& inputs);

// attn [s_q, topk] = sum_h exp(score - lse) for the given lse [s_q, h_q], not normalised. If `with_sink`,
// exp(score - lse') with exp(lse') = exp(lse) + exp(attn_sink).
struct DistributionReference {
  std::vector<double> attn, magnitude;
};
DistributionReference distribution_reference(const SparseMlaInputs& inputs, const std::vector<QueryReference>& queries,
                                             const std::vector<double>& lse, bool with_sink = false);

}  // namespace hopwell::cases
