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
  kPermuted,  // every sequence has its own pages
  kShared,    // sequences begin with the same pages
  kRepeated,  // random pages, with repetitions
  kBad        // kPermuted, with out-of-range page numbers within the context
};

// One call. The defaults are a small plain case.
struct Config {
  std::string name;
  DType dtype = DType::kFloat32;
  hopwell_cache_layout layout = HOPWELL_CACHE_NHD;
  std::vector<std::int64_t> lengths = {0, 1, 15, 16, 17, 70};  // context_lens as given
  std::int64_t max_blocks = -1;                                // -1: blocks of the longest context, plus two
  std::int64_t q_len = 0;                                      // 0: a three-dimensional q
  std::int64_t h_q = 4, h_kv = 2, d = 64, block = 16;
  float scale = 0.125F;
  double q_spread = 1;  // standard deviation of q
  std::int64_t window = 0;
  Pages pages = Pages::kPermuted;
  BiasForm bias = BiasForm::kNone;
  std::optional<DType> bias_dtype = {};  // type of bias, u, v and r; default: q's type
  hopwell_out_of_range out_of_range = HOPWELL_OUT_OF_RANGE_ZERO;
  std::int64_t extent = 40;
  bool shared_bias = false;  // first dimension 1
  bool post_scale = false, u = false, no_v = false, alibi = false, strided = false;
  bool hidden = false;    // biases of -inf: for all keys of a row, and for keys that hold NaN
  bool partly = false;    // with hidden: every second row sees those keys; NaN is then in their values, not in the keys
  bool constant = false;  // q, k and v are all 8, -8 and 0.1, so that roundings do not cancel
  bool infinite = false;  // values of +-inf and NaN among visible keys, seen by all queries or by some
  bool far = false;       // on a device: page stride 2^27 elements, so that most are beyond 2^31
  bool emulated = true;   // false: too large for the emulator
  // As Case::emulated_on. Both GPU kernels use the same tiles. emu:sm90 with its clusters takes five times as long as
  // emu:sm80, so it runs each tile, number of queries, layout and type, but not all combinations.
  std::string_view emulated_on = {};
  bool nightly = false;  // as Case::nightly

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
  [[nodiscard]] std::int64_t first_seen(std::int64_t n) const {  // the first key that any query sees
    const std::int64_t before = context(n) - queries() + 1;      // a window may be as large as the largest integer
    return window == 0 || window > before ? 0 : before - window;
  }
};

// A copy of a cache on the device with large distances between pages.
struct FarCache {
  std::shared_ptr<std::byte> memory;
  Tensor of(const Array& cache);
};

struct Arrays {
  Array *q = nullptr, *k = nullptr, *v = nullptr, *tables = nullptr, *lengths = nullptr, *u = nullptr, *bias = nullptr,
        *pos_bias_v = nullptr, *r = nullptr, *slopes = nullptr, *out = nullptr, *lse = nullptr;
  std::shared_ptr<FarCache> far_k = {}, far_v = {};  // with Config::far
};

// Allocates all arrays for a cache of `blocks` pages, and fills q and the biases that are added to it.
Arrays add_arrays(const Config& c, Random& random, Instance& instance, std::int64_t blocks);

// Fills block tables. Entries name pages only where a query sees keys; other entries are invalid page numbers.
void fill_tables(const Config& c, Random& random, Array& tables, std::int64_t blocks);

void call(const Config& c, const Arrays& a, Workspace& workspace, const char* backend, Stream stream);

// Sets flops and bytes. The minimum traffic reads visible keys and values once, and accesses every other tensor once.
void count_work(const Config& c, Instance& instance);

// The complete case: random data for visible keys, NaN and infinities everywhere else, and the reference.
Instance make(const Config& c, Random& random);

}  // namespace hopwell::cases::paged
