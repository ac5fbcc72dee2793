#include "work.hpp"

#include <algorithm>

#include "machine.hpp"
#include "numeric.hpp"

namespace hopwell::arch::emu {

namespace {
thread_local WorkCount* innermost = nullptr;
constexpr uint64_t kSector = 32;
}  // namespace

WorkCount* current_work_count() { return innermost; }

Work& Work::operator+=(const Work& o) {
  tensor_cycles += o.tensor_cycles;
  full_rate_cycles += o.full_rate_cycles;
  flops += o.flops;
  products += o.products;
  operand_bytes += o.operand_bytes;
  collected_bytes += o.collected_bytes;
  shared_bytes += o.shared_bytes;
  copied_bytes += o.copied_bytes;
  gathers += o.gathers;
  added_bytes += o.added_bytes;
  added_scalars += o.added_scalars;
  tmem_loaded += o.tmem_loaded;
  tmem_stored += o.tmem_stored;
  tmem_copied += o.tmem_copied;
  global_bytes += o.global_bytes;
  exponentials += o.exponentials;
  slots += o.slots;
  return *this;
}

std::vector<Demand> demands(const Work& w, const Rates& r) {
  const auto cycles = [](double amount, double rate) { return rate > 0 ? amount / rate : 0; };
  const double added = double(w.added_bytes + w.added_scalars) * r.added_passes;
  return {
      {"tensor pipe", w.tensor_cycles},
      {"shared memory", cycles(double(w.operand_bytes + w.shared_bytes + w.copied_bytes) + added, r.shared_bytes)},
      {"gather", std::max(cycles(double(w.copied_bytes), r.gather_bytes), double(w.gathers) * r.gather4_cycles)},
      {"additions", cycles(double(w.added_bytes), r.added_bytes) + cycles(double(w.added_scalars), r.added_scalars)},
      {"tensor memory",
       cycles(double(w.tmem_loaded + w.tmem_stored), r.tmem_bytes) + cycles(double(w.tmem_copied), r.tmem_copy_bytes)},
      {"exponentials", cycles(double(w.exponentials), r.exponentials)},
      {"issue slots", cycles(double(w.slots), r.issue_slots)},
  };
}

double product_cycles(const Rates& r, const ProductForm& p) {
  const double rows = double(p.m) / p.cta_group, half_rate = p.m == 64 && !p.ws && r.tmem_bytes > 0 ? 2 : 1,
               arithmetic = half_rate * 2 * rows * p.n * 16 / r.flops;
  const bool reads_a = !p.a_in_tmem && (p.ws || !p.collected), reads_b = !p.ws || !p.collected;
  double operands = 32 * ((reads_a ? rows : 0) + (reads_b ? double(p.n) / p.cta_group : 0)) / r.shared_bytes;
  if (!p.ws) return std::max(arithmetic, operands);
  // Measured: if B is already in its collector buffer, the read of A is not fully hidden. If two consecutive products
  // both refill one buffer, the refill costs time between them; M 32 waits as long as M 64.
  if (p.collected) return std::max(arithmetic, operands + (reads_a ? 7 : 0));
  const double refill = p.alternates ? 0 : p.m == 128 ? 10 : 12;
  return std::max({arithmetic + refill, p.n / 4.0 + refill, operands});
}

namespace {
void count_exponential() {
  if (!current) return;  // outside of a launch
  ++current->instructions;
  count_work([](Work& w) { ++w.exponentials; });
}
}  // namespace

float exp2(float x) {
  count_exponential();
  return std::exp2(x);
}
float log2(float x) {
  count_exponential();
  return std::log2(x);
}

WorkCount::WorkCount(const Rates& chip) : rates(chip), outer_(innermost) { innermost = this; }
WorkCount::~WorkCount() { innermost = outer_; }

void WorkCount::start_cluster(uint32_t cluster_ctas, uint32_t cta_warps) {
  if (cta_warps > warps_a_cta) {  // several launches with different shapes: warps keep their index
    std::vector<Work> wider(size_t{cta_warps} * std::max<size_t>(cluster_ctas, warps.size()));
    for (size_t i = 0; i < warps.size(); ++i) wider[i / warps_a_cta * cta_warps + i % warps_a_cta] = warps[i];
    warps = std::move(wider);
    warps_a_cta = cta_warps;
  }
  warps.resize(std::max(warps.size(), size_t{cluster_ctas} * warps_a_cta));
  ctas += cluster_ctas;
}

void WorkCount::touch(const void* global, uint64_t bytes, bool write) {
  const auto first = reinterpret_cast<uintptr_t>(global);
  for (uint64_t sector = first / kSector; bytes && sector <= (first + bytes - 1) / kSector; ++sector)
    sectors_[sector] |= uint8_t(write ? 2 : 1);
}

Work WorkCount::total() const {
  Work all;
  for (const Work& w : warps) all += w;
  return all;
}

uint64_t WorkCount::memory_bytes() const {
  uint64_t count = 0;
  for (const auto& [sector, how] : sectors_) count += uint64_t(how & 1) + uint64_t(how >> 1);
  return count * kSector;
}

std::vector<Demand> WorkCount::units() const {
  std::vector<Demand> units = demands(total(), rates);
  units.push_back({"HBM", double(memory_bytes()) / rates.memory_bytes});
  for (Demand& unit : units) unit.cycles /= double(std::max<uint64_t>(1, ctas));
  return units;
}

std::vector<Role> WorkCount::roles() const {
  const auto kinds = [&](const Work& w) {
    uint32_t bits = 0;
    const std::vector<Demand> of_role = demands(w, rates);
    for (size_t i = 0; i < of_role.size(); ++i) bits |= uint32_t(of_role[i].cycles > 0) << i;
    return bits;
  };
  std::vector<Role> all;
  for (size_t first = 0, end; first < warps.size(); first = end) {
    Work work = warps[first];
    for (end = first + 1; end % warps_a_cta && end < warps.size() && kinds(warps[end]) == kinds(warps[first]); ++end)
      work += warps[end];
    if (!kinds(work)) continue;
    Role role{first / warps_a_cta, first % warps_a_cta, (end - 1) % warps_a_cta, demands(work, rates)};
    const double clusters = double(ctas) * warps_a_cta / double(warps.size());
    for (Demand& unit : role.demands) unit.cycles /= clusters;
    all.push_back(std::move(role));
  }
  return all;
}

namespace {
std::string json_of(const std::vector<Demand>& demands) {
  std::string out;
  for (const Demand& d : demands) out += format("%s\"%s\": %.17g", out.empty() ? "{" : ", ", d.unit, d.cycles);
  return out + "}";
}
}  // namespace

std::string WorkCount::json() const {
  const Work all = total();
  std::string roles_text;
  for (const Role& role : roles())
    roles_text += format("%s{\"rank\": %zu, \"first_warp\": %zu, \"last_warp\": %zu, \"cycles\": ",
                         roles_text.empty() ? "" : ", ", role.rank, role.first_warp, role.last_warp) +
                  json_of(role.demands) + "}";
  return format("{\"chip\": \"%s\", \"kernel\": \"%s\", \"ctas\": %llu, \"warps\": %u, ", rates.chip, kernel.c_str(),
                static_cast<unsigned long long>(ctas), warps_a_cta) +
         format("\"products\": %llu, \"flops\": %.17g, \"full_rate_cycles\": %.17g, \"cycles\": ",
                static_cast<unsigned long long>(all.products), all.flops,
                all.full_rate_cycles / double(std::max<uint64_t>(1, ctas))) +
         json_of(units()) + ", \"roles\": [" + roles_text + "]}";
}

}  // namespace hopwell::arch::emu
