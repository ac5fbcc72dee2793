#include "runtime/check.hpp"

#include <hopwell/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "runtime/overlap.hpp"

namespace hopwell {
namespace {

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

// "[4, 1, 2048]"
std::string list(const std::int64_t* numbers, int count) {
  std::vector<std::string> parts;
  for (int i = 0; i < count; ++i) parts.push_back(std::to_string(numbers[i]));
  return "[" + join(parts, ", ") + "]";
}

// Larger than any address space, and small enough that sizes derived from it (bits of codes, padded scales, bytes of
// scratch) do not overflow 2^63.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 56;

// min(x * y, kMaxBytes). x and y are not negative.
std::int64_t bounded_product(std::int64_t x, std::int64_t y) {
  return y != 0 && x > kMaxBytes / y ? kMaxBytes : std::min(x * y, kMaxBytes);
}

// Treats pinned and managed memory as host memory and device memory.
DLDevice reached_from(const DLDevice& device) {
  if (device.device_type == kDLCUDAHost) return {kDLCPU, 0};
  if (device.device_type == kDLCUDAManaged) return {kDLCUDA, device.device_id};
  return device;
}

}  // namespace

std::int64_t View::size() const {
  return std::accumulate(shape.begin(), shape.begin() + ndim, std::int64_t{1}, std::multiplies<>());
}

View View::squeezed(int dim) const {
  View view = *this;
  const auto at = static_cast<std::ptrdiff_t>(dim);
  std::copy(view.shape.begin() + at + 1, view.shape.end(), view.shape.begin() + at);
  std::copy(view.stride.begin() + at + 1, view.stride.end(), view.stride.begin() + at);
  --view.ndim;
  return view;
}

std::string to_string(const DLDevice& device) {
  switch (device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda:" + std::to_string(device.device_id);
    default:
      return "device type " + std::to_string(device.device_type) + ":" + std::to_string(device.device_id);
  }
}

bool has_sizes(const DLTensor& tensor) {
  return tensor.ndim == 0 || (tensor.ndim > 0 && tensor.ndim <= Tensor::kMaxDims && tensor.shape != nullptr);
}

std::string shape_string(const DLTensor& tensor) {
  if (!has_sizes(tensor)) {
    const bool no_shape = tensor.shape == nullptr;
    return "of " + std::to_string(tensor.ndim) + " dimensions" + (no_shape ? " and no shape" : "");
  }
  return list(tensor.shape, tensor.ndim);
}

std::string Checker::to_string(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

void Checker::fail(std::string_view argument, std::string_view expected, std::string_view got) const {
  std::string message(operator_);
  message.append(": ").append(argument).append(" must be ").append(expected).append("; got ").append(got);
  throw Error(HOPWELL_INVALID_ARGUMENT, message);
}

void Checker::rule(bool holds, std::string_view rule) const {
  if (!holds) throw Error(HOPWELL_INVALID_ARGUMENT, std::string(operator_).append(": ").append(rule));
}

void Checker::together(std::string_view first, bool has_first, std::string_view second, bool has_second) const {
  if (has_first == has_second) return;
  const std::string pair = std::string(first) + " and " + std::string(second);
  rule(false, pair + " must both be given, or neither; got " + std::string(has_first ? first : second) + " alone");
}

const std::int64_t* Checker::find(std::string_view dim) const {
  const auto at = std::find_if(dims_.begin(), dims_.end(), [&](const auto& bound) { return bound.first == dim; });
  return at == dims_.end() ? nullptr : &at->second;
}

void Checker::finite(std::string_view argument, float value) const {
  require(std::isfinite(value), argument, "finite", static_cast<double>(value));
}

std::string Checker::expected(const DTypes& dtypes, const Shape* shape, bool any_rank) const {
  std::vector<std::string> names;
  for (const DType type : dtypes) names.push_back(dtype_name(type));
  const std::string text = join(names, " or ");
  if (shape == nullptr) return text;
  std::vector<std::string> dims, fewer;  // fewer: without those that may be absent
  for (const Dim& dim : *shape) {
    const std::int64_t* bound = dim.name == nullptr ? nullptr : find(dim.name);
    const std::string name = dim.name == nullptr ? std::to_string(dim.value) : dim.name;
    dims.push_back(bound == nullptr ? name : name + "=" + std::to_string(*bound));
    if (!dim.may_be_absent) fewer.push_back(dims.back());
  }
  const bool two = any_rank && fewer.size() < dims.size();
  return text + (two ? " [" + join(fewer, ", ") + "] or [" : " [") + join(dims, ", ") + "]";
}

void Checker::check_device(std::string_view name, const DLDevice& given) {
  const DLDevice device = reached_from(given);
  const bool known = device.device_type == kDLCPU || device.device_type == kDLCUDA;
  if (!known) fail(name, "on a cpu or cuda device", hopwell::to_string(device));
  if (device_owner_.empty()) {
    device_ = device;
    device_owner_ = name;
  }
  const bool same = device.device_type == device_.device_type &&
                    (device.device_type == kDLCPU || device.device_id == device_.device_id);  // there is one host
  if (!same) {
    fail(name, "on " + hopwell::to_string(device_) + " as " + std::string(device_owner_) + " is",
         hopwell::to_string(device));
  }
}

View Checker::checked(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape* shape) {
  if (tensor == nullptr) fail(name, expected(dtypes, shape, true), "nothing");
  View view;
  view.present = true;
  view.dtype = dtype_of(tensor->dtype);
  view.ndim = tensor->ndim;
  bool ok = std::find(dtypes.begin(), dtypes.end(), view.dtype) != dtypes.end() && view.dtype != DType::kOther;
  ok = ok && has_sizes(*tensor) && tensor->ndim <= View::kMaxDims &&
       (shape == nullptr || static_cast<std::size_t>(tensor->ndim) == shape->size());
  // Binds names only if the whole shape matches: a partly bound shape would change the shape that the error message
  // says is expected.
  const std::size_t bound_before = dims_.size();
  for (std::size_t i = 0; ok && i < static_cast<std::size_t>(tensor->ndim); ++i) {
    ok = tensor->shape[i] >= 0;
    if (!ok || shape == nullptr) continue;
    const Dim& dim = (*shape)[i];
    const std::int64_t* bound = dim.name == nullptr ? &dim.value : find(dim.name);
    if (bound == nullptr)
      dims_.emplace_back(dim.name, tensor->shape[i]);
    else
      ok = tensor->shape[i] == *bound;
  }
  if (!ok) dims_.resize(bound_before);
  if (!ok) {
    const bool other_rank = shape != nullptr && static_cast<std::size_t>(tensor->ndim) != shape->size();
    fail(name, expected(dtypes, shape, other_rank), dtype_name(tensor->dtype) + " " + shape_string(*tensor));
  }
  if (view.ndim > 0) std::copy(tensor->shape, tensor->shape + tensor->ndim, view.shape.begin());
  if (tensor->strides != nullptr) std::copy(tensor->strides, tensor->strides + tensor->ndim, view.stride.begin());
  check_extent(name, *tensor, view);
  if (tensor->strides == nullptr) {  // DLPack: no strides means row-major
    std::int64_t stride = 1;
    for (auto i = static_cast<std::size_t>(tensor->ndim); i-- > 0; stride *= view.shape[i]) view.stride[i] = stride;
  }
  // The caller may give such a dimension any stride. Kernels must not make an address of it: it may be misaligned.
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i)
    if (view.shape[i] <= 1) view.stride[i] = 0;
  check_device(name, tensor->device);
  view.data = static_cast<char*>(tensor->data) + (tensor->data == nullptr ? 0 : tensor->byte_offset);
  return view;
}

void Checker::check_extent(std::string_view name, const DLTensor& tensor, const View& view) const {
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  std::int64_t size = bytes, reach = bytes;  // both over the dimensions of size > 1
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i) {
    if (view.shape[i] <= 1) continue;
    size = bounded_product(size, view.shape[i]);
    const std::int64_t stride = view.stride[i] >= 0 ? view.stride[i] : -(view.stride[i] + 1);
    reach = std::min(reach + bounded_product(bounded_product(stride, bytes), view.shape[i] - 1), kMaxBytes);
  }
  if (size < kMaxBytes && reach < kMaxBytes) return;
  std::string got = dtype_name(view.dtype) + " " + shape_string(tensor);
  if (tensor.strides != nullptr) got += " with strides " + list(tensor.strides, tensor.ndim);
  fail(name, "of less than 2^56 bytes, from its first element to its last", got);
}

void Checker::check_memory(std::string_view name, const DLTensor& tensor, const View& view, Layout layout,
                           bool written) const {
  if (view.size() == 0) return;
  require(tensor.data != nullptr, name, "given memory", "a null data pointer");
  require(reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0, name, "aligned to its element size",
          "an address that is not");
  const auto last = static_cast<std::size_t>(std::max(view.ndim - 1, 0));
  if (layout == Layout::kRows && view.ndim > 0) {
    if (view.stride[last] != 1 && view.shape[last] != 1)
      fail(name, "contiguous in its last dimension", "a stride of " + std::to_string(view.stride[last]));
  }
  if (layout == Layout::kDense) {
    std::int64_t stride = 1;
    for (auto i = static_cast<std::size_t>(view.ndim); i-- > 0; stride *= view.shape[i]) {
      if (view.stride[i] != stride && view.shape[i] != 1)
        fail(name, "contiguous",
             "a stride of " + std::to_string(view.stride[i]) + " in dimension " + std::to_string(i));
    }
  }
  if (written)
    require(!overlaps_itself(view), name, "an output whose elements do not overlap",
            "strides that make them share memory");
}

View Checker::taken(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape* shape,
                    Layout layout, Access access) {
  const View view = checked(name, tensor, dtypes, shape);
  check_memory(name, *tensor, view, layout, access == Access::kWritten);
  for (const Taken& other : taken_) {
    if (access == Access::kRead && other.access == Access::kRead) continue;
    if (!overlap(view, other.view)) continue;
    const bool is_it = access == Access::kWritten;
    fail(is_it ? name : other.name, "an output in memory of its own",
         "memory that " + std::string(is_it ? other.name : name) + " lies in too");
  }
  taken_.push_back({name, view, access});
  return view;
}

void Checker::check_workspace(void* workspace, std::size_t bytes) const {
  if (workspace == nullptr) return;
  View scratch;
  scratch.data = workspace, scratch.dtype = DType::kUInt8, scratch.ndim = 1, scratch.present = true;
  scratch.shape[0] = static_cast<std::int64_t>(std::min(bytes, static_cast<std::size_t>(kMaxBytes)));
  scratch.stride[0] = 1;
  for (const Taken& other : taken_)
    if (overlap(scratch, other.view))
      fail("workspace", "in memory of its own", "memory that " + std::string(other.name) + " lies in too");
}

View Checker::input(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
                    Layout layout) {
  return taken(name, tensor, dtypes, &shape, layout, Access::kRead);
}

View Checker::optional_input(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
                             Layout layout) {
  return tensor == nullptr ? View{} : input(name, tensor, dtypes, shape, layout);
}

View Checker::output(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
                     Layout layout) {
  return taken(name, tensor, dtypes, &shape, layout, Access::kWritten);
}

View Checker::optional_output(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, const Shape& shape,
                              Layout layout) {
  return tensor == nullptr ? View{} : output(name, tensor, dtypes, shape, layout);
}

View Checker::any_shape(std::string_view name, const DLTensor* tensor, const DTypes& dtypes, Layout layout,
                        Access access) {
  return taken(name, tensor, dtypes, nullptr, layout, access);
}

}  // namespace hopwell
