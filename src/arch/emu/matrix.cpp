// ldmatrix, stmatrix, mma.sync, atomic additions to global memory, and accesses to shared memory by address.
#include "gemm.hpp"
#include "geometry.hpp"
#include "machine.hpp"
#include "numeric.hpp"
#include "sm80.hpp"

namespace hopwell::arch::emu {

namespace {

struct MatrixArgument {
  uint32_t* registers;
  uint32_t row_address;
};

// The lane that supplies the address of a row reads or writes all 16 bytes of it.
void move_matrices(const char* instruction, uint32_t* registers, int count, bool transposed, uint32_t row_address,
                   bool write) {
  MatrixArgument mine{registers, row_address};
  machine->warp_collective(instruction, ~0u, &mine, [&](Rendezvous& r) {
    Machine& m = *machine;
    Thread* const leader = current;
    const auto argument = [&](int lane) -> MatrixArgument& {
      return *static_cast<MatrixArgument*>(r.argument[size_t(lane)]);
    };
    for (int lane = 0; lane < 8 * count; ++lane) {
      current = leader->cta->threads[size_t(leader->warp * 32 + lane)];
      const uint32_t row = argument(lane).row_address;
      m.require_shared(row, 16, 16, "a row");
      m.generic_access(*current, row, 16, write ? Access::write : Access::read, current->site);
    }
    current = leader;
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < count; ++matrix) {
        uint32_t& word = argument(lane).registers[matrix];
        for (int half = 0; half < 2; ++half) {
          const Coord c = ldmatrix_fragment(lane, half, transposed);
          const uint32_t address = argument(8 * matrix + c.row).row_address + uint32_t(2 * c.col);
          if (write)
            m.store(address, uint16_t(word >> 16 * half));
          else
            word = (word & ~(0xffffu << 16 * half)) | uint32_t{m.load<uint16_t>(address)} << 16 * half;
        }
      }
  });
}

}  // namespace

void ldmatrix(uint32_t* registers, int count, bool transposed, uint32_t row_address, const Site& site) {
  enter("ldmatrix", site);
  move_matrices("ldmatrix", registers, count, transposed, row_address, false);
}

void stmatrix(const uint32_t* registers, int count, bool transposed, uint32_t row_address, const Site& site) {
  enter("stmatrix", site);
  uint32_t copy[4];
  for (int i = 0; i < count; ++i) copy[i] = registers[i];
  move_matrices("stmatrix", copy, count, transposed, row_address, true);
}

void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], MmaType type, const Site& site) {
  enter("mma.sync.m16n8k16", site);
  struct Argument {
    float* d;
    const uint32_t *a, *b;
  } mine{d, a, b};
  machine->warp_collective("mma.sync.m16n8k16", ~0u, &mine, [&](Rendezvous& r) {
    ++machine->report.statistics.tensor_operations;
    count_work([](Work& w) {
      constexpr double kFlops = 2 * 16 * 8 * 16;
      ++w.products;
      w.flops += kFlops;
      w.full_rate_cycles += kFlops / machine->work->rates.flops;
      w.tensor_cycles += kFlops / machine->work->rates.flops;
    });
    const auto value = [type](const uint32_t* registers, int element) {
      const uint16_t bits = uint16_t(registers[element / 2] >> 16 * (element % 2));
      return type == MmaType::bf16 ? from_bf16(bits) : from_fp16(bits);
    };
    float left[16][16], right[16][8], sums[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Argument& t = *static_cast<Argument*>(r.argument[size_t(lane)]);
      for (int e = 0; e < 8; ++e) {
        const Coord c = mma_a_fragment(lane, e);
        left[c.row][c.col] = value(t.a, e);
      }
      for (int e = 0; e < 4; ++e) {
        const Coord c = mma_b_fragment(lane, e);
        right[c.row][c.col] = value(t.b, e);
      }
    }
    const auto each_sum = [&](auto visit) {
      for (int lane = 0; lane < 32; ++lane)
        for (int e = 0; e < 4; ++e) {
          const Coord c = mma_d_fragment(lane, e);
          visit(static_cast<Argument*>(r.argument[size_t(lane)])->d[e], sums[c.row][c.col]);
        }
    };
    each_sum([](float& d, float& sum) { sum = d; });
    gemm(sums[0], 8, left[0], right[0], 8, 16, 8, 16, true);
    each_sum([](float& d, float& sum) { d = sum; });
  });
}

void misaligned(const char* instruction, uint32_t alignment, const Site& site) {
  enter(instruction, site);
  machine->stop(Kind::bounds, format("the global address must be %u-byte aligned", alignment));
}

void red_add(float* pointer, const float* values, uint32_t count, const Site& site) {
  require_global("red.global.add.f32", pointer, 4 * count, site);
  if (machine->work) machine->work->touch(pointer, 4 * count, true);
  ++current->instructions;
  count_work([&](Work& w) { (count == 1 ? w.added_scalars : w.added_bytes) += 4 * count; });
  // red flushes subnormals (PTX); the bulk copies with a reduction do not (observed on an H200).
  for (uint32_t i = 0; i < count; ++i) pointer[i] = canonical(flushed(flushed(pointer[i]) + flushed(values[i])));
}

void read_shared(uint32_t address, uint32_t bytes, void* value, const Site& site) {
  enter("ld.shared", site);
  machine->require_shared(address, bytes, bytes, "the access");
  machine->generic_access(*current, address, bytes, Access::read, current->site);
  __builtin_memcpy(value, machine->memory(address), bytes);
}

void red_add_shared(uint32_t address, uint32_t value, const Site& site) {
  enter("red.shared", site);
  machine->require_shared(address, 4, 4, "the addition");
  machine->generic_access(*current, address, 4, Access::add, current->site);
  machine->store(address, machine->load<uint32_t>(address) + value);
}

uint32_t atomic_or_shared(uint32_t address, uint32_t bits, const Site& site) {
  enter("atom.shared", site);
  machine->require_shared(address, 4, 4, "the word");
  machine->generic_access(*current, address, 4, Access::add, current->site);
  const auto before = machine->load<uint32_t>(address);
  machine->store(address, before | bits);
  return before;
}

void write_shared(uint32_t address, uint32_t bytes, const void* value, const Site& site) {
  enter("st.shared", site);
  machine->require_shared(address, bytes, bytes, "the access");
  machine->generic_access(*current, address, bytes, Access::write, current->site);
  __builtin_memcpy(machine->memory(address), value, bytes);
}

}  // namespace hopwell::arch::emu
