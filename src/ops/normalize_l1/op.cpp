#include "ops/normalize_l1/op.hpp"

#include <hopwell/operators.hpp>

namespace hopwell::ops::normalize_l1 {
namespace {

// Whether a and b are the same matrix in the same memory.
bool same_matrix(const DLTensor& a, const DLTensor& b) {
  if (a.ndim != 2 || b.ndim != 2 || !has_sizes(a) || !has_sizes(b)) return false;
  const auto first = [](const DLTensor& x) { return static_cast<const char*>(x.data) + x.byte_offset; };
  const auto row_stride = [](const DLTensor& x) { return x.strides != nullptr ? x.strides[0] : x.shape[1]; };
  return a.data != nullptr && b.data != nullptr && first(a) == first(b) && a.shape[0] == b.shape[0] &&
         a.shape[1] == b.shape[1] && (a.shape[0] <= 1 || row_stride(a) == row_stride(b));
}

}  // namespace

Problem check(const NormalizeL1Args& args) {
  Checker check(kName);
  Problem p;
  const Shape shape{"rows", "columns"};
  const bool in_place = args.attn != nullptr && args.out != nullptr && same_matrix(*args.attn, *args.out);
  if (!in_place) p.attn = check.input("attn", args.attn, {DType::kFloat32}, shape);
  p.out = check.output("out", args.out, {DType::kFloat32}, shape);
  if (in_place) p.attn = p.out;
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::normalize_l1
