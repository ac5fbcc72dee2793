// Whether tensors share memory.
#pragma once

#include "runtime/check.hpp"

namespace hopwell {

// Whether two elements of the view share an address: true if, with strides sorted, one steps into the extent of those
// below.
bool overlaps_itself(const View& view);

// Whether an element of one shares a byte with an element of the other. Views that lie inside each other's gaps do not.
bool overlap(const View& a, const View& b);

}  // namespace hopwell
