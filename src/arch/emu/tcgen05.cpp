// tcgen05.mma, .cp and .commit: tensor-core operations of a CTA or of a CTA pair, in order of issue.
#include <algorithm>
#include <utility>

#include "gemm.hpp"
#include "numeric.hpp"
#include "operand.hpp"
#include "sm100.hpp"
#include "tensor_agents.hpp"

namespace hopwell::arch::emu {

namespace {

/// Decoded instruction descriptor ("Instruction descriptor").
struct ProductShape {
  int m, n, k;
  ElementType type;
  Major a_major, b_major;
  bool negate;  // either A or B, not both
  DataPath path;
  int rows, columns;  // of D in one CTA: rows, and tensor-memory columns
  int b_rows;         // rows of B in one CTA
};

[[noreturn]] void bad_instruction(const TensorProduct& p, Kind kind, const char* what) {
  machine->stop(kind, format("instruction descriptor 0x%08x: %s", p.instruction, what));
}

ProductShape decode(const TensorProduct& p) {
  const uint32_t i = p.instruction;
  ProductShape s{int(i >> 24 & 31) * 16,
                 int(i >> 17 & 63) * 8,
                 16,
                 ElementType::bf16,
                 Major::k,
                 Major::k,
                 false,
                 DataPath::invalid,
                 0,
                 0,
                 0};
  if (i >> 2 & 1) bad_instruction(p, Kind::unsupported, "sparse products are not modelled");
  if (p.kind == MmaKind::f16) {
    if ((i >> 4 & 3) != 1) bad_instruction(p, Kind::unsupported, "an accumulator type other than fp32 is not modelled");
    if (i & (3u | 1u << 3 | 1u << 6 | 1u << 23 | 1u << 29))
      bad_instruction(p, Kind::descriptor, "reserved bits are set");
    if ((i >> 7 & 7) > 1 || (i >> 7 & 7) != (i >> 10 & 7))
      bad_instruction(p, Kind::descriptor, "the types of kind::f16 must both be 0 (fp16) or both 1 (bf16)");
    s.type = (i >> 7 & 7) == 1 ? ElementType::bf16 : ElementType::fp16;
    s.a_major = Major(i >> 15 & 1);
    s.b_major = Major(i >> 16 & 1);
  } else {
    s.k = 64;
    s.type = ElementType::e2m1;
    if ((i >> 7 & 7) != 1 || (i >> 10 & 3) != 1)
      bad_instruction(p, Kind::descriptor, "the types of kind::mxf4nvf4 must be 1 (e2m1)");
    if (i >> 23 & 1) bad_instruction(p, Kind::unsupported, "ue8m0 scales are not modelled with block16");
    if (i & (3u << 4 | 3u << 29))
      bad_instruction(p, Kind::descriptor, "the scale-factor ids of scale_vec::4X must be 0");
    if (i & (3u | 1u << 3 | 1u << 6 | 1u << 12 | 3u << 15 | 7u << 24))
      bad_instruction(p, Kind::descriptor, "reserved bits are set, or an operand is not K-major");
    if (i >> 31) bad_instruction(p, Kind::unsupported, "K = 96 is not modelled");
    s.m = int(i >> 27 & 3) * 128;
  }
  s.negate = (i >> 13 & 1) != (i >> 14 & 1);
  const bool n_by_16 = p.kind == MmaKind::f16 && s.m == 128 && p.cta_group == 1 && !p.ws;
  const int n_step = p.cta_group == 2 ? (p.kind == MmaKind::f16 ? 32 : 16) : n_by_16 ? 16 : 8;
  s.path = data_path(s.m, p.cta_group, p.ws);
  if (s.path == DataPath::invalid)
    bad_instruction(p, Kind::descriptor, format("M = %d is not possible here", s.m).c_str());
  if (p.ws ? s.n != 64 && s.n != 128 && s.n != 256 : s.n < n_step || s.n > 256 || s.n % n_step)
    bad_instruction(p, Kind::descriptor, format("N = %d is not possible with M = %d", s.n, s.m).c_str());
  if (p.kind == MmaKind::mxf4nvf4 && s.path != DataPath::full)
    bad_instruction(p, Kind::unsupported, "block-scaled products are modelled for M = 128 a CTA");
  if (p.a_in_tmem && s.a_major == Major::mn) bad_instruction(p, Kind::descriptor, "A in tensor memory is K-major");
  s.rows = s.m / p.cta_group;
  s.b_rows = s.n / p.cta_group;
  s.columns = accumulator_columns(s.path, s.n);
  return s;
}

uint32_t first_rank(int cta_group, uint32_t rank) { return cta_group == 2 ? rank & ~1u : rank; }

SharedOperand operand_a(const TensorProduct& p, const ProductShape& s, uint32_t rank) {
  return {decode_tcgen05_descriptor(p.a), s.a_major, s.type, s.rows, s.k, rank};
}
SharedOperand operand_b(const TensorProduct& p, const ProductShape& s, uint32_t rank) {
  return {decode_tcgen05_descriptor(p.b), s.b_major, s.type, s.b_rows, s.k, rank};
}

int scale_columns(int rows) { return (rows + 31) / 32; }

void record(const TensorProduct& p, const ProductShape& s, uint32_t rank, Observer& who, Epoch epoch) {
  if (machine->options.check) {
    if (!p.a_in_tmem) operand_a(p, s, rank).record_reads(who, epoch, "its operand A");
    operand_b(p, s, rank).record_reads(who, epoch, "its operand B");
  }
  const auto touch = [&](const char* what, int lane, int lanes, int column, int columns, bool write) {
    access_tmem({who, epoch, what, true}, rank, lane, lanes, column, columns, write);
  };
  if (p.a_in_tmem) touch("its operand A", 0, kTmemLanes, tmem_column(p.a_tmem), s.k * element_bits(s.type) / 32, false);
  if (p.kind == MmaKind::mxf4nvf4) {
    touch("the scales of A", 0, kTmemLanes, tmem_column(p.scale_a), scale_columns(s.rows), false);
    touch("the scales of B", 0, kTmemLanes, tmem_column(p.scale_b), scale_columns(s.n), false);
  }
  const int parts = s.path == DataPath::half ? 4 : 1, lanes = s.path == DataPath::half ? 16 : kTmemLanes;
  for (int part = 0; part < parts; ++part) {
    const int lane = tmem_lane(p.d) + 32 * part;
    if (p.accumulate) touch("the accumulation into D", lane, lanes, tmem_column(p.d), s.columns, false);
    touch("the result D", lane, lanes, tmem_column(p.d), s.columns, true);
  }
}

// Multiplies x [rows][64], or its transpose, by the scales of `rows` rows, four each. All lane quarters must hold equal
// scales.
void apply_scales(Cta& cta, uint32_t address, int rows, float* x, int row_pitch, int k_pitch) {
  for (int row = 0; row < rows; ++row) {
    const Coord c = scale_coord(row);
    const uint32_t word = tmem_word(cta, c.row, tmem_column(address) + c.col);
    for (int quarter = 1; quarter < 4; ++quarter)
      if (tmem_word(cta, 32 * quarter + c.row, tmem_column(address) + c.col) != word)
        return machine->find(Kind::tensor_memory, format("tcgen05.mma kind::mxf4nvf4: the scales in column %d differ "
                                                         "between lane quarters; a copy with .warpx4 writes all four",
                                                         tmem_column(address) + c.col));
    for (int k = 0; k < 64; ++k) x[row * row_pitch + k * k_pitch] *= from_e4m3(uint8_t(word >> 8 * (k / 16) & 0x7f));
  }
}

void load_a_from_tmem(Cta& cta, const TensorProduct& p, const ProductShape& s, int segment, float* a) {
  for (int m = 0; m < s.rows; ++m) {
    const int lane = a_lane(s.path, s.rows, segment, m) + (s.path == DataPath::half ? tmem_lane(p.d) : 0);
    const std::byte* row = reinterpret_cast<const std::byte*>(&tmem_word(cta, lane, tmem_column(p.a_tmem)));
    for (int k = 0; k < s.k; ++k) a[m * s.k + k] = element_value(s.type, row, k);
  }
}

// M 128 of a pair: both halves of the lanes must hold A's 64 rows (tcgen05.cp.64x128b.warpx2::02_13 copies them to
// both).
void check_both_halves(Cta& cta, const TensorProduct& p, const ProductShape& s, Epoch epoch) {
  const int words = s.k * element_bits(s.type) / 32;
  for (int lane = 0; lane < 64; ++lane) {
    const uint32_t* row = &tmem_word(cta, lane, tmem_column(p.a_tmem));
    if (!std::equal(row, row + words, &tmem_word(cta, lane + 64, tmem_column(p.a_tmem))))
      return machine->find(
          Kind::tensor_memory,
          format("operand A in column %d of tensor memory of CTA %u differs between lane %d and lane %d, "
                 "and with M = 128 in a CTA pair it must stand in both halves of the lanes: read by ",
                 tmem_column(p.a_tmem), cta.rank, lane, lane + 64) +
              machine->describe(epoch),
          &epoch);
  }
}

// Each CTA of a pair multiplies by all of B, so both CTAs must hold B's scales.
void check_scales_of_pair(const TensorProduct& p, const ProductShape& s, uint32_t first, Epoch epoch) {
  Machine& m = *machine;
  for (int row = 0; row < s.n; ++row) {
    const Coord c = scale_coord(row);
    const int column = tmem_column(p.scale_b) + c.col;
    if (tmem_word(m.ctas[first], c.row, column) != tmem_word(m.ctas[first + 1], c.row, column))
      return m.find(
          Kind::tensor_memory,
          format("the scales of row %d of B, in column %d of tensor memory, differ between the CTAs of a pair, "
                 "and each takes its own: read by ",
                 row, column) +
              m.describe(epoch),
          &epoch);
  }
}

// Loads A for one segment of N, with sign and scales applied.
void load_a(Cta& cta, const TensorProduct& p, const ProductShape& s, int segment, std::vector<float>& a) {
  if (!p.a_in_tmem && segment > 0) return;  // all segments use the same A
  if (p.a_in_tmem)
    load_a_from_tmem(cta, p, s, segment, a.data());
  else
    operand_a(p, s, cta.rank).load(a.data(), s.k, false);
  if (s.negate)
    for (float& x : a) x = -x;
  if (p.kind == MmaKind::mxf4nvf4) apply_scales(cta, p.scale_a, s.rows, a.data(), s.k, 1);
}

// ---- collector buffers ----

Collector& collector_of(Cta& first, const TensorProduct& p) {
  return first.collectors[size_t(p.ws ? 1 + p.collector_buffer : 0)];
}
std::string collector_name(const TensorProduct& p) {
  return p.ws ? format("b%d", p.collector_buffer) : std::string("a");
}

// Called at the issue of a product: checks that the collector buffer holds the operand that the product reuses, and
// records its new contents. Buffer contents follow the order of issue. PTX does not say whether .ws products and other
// products leave each other's buffers intact.
void use_collectors(const TensorProduct& p, const ProductShape& s, Cta& first, Observer& who, Epoch epoch) {
  Machine& m = *machine;
  const bool in_tmem = !p.ws && p.a_in_tmem;
  const uint64_t operand = p.ws ? p.b : p.a_in_tmem ? p.a_tmem : p.a;
  const uint32_t form = uint32_t(in_tmem) | uint32_t(s.type) << 1 | uint32_t(p.ws ? s.b_major : s.a_major) << 3 |
                        uint32_t(p.ws ? s.n : s.m) << 4;
  Collector& c = collector_of(first, p);
  if (p.collector == CollectorUsage::use || p.collector == CollectorUsage::lastuse) {
    const std::string what = format("it uses %s of collector buffer ", p.ws ? "B" : "A") + collector_name(p);
    if (c.filled.empty())
      m.find(Kind::uninitialized, what + ", which no product has filled");
    else if (!c.valid)
      m.find(Kind::uninitialized,
             what + ", which no longer holds the operand filled by " + m.describe(c.filled) +
                 ": it was given up or replaced by " + m.describe(c.ended),
             &c.ended);
    else if (c.operand != operand || c.form != form)
      m.find(Kind::descriptor, what + ", which holds another operand, filled by " + m.describe(c.filled), &c.filled);
    else if (c.filled.agent != epoch.agent && !who.tensor({c.filled.step, AgentId(c.filled.agent + 1), 0}))
      m.find(Kind::race, what + ", not ordered after the fill by " + m.describe(c.filled), &c.filled);
  }
  for (size_t i = 0; i < first.collectors.size(); ++i)
    if ((i == 0) == p.ws && first.collectors[i].valid)
      first.collectors[i].valid = false, first.collectors[i].ended = epoch;
  if (p.collector == CollectorUsage::fill) {
    c.operand = operand;
    c.form = form;
    c.valid = true;
    c.filled = epoch;
  } else if (p.collector != CollectorUsage::use && c.valid) {
    c.valid = false;
    c.ended = epoch;
  }
}

// Called when a product executes: checks that its collector buffer still equals its operand.
void compare_collected(const TensorProduct& p, const ProductShape& s, uint32_t first, Epoch epoch) {
  Machine& m = *machine;
  if (p.collector == CollectorUsage::none || p.collector == CollectorUsage::discard) return;
  std::vector<float> values;
  if (p.ws) {
    values.resize(size_t(s.n * s.k));
    operand_b(p, s, first).load(values.data(), s.k, false);
  } else {
    values.resize(size_t(s.m * s.k));
    for (int q = 0; q < p.cta_group; ++q) {
      float* a = values.data() + q * s.rows * s.k;
      if (p.a_in_tmem)
        load_a_from_tmem(m.ctas[first + uint32_t(q)], p, s, 0, a);
      else
        operand_a(p, s, first + uint32_t(q)).load(a, s.k, false);
    }
  }
  Collector& c = collector_of(m.ctas[first], p);
  if (p.collector == CollectorUsage::fill)
    c.values = std::move(values);
  else if (c.values.size() == values.size() &&
           __builtin_memcmp(c.values.data(), values.data(), values.size() * sizeof(float)) != 0)
    m.find(Kind::race,
           "tcgen05.mma uses collector buffer " + collector_name(p) +
               ", and its operand in memory has changed since the fill: used by " + m.describe(epoch),
           &epoch);
}

void perform(const TensorProduct& p, uint32_t rank, Epoch epoch) {
  Machine& m = *machine;
  const ProductShape s = decode(p);
  const uint32_t first = first_rank(p.cta_group, rank);
  if (m.options.check) compare_collected(p, s, first, epoch);
  std::vector<float> a(size_t(128 * 64)), b(size_t(64 * 256));
  for (int q = 0; q < p.cta_group; ++q) operand_b(p, s, first + uint32_t(q)).load(b.data() + q * s.b_rows, s.n, true);
  if (p.kind == MmaKind::mxf4nvf4) {
    if (p.cta_group == 2) check_scales_of_pair(p, s, first, epoch);
    apply_scales(m.ctas[first], p.scale_b, s.n, b.data(), 1, s.n);
  }
  for (int q = 0; q < p.cta_group; ++q) {
    Cta& cta = m.ctas[first + uint32_t(q)];
    if (p.a_in_tmem && p.cta_group == 2 && s.path == DataPath::two) check_both_halves(cta, p, s, epoch);
    float* d = reinterpret_cast<float*>(&tmem_word(cta, tmem_lane(p.d), tmem_column(p.d)));
    // Blocks of D whose rows are consecutive lanes: four groups of 16 rows, or segments of N stacked in the lanes.
    const int segments = s.path == DataPath::two ? 2 : s.path == DataPath::four ? 4 : 1, n = s.n / segments;
    for (int segment = 0; segment < segments; ++segment) {
      load_a(cta, p, s, segment, a);
      const float* right = b.data() + segment * n;
      if (s.path == DataPath::half)
        for (int part = 0; part < 4; ++part)
          gemm(d + 32 * part * kTmemColumns, kTmemColumns, a.data() + 16 * part * s.k, right, s.n, 16, n, s.k,
               p.accumulate);
      else
        gemm(d + segment * s.rows * kTmemColumns, kTmemColumns, a.data(), right, s.n, s.rows, n, s.k, p.accumulate);
    }
  }
}

}  // namespace

void tcgen05_mma(const TensorProduct& p, const Site& site) {
  enter(p.ws ? "tcgen05.mma.ws" : "tcgen05.mma", site);
  Machine& m = *machine;
  check_cta_group(p.cta_group);
  ++m.report.statistics.tensor_operations;
  const ProductShape s = decode(p);
  const int d_lane = tmem_lane(p.d);
  if (d_lane != 0 && !(s.path == DataPath::half && d_lane == 16))
    m.stop(Kind::tensor_memory, format("the address of D names lane %d", d_lane));
  if (p.a_in_tmem && tmem_lane(p.a_tmem) != (s.path == DataPath::half ? d_lane : 0))
    m.stop(Kind::tensor_memory, format("the address of A names lane %d", tmem_lane(p.a_tmem)));
  Observer self(*current);
  const Epoch epoch{current->tensor_step, tensor_agent(*current), current->site};
  const uint32_t rank = current->cta->rank, first = first_rank(p.cta_group, rank);
  if (!p.a_in_tmem) operand_a(p, s, rank).check("A");
  operand_b(p, s, rank).check("B");
  for (uint32_t r = first; r < first + uint32_t(p.cta_group); ++r) record(p, s, r, self, epoch);
  count_work([&](Work& w) {
    const uint64_t a = p.a_in_tmem ? 0 : uint64_t(32 * s.rows), b = uint64_t(32 * s.b_rows);
    ++w.products;
    w.flops += 2.0 * s.m * s.n * s.k;
    w.full_rate_cycles += 2.0 * s.m * s.n * 16 / m.work->rates.flops;
    const bool collected = p.collector == CollectorUsage::use || p.collector == CollectorUsage::lastuse;
    const uint64_t spared = uint64_t(p.cta_group) * (!collected ? 0 : p.ws ? b : a);
    w.operand_bytes += uint64_t(p.cta_group) * (a + b) - spared;
    w.collected_bytes += spared;
    const int before = std::exchange(m.ctas[first].last_collector, p.ws ? p.collector_buffer : -1);
    const bool alternates = before >= 0 && before != p.collector_buffer;
    w.tensor_cycles +=
        p.cta_group * product_cycles(m.work->rates, {s.m, s.n, p.cta_group, p.ws, p.a_in_tmem, collected, alternates});
  });
  if (m.options.check) use_collectors(p, s, m.ctas[first], self, epoch);
  m.submit_tensor(first, {[p, rank, epoch] { perform(p, rank, epoch); }});
}

void tcgen05_copy(CopyShape shape, int cta_group, uint32_t address, uint64_t descriptor, const Site& site) {
  enter("tcgen05.cp", site);
  Machine& m = *machine;
  if (shape == CopyShape::b4x256) m.stop(Kind::unsupported, "tcgen05.cp.4x256b is not modelled");
  check_cta_group(cta_group);
  const MatrixDescriptor d = decode_tcgen05_descriptor(descriptor);
  if (d.error) m.stop(Kind::descriptor, std::string("matrix descriptor: ") + d.error);
  if (d.base_offset) m.stop(Kind::unsupported, "matrix descriptor: a base offset is not modelled");
  if (tmem_lane(address)) m.stop(Kind::tensor_memory, format("the address names lane %d", tmem_lane(address)));
  const int rows = copy_rows(shape), bytes = copy_row_bytes(shape);
  Observer self(*current);
  const Epoch epoch{current->tensor_step, tensor_agent(*current), current->site};
  const uint32_t rank = current->cta->rank, first = first_rank(cta_group, rank);
  count_work([&](Work& w) {
    w.tmem_copied += uint64_t(cta_group * rows * bytes);
    w.shared_bytes += uint64_t(cta_group * rows * bytes);
  });
  for (uint32_t r = first; r < first + uint32_t(cta_group); ++r) {
    for (int row = 0; row < rows; ++row)
      for (int chunk = 0; chunk < bytes; chunk += 16)
        m.async_access(self, epoch, in_rank(r, operand_address(d, Major::k, 8, row, chunk)), 16, false, Proxy::async,
                       "it");
    access_tmem({self, epoch, "it", true}, r, 0, kTmemLanes, tmem_column(address), bytes / 4, true);
  }
  m.submit_tensor(first, {[&m, shape, cta_group, first, address, d, rows, bytes] {
                    for (uint32_t r = first; r < first + uint32_t(cta_group); ++r)
                      for (int row = 0; row < rows; ++row)
                        for (int byte = 0; byte < bytes; byte += 4) {
                          const uint32_t word =
                              m.load<uint32_t>(in_rank(r, operand_address(d, Major::k, 8, row, byte)));
                          for (int lane : copy_lanes(shape, row))
                            if (lane >= 0) tmem_word(m.ctas[r], lane, tmem_column(address) + byte / 4) = word;
                        }
                  }});
}

// Tracks all operations that this thread has issued: one arrival on the mbarrier (of every CTA of the mask) when all of
// them are complete.
void tcgen05_commit(int cta_group, uint32_t mbarrier, int cta_mask, const Site& site) {
  if (enter_synchronisation("tcgen05.commit", site)) return;
  Machine& m = *machine;
  check_cta_group(cta_group);
  if (current->tensor_agent == kNoAgent)
    m.find(Kind::barrier, "by a thread that has issued no tensor-core operation; it tracks only its own thread's");
  std::vector<uint32_t> targets;
  for (uint32_t r = 0; r < m.ctas.size(); ++r)
    if (cta_mask < 0 ? r == rank_of(mbarrier) : cta_mask >> r & 1) targets.push_back(in_rank(r, mbarrier));
  for (uint32_t target : targets) m.mbarrier_at(target, true);
  const Epoch epoch{current->tensor_step, tensor_agent(*current), current->site};
  Knowledge released;
  if (m.options.check) {
    ++current->tensor_step;
    released = current->knows;  // a waiting thread learns the accesses before the operations, but not this thread's
                                // later steps
    released.ordered.forget(current->agent);
    released.proxied.forget(current->agent);
    current->tick();
  }
  m.submit_tensor(
      first_rank(cta_group, current->cta->rank), {[&m, targets, epoch, released] {
        for (uint32_t target : targets) {
          Mbarrier* b = m.find_mbarrier(target);
          if (!b) {
            m.find(Kind::barrier,
                   "tcgen05.commit arrives on the mbarrier at " + m.place(target) + ", which no longer exists");
            continue;
          }
          if (m.ctas[rank_of(target)].live == 0)
            m.find(Kind::pending, format("tcgen05.commit arrives at CTA %u after it has exited", rank_of(target)));
          if (b->pending == 0)
            m.stop(Kind::barrier,
                   "tcgen05.commit arrives more often than the mbarrier at " + m.place(target) + " expects");
          if (m.options.check) {
            b->arriving.join(released);
            b->arriving.ordered.raise(epoch.agent, epoch.step);
          }
          --b->pending;
          m.finish_phase(*b);
        }
      }});
}

void unsupported(const char* instruction, const Site& site) {
  enter(instruction, site);
  machine->stop(Kind::unsupported, "this instruction is not modelled");
}

}  // namespace hopwell::arch::emu
