// The operators' kernels on the emulator, through the public interface: correct and without findings under many
// schedules, and the tests detect it if any synchronisation call of a kernel is left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <hopwell/hopwell.hpp>
#include <limits>
#include <list>
#include <map>

#include "arch/emu/launch.hpp"
#include "cases/suites.hpp"
#include "harness.hpp"
#include "mutant.hpp"

namespace hopwell {
namespace {

using arch::emu::Session;

// A kernel, or a few related kernels, and the cases that reach all of its synchronisation calls repeatedly.
struct Subject {
  std::string name, backend;
  cases::Suite (*suite)();
  std::vector<std::string> cases;
  uint64_t schedules;
  size_t calls;                           // minimum number of synchronisation calls
  std::string folder = "";                // only its calls count, if a case runs another operator's kernels too
  const char* multiprocessors = nullptr;  // of the emulated device, if the usual number is too small

  [[nodiscard]] cases::Case case_named(const std::string& wanted) const {
    for (const cases::Case& c : suite().cases)
      if (c.name == wanted) return c;
    throw std::logic_error("no case " + wanted);
  }
  friend std::ostream& operator<<(std::ostream& to, const Subject& subject) { return to << subject.backend; }
};

// A subject's cases with inputs and expected results, made once for all runs.
struct Prepared {
  cases::Case c;
  cases::Instance instance;
};
std::list<Prepared> prepare_cases(const Subject& subject) {
  std::list<Prepared> prepared;
  for (const std::string& name : subject.cases) {
    const cases::Case c = subject.case_named(name);
    prepared.push_back({c, cases::prepare(c, 1)});
  }
  return prepared;
}

// Runs a case under two schedules, one per call. In the second schedule CTA 0 of a cluster is late: other CTAs must
// have waited for its data.
cases::Report run_under_two(Session& session, uint64_t pair, Prepared& of_case, const std::string& backend) {
  const auto choose = [&](uint64_t seed, int late_cta) {
    const arch::emu::Options chosen = arch::test::options_for(seed);
    session.options.seed = chosen.seed, session.options.async = chosen.async;
    session.options.late_cta = late_cta;
  };
  choose(2 * pair, -1);
  return cases::run(of_case.c, of_case.instance, backend, [&] { choose(2 * pair + 1, 0); });
}

// A synchronisation call, and the cases that execute it, shortest first.
struct Needed {
  arch::emu::SynchronisationCall call;
  std::vector<Prepared*> cases;
};

// All synchronisation calls that the cases execute.
std::vector<Needed> calls_of(const Subject& subject, std::list<Prepared>& prepared) {
  std::vector<Needed> calls;
  std::map<const Prepared*, uint64_t> switches;
  for (Prepared& of_case : prepared) {
    Session session({});
    run_under_two(session, 0, of_case, subject.backend);
    switches[&of_case] = session.report.statistics.switches;
    for (const auto& counted : session.report.synchronisation) {
      const auto& call = counted.call;
      if (std::string_view(call.where.file).find(subject.folder) == std::string_view::npos) continue;
      auto known = std::find_if(calls.begin(), calls.end(), [&](const Needed& needed) { return needed.call == call; });
      if (known == calls.end()) known = calls.insert(known, {call, {}});
      known->cases.push_back(&of_case);
    }
  }
  for (Needed& needed : calls)
    std::stable_sort(needed.cases.begin(), needed.cases.end(),
                     [&](const Prepared* a, const Prepared* b) { return switches[a] < switches[b]; });
  return calls;
}

// Whether a case that executes this call fails or has a finding without it.
bool noticed_without(const Subject& subject, const Needed& needed) {
  for (uint64_t pair = 0; pair < 3; ++pair) {
    for (Prepared* of_case : needed.cases) {
      arch::emu::Options options;
      options.leave_out = needed.call;
      options.max_switches = 5'000'000;  // without a wait or an arrival, threads may poll for ever
      options.throw_findings = true;     // ends the launch at its first finding, which is enough to fail the case
      Session session(options);
      if (!run_under_two(session, pair, *of_case, subject.backend).failures.empty()) return true;
    }
  }
  return false;
}

class Operators : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override {
    if (GetParam().multiprocessors) ASSERT_EQ(setenv("HOPWELL_EMULATOR_SMS", GetParam().multiprocessors, 1), 0);
  }
  void TearDown() override { unsetenv("HOPWELL_EMULATOR_SMS"); }
};

bool is_nightly() { return arch::test::schedules(1) > 1; }

// `make test` runs the first case under one pair of schedules. RightOnDevicesOfAllSizes runs this pair for every case, and
// `hopwell check` another pair; together they meet all three policies of asynchronous work.
TEST_P(Operators, RightAndCleanUnderManySchedules) {
  const Subject& subject = GetParam();
  const uint64_t schedules =
      is_nightly() ? arch::test::schedules(subject.schedules) : std::min<uint64_t>(subject.schedules, 2);
  const auto end = is_nightly() ? subject.cases.end() : subject.cases.begin() + 1;
  for (const std::string& name : std::vector<std::string>(subject.cases.begin(), end)) {
    const cases::Case c = subject.case_named(name);
    for (uint64_t pair = 0; 2 * pair < schedules; ++pair) {
      Session session({});
      Prepared prepared{c, cases::prepare(c, pair)};
      const cases::Report report = run_under_two(session, pair, prepared, subject.backend);
      ASSERT_FALSE(report.unsupported);
      ASSERT_TRUE(report.failures.empty()) << name << ", pair " << pair << ": " << report.failures.front();
      ASSERT_TRUE(session.report.clean()) << name << ", pair " << pair << "\n" << session.report.text();
    }
  }
}

// Numbers of SMs of the devices on which a backend's machine code runs: a slice of a GPU and a large card; with
// HOPWELL_EMULATOR_SCHEDULES (make nightly) also a small card.
std::vector<const char*> sizes_of_devices(const std::string& backend) {
  std::vector<const char*> sizes = {"8", backend == "emu:sm90" ? "132" : "148"};
  if (is_nightly()) sizes.push_back("66");
  return sizes;
}

// Plans depend on the number of SMs. At most one size may leave a case to another backend. `make test` runs the first
// case on all sizes, and the others on one size each, in turn.
TEST_P(Operators, RightOnDevicesOfAllSizes) {
  const std::vector<const char*> all_sizes = sizes_of_devices(GetParam().backend);
  size_t number = 0;
  for (Prepared& of_case : prepare_cases(GetParam())) {
    const std::string& name = of_case.c.name;
    std::vector<const char*> sizes = all_sizes;
    if (!is_nightly() && number > 0) sizes = {all_sizes[number % all_sizes.size()]};
    ++number;
    size_t runs = 0;
    for (const char* multiprocessors : sizes) {
      ASSERT_EQ(setenv("HOPWELL_EMULATOR_SMS", multiprocessors, 1), 0);
      Session session({});
      const cases::Report report = run_under_two(session, 0, of_case, GetParam().backend);
      unsetenv("HOPWELL_EMULATOR_SMS");
      if (report.unsupported) continue;
      ++runs;
      EXPECT_TRUE(report.failures.empty()) << name << " on " << multiprocessors << ": " << report.failures.front();
      EXPECT_TRUE(session.report.clean()) << name << " on " << multiprocessors << "\n" << session.report.text();
    }
    EXPECT_GE(runs, sizes.size() - 1) << name;
  }
}

TEST_P(Operators, EverySynchronisationCallIsNeeded) {
  std::list<Prepared> prepared = prepare_cases(GetParam());
  const auto calls = calls_of(GetParam(), prepared);
  ASSERT_GE(calls.size(), GetParam().calls);
  for (const Needed& needed : calls) {
    const auto& call = needed.call;
    if (arch::test::is_kept(call.where)) continue;
    const std::string name = call.instruction + " at " + arch::emu::to_string(call.where);
    const auto mutant = arch::test::in_child([&] { return noticed_without(GetParam(), needed); });
    EXPECT_TRUE(mutant.noticed) << name << " can be left out unnoticed";
    if (!mutant.how.empty()) std::printf("%s: noticed by %s\n", name.c_str(), mutant.how.c_str());
  }
}

// A backend that supports fewer or more cases than recorded fails the cases.
TEST(Refusals, AreThoseThatAreRecorded) {
  const Subject forward{"", "emu:sm80", cases::sparse_mla_forward, {}, 1, 0};
  cases::Case refused = forward.case_named("odd_widths"), taken = forward.case_named("topk_127");
  EXPECT_TRUE(cases::run(refused, forward.backend, 1).unsupported);
  EXPECT_TRUE(cases::run(taken, forward.backend, 1).failures.empty());
  std::swap(refused.name, taken.name);
  const cases::Report narrower = cases::run(refused, forward.backend, 1), wider = cases::run(taken, forward.backend, 1);
  EXPECT_FALSE(narrower.unsupported || wider.unsupported);
  EXPECT_EQ(narrower.failures.size(), 1U);
  ASSERT_FALSE(wider.failures.empty());
  EXPECT_NE(wider.failures.front().find("runs, although cases/refused.cpp"), std::string::npos);
}

// A key with an infinity has score −inf with every head, and NaN with the zeros of padding heads. If the lse is +inf,
// as without a valid entry, the result is 0 for any score.
TEST(AttentionDistributionSm80, InfiniteKeysCountForTheHeadsThatExist) {
  constexpr int kHeads = 5, kColumns = 64;
  constexpr bfloat16 kMinusOne{0xbf80}, kHalf{0x3f00}, kInfinity{0x7f80};
  std::vector<bfloat16> q(kHeads * kColumns, kHalf), kv(2 * kColumns, kHalf);
  for (size_t head = 0; head < kHeads; ++head) q[head * kColumns] = kMinusOne;
  kv[0] = kInfinity;
  std::vector<int32_t> indices{0, 1};
  std::vector<float> lse(kHeads), out(2, -1.0F);
  const auto run = [&](float lse_of_all) {
    std::fill(lse.begin(), lse.end(), lse_of_all);
    const Tensor queries(q.data(), {1, kHeads, kColumns}), keys(kv.data(), {2, kColumns}), rows(indices.data(), {1, 2}),
        sums(lse.data(), {1, kHeads}), attn(out.data(), {1, 2});
    attention_distribution({.q = queries,
                            .kv = keys,
                            .indices = rows,
                            .lse = sums,
                            .sm_scale = 0.125F,
                            .out = attn,
                            .backend = "emu:sm80"});
  };
  run(2);
  EXPECT_EQ(out[0], 0.0F);
  EXPECT_NEAR(out[1], kHeads * std::exp(0.125 * (63 * 0.25 - 0.5) - 2), 1e-5);
  run(std::numeric_limits<float>::infinity());
  EXPECT_EQ(out, std::vector<float>(2, 0.0F));
}

const Subject kSubjects[] = {
    {"sparse_mla_forward_sm80", "emu:sm80", cases::sparse_mla_forward, {"topk_127"}, 50, 6},
    {"sparse_mla_forward_sm80_window", "emu:sm80", cases::sparse_mla_forward, {"window_127"}, 20, 6},
    {"sparse_mla_forward_sm90",
     "emu:sm90",
     cases::sparse_mla_forward,
     {"d_qk_512_h_q_100", "masks_h_q_40", "many_tiles"},
     3,
     6},
    {"sparse_mla_forward_sm90_few_heads",
     "emu:sm90",
     cases::sparse_mla_forward,
     {"d_qk_512_h_q_20", "large_scores_h_q_20", "lengths"},
     3,
     6},
    // Window keys: the kernels for few heads, also with unaligned rows, and for many with d_qk 576.
    {"sparse_mla_forward_sm90_window",
     "emu:sm90",
     cases::sparse_mla_forward,
     {"window_large_scores_h_q_20", "window_d_qk_576_h_q_40", "window_unaligned_h_q_20"},
     3,
     6},
    // Tensor copies of Q and of tiles of consecutive keys, several queries per CTA, row_max changes.
    {"sparse_mla_forward_sm90_window_boxes",
     "emu:sm90",
     cases::sparse_mla_forward,
     {"window_boxes", "window_boxes_dense", "window_boxes_extreme_rows_h_q_100", "window_large_scores_h_q_64"},
     3,
     8},
    // Groups that wrap around the ring, several per CTA, row_max changes, and ungrouped queries.
    {"sparse_mla_forward_sm90_groups",
     "emu:sm90",
     cases::sparse_mla_forward,
     {"share_keys_many_queries", "share_keys_large_scores", "share_keys_d_qk_512_h_q_32",
      "share_keys_many_queries_lengths"},
     3,
     12,
     "ops/sparse_mla_forward/"},
    // row_max changes, keys that wrap around the ring, rows of all lengths.
    {"sparse_mla_forward_sm100",
     "emu:sm100",
     cases::sparse_mla_forward,
     {"d_qk_512_h_q_20", "large_scores_h_q_20", "lengths", "many_tiles_h_q_40"},
     6,
     20},
    {"sparse_mla_forward_sm100_pair",
     "emu:sm100",
     cases::sparse_mla_forward,
     {"d_qk_512_h_q_100", "production", "large_scores_h_q_192"},
     6,
     35},
    // Tiles of 32 heads and of 64, deterministic sums and atomic sums, with attn.
    {"sparse_mla_backward_sm80",
     "emu:sm80",
     cases::sparse_mla_backward,
     {"topk_127", "h_q_64", "h_q_70_invalid_indices"},
     9,
     10,
     "ops/sparse_mla_backward/"},
    // Two steps of keys, every output, deterministic sums; and three steps with more heads than one tile has, atomic
    // sums.
    {"sparse_mla_backward_sm90",
     "emu:sm90",
     cases::sparse_mla_backward,
     {"topk_127"},
     12,
     20,
     "ops/sparse_mla_backward/"},
    {"sparse_mla_backward_sm90_pair", "emu:sm90", cases::sparse_mla_backward, {"h_q_70_invalid_indices"}, 12, 20},
    // Window keys, with rows that end within a step: deterministic sums, and atomic sums of 64 and of 128 heads.
    {"sparse_mla_backward_sm80_window",
     "emu:sm80",
     cases::sparse_mla_backward,
     {"window_127", "window_128"},
     6,
     10,
     "ops/sparse_mla_backward/"},
    {"sparse_mla_backward_sm90_window",
     "emu:sm90",
     cases::sparse_mla_backward,
     {"window_127", "window_128"},
     6,
     20,
     "ops/sparse_mla_backward/"},
    {"sparse_mla_backward_sm90_window_pair",
     "emu:sm90",
     cases::sparse_mla_backward,
     {"window_not_deterministic_h_q_128"},
     6,
     20,
     "ops/sparse_mla_backward/"},
    // Query groups: rows with a key twice, which take two rounds; rows without a key, whose groups are not merged.
    {"sparse_mla_backward_sm90_groups",
     "emu:sm90",
     cases::sparse_mla_backward,
     {"share_keys_duplicates", "share_keys_sink_lengths"},
     6,
     20},
    // One pass of heads and two, tiles of one slab and of five, rows that end early.
    {"attention_distribution_sm80",
     "emu:sm80",
     cases::attention_distribution,
     {"d_qk_64_h_q_130", "h_q_256", "lengths", "topk_2048_l1"},
     9,
     4},
    // Two passes of heads, tiles that wrap around the ring, many queries per CTA, warpgroups that alternate between
    // tiles of the ring, unaligned rows; unsorted and sorted rows.
    {"attention_distribution_sm90",
     "emu:sm90",
     cases::attention_distribution,
     {"h_q_256", "production_l1", "lengths_l1", "topk_2048", "strided"},
     9,
     12},
    {"sparse_mla_backward_sm100",
     "emu:sm100",
     cases::sparse_mla_backward,
     {"topk_127", "h_q_64"},
     6,
     25,
     "ops/sparse_mla_backward/"},
    // Slices of a query, and three consecutive steps.
    {"sparse_mla_backward_sm100_pair",
     "emu:sm100",
     cases::sparse_mla_backward,
     {"h_q_70_invalid_indices", "h_q_128_no_attn", "h_q_128_lengths"},
     6,
     40,
     "ops/sparse_mla_backward/"},
    // Two passes of heads, and stages that wrap around the ring; many queries per CTA.
    {"attention_distribution_sm100",
     "emu:sm100",
     cases::attention_distribution,
     {"h_q_256", "production_l1", "lengths"},
     9,
     15},
    {"paged_attention_key_major",
     "emu:sm80",
     cases::paged_attention,
     {"group_key_h_q_4_h_kv_4_bf16", "lengths_out_of_range", "batch_of_70_h_kv_2"},
     8,
     9},
    // Many CTAs share a row block, so that groups of warps combine their partial results.
    {"paged_attention_merge_groups",
     "emu:sm80",
     cases::paged_attention,
     {"one_row_block_bf16", "one_row_block_vllm"},
     8,
     1,
     "ops/paged_attention/gpu/combine.hpp",
     "16"},
    {"paged_attention_packed_rows",
     "emu:sm80",
     cases::paged_attention,
     {"packed_rows_of_40_many_tiles", "packed_rows_of_136_strided"},
     3,
     5,
     "ops/paged_attention/tiles/"},
    {"paged_attention_dimension_major",
     "emu:sm80",
     cases::paged_attention,
     {"window_17_vllm", "bias_hides_keys_vllm"},
     3,
     5},
    {"paged_attention_mma",
     "emu:sm80",
     cases::paged_attention,
     {"group_key_h_q_9_h_kv_1_bf16_hidden", "bias_hides_keys_from_some_nhd_bf16", "many_tiles_bf16",
      "q_and_u_of_7_d_256_bf16"},
     8,
     6},
    {"paged_attention_mma_two_blocks",
     "emu:sm80",
     cases::paged_attention,
     {"large_group_nhd_h_q_9_h_kv_1_bf16_hidden", "infinite_values_hidden_group_of_11_nhd_bf16",
      "large_group_many_tiles_bf16", "q_and_u_of_12_d_128_bf16"},
     8,
     6},
    // Separate parts of a row, one part of K and of V per tile, and interleaved heads.
    {"paged_attention_mma_exact",
     "emu:sm80",
     cases::paged_attention,
     {"exact_q_of_7_d_96_bf16", "exact_q_of_2_d_192_bf16", "exact_q_of_7_d_256_bf16_hnd_window",
      "exact_q_of_12_d_72_fp16_infinite", "infinite_values_group_d_256_nhd_bf16"},
     8,
     5},
    {"paged_attention_mma_vllm",
     "emu:sm80",
     cases::paged_attention,
     {"decoder_bf16_h32_h_kv_8_d128_vllm", "bias_hides_keys_from_some_vllm_bf16"},
     4,
     6},
    // One cluster per row block, with wrong estimates of the lengths. Of the mma tiles only the calls in the kernel's
    // own file, because few of these warps have more tiles than stages.
    {"paged_attention_cluster_key_major",
     "emu:sm90",
     cases::paged_attention,
     {"group_key_h_q_4_h_kv_4_bf16", "lengths_out_of_range", "decoder_bf16_h16_d64"},
     4,
     6},
    {"paged_attention_cluster_dimension_major", "emu:sm90", cases::paged_attention, {"bias_hides_keys_vllm"}, 3, 6},
    {"paged_attention_cluster_mma",
     "emu:sm90",
     cases::paged_attention,
     {"group_key_h_q_8_h_kv_2_bf16", "bias_hides_keys_from_some_nhd_bf16", "bias_hides_keys_from_some_vllm_bf16"},
     4,
     6,
     "cluster_kernel"},
    {"nvfp4_linear",
     "emu:sm80",
     cases::nvfp4_linear,
     {"n_1_slices_end_anywhere", "n_1_many_tiles_blocked", "wide_range_x_bf16", "n_2_pair", "longer_k_n_10",
      "wide_range_x_n_5", "n_16_blocked"},
     3,
     8},
    // Clusters, slots of x and rings that wrap around; several warpgroups per tile in one CTA.
    {"nvfp4_linear_sm90", "emu:sm90", cases::nvfp4_linear, {"longer_k_n_10", "nan_scales_n_4"}, 3, 10},
    // Split K over a cluster and over warpgroups, with a ring that wraps around; split K over warpgroups alone; tiles
    // of one CTA that wrap around the ring.
    {"nvfp4_linear_sm90_matmul",
     "emu:sm90",
     cases::nvfp4_linear,
     {"n_40_cluster", "huge_x_n_33", "non_finite_x_n_1200"},
     3,
     14},
    // Stages round the ring, in CTAs of one chunk and of several.
    {"nvfp4_linear_backward",
     "emu:sm80",
     cases::nvfp4_linear_backward,
     {"longer_chunks", "n_16_chunks_of_a_cta"},
     3,
     3},
    {"nvfp4_gemv", "emu:sm80", cases::nvfp4_gemv, {"many_tiles_blocked"}, 8, 4},
    // Steps that wrap around the ring, scales with and without signs, clusters; blocked scales that end in NaN.
    {"nvfp4_gemv_sm100", "emu:sm100", cases::nvfp4_gemv, {"longer_k", "tail_blocked", "many_tiles_blocked"}, 8, 15},
    // Codes decoded to a workspace that the next kernel reads.
    {"nvfp4_matmul", "emu:sm80", cases::nvfp4_matmul, {"few_rows_of_a", "few_rows_of_b"}, 4, 3},
    // Tiles of one CTA of every width, in clusters and alone, with negative scales.
    {"nvfp4_matmul_sm100",
     "emu:sm100",
     cases::nvfp4_matmul,
     {"few_rows_of_a", "longer_k", "long_k_40_rows_of_a"},
     4,
     15},
    // Pairs alone and in clusters, wrapping around the ring, with negative scales.
    {"nvfp4_matmul_sm100_pairs",
     "emu:sm100",
     cases::nvfp4_matmul,
     {"many_rows_of_both", "longer_k_rows_140_columns_130"},
     4,
     15},
    {"nvfp4_quantize", "emu:sm80", cases::nvfp4_quantize, {"basic", "blocked", "bf16"}, 8, 2},
    // The maximum size for two SMs.
    {"nvfp4_quantize_one_pass", "emu:sm80", cases::nvfp4_quantize, {"one_pass_bf16"}, 3, 10, "", "2"},
    // Tiles of many heads, which wrap around the ring; two warps that select among ties; a row in two parts; CTAs that
    // split the visible keys.
    {"lightning_indexer",
     "emu:sm80",
     cases::lightning_indexer,
     {"many_heads", "topk_64_exact", "longest_row_exact", "documents", "no_relu"},
     6,
     6},
    // Tiles of many heads, which wrap around the ring; clusters that select, and CTAs of several warps, with a sample
    // and with ties; CTAs that split the visible keys, and CTAs of queries that see all keys, without relu.
    {"lightning_indexer_sm90",
     "emu:sm90",
     cases::lightning_indexer,
     {"many_heads", "long_row", "many_long_rows", "longest_row_one_query", "longest_row_exact", "topk_2048_exact",
      "causal_many_heads", "documents", "h_index_32", "fp8_documents_many_heads", "no_relu_h_index_192"},
     2,
     13},
    {"lightning_indexer_backward",
     "emu:sm80",
     cases::lightning_indexer_backward,
     {"basic", "many_heads", "any_order"},
     3,
     7},
    {"lightning_indexer_backward_sm90", "emu:sm90", cases::lightning_indexer_backward, {"basic", "many_heads"}, 3, 12},
    // The forward's kernels with block tables. Those of sm90: several queries per CTA, steps that wrap around the rings.
    {"sparse_mla_decode_sm80", "emu:sm80", cases::sparse_mla_decode, {"bf16_topk_127", "bf16_tables"}, 20, 6},
    // The split kernel and the merge: steps that wrap around the ring, lists of entries, scales of both kinds.
    {"sparse_mla_decode_splits_sm80",
     "emu:sm80",
     cases::sparse_mla_decode,
     {"v32_lists", "v32_some_scales", "v4_splits_h_q_16", "bf16_splits_h_q_8"},
     4,
     9,
     "ops/sparse_mla_decode/"},
    {"sparse_mla_decode_splits_sm90",
     "emu:sm90",
     cases::sparse_mla_decode,
     {"v32_lists", "v32_some_scales", "v4_splits_h_q_16", "bf16_splits_h_q_8"},
     4,
     9,
     "ops/sparse_mla_decode/"},
    // The kernel for many heads: tiles that wrap around the ring, several lists of entries, scales of both kinds, rows of
    // bf16 and of codes, with and without splits.
    {"sparse_mla_decode_many_heads_sm90",
     "emu:sm90",
     cases::sparse_mla_decode,
     {"many_heads_v32", "many_heads_v4", "many_heads_per_tensor_576", "many_heads_bf16_splits",
      "many_heads_v32_some_scales"},
     2,
     20,
     "ops/sparse_mla_decode/"},
    {"sparse_mla_decode_sm90",
     "emu:sm90",
     cases::sparse_mla_decode,
     {"bf16_tables_h_q_64", "bf16_large_scores", "bf16_h_q_33", "bf16_many_tiles", "bf16_unaligned_h_q_40"},
     3,
     12},
    // CTAs with several items, of several tiles; rows of several warps, of all positions and with pages that do not exist.
    {"paged_lightning_indexer",
     "emu:sm80",
     cases::paged_lightning_indexer,
     {"bf16_many_keys", "bf16_many_keys_few_left", "bf16_bad_pages_few_left", "fp8_q_len_8", "bf16_h_index_130"},
     6,
     8},
    // More rows than a CTA lists at a time, and rows with equal slots.
    {"mla_cache_append", "emu:sm80", cases::mla_cache_append, {"many_rows", "duplicates", "rotated_halves"}, 6, 2},
    // Query groups: tiles that wrap around the rings, queries with different first keys, queries that add one by one;
    // also without relu, where the entries wait for no signs.
    {"lightning_indexer_backward_sm90_groups",
     "emu:sm90",
     cases::indexer_dense_loss,
     {"groups_h_32_any_order", "groups_h_32_documents", "groups_h_17_no_relu"},
     3,
     20,
     "ops/lightning_indexer_backward/"},
};
INSTANTIATE_TEST_SUITE_P(All, Operators, testing::ValuesIn(kSubjects),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace hopwell
