// Tensor copies: boxes of tensors with 1 to 5 dimensions, gathered and scattered rows, to one CTA or to several.
#include <cmath>

#include "box_walk.hpp"
#include "machine.hpp"
#include "numeric.hpp"
#include "sm90.hpp"
#include "tensor_map.hpp"

namespace hopwell::arch {

TensorMap make_tensor_map(const TensorMapRequest& r) {
  check_tensor_map_request(r);
  emu::TensorMapContents c{};
  c.magic = emu::kTensorMapMagic;
  c.base = static_cast<std::byte*>(r.address);
  c.rank = uint8_t(r.rank);
  c.element_bytes = uint8_t(element_bytes(r.element));
  c.swizzle = r.swizzle;
  for (int i = 0; i < r.rank; ++i) {
    c.extent[i] = uint32_t(r.extent[i]);
    c.box[i] = uint16_t(r.box[i]);
    if (i > 0) c.stride_bytes[i - 1] = r.stride_bytes[i - 1];
  }
  TensorMap map{};
  __builtin_memcpy(&map, &c, sizeof c);
  return map;
}

namespace emu {

namespace {

TensorMapContents contents_of(const TensorMap& map, int rank) {
  TensorMapContents c;
  __builtin_memcpy(&c, &map, sizeof c);
  if (c.magic != kTensorMapMagic) machine->stop(Kind::descriptor, "the tensor map was not made by make_tensor_map");
  if (c.rank != rank)
    machine->stop(Kind::descriptor, format("%d coordinates for a tensor map of rank %d", rank, c.rank));
  if (c.swizzle != Swizzle::none && c.box[0] * c.element_bytes != 16u << int(c.swizzle))
    machine->stop(Kind::unsupported,
                  format("a box whose rows of %u bytes are narrower than the swizzle is not modelled",
                         c.box[0] * c.element_bytes));
  return c;
}

// Not stated by PTX. An H200 raises an illegal instruction otherwise (tests/arch/certify/refused.cu).
void check_coordinates(const BoxWalk& walk, bool store) {
  if (walk.coordinates[0] * int64_t{walk.map.element_bytes} % 16)
    machine->stop(Kind::bounds,
                  format("coordinate %d of the innermost dimension, %u bytes an element: a box must start "
                         "at a multiple of 16 bytes",
                         walk.coordinates[0], walk.map.element_bytes));
  for (int i = 0; store && i < (walk.rows ? 1 : walk.map.rank); ++i)
    if (walk.coordinates[size_t(i)] < 0)
      machine->stop(Kind::bounds,
                    format("coordinate %d of dimension %d: a box that is stored may leave the tensor at its "
                           "end, not before its beginning",
                           walk.coordinates[size_t(i)], i));
}

void touch(const BoxWalk& walk, uint32_t shared, bool write) {
  if (!machine->work) return;
  walk.each_element(shared, [&](uint32_t, const std::byte* global) {
    if (global) machine->work->touch(global, walk.map.element_bytes, write);
  });
}

// With .cta_group::2, each destination CTA's pair is signalled in the CTA with the parity of the mbarrier's CTA.
uint32_t signalled(uint32_t mbarrier, uint32_t rank, int cta_group) {
  return in_rank(cta_group == 2 ? (rank & ~1u) | (rank_of(mbarrier) & 1) : rank, mbarrier);
}

}  // namespace

void tma_load(uint32_t destination, const TensorMap& map, const int* coordinates, int rank, uint32_t mbarrier,
              TmaMode mode, int cta_group, int cta_mask, const Site& site) {
  enter(mode == TmaMode::gather4 ? "cp.async.bulk.tensor.tile::gather4" : "cp.async.bulk.tensor (load)", site);
  Machine& m = *machine;
  const bool gather = mode == TmaMode::gather4, multicast = cta_mask >= 0;
  BoxWalk walk{contents_of(map, gather ? 2 : rank), {}, gather};
  for (int i = 0; i < (gather ? 5 : rank); ++i) walk.coordinates[size_t(i)] = coordinates[i];
  if (gather && walk.map.box[1] != 1)
    m.stop(Kind::descriptor, format("gather4 needs a box of one row, got %u", walk.map.box[1]));
  check_coordinates(walk, false);
  const uint32_t bytes = box_bytes(walk.map) * (gather ? 4 : 1);
  m.require_shared(destination, bytes, 128, "the destination");
  if (!multicast && rank_of(destination) != rank_of(mbarrier) &&
      !(cta_group == 2 && (rank_of(destination) ^ rank_of(mbarrier)) == 1))
    m.stop(Kind::barrier,
           format("the destination is in CTA %u and the mbarrier in CTA %u", rank_of(destination), rank_of(mbarrier)));
  if (multicast && (cta_mask == 0 || uint32_t(cta_mask) >> m.ctas.size()))
    m.stop(Kind::bounds, format("CTA mask 0x%x in a cluster of %zu", cta_mask, m.ctas.size()));
  ++m.report.statistics.bulk_copies;
  touch(walk, destination, false);
  Observer self(*current);
  count_work([&](Work& w) { w.gathers += gather; });
  for (uint32_t r = 0; r < m.ctas.size(); ++r) {
    if (multicast ? !(cta_mask >> r & 1) : r != rank_of(destination)) continue;
    const uint32_t target = in_rank(r, destination), signal = multicast ? signalled(mbarrier, r, cta_group) : mbarrier;
    const Epoch epoch = m.begin_transaction(m.mbarrier_at(signal, true));
    m.async_access(self, epoch, target, bytes, true, Proxy::async, "it");
    m.poison(target, bytes);
    if (m.work) m.work->of(r, r == current->cta->rank ? current->warp : 0).copied_bytes += bytes;
    m.submit({[&m, walk, target, signal, step = epoch.step, bytes] {
      walk.each_element(target, [&](uint32_t shared, std::byte* global) {
        if (global)
          __builtin_memcpy(m.memory(shared), global, walk.map.element_bytes);
        else
          __builtin_memset(m.memory(shared), 0, walk.map.element_bytes);
      });
      m.complete_transaction(signal, step, bytes);
    }});
  }
}

void tma_store(const TensorMap& map, const int* coordinates, int rank, uint32_t source, TmaStore mode,
               const Site& site) {
  enter(mode == TmaStore::reduce_add ? "cp.reduce.async.bulk.tensor.add"
        : mode == TmaStore::scatter4 ? "cp.async.bulk.tensor.tile::scatter4"
                                     : "cp.async.bulk.tensor (store)",
        site);
  Machine& m = *machine;
  const bool scatter = mode == TmaStore::scatter4;
  BoxWalk walk{contents_of(map, scatter ? 2 : rank), {}, scatter};
  for (int i = 0; i < (scatter ? 5 : rank); ++i) walk.coordinates[size_t(i)] = coordinates[i];
  if (scatter && walk.map.box[1] != 1)
    m.stop(Kind::descriptor, format("scatter4 needs a box of one row, got %u", walk.map.box[1]));
  if (mode == TmaStore::reduce_add && walk.map.element_bytes != 4)
    m.stop(Kind::unsupported, "a tensor reduction of other than 32-bit floats is not modelled");
  check_coordinates(walk, true);
  const uint32_t bytes = box_bytes(walk.map) * (scatter ? 4 : 1);
  m.require_shared(source, bytes, 128, "the source");
  touch(walk, source, true);
  if (mode == TmaStore::reduce_add) count_work([&](Work& w) { w.added_bytes += bytes; });
  submit_bulk_store(source, bytes, [walk, source, mode](const std::byte* data) {
    walk.each_element(source, [&](uint32_t shared, std::byte* global) {
      if (!global) return;
      const std::byte* from = data + (shared - source);
      if (mode != TmaStore::reduce_add) {
        __builtin_memcpy(global, from, walk.map.element_bytes);
        return;
      }
      float sum, addend;
      __builtin_memcpy(&sum, global, 4);
      __builtin_memcpy(&addend, from, 4);
      sum = canonical(sum + addend);
      __builtin_memcpy(global, &sum, 4);
    });
  });
}

}  // namespace emu
}  // namespace hopwell::arch
