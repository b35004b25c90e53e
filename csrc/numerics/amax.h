// Largest magnitude by bit patterns: non-negative floats have the order of their bits, infinity is above all numbers
// and NaN above infinity, so an integer maximum propagates both, in any order of the elements.
#pragma once

#include "numerics/platform.h"

namespace lowprec {

LOWPREC_HD uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
LOWPREC_HD uint32_t larger_magnitude(uint32_t bits, float x) { return larger(bits, magnitude_bits(x)); }

}  // namespace lowprec
