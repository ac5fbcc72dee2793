#include "runtime/overlap.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace hopwell {
namespace {

// Address range of a view.
struct Span {
  std::int64_t begin, end;

  explicit Span(const View& view) : begin(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(view.data))) {
    const auto width = static_cast<std::int64_t>(size_of(view.dtype));
    std::int64_t before = 0, after = width;
    for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i)
      if (view.shape[i] > 1)  // otherwise the stride is not used
        (view.stride[i] < 0 ? before : after) += std::abs(view.stride[i]) * width * (view.shape[i] - 1);
    end = begin + after;
    begin -= before;
  }
};

// Byte addresses of a view: its first byte, and steps from there.
struct Steps {
  std::int64_t stride, count;  // a distance in bytes, and the maximum number of steps
};
struct Bytes : Span {
  std::vector<Steps> steps;

  explicit Bytes(const View& view) : Span(view) {
    const auto width = static_cast<std::int64_t>(size_of(view.dtype));
    steps.push_back({1, width - 1});
    for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i)
      if (view.shape[i] > 1 && view.stride[i] != 0)
        steps.push_back({std::abs(view.stride[i]) * width, view.shape[i] - 1});
  }
};

// Whether sum_i steps[i].stride * n_i = distance for some 0 <= n_i <= steps[i].count. Strides descend. most[i] is the
// largest sum of steps i and following; divisor[i] is the gcd of their strides. The search gives up after many steps,
// which occurs only for strides that no real array has. It then returns true, because it has not excluded a solution.
class Search {
 public:
  explicit Search(std::vector<Steps> steps) : steps_(std::move(steps)), most_(steps_.size() + 1), divisor_(most_) {
    for (std::size_t i = steps_.size(); i-- > 0;) {
      most_[i] = most_[i + 1] + steps_[i].stride * steps_[i].count;
      divisor_[i] = std::gcd(divisor_[i + 1], steps_[i].stride);
    }
  }

  bool reaches(std::int64_t distance, std::size_t i = 0) {
    if (distance < 0 || distance > most_[i]) return false;
    if (distance == 0 || --patience_ < 0) return true;
    if (distance % divisor_[i] != 0) return false;
    const auto [stride, count] = steps_[i];
    const std::int64_t fewest = std::max<std::int64_t>((distance - most_[i + 1] + stride - 1) / stride, 0);
    for (std::int64_t n = std::min(distance / stride, count); n >= fewest; --n)
      if (reaches(distance - n * stride, i + 1)) return true;
    return false;
  }

 private:
  std::vector<Steps> steps_;
  std::vector<std::int64_t> most_, divisor_;
  int patience_ = 10'000;
};

}  // namespace

bool overlaps_itself(const View& view) {
  std::vector<int> order;
  for (int i = 0; i < view.ndim; ++i)
    if (view.shape[static_cast<std::size_t>(i)] > 1) order.push_back(i);
  const auto stride = [&](int i) { return std::abs(view.stride[static_cast<std::size_t>(i)]); };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return stride(a) < stride(b); });
  std::int64_t extent = 1;
  for (const int i : order) {
    if (stride(i) < extent) return true;
    extent = stride(i) * (view.shape[static_cast<std::size_t>(i)] - 1) + extent;
  }
  return false;
}

bool overlap(const View& a, const View& b) {
  if (a.size() == 0 || b.size() == 0) return false;
  // Most tensors have disjoint ranges. This test must be cheap, because every call runs it for all of its outputs.
  const Span whole_a(a), whole_b(b);
  if (whole_a.end <= whole_b.begin || whole_b.end <= whole_a.begin) return false;
  const Bytes x(a), y(b);
  // Solves x.begin + steps of x = y.begin + steps of y. Counting y's steps from its end moves all steps to one side.
  std::vector<Steps> steps = x.steps;
  steps.insert(steps.end(), y.steps.begin(), y.steps.end());
  std::sort(steps.begin(), steps.end(), [](const Steps& s, const Steps& t) { return s.stride > t.stride; });
  std::vector<Steps> merged;
  for (const Steps& step : steps) {
    if (!merged.empty() && merged.back().stride == step.stride)
      merged.back().count += step.count;
    else
      merged.push_back(step);
  }
  return Search(std::move(merged)).reaches(y.end - 1 - x.begin);
}

}  // namespace hopwell
