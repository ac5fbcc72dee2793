// Whether tensors share memory.
#pragma once

#include "runtime/check.hpp"

namespace hopwell {

// Whether two elements of the view share an address: true if, with strides sorted, some stride is smaller than the
// extent of the dimensions with smaller strides.
bool overlaps_itself(const View& view);

// Whether an element of a shares a byte with an element of b. False for views that fit into each other's gaps.
bool overlap(const View& a, const View& b);

}  // namespace hopwell
