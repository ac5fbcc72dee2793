// wgmma: asynchronous products of a warpgroup. The accumulators hold poison until wait_group.
#include "wgmma.hpp"

#include <algorithm>

#include "gemm.hpp"
#include "machine.hpp"
#include "numeric.hpp"
#include "operand.hpp"
#include "sm90.hpp"

namespace hopwell::arch::emu {

namespace {

Warpgroup& group_of(const Thread& t) { return t.cta->warpgroups[size_t(t.linear / 128)]; }

ElementType element(WgmmaType type) {
  constexpr ElementType of[] = {ElementType::fp16, ElementType::bf16, ElementType::e4m3};
  return of[int(type)];
}
// Number of elements in 32 bytes.
int depth(const WgmmaOperation& op) { return 256 / element_bits(element(op.type)); }
SharedOperand a_operand(const WgmmaOperation& op, uint32_t rank) {
  return {op.a, op.a_major, element(op.type), 64, depth(op), rank};
}
SharedOperand b_operand(const WgmmaOperation& op, uint32_t rank) {
  return {op.b, op.b_major, element(op.type), op.n, depth(op), rank};
}

float register_element(WgmmaType type, const std::array<uint32_t, 4>& registers, int e) {
  if (type == WgmmaType::e4m3) return from_e4m3(uint8_t(registers[size_t(e / 4)] >> 8 * (e % 4)));
  const uint16_t bits = uint16_t(registers[size_t(e / 2)] >> 16 * (e % 2));
  return type == WgmmaType::bf16 ? from_bf16(bits) : from_fp16(bits);
}

void compute(WgmmaOperation& op, uint32_t rank) {
  float a[64 * 32], b[32 * 256];
  const int k = depth(op);
  b_operand(op, rank).load(b, op.n, true);
  if (!op.a_in_registers) {
    a_operand(op, rank).load(a, k, false);
  } else {
    for (int thread = 0; thread < 128; ++thread)
      for (int e = 0; e < k / 2; ++e) {
        const Coord c = k == 16 ? wgmma_a_fragment(thread, e) : wgmma_a_fragment_8bit(thread, e);
        a[c.row * k + c.col] = register_element(op.type, op.a_registers[size_t(thread)], e);
      }
  }
  if (op.negate_a != op.negate_b)
    for (float& x : a) x = -x;
  gemm(op.sums.data(), op.n, a, b, op.n, 64, op.n, k, op.accumulate);
}

// Executes the oldest operation. If a later operation in flight uses the same accumulators, the sums stay in the
// operation.
void retire_first(Warpgroup& group, uint32_t rank) {
  const std::unique_ptr<WgmmaOperation> op = std::move(group.operations.front());
  group.operations.pop_front();
  compute(*op, rank);
  for (const auto& later : group.operations)
    if (later->d[0] == op->d[0]) {
      later->sums = std::move(op->sums);
      return;
    }
  for (int thread = 0; thread < 128; ++thread) {
    float* d = op->d[size_t(thread)];
    if (!std::all_of(d, d + op->n / 2, [](float x) { return bit_cast<uint32_t>(x) == kPoison; })) {
      // They are not written either, because they may be variables of a function that has returned.
      machine->find(Kind::race, "the accumulators of a wgmma.mma_async were written while it was in flight");
      continue;
    }
    for (int e = 0; e < op->n / 2; ++e) {
      const Coord c = wgmma_d_fragment(thread, e);
      d[e] = op->sums[size_t(c.row * op->n + c.col)];
    }
  }
  group.fences_at_release[op->d[0]] = group.fences;
}

struct Argument {
  float* d;
  const uint32_t* a_registers;
  uint64_t a, b;
};

void issue(Rendezvous& r, WgmmaOperation op) {
  Machine& m = *machine;
  Cta& cta = *current->cta;
  Warpgroup& group = group_of(*current);
  ++m.report.statistics.tensor_operations;
  count_work([&](Work& w) {
    const double flops = 2 * 64 * op.n * depth(op);
    ++w.products;
    w.flops += flops;
    w.full_rate_cycles += 2 * 64 * op.n * 16 / m.work->rates.flops;  // 32 bytes of k, for any element type
    w.operand_bytes += uint64_t(32 * ((op.a_in_registers ? 0 : 64) + op.n));
    w.tensor_cycles += product_cycles(m.work->rates, {64, op.n, 1, false, op.a_in_registers});
  });
  if (group.agent == kNoAgent)
    group.agent = m.new_agent(format("wgmma of CTA %u warpgroup %d", cta.rank, current->linear / 128),
                              "no wgmma.wait_group (and barrier) in between");
  const Argument& first = *static_cast<Argument*>(r.argument[0]);
  for (size_t i = 0; i < 128; ++i) {
    const Argument& argument = *static_cast<Argument*>(r.argument[i]);
    if (argument.a != first.a || argument.b != first.b)
      m.stop(Kind::divergence, "the matrix descriptors differ within the warpgroup");
    op.d[i] = argument.d;
    if (op.a_in_registers) __builtin_memcpy(op.a_registers[i].data(), argument.a_registers, 16);
  }
  const auto released = group.fences_at_release.find(op.d[0]);
  if (group.fences <= (released == group.fences_at_release.end() ? 0 : released->second))
    m.find(Kind::race, "no wgmma.fence between the threads' own use of its registers and it");
  if (!op.a_in_registers) a_operand(op, cta.rank).check("A");
  b_operand(op, cta.rank).check("B");
  if (m.options.check) {
    Observer all(&cta.threads[size_t(current->linear / 128 * 128)], 128, group.common);
    const Epoch epoch{uint32_t(op.group), group.agent, current->site};
    if (!op.a_in_registers) a_operand(op, cta.rank).record_reads(all, epoch, "its operand A");
    b_operand(op, cta.rank).record_reads(all, epoch, "its operand B");
  }
  bool chained = false;
  for (const auto& earlier : group.operations) {
    if (earlier->d[0] != op.d[0]) continue;
    chained = true;
    if (earlier->n != op.n) m.stop(Kind::race, "its accumulators are in flight, with another shape");
  }
  op.sums.resize(size_t(64 * op.n));
  for (int thread = 0; thread < 128; ++thread)
    for (int e = 0; e < op.n / 2; ++e) {
      float& accumulator = op.d[size_t(thread)][e];
      const Coord c = wgmma_d_fragment(thread, e);
      if (!chained) op.sums[size_t(c.row * op.n + c.col)] = accumulator;
      accumulator = bit_cast<float>(kPoison);
    }
  if (m.recorder) m.recorder->issued(Recorder::Engine::tensor, &group, op.group);
  group.operations.push_back(std::make_unique<WgmmaOperation>(std::move(op)));
}

}  // namespace

void wgmma_fence(const Site& site) {
  if (enter_synchronisation("wgmma.fence", site)) return;
  machine->warpgroup_collective("wgmma.fence", nullptr, [](Rendezvous&) { ++group_of(*current).fences; });
}

void wgmma(float* d, int n, WgmmaType type, const uint32_t* a_registers, uint64_t a, uint64_t b, Major a_major,
           Major b_major, bool negate_a, bool negate_b, bool accumulate, const Site& site) {
  enter("wgmma.mma_async", site);
  Argument mine{d, a_registers, a, b};
  machine->warpgroup_collective("wgmma.mma_async", &mine, [&](Rendezvous& r) {
    WgmmaOperation op{};
    op.group = group_of(*current).open_group;
    op.n = n;
    op.type = type;
    op.a_in_registers = a_registers != nullptr;
    op.accumulate = accumulate;
    op.negate_a = negate_a;
    op.negate_b = negate_b;
    op.a_major = a_major;
    op.b_major = b_major;
    op.a = decode_wgmma_descriptor(a);
    op.b = decode_wgmma_descriptor(b);
    issue(r, std::move(op));
  });
}

void wgmma_commit(const Site& site) {
  if (enter_synchronisation("wgmma.commit_group", site)) return;
  machine->warpgroup_collective("wgmma.commit_group", nullptr, [](Rendezvous&) { ++group_of(*current).open_group; });
}

void wgmma_wait(int pending_groups, const Site& site) {
  if (enter_synchronisation("wgmma.wait_group", site)) return;
  Machine& m = *machine;
  m.warpgroup_collective("wgmma.wait_group", nullptr, [&](Rendezvous&) {
    Warpgroup& group = group_of(*current);
    // Its accumulators may no longer exist when it would be executed.
    if (pending_groups == 0 && !group.operations.empty() && group.operations.back()->group == group.open_group)
      m.stop(Kind::pending, "a wgmma.mma_async was not committed, so that waiting for all groups does not cover it");
    const uint64_t before =
        group.open_group > uint64_t(pending_groups) ? group.open_group - uint64_t(pending_groups) : 0;
    while (!group.operations.empty() && group.operations.front()->group < before)
      retire_first(group, current->cta->rank);
    if (m.recorder) m.recorder->waited(&group, before);
    if (!m.options.check || group.agent == kNoAgent || before == 0) return;
    const size_t first = size_t(current->linear / 128 * 128);
    for (size_t i = first; i < first + 128; ++i)
      current->cta->threads[i]->knows.ordered.raise(group.agent, uint32_t(before - 1));
  });
}

}  // namespace hopwell::arch::emu
