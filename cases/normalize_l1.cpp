// normalize_l1: inputs, float64 reference, tolerance and cost.
#include <numeric>

#include "suites.hpp"

namespace hopwell::cases {
namespace {

struct Rows {
  std::int64_t rows = 5, columns = 64;
  bool in_place = false, strided = false, zero_rows = false, nan_row = false;
};

Instance make(Random& random, const Rows& p) {
  Instance instance;
  const std::vector<std::int64_t> strides{p.columns + (p.strided ? 7 : 0), 1};
  Array& out = instance.add({"out", DType::kFloat32, {p.rows, p.columns}, strides});
  Array& attn = p.in_place ? out : instance.add({"attn", DType::kFloat32, {p.rows, p.columns}, strides});
  for (std::int64_t i = 0; i < attn.size(); ++i) {
    const std::int64_t row = i / p.columns;
    attn.set(i, (p.zero_rows && row % 2 == 0) || random.below(4) == 0 ? 0 : std::abs(random.normal()));
  }
  if (p.nan_row) attn.set(attn.size() / 2, std::numeric_limits<double>::quiet_NaN());
  instance.expect(out, {.norm = 1e-6, .absolute = 1e-6}).accumulates = p.in_place;
  instance.reference = [p, &attn](Instance& self) {
    for (std::int64_t row = 0; row < p.rows; ++row) {
      double total = 0;
      for (std::int64_t i = 0; i < p.columns; ++i) total += attn.get(row * p.columns + i);
      for (std::int64_t i = 0; i < p.columns; ++i)
        self.outputs[0].expected.push_back(attn.get(row * p.columns + i) / (total == 0 ? 1 : total));
    }
  };
  instance.call = [&attn, &out, &workspace = *instance.workspace](const char* backend, Stream stream) {
    run_with_workspace<NormalizeL1Args>(hopwell::normalize_l1, hopwell::normalize_l1_workspace_bytes, workspace,
                                        {.attn = attn.view(), .out = out.view(), .backend = backend}, stream);
  };
  instance.flops = 2 * static_cast<double>(p.rows * p.columns);
  instance.bytes = 8 * static_cast<double>(p.rows * p.columns);
  return instance;
}

}  // namespace

Suite normalize_l1() {
  const std::vector<std::pair<std::string, Rows>> problems = {
      {"basic", {}},
      {"in_place", {.in_place = true}},
      {"zero_rows", {.rows = 9, .columns = 300, .zero_rows = true}},
      {"strided_in_place", {.rows = 9, .columns = 1000, .in_place = true, .strided = true, .zero_rows = true}},
      {"nan_row", {.nan_row = true}},
      {"one_column", {.rows = 70, .columns = 1}},
      {"long_row", {.rows = 2, .columns = 70001}},
      {"no_rows", {.rows = 0}},
      {"no_columns", {.columns = 0}}};
  Suite suite{"normalize_l1", {}, {{"training_step", {{"rows", "4096"}, {"columns", "2048"}}}}, {}};
  for (const auto& [name, problem] : problems)
    suite.cases.emplace_back(suite.op, name, [p = problem](Random& random) { return make(random, p); });
  suite.bench = [](const Settings& settings, Random& random) {
    return make(random, {.rows = number(settings, "rows"), .columns = number(settings, "columns")});
  };
  suite.allocating = {"strided_in_place"};
  return suite;
}

}  // namespace hopwell::cases
