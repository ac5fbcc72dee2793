// ldmatrix, stmatrix, mma.sync, sums in global memory, and accesses to shared memory by address.
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

// Each lane touches exactly the half-words that are its own, so each lane answers for these only.
void move_matrices(const char* instruction, uint32_t* registers, int count, bool transposed, uint32_t row_address,
                   bool write) {
  MatrixArgument mine{registers, row_address};
  machine->warp_collective(instruction, ~0u, &mine, [&](Rendezvous& r) {
    Machine& m = *machine;
    Thread* const leader = current;
    Cta& cta = *leader->cta;
    for (int lane = 0; lane < 32; ++lane) {
      current = cta.threads[size_t(leader->warp * 32 + lane)];
      MatrixArgument& argument = *static_cast<MatrixArgument*>(r.argument[size_t(lane)]);
      if (lane < 8 * count) m.require_shared(argument.row_address, 16, 16, "a row");
      for (int matrix = 0; matrix < count; ++matrix)
        for (int half = 0; half < 2; ++half) {
          const Coord c = ldmatrix_fragment(lane, half, transposed);
          const uint32_t row = static_cast<MatrixArgument*>(r.argument[size_t(8 * matrix + c.row)])->row_address;
          const uint32_t address = row + uint32_t(2 * c.col);
          uint32_t& word = argument.registers[matrix];
          if (transposed)
            m.generic_access(*current, address, 2, write, current->site);
          else if (half == 0)
            m.generic_access(*current, address, 4, write, current->site);
          if (write)
            m.store(address, uint16_t(word >> 16 * half));
          else
            word = (word & ~(0xffffu << 16 * half)) | uint32_t{m.load<uint16_t>(address)} << 16 * half;
        }
    }
    current = leader;
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
    const auto value = [type](const uint32_t* registers, int element) {
      const uint16_t bits = uint16_t(registers[element / 2] >> 16 * (element % 2));
      return type == MmaType::bf16 ? from_bf16(bits) : from_fp16(bits);
    };
    float left[16][16], right[16][8];
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
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 4; ++e) {
        const Coord c = mma_d_fragment(lane, e);
        float sum = static_cast<Argument*>(r.argument[size_t(lane)])->d[e];
        for (int k = 0; k < 16; ++k) sum += left[c.row][k] * right[k][c.col];
        static_cast<Argument*>(r.argument[size_t(lane)])->d[e] = sum;
      }
  });
}

void misaligned(const char* instruction, uint32_t alignment, const Site& site) {
  enter(instruction, site);
  machine->stop(Kind::bounds, format("the global address must be %u-byte aligned", alignment));
}

void red_add(float* pointer, const float* values, uint32_t count, const Site& site) {
  require_global("red.global.add.f32", pointer, 4 * count, site);
  // red flushes subnormals (PTX); the reducing copies do not (seen on an H200).
  for (uint32_t i = 0; i < count; ++i) pointer[i] = canonical(flushed(flushed(pointer[i]) + flushed(values[i])));
}

void read_shared(uint32_t address, uint32_t bytes, void* value, const Site& site) {
  enter("ld.shared", site);
  machine->require_shared(address, bytes, bytes, "the access");
  machine->generic_access(*current, address, bytes, false, current->site);
  __builtin_memcpy(value, machine->memory(address), bytes);
}

void write_shared(uint32_t address, uint32_t bytes, const void* value, const Site& site) {
  enter("st.shared", site);
  machine->require_shared(address, bytes, bytes, "the access");
  machine->generic_access(*current, address, bytes, true, current->site);
  __builtin_memcpy(machine->memory(address), value, bytes);
}

}  // namespace hopwell::arch::emu
