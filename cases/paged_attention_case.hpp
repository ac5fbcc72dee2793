// One call of paged_attention as a case: its configuration, the arrays it makes and the float64 reference.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "case.hpp"

namespace hopwell::cases::paged {

enum class BiasForm { kNone, kKey, kDistance, kFused };
enum class Pages {
  kPermuted,  // every sequence has pages of its own
  kShared,    // sequences begin with the same pages
  kRepeated,  // any page anywhere, several times over
  kBad        // kPermuted, with page numbers out of range within the context
};

// One call. The defaults are a small case in which nothing is special.
struct Config {
  std::string name;
  DType dtype = DType::kFloat32;
  hopwell_cache_layout layout = HOPWELL_CACHE_NHD;
  std::vector<std::int64_t> lengths = {0, 1, 15, 16, 17, 70};  // context_lens as given
  std::int64_t max_blocks = -1;                                // -1: what the longest context needs, and two more
  std::int64_t q_len = 0;                                      // 0: a three-dimensional q
  std::int64_t h_q = 4, h_kv = 2, d = 64, block = 16;
  float scale = 0.125F;
  double q_spread = 1;  // standard deviation of q
  std::int64_t window = 0;
  Pages pages = Pages::kPermuted;
  BiasForm bias = BiasForm::kNone;
  std::optional<DType> bias_dtype = {};  // of bias, u, v and r; else q's
  hopwell_out_of_range out_of_range = HOPWELL_OUT_OF_RANGE_ZERO;
  std::int64_t extent = 40;
  bool shared_bias = false;  // first dimension 1
  bool post_scale = false, u = false, no_v = false, alibi = false, strided = false;
  bool hidden = false;  // biases of -inf: a row's all, and keys that hold NaN
  bool partly =
      false;  // with hidden: every second row sees those keys, and their values, which then are NaN, not the keys
  bool constant = false;  // q, k and v are all 8, -8 and 0.1, so that roundings do not cancel
  bool infinite = false;  // values of +-inf and NaN among those that are seen, by all queries or by some
  bool far = false;       // on a device, with pages 2^27 elements apart, most of them beyond 2^31
  bool emulated = true;   // not too large for the emulator
  // As Case has it. Both kernels of GPUs are made of the same tiles; with its clusters emu:sm90 takes five times as long as
  // emu:sm80, so that it has each tile, number of queries, layout and type, and not all that they can be together.
  std::string_view emulated_on = {};

  [[nodiscard]] std::int64_t b() const { return static_cast<std::int64_t>(lengths.size()); }
  [[nodiscard]] std::int64_t queries() const { return std::max<std::int64_t>(q_len, 1); }
  [[nodiscard]] std::int64_t table_length() const {
    if (max_blocks >= 0) return max_blocks;
    const std::int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    return (longest + block - 1) / block + 2;
  }
  [[nodiscard]] std::int64_t context(std::int64_t n) const {
    return std::clamp<std::int64_t>(lengths[static_cast<std::size_t>(n)], 0, table_length() * block);
  }
  [[nodiscard]] std::int64_t first_seen(std::int64_t n) const {  // by any query
    const std::int64_t before = context(n) - queries() + 1;      // a window may be as large as an integer can be
    return window == 0 || window > before ? 0 : before - window;
  }
};

// A copy of a cache on the device whose pages lie far apart.
struct FarCache {
  std::shared_ptr<std::byte> memory;
  Tensor of(const Array& cache);
};

struct Arrays {
  Array *q = nullptr, *k = nullptr, *v = nullptr, *tables = nullptr, *lengths = nullptr, *u = nullptr, *bias = nullptr,
        *pos_bias_v = nullptr, *r = nullptr, *slopes = nullptr, *out = nullptr, *lse = nullptr;
  std::shared_ptr<FarCache> far_k = {}, far_v = {};  // with Config::far
};

// All the arrays for a cache of `blocks` pages, allocated; q and what is added to it filled.
Arrays add_arrays(const Config& c, Random& random, Instance& instance, std::int64_t blocks);

// Block tables whose entries name pages only where a query sees keys; anything else is a number that no page has.
void fill_tables(const Config& c, Random& random, Array& tables, std::int64_t blocks);

void call(const Config& c, const Arrays& a, Workspace& workspace, const char* backend, Stream stream);

// Sets flops and bytes: the least traffic reads visible keys and values once, and touches the rest once.
void count_work(const Config& c, Instance& instance);

// The whole case: random data where a query sees keys, NaN and infinities everywhere else, and the reference.
Instance make(const Config& c, Random& random);

}  // namespace hopwell::cases::paged
